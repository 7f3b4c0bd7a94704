"""Manifest files: objects of Kubernetes as YAML or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainmaster.core.errors import UsageError


def load(path: Path) -> list[dict[str, Any]]:
    """Objects of a manifest, or of the output of a dry run."""
    import yaml

    try:
        # The last line of a dry run is the command that applies it.
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("$ ")]
        found = [one for one in yaml.safe_load_all("\n".join(lines)) if one is not None]
    except OSError as wrong:
        raise UsageError(f"{path}: {wrong.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as wrong:
        raise UsageError(f"{path}: not YAML: {str(wrong).partition(chr(10))[0]}") from None
    if not found or not all(isinstance(one, dict) and one.get("kind") for one in found):
        raise UsageError(f"{path}: not a manifest: every object in it needs a `kind`")
    return found
