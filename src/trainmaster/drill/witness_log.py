"""Lines of the witness, read: what each process of an attempt held at each of its optimizer steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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
    steps = [item for item in objects if item.get("k") == "step"]
    lines = _merge(steps)
    if not lines:
        return None
    return Life(
        pid=pid,
        rank=int(steps[0]["r"]),
        world=int(steps[0]["w"]),
        lines=lines,
        saves=tuple(
            Save(after=int(item["n"]), at=float(item["t"]), path=str(item["path"]), behind=bool(item.get("behind")))
            for item in objects
            if item.get("k") == "save"
        ),
        missed=max(int(item["n"]) for item in steps) - len({int(item["n"]) for item in steps}),
        struck=any(item.get("k") == "struck" for item in objects),
    )


def _merge(items: Sequence[dict[str, Any]]) -> tuple[Line, ...]:
    """One line for each step of the first optimizer, with the steps that others did before its next one.

    Where the last one has fewer than the one before it, the process was killed in between, and it is left out.
    """
    groups: dict[int, list[dict[str, Any]]] = {}
    for item in items:
        groups.setdefault(int(item["n"]), []).append(item)
    whole = list(groups.values())
    if len(whole) > 1 and len(whole[-1]) < len(whole[-2]):
        whole.pop()
    return tuple(_line(group) for group in whole)


def _line(group: Sequence[dict[str, Any]]) -> Line:
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
    )
