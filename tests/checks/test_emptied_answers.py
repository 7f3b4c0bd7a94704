"""Contract of every check: an emptied, cut, N/A or refused answer never makes a pass or a bare skip of a finding.

Each test records its number of mutations; the end of the run prints their sum (tests/checks/conftest.py).
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_faults
import pytest
import system_faults
from damaged import DamagedHost, damages, judge, opened
from fail_open_cases import CASES as FIRST
from fail_open_cases import Case
from fail_open_hidden import CASES as HIDDEN
from nodes import HEALTHY

from machines import H200, Machine
from trainmaster import checks
from trainmaster.checks.profiles import resolve
from trainmaster.core.expect import Expect
from trainmaster.node.host import Host, Snapshot
from trainmaster.node.recorded import RecordedHost

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.matrix(one_in=6)]
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
