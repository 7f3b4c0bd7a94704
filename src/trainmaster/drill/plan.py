"""Plan of a drill of any program: which strikes, in which order, after which step. Pure and printable."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

# In the order in which they happen.
STRIKES = {
    "before-save": "SIGKILL of every rank before anything was saved",
    "after-save": "SIGKILL of every rank right after the first save",
    "one": "SIGKILL of one rank",
    "all": "SIGKILL of every rank",
    "launcher": "SIGKILL of the launcher",
    "twice": "SIGKILL, and again two steps after the resume",
    "term": "SIGTERM, with the time to save",
    "saving": "SIGKILL during a save",
    "power": "a power cut right after a save",
    "full": "the disk full at a save",
    "readonly": "the checkpoint folder read-only at a save",
    "truncated": "the newest checkpoint truncated",
    "flipped": "one bit of the newest checkpoint flipped",
    "missing": "a file of the newest checkpoint missing",
    "unfinished": "`latest` naming a checkpoint that was only begun",
    "ranks": "SIGKILL, and on with half as many ranks",
    "stop": "SIGSTOP for two seconds, then on",
}
DAMAGE = ("truncated", "flipped", "missing", "unfinished")
STORAGE = ("power", "full", "readonly")
APART = (*STORAGE, *DAMAGE, "ranks")  # each has a judgement of its own
# In a copy of the run: what they spoil, or a program that runs to its end in its grace, must not reach the others.
BRANCHES = ("term", "saving", *APART)
_ALONE = ("before-save", "stop", *BRANCHES)  # they leave no such run
NOT_TRIED = "more ranks than before, another node"
# What a checkpoint may hold else is seen only by what is saved next, by the losses and other numbers that are printed.
NOT_SEEN = (
    "state other than weights, optimizers, learning rates, GradScaler, AveragedModel, buffers, random generators, the "
    "place in the data, and tensors that torch.save saves in an entry of their own: a moving average of your own that "
    "is never saved is missed only where a number shows it that is printed, as the result of a last evaluation"
)
LOOK_STEPS = 6  # steps of a resume in a copy of the run, before the drill ends it


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One strike of the run, when this many of its steps are done."""

    name: str
    after: int
    rank: int | None = None  # None: every rank

    def __str__(self) -> str:
        words = STRIKES[self.name]
        if self.name == "one":
            words = f"SIGKILL of rank {self.rank}"
        return f"{words}, in step {self.after}" if self.after else words


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the undisturbed run has shown of the program."""

    steps: int
    saves: tuple[int, ...]  # after which steps it saved
    world: int
    launcher: bool  # the command starts its ranks itself, as torchrun does
    fewer: int | None = None  # ranks that the command can be started with instead
    keeps_one: bool = False  # of its saves only the newest was there at its end


def make(shape: Shape, *, wanted: Collection[str], seed: int) -> tuple[Strike, ...]:
    """The strikes, in their order. What the program has no place for is left out: `left_out` says why."""
    dice = random.Random(seed)  # noqa: S311 (a drill, not a key)
    # A drill without a strike shows nothing: where each one that was asked for is left out, one rank is killed.
    wanted = complete(name for name in wanted if name not in left_out(shape)) or {"one"}
    names = [name for name in STRIKES if name in wanted]
    # Two saves are left for the copies: one that is struck, and steps after it.
    first, last = shape.saves[0], shape.saves[-2]
    spread = [name for name in names if name not in ("after-save", *_ALONE)]
    places = dict(zip(spread, _places(first + 2, max(first + 3, last - 1), len(spread), dice), strict=True))
    strikes = []
    for name in names:
        if name == "before-save":
            after = dice.randint(1, first)
        elif name == "after-save":
            after = first + 1
        else:
            after = places.get(name, 0)
        strikes.append(Strike(name=name, after=after, rank=dice.randrange(shape.world) if name == "one" else None))
    return tuple(strikes)


def complete(wanted: Iterable[str]) -> set[str]:
    """These strikes, and a kill where there is none: a copy needs a run that has saved and was killed."""
    names = set(wanted)
    return names | {"one"} if names & set(BRANCHES) and names <= set(_ALONE) else names


def past_next_save(shape: Shape, newest: int) -> int | None:
    """Steps after `newest` until one more save is done, and the one after it is not begun; None: none is left."""
    saves = [step for step in shape.saves if step > newest]
    if not saves or saves[0] >= shape.steps:
        return None
    return (saves[1] if len(saves) > 1 else saves[0] + 1) - newest


def left_out(shape: Shape) -> dict[str, str]:
    """Strikes that this program has no place for, each with what shows it."""
    reasons = {}
    if shape.world == 1:
        reasons["all"] = "one rank: the same as SIGKILL of one rank"
    if not shape.launcher:
        reasons["launcher"] = "no launcher: the process that the command starts is the one that trains"
    if shape.fewer is None:
        reasons["ranks"] = (
            "one rank: there are no fewer"
            if shape.world == 1
            else "the command does not tell the number of its ranks (--processes, --nproc-per-node, --num_processes)"
        )
    return reasons


def _places(first: int, last: int, many: int, dice: random.Random) -> Sequence[int]:
    width = (last - first) / max(1, many)
    return [first + int(width * (number + dice.uniform(0.1, 0.9))) for number in range(many)]
