"""Whatever a file holds, a check judges it or says that it cannot be read; it never breaks, and damage is no health."""

from __future__ import annotations

import re

import pytest
from nodes import bare_metal, efa, put, roce
from system_faults import MINE

from machines import Machine
from trainmaster import checks
from trainmaster.core.expect import Expect
from trainmaster.core.results import Verdict


def kinds(machine: Machine) -> list[str]:
    """One file of each kind: of sixteen CPUs' governors the first."""
    held = [path for path, answer in machine.answers["read"].items() if "error" not in answer]
    return sorted({re.sub(r"\d+", "#", path): path for path in held}.values())


@pytest.mark.slow
@pytest.mark.parametrize("garbage", ["", "\ufffd?\n-1 x"])
@pytest.mark.parametrize("node", ["metal with RoCE", "EFA"])
def test_no_check_breaks_on_a_damaged_file(machine: Machine, node: str, garbage: str) -> None:
    if node == "EFA":
        efa(machine, 1)
    else:
        bare_metal(machine)
        roce(machine, 1)
    for path in kinds(machine):
        whole = machine.text(f"files{path}")
        put(machine, files={path: garbage})
        results = checks.run(machine.host, Expect(), level=1, only=MINE)
        broken = [(path, r.check, f.reason) for r in results for f in r.findings if "check itself failed" in f.reason]
        assert broken == []
        put(machine, files={path: whole})


MUST_READ = {
    "/proc/loadavg": "cpu_load",
    "/proc/meminfo": "swap",
    "/proc/vmstat": "oom_kills",
    "/proc/pressure/memory": "memory_pressure",
    "/proc/self/limits": "open_files",
    "/proc/self/mountinfo": "mounts",
    "/sys/devices/system/node/online": "numa",
    "/sys/devices/system/cpu/online": "cpu_load",
    "/sys/fs/cgroup/pids.max": "processes",
    "/sys/fs/cgroup/cpu.max": "cpu",
    "/sys/fs/cgroup/memory.max": "ram",
    "/sys/class/net/eth0/flags": "nccl_interfaces",
}


@pytest.mark.parametrize(("path", "check"), MUST_READ.items(), ids=MUST_READ.values())
def test_a_check_whose_only_witness_is_damaged_is_an_error(machine: Machine, path: str, check: str) -> None:
    put(machine, files={path: "\ufffd?\n"})
    (result,) = checks.run(machine.host, Expect(), level=1, only=[check])
    assert result.verdict is Verdict.ERROR
