"""Folders of a drill: copies of the user's working folder, and the checkpoint files that a program left in them."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainmaster.core.errors import UsageError

REPORT = "drill.json"  # in a folder that a drill wrote
LEFT_OUT = frozenset({".git", ".venv", "node_modules", "__pycache__"})
MOST_BYTES = 2 << 30
_LEAST_BYTES = 256  # of a file that may hold weights
_POINTER_BYTES = 4096  # of a file that only names the newest checkpoint
_ENTRIES = 50_000
# Files that programs keep beside their checkpoints.
_NOT_WEIGHTS = re.compile(
    r"(\.(log|txt|csv|jsonl|out|err|py|pyc|ya?ml|md|html|png|svg|wandb|db|lock)|tfevents.*|\.tmp|~)$"
)


_STEP = r"(?:step|iter|iteration|checkpoint|ckpt)[-_=]?(\d+)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Files that belong together: those of one numbered folder or of one number, or a file that is written anew."""

    name: str
    files: tuple[Path, ...]
    at: float  # when its last file was written


def copy_work(source: Path | None, to: Path, *, links: Collection[str] = ()) -> None:
    """Copy the working folder; entries in `links` are linked."""
    mended = check_work(source, to, links=links)
    to.mkdir(parents=True)
    if source is None:
        return
    linked = _names(links)
    for entry in sorted(source.iterdir()):
        if entry.name in LEFT_OUT or to.is_relative_to(entry) or _is_proof(entry):
            continue
        if entry.name in linked:
            (to / entry.name).symlink_to(entry.absolute())
        elif entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, to / entry.name, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        elif entry.is_symlink() or entry.is_file():
            shutil.copy2(entry, to / entry.name, follow_symlinks=False)
    for path, target in mended.items():
        (to / path).unlink()
        (to / path).symlink_to(target)


def _is_proof(entry: Path) -> bool:
    """Whether a drill has written this folder: the next one would carry its copies along."""
    return (entry / REPORT).is_file() and (entry / "reference").is_dir()


def check_work(source: Path | None, to: Path, *, links: Collection[str] = ()) -> dict[Path, str]:
    """Symbolic links of the working folder that a copy of it must not have as they are, with their targets there.

    UsageError where it is too large to copy, or where a program in the copy would write to the user's own files.
    """
    if source is None:
        return {}
    linked = _names(links)
    for name in linked:
        if name != Path(name).name or not (source / name).exists():
            raise UsageError(f"--link {name}: {source} has no such entry; name a file or folder that is directly in it")
    mended = _links_to_mend(source, to, linked)
    if (size := measure(source, leave=linked)) > MOST_BYTES:
        raise UsageError(
            f"{source} has more than {MOST_BYTES >> 30} GiB ({size / (1 << 30):.1f} GiB counted), and a drill works in "
            "copies of it: name what the program only reads with --link NAME, or another folder with --workdir"
        )
    return mended


def _names(links: Collection[str]) -> list[str]:
    """Without the slash that a shell adds to a folder."""
    return [str(Path(name)) for name in links]


def _links_to_mend(source: Path, to: Path, links: Collection[str]) -> dict[Path, str]:
    """Symbolic links that are not the same in a copy, and where they must point there. UsageError for one that leads
    out of the folder: through it the drill would train, strike and damage the user's own checkpoints."""
    real = source.resolve()
    shared = [(source / name).resolve() for name in links]
    changed: dict[Path, str] = {}
    for path in _links(source, to, links):
        try:
            written, target = str(path.readlink()), path.resolve()
        except RuntimeError:  # before Python 3.13
            raise UsageError(f"{path} is a link that leads to itself: remove it, or name it with --link") from None
        if not any(target.is_relative_to(folder) for folder in (real, *shared)):
            first = path.relative_to(source).parts[0]
            raise UsageError(
                f"{path} is a link to {target}, outside of the folder that a drill works in copies of: what the "
                f"program writes through it would reach your own files. If the program only reads it: --link {first}. "
                "If it writes there: replace the link by a folder for the drill, or let it save below "
                "TRAINMASTER_CHECKPOINTS"
            )
        beside = os.path.relpath(path.parent, source)
        leads_out = os.path.isabs(written) or os.path.normpath(os.path.join(beside, written)).startswith("..")  # noqa: PTH117, PTH118
        if leads_out and target.is_relative_to(real):
            changed[path.relative_to(source)] = os.path.relpath(target, path.parent.resolve())
    return changed


def _links(source: Path, to: Path, leave: Collection[str]) -> Iterator[Path]:
    """Symbolic links that `copy_work` would copy."""
    for above, folders, files in os.walk(source):
        here = Path(above)
        names = {
            name
            for name in (*folders, *files)
            if name not in LEFT_OUT
            and not (here == source and (name in leave or to.is_relative_to(here / name) or _is_proof(here / name)))
        }
        yield from (here / name for name in sorted(names) if (here / name).is_symlink())
        # The links of a virtual environment lead to its interpreter, whatever the folder is called.
        folders[:] = [name for name in folders if name in names and not (here / name / "pyvenv.cfg").is_file()]


def measure(folder: Path, *, leave: Collection[str] = ()) -> int:
    """Bytes of a folder, counted until they are too many."""
    total = 0
    for above, folders, files in os.walk(folder):
        here = Path(above)
        folders[:] = [
            name
            for name in folders
            if name not in LEFT_OUT and not (here == folder and (name in leave or _is_proof(here / name)))
        ]
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


def list_alike(found: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Those of about the size of the largest: a config or a table that lies beside them is none to go on from."""
    sizes = [sum(path.stat().st_size for path in checkpoint.files) for checkpoint in found]
    return [checkpoint for checkpoint, size in zip(found, sizes, strict=True) if 2 * size >= max(sizes)]


def find_pointer(checkpoint: Checkpoint, roots: Collection[Path]) -> Path | None:
    """The file or link that names a checkpoint, such as `latest`: one line, in a file whose own name has no number."""
    below = [path.relative_to(root) for path in checkpoint.files for root in roots if path.is_relative_to(root)]
    numbers = {int(found) for path in below for found in re.findall(_STEP, str(path))}
    numbers = numbers or {int(found) for path in below for found in re.findall(r"\d+", path.name)}
    beside = {path.parent for path in checkpoint.files}
    for folder in sorted({*beside, *(above for path in beside for above in path.parents)}):
        if any(folder.is_relative_to(root) for root in roots):
            for path in sorted(folder.iterdir()):
                if path not in checkpoint.files and not re.search(r"\d", path.name) and _points_at(path, numbers):
                    return path
    return None


def _points_at(path: Path, numbers: Collection[int]) -> bool:
    """Whether a link or a small file names one of these steps, and nothing more."""
    if path.is_symlink():
        text = str(path.readlink())
    elif path.is_file() and path.stat().st_size <= _POINTER_BYTES:
        text = path.read_text(errors="replace").strip()
    else:
        return False
    few = len(text.splitlines()) == 1 and len(text.split()) <= 3
    return few and any(int(found) in numbers for found in re.findall(r"\d+", Path(text).name))


def damage(checkpoint: Checkpoint, kind: str, dice: random.Random) -> Path:
    """Damage the largest file of a checkpoint; of several the last one written."""
    path = max(checkpoint.files, key=lambda file: (file.stat().st_size, file.stat().st_mtime_ns, str(file)))
    size = path.stat().st_size
    if kind == "missing":
        path.unlink()
    elif kind == "unfinished":  # as if the first file had just been begun
        for file in checkpoint.files:
            if file != path:
                file.unlink()
        os.truncate(path, 0)
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
    """What the files of one checkpoint share: the path up to its part with the number of a step, and that number.

    `version_0/epoch=1-step=20.ckpt` is of step 20; `model_000010.pt` and `optim_000010.pt` are of one checkpoint.
    """
    for pattern in (_STEP, r"(\d+)"):
        for place, part in enumerate(path.parts):
            if number := re.search(pattern, part):
                is_file = place == len(path.parts) - 1
                return "/".join((*path.parts[:place], number[1] if is_file else part[: number.end()]))
    return str(path)
