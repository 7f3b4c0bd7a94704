"""The fabric as /sys shows it: what counts as up, what a profile asks for, and that damage never passes."""

from __future__ import annotations

import pytest
from nodes import IB, NET, efa, fi_info_text, infiniband, interface, match_ibstat, put, rdma, roce

from machines import PCI, Machine
from trainmaster import checks
from trainmaster.checks.fabric.nccl_interfaces import matches
from trainmaster.core.expect import Expect
from trainmaster.core.results import UNSEEN, Verdict

FABRIC = ["efa", "ib_counters", "ib_ports", "nic_pcie", "roce_gid"]


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
    match_ibstat(machine)
    assert set(machine.verdicts("ib_ports").values()) == {"pass"}


def test_an_ethernet_port_beside_eight_rails_of_its_board_is_no_fault(machine: Machine) -> None:
    infiniband(machine, ports=9)
    put(machine, files={f"{IB}/mlx5_8/ports/1/link_layer": "Ethernet\n"})
    match_ibstat(machine)
    assert set(machine.verdicts("ib_ports").values()) == {"pass"}


OFF = {f"{IB}/mlx5_2/ports/1/state": "1: DOWN\n", f"{IB}/mlx5_2/ports/1/phys_state": "3: Disabled\n"}


def test_a_roce_port_that_is_switched_off_is_left_alone(machine: Machine) -> None:
    """One of three beside others that are up, or the second port of a card that has a link."""
    roce(machine, ports=3)
    put(machine, files={**OFF, **interface("eth3", index=5, flags="0x1002", state="down")})
    assert machine.verdicts("ib_ports")["mlx5_2:1"] == "skip"
    assert machine.verdicts("ib_ports", ib_ports=3)["mlx5_2:1"] == "fail"
    assert "mlx5_2:1" not in machine.verdicts("roce_gid")


def on_bus(number: int, address: str) -> dict[str, str | None]:
    return {f"{IB}/mlx5_{number}/device/uevent": f"DRIVER=mlx5_core\nPCI_SLOT_NAME={address}\n"}


def test_a_second_port_of_a_card_with_a_link_is_no_rail(machine: Machine) -> None:
    roce(machine, ports=8)
    for number in range(8):
        put(machine, files=on_bus(number, f"0000:{0x80 + number // 2:02x}:00.{number % 2}"))
    put(machine, files={f"{IB}/mlx5_{n}/ports/1/{name}": text for n in (1, 3, 5, 7) for name, text in
                        (("state", "1: DOWN\n"), ("phys_state", "2: Polling\n"))})  # fmt: skip
    assert set(machine.verdicts("ib_ports").values()) == {"pass", "warn"}
    put(machine, files={f"{IB}/mlx5_0/ports/1/state": "1: DOWN\n", f"{IB}/mlx5_0/ports/1/phys_state": "2: Polling\n"})
    assert [name for name, verdict in machine.verdicts("ib_ports").items() if verdict == "fail"] == [
        "mlx5_0:1",
        "mlx5_1:1",
    ]


@pytest.mark.parametrize("flags", ["0x1003", "0x1002", None])
def test_a_rail_without_a_link_fails_wherever_its_interface_is(machine: Machine, flags: str | None) -> None:
    """Up without a carrier, switched off, or in the network namespace of the host."""
    roce(machine)
    put(machine, files={**OFF, **interface("eth3", index=5, flags=flags or "0x1003", state="down")},
        lists={f"{IB}/mlx5_2/device/net": [] if flags is None else ["eth3"]})  # fmt: skip
    assert machine.verdicts("ib_ports")["mlx5_2:1"] == "fail"
    machine.no_gpus()  # a storage node: its ports may be spares
    assert machine.verdicts("ib_ports")["mlx5_2:1"] == ("warn" if flags == "0x1003" else "skip")


def test_one_dark_adapter_of_a_gpu_node_is_not_passed_over(machine: Machine) -> None:
    roce(machine, ports=1)
    down = {"state": "1: DOWN\n", "phys_state": "3: Disabled\n"}
    put(machine, files={f"{IB}/mlx5_0/ports/1/{name}": text for name, text in down.items()},
        lists={f"{IB}/mlx5_0/device/net": []})  # fmt: skip
    assert machine.verdicts("ib_ports") == {None: "warn", "mlx5_0:1": "warn"}


def pci(machine: Machine, *rows: tuple[str, str, str | None]) -> None:
    """Mellanox adapters on the bus: address, class, driver."""
    files: dict[str, str | None] = {}
    for address, kind, driver in rows:
        bound = f"DRIVER={driver}\n" if driver else ""
        files |= {f"{PCI}/{address}/vendor": "0x15b3\n", f"{PCI}/{address}/class": f"{kind}\n",
                  f"{PCI}/{address}/device": "0x1021\n",
                  f"{PCI}/{address}/uevent": f"{bound}PCI_SLOT_NAME={address}\n"}  # fmt: skip
    lists = {f"{PCI}/{address}/physfn": None for address, _, _ in rows}
    put(machine, files=files, lists={PCI: [*machine.host.list(PCI), *(address for address, _, _ in rows)], **lists})


def rails_on_bus(machine: Machine, ports: int, cards: int) -> None:
    """So many RoCE ports, of which each has its card, and further cards without an RDMA device."""
    roce(machine, ports=ports)
    for number in range(ports):
        put(machine, files=on_bus(number, f"0000:{0x80 + number:02x}:00.0"))
    pci(machine, *((f"0000:{0x80 + number:02x}:00.0", "0x020000", "mlx5_core") for number in range(cards)))


def test_a_bound_adapter_without_rdma_fails_where_equal_ones_have_it(machine: Machine) -> None:
    rails_on_bus(machine, 3, 4)
    (found,) = [finding for finding in machine.judge("ib_ports") if finding.verdict == "fail"]
    assert "0000:83:00.0" in found.reason
    put(machine, files={f"{PCI}/0000:83:00.0/device": "0x1015\n"})  # an ordinary network card
    assert set(machine.verdicts("ib_ports").values()) == {"pass"}
    put(machine, files={f"{PCI}/0000:83:00.0/device": "0x1021\n"}, lists={f"{PCI}/0000:83:00.0/physfn": ["driver"]})
    assert set(machine.verdicts("ib_ports").values()) == {"pass"}  # a virtual function, whose RDMA device a pod has


def test_rails_without_any_rdma_device_are_warned_about(machine: Machine) -> None:
    pci(machine, *((f"0000:{0x80 + number:02x}:00.0", "0x020000", "mlx5_core") for number in range(8)))
    assert machine.verdicts("ib_ports") == {None: "warn"}
    assert machine.verdicts("ib_ports", ib_ports=8) == {None: "fail"}


def test_an_adapter_given_to_a_virtual_machine_is_explained(machine: Machine) -> None:
    infiniband(machine)
    for number in range(8):
        put(machine, files=on_bus(number, f"0000:{0x80 + number:02x}:00.0"))
    pci(machine, ("0000:90:00.1", "0x020700", "vfio-pci"))
    (found,) = [finding for finding in machine.judge("ib_ports") if finding.device == "0000:90:00.1"]
    assert (found.verdict, found.reason) == ("skip", "passed through to a virtual machine")
    pci(machine, ("0000:91:00.0", "0x020700", "vfio-pci"))  # a whole card: a rail that jobs here do not have
    assert machine.verdicts("ib_ports")[None] == "warn"
    pci(machine, ("0000:92:00.0", "0x020700", None))
    assert "0000:92:00.0" in next(f.reason for f in machine.judge("ib_ports") if f.verdict == "fail")


def test_counters_are_judged_by_the_time_they_had(machine: Machine) -> None:
    """Nine flaps in ten days are a bad cable; in a year they are switches that were served."""
    infiniband(machine)
    path = f"{IB}/mlx5_0/ports/1/counters"
    put(machine, files={f"{path}/link_downed": "9\n", f"{path}/symbol_error": "900\n"})
    assert machine.verdicts("ib_counters")["mlx5_0:1"] == "warn"
    put(machine, files={"/proc/uptime": f"{365 * 86400}.00 1.00\n"})
    assert machine.verdicts("ib_counters")["mlx5_0:1"] == "pass"


@pytest.mark.parametrize(("physical", "verdict"), [(["net"], "skip"), (None, "error")])
def test_only_a_virtual_port_may_lack_counters(machine: Machine, physical: list[str] | None, verdict: str) -> None:
    infiniband(machine, ports=1)
    address = "0000:80:00.1"
    put(
        machine,
        files=on_bus(0, address),
        lists={
            f"{IB}/mlx5_0/ports/1/counters": None,
            f"{IB}/mlx5_0/ports/1/hw_counters": None,
            f"{PCI}/{address}/physfn": physical,
        },
    )
    assert machine.verdicts("ib_counters") == {"mlx5_0:1": verdict}


def test_the_numbers_of_a_node_are_there_to_compare(machine: Machine) -> None:
    infiniband(machine, ports=7)
    first = machine.judge("ib_ports")[0]
    assert (first.device, dict(first.values)) == (None, {"ports": 7, "fit": 7, "up": 7})


@pytest.mark.parametrize(("slow", "verdicts"), [(3, {"fail"}), (4, {"warn"})])
def test_slow_rails_are_told_from_the_others(machine: Machine, slow: int, verdicts: set[str]) -> None:
    infiniband(machine, ports=8)
    put(machine, files={f"{IB}/mlx5_{n}/ports/1/rate": "100 Gb/sec (4X EDR)\n" for n in range(slow)})
    found = machine.verdicts("ib_ports")
    assert {found[f"mlx5_{n}:1"] for n in range(slow)} == verdicts
    assert {found[f"mlx5_{n}:1"] for n in range(slow, 8)} == {"pass"}


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("100 Gb/sec (1X NDR)", "warn"), ("200 Gb/sec (2X NDR)", "pass"), ("100 Gb/sec (2X HDR)", "pass")],
)
def test_one_lane_is_no_healthy_infiniband(machine: Machine, text: str, verdict: str) -> None:
    infiniband(machine, ports=8)
    put(machine, files={f"{IB}/mlx5_{n}/ports/1/rate": f"{text}\n" for n in range(8)})
    match_ibstat(machine)
    assert set(machine.verdicts("ib_ports").values()) == {"pass", verdict}


def test_one_lane_of_ethernet_is_normal(machine: Machine) -> None:
    roce(machine, ports=2)
    put(machine, files={f"{IB}/mlx5_{n}/ports/1/rate": "25 Gb/sec (1X EDR)\n" for n in range(2)})
    assert set(machine.verdicts("ib_ports").values()) == {"pass"}


@pytest.mark.parametrize(
    ("counter", "number", "verdict"),
    [("local_link_integrity_errors", 15, "warn"), ("excessive_buffer_overrun_errors", 15, "warn"),
     ("link_error_recovery", 255, "warn"), ("link_downed", 255, "fail"), ("symbol_error", 65_535, "warn"),
     ("port_rcv_errors", 65_535, "warn"), ("local_link_integrity_errors", 14, "pass")],
)  # fmt: skip
def test_a_full_counter_is_a_lower_bound(machine: Machine, counter: str, number: int, verdict: str) -> None:
    infiniband(machine, ports=8)
    put(machine, files={f"{IB}/mlx5_3/ports/1/counters/{counter}": f"{number}\n", "/proc/uptime": "86400000.00 1.00\n"})
    assert machine.verdicts("ib_counters")["mlx5_3:1"] == verdict


def test_fi_info_is_found_where_the_installer_puts_it(machine: Machine) -> None:
    efa(machine, 4)
    told = machine.text("commands/fi_info_p_efa.out")
    machine.refuses("fi_info -p efa", "CommandMissing", "fi_info is not on this machine")
    machine.command("/opt/amazon/efa/bin/fi_info -p efa", told)
    assert machine.verdicts("efa", efa_devices=4) == {None: "pass"}


def pod_without(machine: Machine, given: int) -> None:
    """A pod on a node of four EFA devices that was given the first `given`; libfabric may open no other."""
    efa(machine, 4, offered=given)
    names = [f"rdmap{n}s0" for n in range(79, 83)]
    put(
        machine,
        files={f"/sys/class/infiniband_verbs/uverbs{n}/ibdev": f"{name}\n" for n, name in enumerate(names)},
        lists={
            "/sys/class/infiniband_verbs": ["abi_version", *(f"uverbs{n}" for n in range(4))],
            "/dev/infiniband": [f"uverbs{n}" for n in range(given)],
        },
    )


def test_a_pod_that_was_given_no_efa_is_warned_and_starts(machine: Machine) -> None:
    pod_without(machine, 0)
    machine.command("fi_info -p efa", "fi_getinfo: -61 (No data available)\n", exit_code=61)
    (found,) = machine.judge("efa")
    assert (found.verdict, found.values[UNSEEN]) == ("warn", ["EFA devices"])
    machine.refuses("fi_info -p efa", "CommandMissing", "fi_info is not on this machine")  # nor in its image
    machine.refuses("/opt/amazon/efa/bin/fi_info -p efa", "CommandMissing", "fi_info is not on this machine")
    assert machine.verdicts("efa") == {None: "warn"}
    assert "warn" not in machine.verdicts("efa", efa_devices=4).values()  # who wants them is not served


def test_a_pod_that_was_given_some_is_judged_by_those(machine: Machine) -> None:
    pod_without(machine, 2)
    assert machine.verdicts("efa") == {None: "pass"}
    assert machine.verdicts("efa", efa_devices=4) == {"rdmap81s0": "fail", "rdmap82s0": "fail"}
    machine.command("fi_info -p efa", fi_info_text("rdmap79s0"))
    assert machine.verdicts("efa") == {"rdmap80s0": "fail"}


@pytest.mark.parametrize(("driver", "verdict"), [("efa", "warn"), (None, "fail")])
def test_devices_in_another_rdma_namespace_are_told_from_those_without_a_driver(
    machine: Machine, driver: str | None, verdict: str
) -> None:
    efa(machine, 2)
    put(machine, files={}, lists={"/sys/class/infiniband": [], "/dev/infiniband": []})
    for number in (79, 80):
        line = f"DRIVER={driver}\n" if driver else ""
        machine.file(f"/sys/bus/pci/devices/0000:{number:02x}:00.0/uevent", f"{line}PCI_CLASS=20000\n")
    assert verdict in machine.verdicts("efa").values()


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
    assert machine.verdicts("ib_ports") == {None: "pass", "rxe0:1": "pass"}
    assert machine.verdicts("ib_ports", ib_ports=1, ib_rate_gbps=400.0)["rxe0:1"] == "fail"


@pytest.mark.parametrize("master", ["10.0.0.1", "192.0.2.7", "node-0", "localhost", "127.0.0.1", "h200", "fd00::1"])
def test_a_master_that_can_be_reached_is_no_fault(machine: Machine, master: str) -> None:
    machine.answer("env", "MASTER_ADDR", master)
    assert machine.verdicts("nccl_interfaces") == {None: "pass"}


def test_a_node_without_any_interface_works_alone(machine: Machine) -> None:
    put(machine, files={f"{NET}/sit0/{name}": text for name, text in
                        (("flags", "0x80\n"), ("ifindex", "2\n"), ("operstate", "down\n"))},
        lists={NET: ["lo", "sit0"]})  # fmt: skip
    assert machine.verdicts("nccl_interfaces") == {None: "skip"}
    machine.answer("env", "MASTER_ADDR", "localhost")
    assert machine.verdicts("nccl_interfaces") == {None: "skip"}


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
