"""Adapters of several roles: healthy nodes pass, and a fault of one is named whatever another does not answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fabric_nodes import EVERY, HEALTHY, Kind, Nic, broadcom, compose, dual, rails, refuse
from nodes import IB, put

from machines import PCI, Machine
from trainmaster import checks
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, judge_overall

DOWN = {"state": "1: DOWN\n", "phys_state": "2: Polling\n"}
RIGHTS = "make it readable for this user"


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_node_passes(machine: Machine, name: str) -> None:
    compose(machine, HEALTHY[name])
    results = checks.run(machine.host, Expect(), level=1)
    wrong = [(r.check, f.device, f.reason) for r in results for f in r.findings if f.verdict not in ("pass", "skip")]
    assert wrong == []
    assert judge_overall(results, planned=checks.plan(1)) == "PASS"


def down(*numbers: int) -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        files = {f"{IB}/mlx5_{n}/ports/1/{name}": text for n in numbers for name, text in DOWN.items()}
        put(machine, files={**files})
        machine.refuses("ibstat", "CommandMissing", "ibstat is not on this machine")

    return change


def counter(device: str, name: str, number: int, folder: str = "counters") -> Callable[[Machine], None]:
    return lambda machine: put(machine, files={f"{IB}/{device}/ports/1/{folder}/{name}": f"{number}\n"})


def refusing(reason: str, *paths: str) -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        for path in paths:
            refuse(machine, path, reason)

    return change


def counters(device: str) -> list[str]:
    return [f"{IB}/{device}/ports/1/counters/{name}" for name in EVERY]


def link(address: str, **values: str) -> Callable[[Machine], None]:
    return lambda machine: put(machine, files={f"{PCI}/{address}/{name}": f"{text}\n" for name, text in values.items()})


def several(*changes: Callable[[Machine], None]) -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        for one in changes:
            one(machine)

    return change


NARROW = {"current_link_width": "8", "current_link_speed": "8.0 GT/s PCIe"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A change of a healthy node, and the verdicts of the devices that it concerns."""

    name: str
    node: str
    check: str
    put: Callable[[Machine], None]
    found: dict[str | None, str]
    says: str = ""  # part of the reason or the action of the first of them
    expect: dict[str, Any] = field(default_factory=dict)


CASES = [
    Case(name="255 link losses beside EIO", node="HGX B300", check="ib_counters",
         put=several(counter("mlx5_2", "link_downed", 255), refusing("EIO", counters("mlx5_5")[1])),
         found={"mlx5_2:1": "fail", "mlx5_5:1": "fail"}, says="went down 255 times"),
    Case(name="255 link losses beside EINVAL", node="HGX B300", check="ib_counters",
         put=several(counter("mlx5_2", "link_downed", 255), refusing("EINVAL", *counters("mlx5_5"))),
         found={"mlx5_2:1": "fail", "mlx5_5:1": "error"}),
    Case(name="255 link losses beside missing rights", node="HGX B300", check="ib_counters",
         put=several(counter("mlx5_2", "link_downed", 255), refusing("EACCES", *counters("mlx5_5"))),
         found={"mlx5_2:1": "fail", "mlx5_5:1": "error"}),
    Case(name="missing rights", node="HGX B300", check="ib_counters", put=refusing("EACCES", *counters("mlx5_5")),
         found={"mlx5_5:1": "error", "mlx5_4:1": "pass"}, says=RIGHTS),
    Case(name="a rail that answers EINVAL where equal ones count", node="DGX B200", check="ib_counters",
         put=refusing("EINVAL", *counters("mlx5_4")), found={"mlx5_4:1": "error", "mlx5_0:1": "skip"},
         says="Invalid argument"),
    Case(name="all rails answer EINVAL", node="H100, storage and management", check="ib_counters",
         put=refusing("EINVAL", *(path for n in range(8) for path in counters(f"mlx5_{n}"))),
         found={"mlx5_0:1": "error", "mlx5_8:1": "pass"}),
    Case(name="one counter that answers EINVAL", node="H100, storage and management", check="ib_counters",
         put=refusing("EINVAL", f"{IB}/mlx5_3/ports/1/counters/link_downed"), found={"mlx5_3:1": "error"}),
    Case(name="Broadcom, retransmissions", node="Broadcom", check="ib_counters",
         put=counter("bnxt_re3", "to_retransmits", 5_000_000, "hw_counters"), found={"bnxt_re3:1": "fail"},
         says="did not acknowledge in time"),
    Case(name="Broadcom, a counter of its own refused", node="Broadcom", check="ib_counters",
         put=refusing("EINVAL", f"{IB}/bnxt_re3/ports/1/hw_counters/to_retransmits"), found={"bnxt_re3:1": "error"}),
    Case(name="a port down beside EIO", node="DGX B200", check="ib_ports",
         put=several(down(6), refusing("EIO", f"{IB}/mlx5_9/ports/1/state")),
         found={"mlx5_6:1": "fail", "mlx5_9:1": "fail", "mlx5_0": "skip"}, says="6 of 8 equal adapters have a link"),
    Case(name="a port down beside EINVAL", node="HGX B300", check="ib_ports",
         put=several(down(6), refusing("EINVAL", f"{IB}/mlx5_2/ports/1/phys_state")),
         found={"mlx5_6:1": "fail", "mlx5_2:1": "error"}),
    Case(name="the board of one adapter does not answer", node="HGX B300", check="ib_ports",
         put=several(down(6), refusing("EIO", f"{IB}/mlx5_2/board_id")), found={"mlx5_6:1": "fail", "mlx5_2": "fail"}),
    Case(name="the driver of one adapter may not be read", node="HGX B300", check="ib_ports",
         put=refusing("EACCES", f"{IB}/mlx5_2/device/uevent"), found={"mlx5_2": "error", None: "pass"}, says=RIGHTS),
    Case(name="functions of NVSwitches stand for no rail", node="HGX B300", check="ib_ports", put=down(6),
         expect={"ib_ports": 8}, found={None: "fail", "mlx5_6:1": "fail"}, says="7 of 8 ports fit"),
    Case(name="storage ports stand for no rail", node="H100, storage and management", check="ib_ports", put=down(6),
         expect={"ib_ports": 8}, found={None: "fail", "mlx5_6:1": "fail"}, says="7 of 8 ports fit"),
    Case(name="a second port that had a link", node="H100, storage and management", check="ib_ports",
         put=counter("mlx5_9", "link_downed", 1), found={"mlx5_9:1": "warn", "mlx5_11:1": "skip"},
         says="state ib_ports=N"),
    Case(name="a card of which no port has a link", node="H100, storage and management", check="ib_ports",
         put=down(10), found={"mlx5_10:1": "warn", "mlx5_11:1": "warn"}, says="state ib_ports=N"),
    Case(name="GIDs of one port do not answer", node="Broadcom", check="roce_gid",
         put=refusing("EIO", f"{IB}/bnxt_re3/ports/1/gids/0"), found={"bnxt_re3:1": "fail", "bnxt_re2:1": "pass"}),
    Case(name="one adapter of eight at x8 of generation 3", node="DGX B200", check="nic_pcie",
         put=link("0000:5d:00.0", **NARROW), found={"mlx5_7": "fail", "mlx5_6": "pass", "mlx5_0": "skip"},
         says="8 lanes at 8 GT/s, where equal adapters have 16 lanes at 32 GT/s"),
    Case(name="one adapter at generation 4", node="BlueField rails and DPU", check="nic_pcie",
         put=link("0000:5d:00.0", current_link_speed="16.0 GT/s PCIe"), found={"mlx5_3": "fail", "mlx5_8": "pass"}),
    Case(name="every adapter at x8 of generation 3", node="Broadcom", check="nic_pcie",
         put=several(*(link(f"0000:{0x20 + 8 * n:02x}:00.0", **NARROW) for n in range(8))),
         found={f"bnxt_re{n}": "warn" for n in range(8)}, says="63 Gb/s for a port of 400"),
    Case(name="a narrow link beside EIO", node="HGX B300", check="nic_pcie",
         put=several(link("0000:5d:00.0", **NARROW), refusing("EIO", f"{PCI}/0000:18:00.0/current_link_width")),
         found={"mlx5_3": "fail", "mlx5_0": "fail"}),
    Case(name="a link that may not be read", node="HGX B300", check="nic_pcie",
         put=refusing("EACCES", f"{PCI}/0000:18:00.0/current_link_width"), found={"mlx5_0": "error"}, says=RIGHTS),
    Case(name="a link that is shown as none", node="HGX B300", check="nic_pcie",
         put=link("0000:18:00.0", current_link_width="0", current_link_speed="Unknown"), found={"mlx5_0": "error"}),
    Case(name="a link that exceeds its capability", node="HGX B300", check="nic_pcie",
         put=link("0000:18:00.0", max_link_width="8"), found={"mlx5_0": "error", "mlx5_1": "pass"}),
    Case(name="a width that is no number", node="HGX B300", check="nic_pcie",
         put=link("0000:18:00.0", current_link_width="N/A"), found={"mlx5_0": "error"}),
    Case(name="a virtual function", node="HGX B300", check="nic_pcie",
         put=lambda machine: put(machine, files={}, lists={f"{PCI}/0000:18:00.0/physfn": ["driver"]}),
         found={"mlx5_0": "skip", "mlx5_1": "pass"}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_adapter_is_judged_by_itself(machine: Machine, case: Case) -> None:
    compose(machine, HEALTHY[case.node])
    case.put(machine)
    (result,) = checks.run(machine.host, Expect(**case.expect), level=1, only=[case.check])
    by_device: dict[str | None, Finding] = {finding.device: finding for finding in result.findings}
    found = {device: str(by_device[device].verdict) for device in case.found}
    assert found == case.found, [(str(f.verdict), f.device, f.reason) for f in result.findings]
    first = by_device[next(iter(case.found))]
    assert case.says in f"{first.reason}; {first.action}"
    rights = {f.device for f in result.findings if RIGHTS in (f.action or "")}
    closed = {"missing rights", "may not be read"}  # only there rights are the cause
    assert bool(rights) == any(words in case.name for words in closed)


def test_second_ports_that_most_cards_use_are_rails(machine: Machine) -> None:
    cards = [dual(2 * n, f"{0x20 + n:02x}", f"e{n}a", f"e{n}b", lit=2, board="MT_0000000838") for n in range(4)]
    last = (cards[3][0], replace(cards[3][1], up=False))
    compose(machine, Kind(gpus="8 H100", nics=(*cards[0], *cards[1], *cards[2], *last)))
    assert machine.verdicts("ib_ports")["mlx5_7:1"] == "fail"


@pytest.mark.parametrize(("packets", "verdict"), [("0\n", "skip"), ("17\n", "warn")])
def test_a_second_port_of_broadcom_without_a_cable(machine: Machine, packets: str, verdict: str) -> None:
    cards = broadcom(2)
    second = replace(cards[1], address="0000:20:00.1", up=False)
    compose(machine, Kind(gpus="8 H100", nics=(cards[0], second)))
    put(machine, files={f"{IB}/bnxt_re1/ports/1/hw_counters/rx_pkts": packets})
    assert machine.verdicts("ib_ports")["bnxt_re1:1"] == verdict


def test_four_limited_functions_are_known_without_their_addresses(machine: Machine) -> None:
    """The bus is hidden, as in some containers: a board of its own, of which all answer EINVAL."""
    compose(machine, HEALTHY["DGX B200"])
    for name in machine.host.list(IB):
        put(machine, files={f"{IB}/{name}/device/uevent": "DRIVER=mlx5_core\nPCI_CLASS=20700\n"})
    assert {machine.verdicts("ib_counters")[f"mlx5_{n}:1"] for n in range(12)} == {"pass"}  # by hw_counters
    put(machine, files={}, lists={f"{IB}/mlx5_{n}/ports/1/hw_counters": [] for n in range(4)})
    assert {machine.verdicts("ib_counters")[f"mlx5_{n}:1"] for n in range(4)} == {"skip"}


def test_a_scalable_function_has_no_counters_of_its_own(machine: Machine) -> None:
    compose(
        machine,
        Kind(gpus="8 H100", nics=(*rails(), Nic(name="mlx5_8", address="0000:01:00.0", refuses=True, hardware=()))),
    )
    put(machine, files={f"{IB}/mlx5_8/device/uevent": "DRIVER=mlx5_core.sf\nMODALIAS=auxiliary:mlx5_core.sf\n"})
    assert machine.verdicts("ib_counters")["mlx5_8:1"] == "skip"
    assert machine.verdicts("nic_pcie")["mlx5_8"] == "skip"


def test_links_that_an_earlier_version_did_not_capture_are_told(machine: Machine) -> None:
    compose(machine, HEALTHY["HGX B300"])
    answers = machine.answers
    answers["read"] = {path: answer for path, answer in answers["read"].items() if "_link_" not in path}
    machine.put_answers(answers)
    for name in [name for name in machine._texts if "_link_" in name]:
        del machine._texts[name]
    assert machine.verdicts("nic_pcie") == {None: "skip"}
