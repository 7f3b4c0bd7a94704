"""What a crash may cost, and how often each tier must be saved to so that it costs no more. Pure arithmetic.

A tier is behind training by its interval, and by the time that a save takes to get there: a run that is killed right
before a commit goes back to the commit before it. With `gap` steps between the beginnings of two saves for a tier, and
`late` steps from the beginning of one to its commit, at most gap + late finished steps are lost, and the one under way.

The rules these bounds rest on. A save begins at a step boundary once a tier is due (a multiple of its interval has been
passed since the last one begun for it) and the first tier is free. It passes through the tiers in their order. A tier
that is busy takes the newest that waits for it when it is free, on behalf of those that this one replaces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

MEMORY, DISK, REMOTE = "memory", "disk", "remote"
# Saves vary: the slowest of the last few, and a quarter more, is what the next one is believed to need.
SLACK = 1.25
_LESS = 0.5  # a bound that became better is news only if it did by half; one that became worse always is
# What can be lost, and which tiers outlive it. The folder of the disk tier is one that all nodes share.
LOSSES = {
    "process": ("a crash", (MEMORY, DISK, REMOTE)),
    "node": ("losing a node", (MEMORY, DISK, REMOTE)),
    "cluster": ("losing all nodes and their memory", (DISK, REMOTE)),
    "disk": ("losing the disk", (REMOTE,)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier, fastest first in any list of them: each is fed by the one before it."""

    name: str
    every_steps: int
    busy_s: float  # how long one save keeps it busy, measured
    replicated: bool = True  # whether what it holds outlives a node


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBound:
    """What one kind of loss costs at most; no tier: everything."""

    tier: str | None
    lost_steps: int | None
    lost_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What the run holds now, from the times measured so far."""

    step_s: float
    every_steps: Mapping[str, int]  # of each tier
    losses: Mapping[str, LossBound]  # by the names of LOSSES
    limit_steps: int | None  # what was asked for, in steps of today's length
    unmeasured: tuple[str, ...] = ()  # tiers that no save has reached yet: what they would hold is not in here
    missed: str | None = None  # why the limit is not held for a process or a node, and what would hold
    withdrawn: str | None = None  # why what was stated does not hold now: saves fail

    def without(self, failing: Mapping[str, str]) -> Bound:
        """The same while saves to these tiers fail, with the reason of each: what rests on them is not promised."""
        rests = sorted({held.tier for held in self.losses.values() if held.tier is not None} & failing.keys())
        if not rests:
            return self
        losses = {
            kind: replace(held, lost_steps=None, lost_s=None) if held.tier in failing else held
            for kind, held in self.losses.items()
        }
        why = "; ".join(f"saves to {tier} fail: {failing[tier]}" for tier in rests)
        return replace(self, losses=losses, missed=None, withdrawn=why)

    def differs(self, other: Bound | None) -> bool:
        """Whether it should be said after `other` was: times change a little with every save, and mean nothing then."""
        if other is None or (self.missed is None) != (other.missed is None) or self.unmeasured != other.unmeasured:
            return True
        if (self.withdrawn is None) != (other.withdrawn is None):
            return True
        pairs = [(held.lost_steps or 0, other.losses[kind].lost_steps or 0) for kind, held in self.losses.items()]
        return any(new > old or new < _LESS * old for new, old in pairs)

    def event(self) -> dict[str, Any]:
        """The data of the CHECKPOINT bound event. A lost node is what `lost_steps` and `lost_s` speak of."""
        node = self.losses["node"]
        return {
            "lost_steps": node.lost_steps,
            "lost_s": _rounded(node.lost_s),
            "losses": {
                kind: {"tier": held.tier, "lost_steps": held.lost_steps, "lost_s": _rounded(held.lost_s)}
                for kind, held in self.losses.items()
            },
            "every_steps": dict(self.every_steps),
            "step_s": round(self.step_s, 6),
            "limit_steps": self.limit_steps,
            "unmeasured": list(self.unmeasured),
            "missed": self.missed,
            "withdrawn": self.withdrawn,
        }

    def lines(self) -> list[str]:
        """The same for people: what is lost, most of the time by one tier, in one line."""
        costs: dict[LossBound, list[str]] = {}
        for kind, held in self.losses.items():
            costs.setdefault(held, []).append(LOSSES[kind][0])
        intervals = ", ".join(f"{name} every {every} steps" for name, every in self.every_steps.items())
        costs_text = "; ".join(f"{' or '.join(kinds)} costs {_cost(held)}" for held, kinds in costs.items())
        unmeasured = f" ({', '.join(self.unmeasured)}: not measured yet)" if self.unmeasured else ""
        lines = [f"{costs_text}{unmeasured}; saved to {intervals}"]
        if self.withdrawn:
            lines.append(f"WARNING: what was stated does not hold until a save is kept: {self.withdrawn}")
        return [*lines, f"WARNING: {self.missed}"] if self.missed else lines


def _cost(held: LossBound) -> str:
    if held.tier is not None and held.lost_steps is None:
        return f"all since the last save that was kept in {held.tier}"
    if held.lost_steps is None or held.lost_s is None:
        return "the whole run"
    time = f"{held.lost_s:.3g} s" if held.lost_s < 90 else f"{held.lost_s / 60:.1f} min"
    unit = "step" if held.lost_steps == 1 else "steps"
    return f"at most {held.lost_steps} {unit} ({time}, from {held.tier})"


def settle(tiers: Sequence[Tier]) -> list[Tier]:
    """No interval longer than that of a farther tier: what goes there passes through here anyway."""
    return [
        replace(tier, every_steps=min(other.every_steps for other in tiers[index:])) for index, tier in enumerate(tiers)
    ]


def derive(tiers: Sequence[Tier], *, step_s: float, limit_steps: int) -> list[Tier]:
    """The same tiers with intervals that hold the limit as far down as it can be held, and no shorter ones.

    Those that cannot hold it are saved to as often as they can keep up with.
    """
    busy = [_steps(tier.busy_s, step_s) for tier in tiers]
    # Every save that reaches a tier passes through those before it: as many as hold the limit share one interval.
    common, holding = next(
        (
            (every, count)
            for count in range(len(tiers), 0, -1)
            # With room for one save to be through before the next begins nothing ever waits; else each may.
            for every in (limit_steps - sum(busy[:count]), limit_steps - 2 * sum(busy[:count]) + busy[0])
            if every >= max(1, busy[0]) and every + _late(busy[:count], [every] * count)[-1] <= limit_steps
        ),
        (0, 0),
    )
    derived: list[Tier] = []
    for index, tier in enumerate(tiers):
        every = common
        if index >= holding:
            grid = derived[-1].every_steps if derived else 1
            every = grid * max(1, math.ceil(busy[index] / grid))
        derived.append(replace(tier, every_steps=every))
    return derived


def steps_in(minutes: float, *, step_s: float, pause_s: float = 0.0) -> int:
    """How many finished steps may be lost in that time: one is under way, and a pause may fall into it."""
    return max(1, math.floor((minutes * 60 - pause_s) / step_s) - 1)


def bound_of(tiers: Sequence[Tier], *, step_s: float, pause_s: float = 0.0, limit_steps: int | None = None) -> Bound:
    """What these intervals hold. `pause_s` is the longest time training has stood still (an evaluation)."""
    lost = dict(zip((tier.name for tier in tiers), lost_steps(tiers, step_s), strict=True))
    local = {tier.name for tier in tiers if not tier.replicated}
    losses = {}
    for kind, (_, outliving) in LOSSES.items():
        left = [name for name in outliving if name in lost and not (kind == "node" and name in local)]
        name = min(left, key=lambda name: lost[name], default=None)
        steps = lost[name] if name is not None else None
        seconds = (steps + 1) * step_s + pause_s if steps is not None else None
        losses[kind] = LossBound(tier=name, lost_steps=steps, lost_s=seconds)
    return Bound(
        step_s=step_s,
        every_steps={tier.name: tier.every_steps for tier in tiers},
        losses=losses,
        limit_steps=limit_steps,
        missed=_missed(tiers, losses, step_s, limit_steps),
    )


def _missed(
    tiers: Sequence[Tier], losses: Mapping[str, LossBound], step_s: float, limit_steps: int | None
) -> str | None:
    """Why the limit is missed for the loss of a process or a node; farther tiers save as often as they keep up with."""
    if limit_steps is None:
        return None
    for kind in ("process", "node"):
        steps, name = losses[kind].lost_steps, losses[kind].tier
        if steps is not None and steps <= limit_steps:
            continue
        what = LOSSES[kind][0]
        if steps is None or name is None:
            return f"{what}: no tier outlives it; state checkpoint.folder or checkpoint.remote"
        tier = next(tier for tier in tiers if tier.name == name)
        least = lost_steps(derive(tiers, step_s=step_s, limit_steps=1), step_s)[[t.name for t in tiers].index(name)]
        can_s = limit_steps * step_s / 2 / SLACK
        return (
            f"{what}: {steps} steps, and {limit_steps} were asked for; a save to {name} takes {tier.busy_s:.3g} s, "
            f"which is {_steps(tier.busy_s, step_s)} steps. {least} steps can be held, or {limit_steps} with saves of "
            f"at most {can_s:.2g} s"
        )
    return None


def lost_steps(tiers: Sequence[Tier], step_s: float) -> list[int]:
    """Finished steps that each tier alone would cost at most."""
    busy = [_steps(tier.busy_s, step_s) for tier in tiers]
    every = [tier.every_steps for tier in tiers]
    assert every == sorted(every), "settle first"
    return [gap + late for gap, late in zip(_gaps(busy, every), _late(busy, every), strict=True)]


def _gaps(busy: Sequence[int], every: Sequence[int]) -> list[int]:
    """Steps between the beginnings of two saves for each tier, at most."""
    first = max(every[0], busy[0])
    if first == every[0] and _aligned(every):
        return list(every)
    # Due at some step, a tier may have to wait for the first one to be free.
    return [first, *(first if own == every[0] else own + first for own in every[1:])]


def _late(busy: Sequence[int], every: Sequence[int]) -> list[int]:
    """Steps from the beginning of a save to its commit in each tier, at most."""
    late = [busy[0]]
    for own, interval in zip(busy[1:], every[1:], strict=True):
        through = late[-1] + own
        # If the save before may still be under way there, this one waits for it.
        late.append(through if through <= interval and _aligned(every) else through + own)
    return late


def _aligned(every: Sequence[int]) -> bool:
    """Whether a save for a farther tier is always one that the nearer ones are due for as well."""
    return all(own % before == 0 for before, own in itertools.pairwise(every))


def _steps(seconds: float, step_s: float) -> int:
    return math.ceil(seconds * SLACK / step_s)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
