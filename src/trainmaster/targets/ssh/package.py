"""The node half of this installation as one file, sent to machines where nothing is installed."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

from trainmaster.targets.ssh import bootstrap

# What checks, benchmarks, the agent and the trainer import on a node, and the node's end of the ssh target.
FOLDERS = ("core", "node", "checks", "bench", "models", "datasets", "train", "storage", "agent", "targets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """The node half as a zip file, with the hash of its content."""

    digest: str
    data: bytes


def pack(root: Path | None = None) -> Package:
    """The node half of this installation."""
    root = root or Path(__file__).parents[2]
    paths = [root / "__init__.py", *(path for name in FOLDERS for path in (root / name).rglob("*") if path.is_file())]
    files = {
        f"trainmaster/{path.relative_to(root).as_posix()}": path.read_bytes()
        for path in sorted(paths)
        if "__pycache__" not in path.parts
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return Package(digest=bootstrap.tree_digest(files), data=packed.getvalue())
