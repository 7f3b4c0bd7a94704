"""Lines of the witness, read: what each process of an attempt held at each of its optimizer steps."""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    optimizer: int = 0  # in the order in which they first stepped in this process
    parts: tuple[Line, ...] = ()  # where several optimizers stepped in it: a line for each time that one did


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A torch.save to a file that has returned, after so many steps of its process."""

    after: int
    at: float
    path: str
    behind: bool = False  # in a thread of its own, while training went on
    parts: int = field(default=0, compare=False)  # steps of all optimizers that were done before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One process that trained, from its first optimizer step to its end."""

    pid: int
    rank: int
    world: int
    lines: tuple[Line, ...]
    saves: tuple[Save, ...] = ()
    parts: tuple[Line, ...] = ()  # a line for each step of each optimizer, of which `lines` are made
    missed: int = 0  # steps without a line: an error kept the witness from writing it
    struck: bool = False  # the witness struck here, or held the process for a strike from outside


def read(folder: Path, *, ended: bool = False) -> tuple[Life, ...]:
    """Every process of an attempt that came as far as a step, the earliest first. `ended`: none of them was killed."""
    paths = list(folder.glob("*.jsonl"))
    lives = [life for path in paths if (life := _life(int(path.stem), list(_objects(path)), ended=ended))]
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


def _life(pid: int, objects: Sequence[dict[str, Any]], *, ended: bool) -> Life | None:
    steps = [(place, item) for place, item in enumerate(objects) if item.get("k") == "step"]
    saves = [(place, item) for place, item in enumerate(objects) if item.get("k") == "save"]
    if not steps:
        return None
    told: dict[Any, Any] = {}  # by optimizer: the hyperparameters of its groups, until others are told
    for _, item in steps:
        item["h"] = told[item.get("o")] = item.get("h", told.get(item.get("o"), []))
    groups = _group(steps)
    places = [place for place, _ in steps]
    missed = max(
        max(int(item["n"]) for _, item in steps) - len(groups),
        max(int(item.get("i", 0)) for _, item in steps) - len(steps),
    )
    saved: dict[int, set[tuple[str, str]]] = {at: set() for at in range(-1, len(steps))}
    for place, item in enumerate(objects):
        if item.get("k") == "content":
            saved[bisect.bisect(places, place) - 1] |= {
                (str(name), str(value)) for name, value in item["entries"].items()
            }
    parts = tuple(_line(item, saved[at]) for at, (_, item) in enumerate(steps))
    begun = [*itertools.accumulate([len(group) for group in groups], initial=0)]
    groups = groups if ended else _whole(groups, saved=max((place for place, _ in saves), default=-1))
    first = steps[0][1]
    return Life(
        pid=pid,
        rank=int(first["r"]),
        world=int(first["w"]),
        lines=tuple(join(parts[begun[at] : begun[at + 1]]) for at in range(len(groups))),
        saves=tuple(
            Save(
                after=bisect.bisect(begun, done) - 1,
                at=float(item["t"]),
                path=str(item["path"]),
                behind=bool(item.get("behind")),
                parts=done,
            )
            for place, item in saves
            for done in [int(item.get("i", bisect.bisect(places, place)))]
        ),
        parts=parts,
        missed=missed,
        struck=any(item.get("k") == "struck" for item in objects),
    )


def join(parts: Sequence[Line]) -> Line:
    """One step of the run, made of steps of optimizers."""
    if len(parts) == 1:
        return parts[0]
    states = [part.state for part in parts]
    return Line(
        at=parts[0].at,
        rates=tuple(rate for part in parts for rate in part.rates),
        weights="+".join(part.weights for part in parts),
        state=None if set(states) == {None} else "+".join(state or _NOTHING for state in states),
        random=parts[-1].random,
        batches=tuple(batch for part in parts for batch in part.batches),
        places=tuple(place for part in parts for place in part.places),
        buffers=None if parts[0].buffers is None else "+".join(part.buffers for part in parts if part.buffers),
        samples=tuple(one for part in parts for one in part.samples),
        ids="+".join(part.ids for part in parts if part.ids) or None,
        groups=tuple(digest for part in parts for digest in part.groups),
        states="+".join(part.states for part in parts),
        settings=tuple(settings for part in parts for settings in part.settings),
        scales=tuple(scale for part in parts for scale in part.scales),
        averages=parts[0].averages,
        saved=frozenset(entry for part in parts for entry in part.saved),
        parts=tuple(parts),
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


def _line(item: dict[str, Any], saved: Iterable[tuple[str, str]]) -> Line:
    return Line(
        at=float(item["t"]),
        rates=tuple(float(rate) for rate in item["lr"]),
        weights=str(item["p"]),
        state=None if item["s"] == _NOTHING else str(item["s"]),
        random=item["g"],
        batches=tuple((str(source), str(digest)) for source, digest, *_ in item["b"]),
        places=tuple(int(batch[2]) if len(batch) > 2 else 0 for batch in item["b"]),
        buffers=str(item["u"]) if "u" in item else None,
        samples=tuple(str(one) for one in item.get("samples", ())),
        ids=str(item["ids"]) if "ids" in item else None,
        groups=tuple(str(digest) for digest in item.get("q", ())),
        states=str(item.get("x", "")),
        settings=tuple(item.get("h", ())),
        scales=tuple((float(scale), float(since)) for scale, since in item.get("z", ())),
        averages=tuple((int(many), str(digest)) for many, digest in item.get("a", ())),
        saved=frozenset(saved),
        optimizer=int(item.get("o", 0)),
    )
