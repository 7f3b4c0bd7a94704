"""Contract of every check: an emptied, cut, N/A or refused answer never makes a pass or a bare skip of a finding.

Each test records its number of mutations; the end of the run prints their sum (tests/checks/conftest.py).
"""

from __future__ import annotations

import errno
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fabric_nodes
import gpu_faults
import nodes
import pytest
import system_faults
from damaged import DamagedHost, Question, damages, garble, judge, masked, opened, refusals, worst
from fail_open_cases import CASES as FIRST
from fail_open_cases import Case
from fail_open_hidden import CASES as HIDDEN
from nodes import HEALTHY

from machines import H200, Machine
from trainmaster import checks
from trainmaster.checks.fabric import _rdma_devices, _roles
from trainmaster.checks.profiles import resolve
from trainmaster.core.errors import FileUnreadable
from trainmaster.core.expect import Expect
from trainmaster.core.results import Verdict
from trainmaster.node.host import Host, Snapshot
from trainmaster.node.recorded import RecordedHost

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.matrix(one_in=20)]
HOSTS = Path(__file__).parents[1] / "hosts"
# What a stated setting is: its absence is another machine, not a missing answer.
LEAST_OF_A_HOST, LEAST_OF_A_COMPOSED_HOST = 1, 1
SETTINGS = ("/etc/nccl.conf", "/.nccl.conf", "/etc/trainmaster/xid.toml")


def mutations(host: Host, check: str, expect: Expect) -> Iterator[tuple[str, str | None]]:
    """Each damage of each answer that the check reads, and how it opened the judgement."""
    whole = DamagedHost(host)
    before = judge(check, whole, expect)
    groups: Counter[str] = Counter()
    for question, answer in list(whole.asked.items()):
        # Of many alike (ports, counters, CPUs) the first is tried.
        alike = re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "#", f"{question[0]} {question[1]}")
        groups[alike] += 1
        if groups[alike] > 1:
            continue
        if question[0] == "read" and str(question[1]).endswith(SETTINGS):
            continue
        for how, damaged in damages(answer):
            after = judge(check, DamagedHost(host, {question: damaged}), expect)
            yield f"{question[0]} {question[1]}: {how}", opened(before, after)


Record = Callable[[str, object], None]


def count(host: Host, names: list[str], expect: Expect, record: Record, *, least: int = 1) -> Counter[str]:
    """Mutations by check. None may open the judgement; fewer than `least` are no test."""
    found, seen = [], Counter[str]()
    for name in names:
        for where, how in mutations(host, name, expect):
            seen[name] += 1
            if how is not None:
                found.append(f"{name}: {where}: {how}")
    record("mutations", seen.total())
    assert found == []
    assert seen.total() >= least
    return seen


@pytest.mark.parametrize(
    "folder", sorted(path for path in HOSTS.iterdir() if path.is_dir()), ids=lambda path: path.name
)
def test_recorded_hosts(folder: Path, record_property: Record) -> None:
    seen = count(Snapshot(RecordedHost(folder)), checks.names(), Expect(), record_property, least=LEAST_OF_A_HOST)
    assert len(seen) > 30  # the others read only variables, disk sizes, the clock, or files that are not there


@pytest.mark.parametrize("name", HEALTHY)
def test_composed_hosts(machine: Machine, name: str, record_property: Record) -> None:
    HEALTHY[name](machine)
    count(Snapshot(machine.host), system_faults.MINE, Expect(), record_property, least=LEAST_OF_A_COMPOSED_HOST)


@pytest.mark.parametrize("fault", system_faults.FAULTS, ids=lambda fault: fault.name)
def test_faults_of_the_system(machine: Machine, fault: Any, record_property: Record) -> None:
    fault.node(machine)
    fault.break_it(machine)
    count(Snapshot(machine.host), [fault.check], Expect(**fault.expect), record_property, least=0)


# A name may be any word, and the link layer of EFA is shown and not judged.
ANY_WORD = re.compile(r"/(?:board_id|scaling_driver)$|'stat', '-f'")
SHOWN = re.compile(r"/rdmap\w+/ports/1/link_layer$")


def find_garbage_taken(host: Host) -> tuple[list[str], int]:
    """Answers that are garbage and pass, or fail a check where a refused file does not; and how many were tried."""
    asked: dict[Question, tuple[Any, list[str]]] = {}
    for name in (name for name in checks.names() if checks.load(name).LEVEL == 1):
        whole = DamagedHost(host)
        judge(name, whole, Expect())
        for question, answer in whole.asked.items():
            asked.setdefault(question, (answer, []))[1].append(name)
    idle = find_idle(host)
    last = {  # of many alike
        re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "#", str(question)): question
        for question in asked
        if not any(f"/{name}/" in str(question[1]) for name in idle)
    }
    found, tried = [], 0
    for question in last.values():
        answer, readers = asked[question]
        where = str(question[1])
        if where.endswith(SETTINGS) or SHOWN.search(where):
            continue
        refusal = FileUnreadable("permission denied", code=errno.EACCES)
        refused = {name: worst(judge(name, DamagedHost(host, {question: refusal}), Expect())) for name in readers}
        for how, garbage in garble(answer):
            if how == "words" and ANY_WORD.search(where):
                continue
            tried += 1
            after = {name: worst(judge(name, DamagedHost(host, {question: garbage}), Expect())) for name in readers}
            wrong = [name for name in readers if after[name] is Verdict.FAIL and refused[name] is not Verdict.FAIL]
            found += [f"{name}: {where}: {how}: fail" for name in wrong]
            # Where a run over the machine notices a refused file, it notices garbage.
            if Verdict.ERROR in refused.values() and not {Verdict.ERROR, Verdict.WARN, Verdict.FAIL} & {
                *after.values()
            }:
                found.append(f"{', '.join(readers)}: {where}: {how}: {refused} became {after}")
    return found, tried


def find_idle(host: Host) -> set[str]:
    """Adapters whose numbers are not judged: those that manage NVSwitches, and those without a link."""
    devices = _rdma_devices.read(host)
    dark = {device.name for device in devices if not all(port.up for port in device.ports)}
    names = {*_roles.find_bridges(host, devices), *dark}
    return names | {str(device.address) for device in devices if device.name in names}


GARBLED: dict[str, Callable[[Machine], None]] = {
    "recorded": lambda machine: None,
    "eight GPUs": gpu_faults.make,
    **HEALTHY,
    **{f"fabric: {name}": lambda machine, kind=kind: fabric_nodes.compose(machine, kind)  # type: ignore[misc]
       for name, kind in fabric_nodes.HEALTHY.items()},
    "EFA": nodes.efa,
}  # fmt: skip


@pytest.mark.parametrize("name", GARBLED)
def test_garbage_is_no_answer(machine: Machine, name: str, record_property: Record) -> None:
    GARBLED[name](machine)
    found, tried = find_garbage_taken(Snapshot(machine.host))
    record_property("mutations", tried)
    assert found == []
    assert tried > 50


@dataclass(frozen=True, kw_only=True)
class Sick:
    """A node with one sick adapter, and another whose files are refused in turn."""

    name: str
    kind: str  # of fabric_nodes.HEALTHY
    check: str
    device: str  # as its finding names it
    other: str  # RDMA device
    put: Callable[[Machine], None]
    files: tuple[str, ...] = ()  # at least these of the other one are read


def port(device: str, **words: str) -> Callable[[Machine], None]:
    files = {f"/sys/class/infiniband/{device}/ports/1/{name}": f"{word}\n" for name, word in words.items()}
    return lambda machine: nodes.put(machine, files={**files})


def files(path: str, **words: str) -> Callable[[Machine], None]:
    return lambda machine: nodes.put(machine, files={f"{path}/{name}": f"{word}\n" for name, word in words.items()})


OFF = {"state": "1: DOWN", "phys_state": "2: Polling"}
NARROW = {"current_link_width": "8", "current_link_speed": "8.0 GT/s PCIe"}
SICK = [
    Sick(name="a rail down, a rail refused", kind="BlueField rails and DPU", check="ib_ports", device="mlx5_3:1",
         other="mlx5_5", put=port("mlx5_3", **OFF), files=("state", "board_id", "uevent")),
    Sick(name="a rail down, a storage port refused", kind="BlueField rails and DPU", check="ib_ports",
         device="mlx5_3:1", other="mlx5_8", put=port("mlx5_3", **OFF), files=("state", "rate")),
    Sick(name="link losses, a rail refused", kind="DGX B200", check="ib_counters", device="mlx5_4:1", other="mlx5_6",
         put=files("/sys/class/infiniband/mlx5_4/ports/1/counters", link_downed="255"), files=("link_downed", "state")),
    Sick(name="link losses, a limited function refused", kind="DGX B200", check="ib_counters", device="mlx5_4:1",
         other="mlx5_1", put=files("/sys/class/infiniband/mlx5_4/ports/1/counters", link_downed="255")),
    Sick(name="retransmissions, another refused", kind="Broadcom", check="ib_counters", device="bnxt_re1:1",
         other="bnxt_re6", put=files("/sys/class/infiniband/bnxt_re1/ports/1/hw_counters", to_retransmits="9000000"),
         files=("to_retransmits",)),
    Sick(name="no GID, another refused", kind="Broadcom", check="roce_gid", device="bnxt_re1:1", other="bnxt_re6",
         put=files("/sys/class/infiniband/bnxt_re1/ports/1/gids", **{"3": "0000:" * 7 + "0000"}), files=("3",)),
    Sick(name="a narrow link, a rail refused", kind="DGX B200", check="nic_pcie", device="mlx5_4", other="mlx5_6",
         put=files("/sys/bus/pci/devices/0000:18:00.0", **NARROW), files=("current_link_width", "max_link_speed")),
    Sick(name="EFA down, another refused", kind="", check="efa", device="rdmap80s0", other="rdmap90s0",
         put=port("rdmap80s0", state="1: DOWN", phys_state="3: Disabled"), files=("state", "uevent")),
]  # fmt: skip


@pytest.mark.parametrize("sick", SICK, ids=lambda sick: sick.name)
def test_unreadable_for_one_device(machine: Machine, sick: Sick, record_property: Record) -> None:
    """What one adapter refuses hides nothing of another; what the sick one refuses makes no pass of it."""
    if sick.kind:
        fabric_nodes.compose(machine, fabric_nodes.HEALTHY[sick.kind])
        machine.refuses("ibstat", "CommandMissing", "ibstat is not on this machine")
    else:
        nodes.efa(machine)
    sick.put(machine)
    host, expect = Snapshot(machine.host), Expect()
    whole = DamagedHost(host)
    before = judge(sick.check, whole, expect)
    mine = sick.device.partition(":")[0]
    found, asked = [], Counter[str]()
    for device in (mine, sick.other):
        questions = [question for question in whole.asked if _belongs(question, device, host)]
        asked[device] = len(questions)
        alone = [
            ({question: refusal}, f"{question[1]}: {how}") for question in questions for how, refusal in refusals()
        ]
        every = [(dict.fromkeys(questions, refusal), f"all of {device}: {how}") for how, refusal in refusals()]
        for changes, where in (*alone, *every):
            after = judge(sick.check, DamagedHost(host, changes), expect)
            how = masked(before, after, sick.device) if device == sick.other else opened(before, after)
            found += [f"{where}: {how}"] if how is not None else []
    record_property("mutations", (sum(asked.values()) + len(asked)) * len(list(refusals())))
    assert found == []
    read = {str(question[1]).rpartition("/")[2] for question in whole.asked if _belongs(question, sick.other, host)}
    assert set(sick.files) <= read


def _belongs(question: Any, device: str, host: Host) -> bool:
    """Whether a file is that of an RDMA device, or of its place on the bus."""
    if re.search(r"counters/(?!link_downed|symbol_error|to_retransmits)", str(question[1])):
        return False  # of many alike, some
    match = re.search(r"PCI_SLOT_NAME=(\S+)", host.read(f"/sys/class/infiniband/{device}/device/uevent"))
    path = str(question[1])
    return f"/infiniband/{device}/" in path or (match is not None and f"/{match[1]}/" in path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hgx") / "node"
    shutil.copytree(H200, folder)
    gpu_faults.make(Machine(folder))
    return folder


@pytest.mark.parametrize("fault", gpu_faults.FAULTS, ids=lambda fault: fault.name)
def test_faults_of_gpus(whole: Path, tmp_path: Path, fault: Any, record_property: Record) -> None:
    machine = Machine(tmp_path / "node", of=whole)
    fault.put(machine)
    count(Snapshot(machine.host), [fault.check], Expect(**fault.expect), record_property)


@pytest.mark.parametrize("case", (*FIRST, *HIDDEN), ids=lambda case: case.name)
def test_classes_of_input(machine: Machine, case: Case, record_property: Record) -> None:
    case.put(machine)
    expect = resolve(case.expect, machine.host).expect
    count(Snapshot(machine.host), case.check.split(","), expect, record_property)
