"""The fabric as /sys shows it: what counts as up, what a profile asks for, and that damage never passes."""

from __future__ import annotations

import pytest
from nodes import IB, NET, efa, infiniband, interface, put, rdma, roce

from machines import Machine
from trainmaster import checks
from trainmaster.checks.fabric.nccl_interfaces import matches
from trainmaster.core.expect import Expect
from trainmaster.core.results import Verdict

FABRIC = ["efa", "ib_counters", "ib_ports", "roce_gid"]


def test_ports_beyond_those_expected_are_nobodys_fault(machine: Machine) -> None:
    """Eight rails and a storage port that nobody has plugged in."""
    infiniband(machine, ports=9)
    put(machine, files={f"{IB}/mlx5_8/ports/1/state": "1: DOWN\n", f"{IB}/mlx5_8/ports/1/phys_state": "2: Polling\n"})
    assert machine.verdicts("ib_ports", ib_ports=8) == {None: "pass", "mlx5_8:1": "skip"}
    assert machine.verdicts("ib_ports", ib_ports=9)["mlx5_8:1"] == "fail"


def test_a_slower_board_beside_the_rails_is_no_fault(machine: Machine) -> None:
    infiniband(machine, ports=6)
    files = {f"{IB}/mlx5_{n}/{name}": text for n in (4, 5) for name, text in
             (("board_id", "MT_0000000359\n"), ("ports/1/rate", "100 Gb/sec (4X EDR)\n"))}  # fmt: skip
    put(machine, files=files)
    assert set(machine.verdicts("ib_ports").values()) == {"pass"}


def test_a_roce_port_that_is_switched_off_is_left_alone(machine: Machine) -> None:
    roce(machine)
    put(machine, files={f"{IB}/mlx5_2/ports/1/state": "1: DOWN\n", f"{IB}/mlx5_2/ports/1/phys_state": "3: Disabled\n",
                        **interface("eth3", index=5, flags="0x1002", state="down")})  # fmt: skip
    assert machine.verdicts("ib_ports")["mlx5_2:1"] == "skip"
    assert machine.verdicts("ib_ports", ib_ports=4)["mlx5_2:1"] == "fail"
    assert "mlx5_2:1" not in machine.verdicts("roce_gid")


def test_counters_are_judged_by_the_time_they_had(machine: Machine) -> None:
    """Nine flaps in ten days are a bad cable; in a year they are switches that were served."""
    infiniband(machine)
    path = f"{IB}/mlx5_0/ports/1/counters"
    put(machine, files={f"{path}/link_downed": "9\n", f"{path}/symbol_error": "900\n"})
    assert machine.verdicts("ib_counters")["mlx5_0:1"] == "warn"
    put(machine, files={"/proc/uptime": f"{365 * 86400}.00 1.00\n"})
    assert machine.verdicts("ib_counters")["mlx5_0:1"] == "pass"


def test_a_virtual_port_without_counters_skips(machine: Machine) -> None:
    infiniband(machine, ports=1)
    put(machine, files={}, lists={f"{IB}/mlx5_0/ports/1/counters": None, f"{IB}/mlx5_0/ports/1/hw_counters": None})
    assert machine.verdicts("ib_counters") == {"mlx5_0:1": "skip"}


def test_fi_info_is_found_where_the_installer_puts_it(machine: Machine) -> None:
    efa(machine, 4)
    told = (machine.folder / "commands/fi_info_p_efa.out").read_text()
    machine.refuses("fi_info -p efa", "CommandMissing", "fi_info is not on this machine")
    machine.command("/opt/amazon/efa/bin/fi_info -p efa", told)
    assert machine.verdicts("efa", efa_devices=4) == {None: "pass"}


@pytest.mark.parametrize(
    "told", ["", "provider: efa\n", "Segmentation fault\n", "provider: efa\n    fabric: efa\n    doma"]
)
def test_a_damaged_fi_info_never_passes(machine: Machine, told: str) -> None:
    efa(machine, 2)
    machine.command("fi_info -p efa", told)
    assert "pass" not in machine.verdicts("efa").values()


@pytest.mark.parametrize("name", ["state", "phys_state", "rate"])
@pytest.mark.parametrize(
    "text", ["", "\x00", "4", "ACTIVE", "4: ACTIVE DOWN", "-1", "999999999999", "5: LinkDown", None]
)
def test_a_damaged_file_of_a_port_never_passes(machine: Machine, name: str, text: str | None) -> None:
    infiniband(machine, ports=1)
    put(machine, files={f"{IB}/mlx5_0/ports/1/{name}": text})
    results = checks.run(machine.host, Expect(ib_ports=1), level=1, only=["ib_ports"])
    assert results[0].verdict in (Verdict.FAIL, Verdict.ERROR)


@pytest.mark.parametrize("path", ["ports/1/state", "device/uevent", "board_id", "ports/1/counters/symbol_error"])
def test_what_may_not_be_read_is_an_error(machine: Machine, path: str) -> None:
    infiniband(machine, ports=1)
    machine.answer("read", f"{IB}/mlx5_0/{path}", {"error": "FileUnreadable", "message": "Permission denied"})
    results = checks.run(machine.host, Expect(ib_ports=1), level=1, only=["ib_ports", "ib_counters"])
    assert Verdict.ERROR in [result.verdict for result in results]


def test_no_fabric_skips_each_check_and_expected_fabric_fails(machine: Machine) -> None:
    results = checks.run(machine.host, Expect(), level=1, only=FABRIC)
    assert {result.verdict for result in results} == {Verdict.SKIP}
    assert machine.verdicts("ib_ports", ib_rate_gbps=400.0) == {None: "fail"}
    assert machine.verdicts("ib_counters", ib_ports=8) == {None: "error"}
    assert machine.verdicts("gdr", gdr=True) == {None: "fail"}


def test_soft_roce_is_seen_as_what_it_is(machine: Machine) -> None:
    rdma(machine, ["rxe0"], driver="none", layer="Ethernet", rate="2.5 Gb/sec (1X SDR)")
    put(machine, files={f"{IB}/rxe0/device/uevent": None})
    assert machine.verdicts("ib_ports") == {"rxe0:1": "pass"}
    assert machine.verdicts("ib_ports", ib_ports=1, ib_rate_gbps=400.0)["rxe0:1"] == "fail"


@pytest.mark.parametrize(
    ("names", "interface", "taken"),
    [
        ("eth", "eth0", True),
        ("eth0,ens", "ens5", True),
        ("=eth", "eth0", False),
        ("=eth0", "eth0", True),
        ("^docker,lo", "eth0", True),
        ("^docker,lo", "lo", False),
        ("^=eth0", "eth0", False),
        ("^=eth0", "eth01", True),
        ("ens5", "eth0", False),
    ],
)
def test_interface_lists_mean_what_nccl_means(names: str, interface: str, taken: bool) -> None:
    assert matches(names, interface) is taken


@pytest.mark.parametrize(
    ("hca", "verdict"),
    [("mlx5", "pass"), ("=mlx5_1", "pass"), ("mlx5_0:1", "pass"), ("mlx5_0:2", "warn"), ("^mlx5", "warn"),
     ("^mlx5_0", "pass"), ("=mlx5", "warn"), ("bnxt", "warn")],
)  # fmt: skip
def test_device_lists_mean_what_nccl_means(machine: Machine, hca: str, verdict: str) -> None:
    infiniband(machine, ports=2)
    machine.answer("env", "NCCL_IB_HCA", hca)
    assert [str(finding.verdict) for finding in machine.judge("nccl_env")] == [verdict]


def test_the_environment_wins_over_the_files(machine: Machine) -> None:
    infiniband(machine, ports=2)
    put(machine, files={"/etc/nccl.conf": "NCCL_IB_DISABLE=1\n", "/root/.nccl.conf": "NCCL_IB_DISABLE=0\n"})
    assert machine.verdicts("nccl_env") == {None: "pass"}
    machine.answer("env", "NCCL_IB_DISABLE", "1")
    assert machine.verdicts("nccl_env") == {"NCCL_IB_DISABLE": "warn"}


def test_harmless_settings_are_told_and_pass(machine: Machine) -> None:
    for name, value in (("NCCL_DEBUG", "INFO"), ("NCCL_IB_DISABLE", "1"), ("NCCL_P2P_DISABLE", "1")):
        machine.answer("env", name, value)  # one GPU and no fabric: nothing to switch off
    (finding,) = machine.judge("nccl_env")
    assert finding.verdict == "pass"
    assert "NCCL_DEBUG=INFO" in finding.reason


def test_p2p_disabled_fails_where_links_are_expected(machine: Machine) -> None:
    machine.gpus(8)
    machine.answer("env", "NCCL_P2P_DISABLE", "1")
    assert machine.verdicts("nccl_env", nvlinks=18) == {"NCCL_P2P_DISABLE": "fail"}


def test_only_loopback_is_a_node_alone(machine: Machine) -> None:
    put(machine, files={}, lists={NET: ["bonding_masters", "lo"]})
    put(machine, files={f"{NET}/bonding_masters/{name}": None for name in ("flags", "ifindex")})
    assert machine.verdicts("nccl_interfaces") == {None: "skip"}
