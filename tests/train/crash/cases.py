"""The cases of the matrix, drawn from a seed: where a rank is killed, and what is damaged before the run goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trainmaster.core.config.train import TrainConfig
from trainmaster.train.drill.failpoints import FAILPOINTS, FIRST_RANK

from ..runs import tiny
from . import damage

STEPS, EVERY, EPOCH = 12, 3, 6
MODEL = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "ffn_width": 16, "vocab": 256}


def config(**checkpoint: Any) -> TrainConfig:
    return tiny(
        model=MODEL, steps=STEPS, epoch_steps=EPOCH, batch_sequences=4, eval_sequences=8,
        sequence_tokens=16, checkpoint={"every_steps": EVERY, "keep": 3, "retries": 1, "retry_s": 0.0, **checkpoint},
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One life of the run: started, killed, perhaps damaged, resumed."""

    place: str
    when: str  # as in TRAINMASTER_KILL_AT
    ranks: int
    rank: int | None  # None: every rank is killed there
    mode: str = "async"  # of saving
    term: str | None = None  # SIGTERM before that, as in TRAINMASTER_TERM_AT
    damage: str | None = None
    every_one: bool = False  # of the checkpoints is damaged, not only the newest
    tiers: bool = False  # memory, disk and a remote store, instead of disk alone
    seed: int = 0

    @property
    def name(self) -> str:
        who = "all" if self.rank is None else f"rank {self.rank}"
        told = f" after SIGTERM at {self.term}" if self.term else ""
        tiers = " in tiers" if self.tiers else ""
        what = f" + {self.damage}{' of all' if self.every_one else ''}" if self.damage else ""
        return f"{self.place} {self.when}{told}, {self.mode}, {who} of {self.ranks}{tiers}{what}"

    @property
    def loads(self) -> bool:
        """Whether it dies while it resumes; the run before it is then ended by other means."""
        return self.place.startswith("load:")


def kills(seed: int, *, places: list[str], each: int = 2) -> Iterator[Case]:
    """Each place `each` times, at seeded moments, on one rank and on several; and once more after a SIGTERM."""
    dice = random.Random(seed)
    for place in places:
        for turn in range(0 if place.startswith("stop:") else each):  # nobody stops who was not told to
            ranks = 1 + (turn + dice.randrange(2)) % 2
            rank = dice.choice([None, 0] if place in FIRST_RANK else [None, *range(ranks)])
            mode = ("async", "sync")[(turn + dice.randrange(2)) % 2]
            yield Case(place=place, when=_when(place, dice), ranks=ranks, rank=rank, mode=mode, seed=seed)
        if place.startswith(("save:", "stop:")):
            yield _told(
                Case(place=place, when="", ranks=2, rank=0 if place in FIRST_RANK else dice.randrange(2), seed=seed),
                dice,
            )


def damages(seed: int, kinds: tuple[str, ...], points: list[Case]) -> Iterator[Case]:
    """Every kind of damage after every kill."""
    for number, (point, kind) in enumerate((point, kind) for point in points for kind in kinds):
        dice = random.Random(f"{seed} {number}")
        # Some time after the first attempt was stopped, which leaves two checkpoints behind.
        when = point.when if point.loads or point.term else f"@{dice.randrange(2 * EVERY, STEPS - EVERY)}"
        yield replace(point, when=when, damage=kind, seed=seed * 10_000 + number)
    for kind in kinds:
        if kind in damage.FILES:
            yield Case(place="step:start", when="@8", ranks=2, rank=1, damage=kind, every_one=True, seed=seed)


def _when(place: str, dice: random.Random) -> str:
    if place.startswith("load:"):
        return "1"
    if place.startswith("step:"):
        return str(dice.randrange(1, STEPS + 1))
    if place == "eval:batch":
        return str(dice.randrange(1, 5))  # two evaluations of two batches each
    return f"@{dice.randrange(1, STEPS - EVERY + 1)}"


def _told(case: Case, dice: random.Random) -> Case:
    """The save that a SIGTERM asks for: at a step at which none is due."""
    step = dice.choice([step for step in range(2 * EVERY + 1, STEPS) if step % EVERY])
    return replace(case, when=f"@{step - 1}" if case.place != "stop:heard" else "1", term=f"step:start @{step - 1}")


LOCAL = [place for place in FAILPOINTS if not place.startswith(("memory:", "remote:"))]


def tiered(seed: int) -> Iterator[Case]:
    """Kills between the tiers: memory, disk and a remote store all in use."""
    places = [place for place in FAILPOINTS if place.startswith(("memory:", "remote:"))]
    for case in kills(seed + 1, places=places):
        yield replace(case, tiers=True)
