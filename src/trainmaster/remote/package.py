"""The node half of this installation: packed as one file for machines where nothing is installed, or as a folder."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainmaster.remote import bootstrap

# What checks, benchmarks, the agent and the trainer import on a node, and what the control half starts there.
FOLDERS = ("core", "node", "checks", "bench", "models", "datasets", "drill", "train", "storage", "agent", "remote")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """The node half as a zip file in gzip, with the hash of its content."""

    digest: str
    data: bytes


def pack() -> Package:
    """The node half of this installation."""
    files = {f"trainmaster/{name}": path.read_bytes() for name, path in sorted(_files())}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    # Compressed as a whole: file by file it is a third larger, and a ConfigMap holds 1 MiB.
    return Package(digest=bootstrap.tree_digest(files), data=gzip.compress(packed.getvalue(), 6, mtime=0))


def install(folder: Path) -> None:
    """Copy the node half to a folder that compute nodes share: whole or not at all, and only where it is not there."""
    if (folder / "trainmaster").is_dir():
        return
    draft = folder.with_name(f".{folder.name}-{os.getpid()}-{time.monotonic_ns()}")
    for name, path in _files():
        place = draft / "trainmaster" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, place)
    try:
        draft.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(draft, ignore_errors=True)
        if not (folder / "trainmaster").is_dir():
            raise


def _files() -> Iterator[tuple[str, Path]]:
    """Every file of the node half by its path below the package."""
    root = Path(__file__).parents[1]
    yield "__init__.py", root / "__init__.py"
    for folder in FOLDERS:
        for path in (root / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path.relative_to(root).as_posix(), path
