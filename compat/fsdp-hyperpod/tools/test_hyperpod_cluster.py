#!/usr/bin/env python3
"""`trainmaster cluster test`, under the name of the testing framework.

python3 tools/test_hyperpod_cluster.py --action full-test --monitor-duration 600
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
VERB = ("-m", "trainmaster", "cluster", "test", "--manifest", str(HERE / "FSDP" / "kubernetes" / "fsdp-hpto.yaml"))


def find_python() -> str:
    """Python of the clone's virtual environment, else the one that runs this."""
    own = HERE.parents[1] / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable


if __name__ == "__main__":
    words = sys.argv[1:] if "--action" in " ".join(sys.argv[1:]) else ["--action", "full-test", *sys.argv[1:]]
    os.execv(find_python(), [find_python(), *VERB, *words])  # noqa: S606 (no shell is wanted)
