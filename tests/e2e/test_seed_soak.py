"""Checkboxes of seed 004, 8.1 and 8.2, that take time: a sample of `make soak-ssh`, seen from all sides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sshd import needs_sshd

ROOT = Path(__file__).parents[2]
STEPS = pytest.mark.matrix(one_in=5, of="steps of a rented box", by_file=True)
pytestmark = [STEPS, pytest.mark.spawns, pytest.mark.slow, needs_sshd, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def soaked() -> dict[str, Any]:
    """The verdict of 24 seconds of jobs that come and go."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "ssh_soak.py"), "--minutes", "0.4"],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, found["wrong"]) == (0, []), done.stdout + done.stderr
    return found


def test_two_hours_of_events_are_watched_in_a_sample_of_24_seconds(soaked: dict[str, Any]) -> None:
    """Not two hours of real time: `make soak-ssh` watches for as long as it is told (20 minutes in docs/LOG.md)."""
    assert soaked["watched_events"] == 1440 and soaked["watched_hours"] >= 1.99, "two hours by the events' own times"


def test_memory_usage_stays_stable(soaked: dict[str, Any]) -> None:
    """The median of each third of the run; the first one still loads modules."""
    assert sum(soaked["jobs"].values()) >= 3, "jobs came and went meanwhile"
    _, second, third = soaked["memory_mib"]
    assert abs(third - second) <= 0.1 * second, soaked["memory_mib"]


def test_memory_does_not_leak(soaked: dict[str, Any]) -> None:
    assert soaked["memory_mib"][2] - soaked["memory_mib"][1] <= 8 and soaked["files"][2] - soaked["files"][1] <= 8


def test_connections_stay_alive(soaked: dict[str, Any]) -> None:
    assert soaked["connections"] == 3 and soaked["cuts"] > 0, "each host is connected at the end, also one that was cut"
