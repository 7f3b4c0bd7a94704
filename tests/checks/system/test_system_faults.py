"""Every fault of system and fabric is found, on its device, with something to do; and no healthy node is accused."""

from __future__ import annotations

from typing import Any

import pytest
from nodes import HEALTHY
from system_faults import EIGHT, FAULTS, MINE, Fault

from machines import Machine
from trainmaster import checks
from trainmaster.core.expect import Expect
from trainmaster.core.results import Verdict, judge_overall


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_named_and_given_an_action(machine: Machine, fault: Fault) -> None:
    fault.node(machine)
    fault.break_it(machine)
    (result,) = checks.run(machine.host, Expect(**fault.expect), level=2, only=[fault.check])
    found = [f for f in result.findings if str(f.verdict) == fault.verdict and fault.says in f.reason]
    assert found, [(str(f.verdict), f.device, f.reason) for f in result.findings]
    assert fault.device in [f.device for f in found]
    assert all(f.action for f in result.findings if f.verdict in (Verdict.WARN, Verdict.FAIL, Verdict.ERROR))
    assert str(judge_overall([result], planned=[fault.check])) not in ("PASS", "SKIP")


def test_the_table_holds_many_kinds_and_each_check_once() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25
    assert {fault.check for fault in FAULTS} == (
        {*MINE, "disk_io"} - {"cpu"}
    )  # cpu has its faults in test_system_checks


@pytest.mark.parametrize("node", HEALTHY)
def test_a_healthy_node_gives_no_false_alarm(machine: Machine, node: str) -> None:
    HEALTHY[node](machine)
    results = checks.run(machine.host, Expect(), level=1, only=MINE)
    wrong = [(r.check, f.device, f.reason) for r in results for f in r.findings if f.verdict not in ("pass", "skip")]
    assert wrong == []


@pytest.mark.parametrize(
    ("node", "expect"),
    [
        ("bare metal with InfiniBand", {**EIGHT, "gdr": True, "mounts": ("/fsx:lustre", "/home:nfs4"), "numa_nodes": 2,
                                        "governor": "performance", "clock_offset_s": 0.1, "processes": 4096,
                                        "kernel_modules": ("nvidia-peermem", "mlx5_ib"), "load_per_cpu": 0.5}),
        ("bare metal with RoCE", {"ib_ports": 4, "ib_link_layer": "Ethernet", "ib_rate_gbps": 400.0}),
        ("EFA", {"efa_devices": 32, "ib_ports": 0}),
    ],
)  # fmt: skip
def test_a_node_that_meets_its_profile_passes(machine: Machine, node: str, expect: dict[str, Any]) -> None:
    HEALTHY[node](machine)
    results = checks.run(machine.host, Expect(**expect), level=1, only=MINE)
    wrong = [(r.check, f.device, f.reason) for r in results for f in r.findings if f.verdict not in ("pass", "skip")]
    assert wrong == []
