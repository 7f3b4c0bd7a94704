"""Fixtures of the checks' tests."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from machines import H200, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A recorded node that the test may damage."""
    shutil.copytree(H200, tmp_path / "h200")
    return Machine(tmp_path / "h200")
