"""The kernel kills a rank for want of memory: a real control group with a real limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.states import Reason

HOG = """
import os, time
if os.environ["RANK"] == "0":
    time.sleep(60)
kept = []
while True:
    kept.append(bytearray(8 << 20))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 100 MiB, version 1 or 2; skips where we may not make one."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"trainmaster-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text("100M")
                yield group
                return
        except PermissionError:
            continue
        finally:
            group.rmdir()
    pytest.skip("no control group can be made here")


def test_the_oom_killer_is_named(node: Any, group: Path) -> None:
    plan = node.plan(sys.executable, "-c", HOG, ranks=2, limits={"grace_s": 0.2})
    enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    agent = ["sh", "-c", enter, "sh", sys.executable, "-m", "trainmaster.agent", str(plan)]
    assert subprocess.run(agent, env=node.env, check=False, capture_output=True).returncode == 1
    record = node.record()
    assert (record.reason, record.exit_codes["1"]) == (Reason.OUT_OF_MEMORY, -9)
    assert record.evidence["rank"] == 1
    assert record.evidence["oom_kills"] >= 1
