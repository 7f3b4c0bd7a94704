"""Manifest files: objects of Kubernetes as YAML or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainmaster.core.errors import UsageError
from trainmaster.documents import yaml_file


def load(path: Path) -> list[dict[str, Any]]:
    """Objects of a manifest, or of the output of a dry run."""
    # The last line of a dry run is the command that applies it; left empty, the lines keep their numbers.
    lines = [b"" if line.startswith(b"$ ") else line for line in yaml_file.read_bytes(path).splitlines()]
    objects = yaml_file.parse_all(b"\n".join(lines), path.name)
    if not objects or not all(isinstance(each, dict) and each.get("kind") for each in objects):
        raise UsageError(f"{path}: not a manifest: every object in it needs a `kind`")
    return objects
