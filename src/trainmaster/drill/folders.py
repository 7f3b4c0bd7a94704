"""Folders of a drill: copies of the user's working folder, and the checkpoint files that a program left in them."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainmaster.core.errors import UsageError

LEFT_OUT = frozenset({".git", ".venv", "node_modules", "__pycache__"})
MOST_BYTES = 2 << 30
_LEAST_BYTES = 256  # of a file that may hold weights
_ENTRIES = 50_000
# Files that programs keep beside their checkpoints.
_NOT_WEIGHTS = re.compile(
    r"(\.(log|txt|csv|jsonl|out|err|py|pyc|ya?ml|md|html|png|svg|wandb|db|lock)|tfevents.*|\.tmp|~)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Files that belong together: those of one numbered folder or of one number, or a file that is written anew."""

    name: str
    files: tuple[Path, ...]
    at: float  # when its last file was written


def copy_work(source: Path | None, to: Path, *, links: Collection[str] = ()) -> None:
    """Copy the working folder; entries in `links` are linked. UsageError where it is too large to copy."""
    to.mkdir(parents=True)
    if source is None:
        return
    if (size := measure(source, leave=links)) > MOST_BYTES:
        raise UsageError(
            f"{source} has more than {MOST_BYTES >> 30} GiB ({size / (1 << 30):.1f} GiB counted), and a drill works in "
            "copies of it: name what the program only reads with --link NAME, or another folder with --workdir"
        )
    for name in links:
        if not (source / name).exists():
            raise UsageError(f"--link {name}: {source} has no such entry")
    for entry in sorted(source.iterdir()):
        if entry.name in LEFT_OUT or to.is_relative_to(entry):
            continue
        if entry.name in links:
            (to / entry.name).symlink_to(entry.absolute())
        elif entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, to / entry.name, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        elif entry.is_symlink() or entry.is_file():
            shutil.copy2(entry, to / entry.name, follow_symlinks=False)


def measure(folder: Path, *, leave: Collection[str] = ()) -> int:
    """Bytes of a folder, counted until they are too many."""
    total = 0
    for above, folders, files in os.walk(folder):
        here = Path(above)
        folders[:] = [name for name in folders if name not in LEFT_OUT and not (here == folder and name in leave)]
        for name in files:
            if not (here == folder and name in leave):
                total += (here / name).lstat().st_size
        if total > MOST_BYTES:
            break
    return total


def find_checkpoints(roots: Collection[Path], *, since: float) -> list[Checkpoint]:
    """Checkpoints written since then, the newest first."""
    groups: dict[str, list[tuple[Path, float]]] = {}
    for root in roots:
        for path, written in _files(root):
            if written >= since:
                groups.setdefault(f"{root}/{_group(path.relative_to(root))}", []).append((path, written))
    found = [
        Checkpoint(name=name, files=tuple(sorted(path for path, _ in files)), at=max(at for _, at in files))
        for name, files in groups.items()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.at, reverse=True)


def damage(checkpoint: Checkpoint, kind: str, dice: random.Random) -> Path:
    """Damage the largest file of a checkpoint; of several the last one written."""
    path = max(checkpoint.files, key=lambda file: (file.stat().st_size, file.stat().st_mtime_ns, str(file)))
    size = path.stat().st_size
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        os.truncate(path, size // 2)
    else:
        flip_bit(path, size // 4 + dice.randrange(max(1, size // 2)), dice.randrange(8))
    return path


def flip_bit(path: Path, place: int, bit: int) -> None:
    """Flip one bit of the byte at `place`."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


def _files(root: Path) -> Iterator[tuple[Path, float]]:
    seen = 0
    for above, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        for name in files:
            path = Path(above) / name
            seen += 1
            try:
                facts = path.lstat()
            except FileNotFoundError:
                continue
            if facts.st_size >= _LEAST_BYTES and not path.is_symlink() and not _NOT_WEIGHTS.search(name):
                yield path, facts.st_mtime
        if seen > _ENTRIES:
            return


def _group(path: Path) -> str:
    """What the files of one checkpoint share: the path up to its first part with a number, and that number."""
    for place, part in enumerate(path.parts):
        if number := re.search(r"\d+", part):
            return "/".join((*path.parts[:place], part[: number.end()]))
    return str(path)
