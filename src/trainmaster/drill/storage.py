"""Strikes at the disk of a run: what a power cut leaves of it, a full disk, a folder that cannot be written.

inject/trainmaster_disk.py is the half inside the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.drill import mounts, witness_log
from trainmaster.drill.folders import LEFT_OUT, Checkpoint
from trainmaster.drill.plan import LOOK_STEPS, Shape
from trainmaster.drill.record import Attempt, Storage

TICK_NS = 20_000_000  # times of files are those of the kernel's last tick
_WRITE = 0o222
_TOLD = re.compile(
    r"error|fail|could ?n[o']t|cannot|can't|unable|exception|errno|denied|too large|no space|read-?only|not saved", re.I
)
_LOG_BYTES = 16 << 20
_PART_BYTES = 1 << 20


def place(name: str, shape: Shape, newest: int) -> dict[str, int]:
    """When to strike, in steps of the attempt that goes on from `newest`; empty: no save is left to be struck."""
    saves = [step for step in shape.saves if step >= newest + 2]
    if not saves or (name == "power" and saves[0] >= shape.steps):
        return {}
    if name == "power":
        return {"after": saves[0] - newest + 1}
    # A save in the background may tell of its error at the next one.
    return {"after": 2, "until": saves[:2][-1] - newest + LOOK_STEPS}


@dataclass(slots=True)
class Disk:
    """What the next saves of a copy of the run are written to."""

    name: str  # the strike
    folder: Path  # in which its checkpoints are
    room: int = 0  # of a full one, in bytes: of the whole disk, or of one file
    is_mount: bool = False
    is_forbidden: bool = False  # without the permission to write, in place of a read-only mount

    @property
    def limit(self) -> int:
        """Bytes of a file that the program may write; 0: the disk itself tells."""
        return 0 if self.is_mount else self.room

    def forbid(self) -> None:
        if not (self.is_mount and mounts.forbid(self.folder)):
            self.is_forbidden = True
            forbid(self.folder)

    def __str__(self) -> str:
        if self.name == "readonly":
            by_permission = "without the permission to write: EACCES in place of EROFS"
            return by_permission if self.is_forbidden else "a read-only mount: EROFS"
        if self.is_mount:
            return f"a disk with {self.room} bytes left: ENOSPC"
        return f"every write past {self.room} bytes of a file failed: RLIMIT_FSIZE, EFBIG in place of ENOSPC"


@contextlib.contextmanager
def prepared(name: str, newest: Checkpoint, run: Path, *, own_mounts: bool) -> Iterator[Disk]:
    """The disk of a strike: a mount where the drill can have mounts of its own."""
    disk = Disk(name=name, folder=find_folder(newest, run))
    sizes = [path.stat().st_size for path in newest.files]
    with contextlib.ExitStack() as stack:
        if own_mounts and name == "full":
            page = os.sysconf("SC_PAGE_SIZE")  # what a tmpfs is counted in
            disk.room = max(page, sum(sizes) // 2 // page * page)
            disk.is_mount = stack.enter_context(mounts.small_disk(disk.folder, disk.room))
        elif own_mounts and name == "readonly":
            disk.is_mount = stack.enter_context(mounts.own_mount(disk.folder))
        if name == "full" and not disk.is_mount:
            disk.room = max(sizes) // 2
        try:
            yield disk
        finally:
            if disk.is_forbidden:
                permit(disk.folder)


def find_folder(newest: Checkpoint, run: Path) -> Path:
    """The folder of a run in which it keeps its checkpoints: `checkpoints`, or what it made itself in `work`; `work`
    itself where each checkpoint is a folder of its own there, beside which the next one is made."""
    parts = newest.files[0].relative_to(run).parts
    is_below = parts[0] == "work" and len(parts) > 2 and re.search(r"\d", parts[1]) is None
    return run.joinpath(*parts[: 2 if is_below else 1])


def forbid(folder: Path) -> None:
    """Take the permission to write from a folder and all that is in it."""
    for path in _below(folder):
        path.chmod(path.stat().st_mode & 0o7777 & ~_WRITE)


def permit(folder: Path) -> None:
    for path in _below(folder):
        path.chmod(path.stat().st_mode & 0o7777 | 0o200)


def look(hit: Attempt, reference: Path, *, until: int, disk: Disk, run: Path, before: Path) -> Storage:
    """What a program did whose saves could not be written. `reference`: folder of the undisturbed attempt; `before`:
    the run that `run` was a copy of."""
    witness = _witness(hit)
    marks = [path.stat().st_mtime_ns for path in (*witness.glob("struck-*"), *witness.glob("go"))]
    since = max(marks, default=0) + TICK_NS
    if disk.is_mount and disk.room:  # it was full before the attempt began
        since = int(hit.begun * 1e9)
    roots = [run / "checkpoints", run / "work"] if disk.limit else [disk.folder]
    written = {
        path: path.stat().st_size
        for path in _files(*roots)
        if path.stat().st_mtime_ns > since and not _is_appended(path, before / path.relative_to(run))
    }
    if disk.limit:
        written = {path: size for path, size in written.items() if size > disk.limit}
    elif sum(written.values()) <= disk.room:  # the part that there was room for
        written = {}
    return Storage(
        way=str(disk),
        went_on=set(hit.codes) == {0} or any(len(life.lines) >= until for life in hit.lives),
        refused=witness_log.read_refused(witness),
        told=_told(Path(hit.folder), reference),
        through=tuple(str(path.relative_to(run)) for path in written),
    )


def _is_appended(path: Path, old: Path) -> bool:
    """Whether a file is an older one with something added, as a log: no save."""
    if not old.is_file() or not 0 < old.stat().st_size <= path.stat().st_size:
        return False
    with path.open("rb") as now, old.open("rb") as then:
        while part := then.read(_PART_BYTES):
            if now.read(len(part)) != part:
                return False
    return True


def cut(hit: Attempt, newest: Collection[Path], run: Path) -> Storage:
    """Take from the disk what a power cut would: data that was not fsynced since it was written.

    Names stay, as on ext4 and XFS, which keep the order of what is done to folders: a file is there, and empty, or as
    long as it was at its last fsync. Files whose writer was not seen are left as they are.
    """
    journal = _journal(_witness(hit))
    synced = {int(item["file"]): (int(item["size"]), int(item["at"])) for item in journal if item["k"] == "sync"}
    everything = max((int(item["t"]) for item in journal if item["k"] == "all"), default=0)
    seen = set[str]() if any(item["k"] == "doubt" for item in journal) else _written(journal)
    lost, unseen = list[Path](), list[Path]()
    for path in _files(run / "checkpoints", run / "work"):
        facts = path.stat()
        if facts.st_mtime_ns < hit.begun * 1e9 - TICK_NS or facts.st_mtime_ns < everything:
            continue
        size, at = synced.get(facts.st_ino, (0, 0))
        if (size, at) == (facts.st_size, facts.st_mtime_ns) or not facts.st_size:
            continue
        if str(path.resolve()) in seen:
            os.truncate(path, min(size, facts.st_size))
            lost.append(path)
        elif path in newest:
            unseen.append(path)
    return Storage(
        way="what was not fsynced is lost, names stay",
        lost=tuple(str(path.relative_to(run)) for path in sorted(lost, key=lambda path: (path not in newest, path))),
        unseen=tuple(str(path.relative_to(run)) for path in sorted(unseen)),
        of=len(newest),
    )


def _written(journal: Sequence[Mapping[str, Any]]) -> set[str]:
    """Files that were opened for writing, by the names that they have now."""
    seen = set[str]()
    for item in journal:
        if item["k"] == "open":
            seen.add(item["path"])
        elif item["k"] == "unsure":
            seen.discard(item["path"])
        elif item["k"] == "link" and item["path"] in seen:
            seen.add(item["to"])
        elif item["k"] == "rename":
            old, new = item["path"], item["to"]
            moved = {path for path in seen if path == old or path.startswith(old + os.sep)}
            seen = {path for path in seen - moved if path != new} | {new + path[len(old) :] for path in moved}
    return seen


def _journal(witness: Path) -> list[dict[str, Any]]:
    """Lines of every process, in the order of their times."""
    items = []
    for path in witness.glob("disk-*.log"):
        for raw in path.read_bytes().splitlines():
            try:
                items.append(json.loads(raw))
            except ValueError:  # cut off by a kill
                continue
    return sorted(items, key=lambda item: int(item["t"]))


def _told(hit: Path, reference: Path) -> str | None:
    """A line of the log that tells of a fault, and is not in that of the undisturbed run."""
    usual = {_shape(line) for line in _log(reference)}
    return next((line.strip()[:160] for line in _log(hit) if _TOLD.search(line) and _shape(line) not in usual), None)


def _shape(line: str) -> str:
    return re.sub(r"[\d.]+", "#", line.strip())


def _log(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("rank-*.log")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LOG_BYTES))
            yield from file.read().decode(errors="replace").splitlines()


def _witness(attempt: Attempt) -> Path:
    folder = Path(attempt.folder)
    return folder.with_name(f"{folder.name}-witness")


def _below(folder: Path) -> list[Path]:
    """The folder, and every folder and file in it; no links."""
    found = [folder]
    for above, folders, files in os.walk(folder):
        found += [path for name in (*folders, *files) if not (path := Path(above) / name).is_symlink()]
    return found


def _files(*roots: Path) -> Iterator[Path]:
    for root in roots:
        for above, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name not in LEFT_OUT]
            yield from (path for name in files if (path := Path(above) / name).is_file() and not path.is_symlink())
