"""Five jobs on five SSH hosts at once: the sample of `make ssh-64`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sshd import needs_sshd

ROOT = Path(__file__).parents[2]
STEPS = pytest.mark.matrix(one_in=5, of="steps of a rented box", by_file=True)
pytestmark = [STEPS, pytest.mark.spawns, needs_sshd]


def test_5_concurrent_jobs_run_successfully() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "ssh_hosts.py"), "--hosts", "5"],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 of 5 run at once" in done.stdout and "5 of 5 completed, 5 outputs stored" in done.stdout
    assert "MiB per job" in done.stdout
