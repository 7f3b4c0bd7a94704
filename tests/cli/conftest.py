"""What several tests of verbs share."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fork_server import ForkServer

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(programs: ForkServer) -> Run:
    """A verb, forked: a new interpreter would only import the same once more."""

    def call(*words: str, home: Path) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "TRAINMASTER_HOME": str(home), "COLUMNS": "200", "NO_COLOR": "1"}
        return programs.run("trainmaster", *words, env=env)

    return call
