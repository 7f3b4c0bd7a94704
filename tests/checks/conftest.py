"""Fixtures of the checks' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from machines import H200, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A recorded node that the test may damage."""
    return Machine(tmp_path / "h200", of=H200)
