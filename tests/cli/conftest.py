from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import slurm as testbed


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real Slurm of three nodes; its slurm.conf."""
    with testbed.start(tmp_path_factory.mktemp("slurm")) as conf:
        yield conf
