"""Lines of the witness, read: what each process of an attempt held at each of its optimizer steps."""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read by inject/trainmaster_process.py, which imports nothing of ours.
FOLDER_VARIABLE = "TRAINMASTER_DRILL_WITNESS"
STRIKE_VARIABLE = "TRAINMASTER_DRILL_STRIKE"
_MOST_BYTES = 64 << 20  # of one process; the witness itself stops far below
_NOTHING = "empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One optimizer step, as it was about to be done."""

    at: float  # seconds since 1970
    rates: tuple[float, ...]  # learning rate of each parameter group
    weights: str  # digests, of a sample of the elements
    state: str | None  # of the optimizer; None: it had none yet
    random: Mapping[str, str]  # python, torch, numpy, cuda → digest
    batches: tuple[tuple[str, str], ...] = ()  # (data set, digest) read since the step before
    places: tuple[int, ...] = ()  # of each of these batches in its pass through the data, from 1; 0: not seen
    buffers: str | None = None  # digest of those beside the weights; "": there are none; None: not looked at
    ids: str | None = None  # what `trainmaster.drill.sample` was told
    samples: tuple[str, ...] = ()  # a digest of each of these, where they are few
    groups: tuple[str, ...] = ()  # digests of the parameters of each group, in their order
    states: str = ""  # digest of the states of its parameters, whichever has which
    settings: tuple[Mapping[str, Any], ...] = ()  # hyperparameters of each group but its rate
    scales: tuple[tuple[float, float], ...] = ()  # of each GradScaler: scale, steps since an infinite gradient
    averages: tuple[tuple[int, str], ...] = ()  # of each AveragedModel: how many were averaged, digest of the weights
    saved: frozenset[tuple[str, str]] = frozenset()  # (entry, digest) of what was saved after it, before the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A torch.save to a file that has returned, after so many steps of its process."""

    after: int
    at: float
    path: str
    behind: bool = False  # in a thread of its own, while training went on


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One process that trained, from its first optimizer step to its end."""

    pid: int
    rank: int
    world: int
    lines: tuple[Line, ...]
    saves: tuple[Save, ...] = ()
    missed: int = 0  # steps without a line: an error kept the witness from writing it
    struck: bool = False  # the witness struck here, or held the process for a strike from outside


def read(folder: Path) -> tuple[Life, ...]:
    """Every process of an attempt that came as far as a step, the earliest first."""
    lives = [life for path in folder.glob("*.jsonl") if (life := _life(int(path.stem), list(_objects(path))))]
    return tuple(sorted(lives, key=lambda life: (life.lines[0].at, life.rank)))


def read_loads(folder: Path, below: Path) -> frozenset[int]:
    """Ranks that read a file of the run with torch.load before their first step."""
    return frozenset(
        int(item["r"])
        for path in folder.glob("*.jsonl")
        for item in _objects(path)
        if item.get("k") == "load" and Path(str(item["path"])).is_relative_to(below.resolve())
    )


def read_outside(folder: Path) -> str | None:
    """The file outside the drill that a process was about to save to, for which the witness ended it."""
    return next(
        (
            str(item["path"])
            for path in sorted(folder.glob("*.jsonl"))
            for item in _objects(path)
            if item.get("k") == "outside"
        ),
        None,
    )


def read_refused(folder: Path) -> str | None:
    """The first error of a save, as the program got it."""
    items = (item for path in sorted(folder.glob("*.jsonl")) for item in _objects(path) if item.get("k") == "refused")
    return next((str(item["words"]) for item in items), None)


def read_versions(folder: Path) -> dict[str, str]:
    """Of Python and the packages of the first process that trained; empty: none did."""
    items = (item for path in sorted(folder.glob("*.jsonl")) for item in _objects(path) if item.get("k") == "versions")
    return {str(name): str(version) for name, version in next(items, {"versions": {}})["versions"].items()}


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for raw in file.read(_MOST_BYTES).splitlines():
            try:
                value = json.loads(raw)
            except ValueError:  # cut off by a kill
                continue
            if isinstance(value, dict):
                yield value


def _life(pid: int, objects: Sequence[dict[str, Any]]) -> Life | None:
    steps = [(place, item) for place, item in enumerate(objects) if item.get("k") == "step"]
    saves = [(place, item) for place, item in enumerate(objects) if item.get("k") == "save"]
    if not steps:
        return None
    told: dict[Any, Any] = {}  # by optimizer: the hyperparameters of its groups, until others are told
    for _, item in steps:
        item["h"] = told[item.get("o")] = item.get("h", told.get(item.get("o"), []))
    groups = _group(steps)
    begun = [group[0][0] for group in groups]

    def late(place: int) -> int:
        """Steps before a save that only turned out to be steps of the run after it."""
        return bisect.bisect(begun, place) - max((int(item["n"]) for at, item in steps if at < place), default=0)

    missed = max(int(item["n"]) for _, item in steps) - len(groups)
    saved: dict[int, set[tuple[str, str]]] = {at: set() for at in range(-1, len(groups))}
    for place, item in enumerate(objects):
        if item.get("k") == "content":
            saved[bisect.bisect(begun, place) - 1] |= {
                (str(name), str(value)) for name, value in item["entries"].items()
            }
    groups = _whole(groups, saved=max((place for place, _ in saves), default=-1))
    first = steps[0][1]
    return Life(
        pid=pid,
        rank=int(first["r"]),
        world=int(first["w"]),
        lines=tuple(_line([item for _, item in group], saved[at]) for at, group in enumerate(groups)),
        saves=tuple(
            Save(
                after=int(item["n"]) + max(0, late(place)),
                at=float(item["t"]),
                path=str(item["path"]),
                behind=bool(item.get("behind")),
            )
            for place, item in saves
        ),
        missed=missed,
        struck=any(item.get("k") == "struck" for item in objects),
    )


_Placed = tuple[int, dict[str, Any]]  # a line, after its place in the file


def _group(steps: Sequence[_Placed]) -> list[list[_Placed]]:
    """Lines of optimizers by steps of the run: a line that counts, with those of others before the next such line.

    One whose number is higher by more than 1 says that its optimizer's last ones were steps of the run too.
    """
    groups: list[list[_Placed]] = []
    number = 0
    for place, item in steps:
        more = int(item["n"]) - number
        if groups and more > 1:
            own = [at for at, (_, other) in enumerate(groups[-1]) if other.get("o") == item.get("o")][1 - more :]
            last = groups.pop()
            cuts = [0, *own, len(last)]
            groups += [last[a:b] for a, b in itertools.pairwise(cuts) if a < b]
        if more > 0 or not groups:
            groups.append([])
        groups[-1].append((place, item))
        number = max(number, int(item["n"]))
    return groups


def _whole(groups: list[list[_Placed]], *, saved: int) -> list[list[_Placed]]:
    """Without the last one, where the process was killed in it: it has fewer lines than the one before it, or one of an
    optimizer that stepped for the first time, which may be the first of many. `saved`: place of the last save."""
    if len(groups) < 2 or groups[-1][0][1].get("o") != groups[-2][0][1].get("o"):
        return groups
    seen = {item.get("o") for group in groups[:-1] for _, item in group}
    new = any(item.get("o") not in seen for _, item in groups[-1])
    cut = len(groups[-1]) < len(groups[-2]) or (new and saved < groups[-1][-1][0])
    return groups[:-1] if cut else groups


def _line(group: Sequence[dict[str, Any]], saved: Iterable[tuple[str, str]]) -> Line:
    states = [str(item["s"]) for item in group]
    return Line(
        at=float(group[0]["t"]),
        rates=tuple(float(rate) for item in group for rate in item["lr"]),
        weights="+".join(str(item["p"]) for item in group),
        state=None if set(states) == {_NOTHING} else "+".join(states),
        random=group[-1]["g"],
        batches=tuple((str(source), str(digest)) for item in group for source, digest, *_ in item["b"]),
        places=tuple(int(batch[2]) if len(batch) > 2 else 0 for item in group for batch in item["b"]),
        buffers="+".join(filter(None, (str(item["u"]) for item in group))) if "u" in group[0] else None,
        samples=tuple(str(one) for item in group for one in item.get("samples", ())),
        ids="+".join(str(item["ids"]) for item in group if "ids" in item) or None,
        groups=tuple(str(digest) for item in group for digest in item.get("q", ())),
        states="+".join(str(item.get("x", "")) for item in group),
        settings=tuple(settings for item in group for settings in item.get("h", ())),
        scales=tuple((float(scale), float(since)) for scale, since in group[0].get("z", ())),
        averages=tuple((int(many), str(digest)) for many, digest in group[0].get("a", ())),
        saved=frozenset(saved),
    )
