"""Machines for the judge layer of `make fuzz`: each check on each, with every text answer that the check reads."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "checks")]

import gpu_faults  # noqa: E402
import gpu_nodes  # noqa: E402
import nodes  # noqa: E402
import system_faults  # noqa: E402
from damaged import DamagedHost, Question  # noqa: E402

from machines import H200, Machine  # noqa: E402
from trainmaster import checks  # noqa: E402
from trainmaster.checks.runner import WholeFiles  # noqa: E402
from trainmaster.core.expect import Expect  # noqa: E402
from trainmaster.core.results import Finding, error  # noqa: E402
from trainmaster.node.host import CommandResult, Host, Snapshot  # noqa: E402

# Settings of the user: without one the machine is another, healthy machine.
_SETTINGS = ("nccl.conf", "xid.toml", "/sys/module", "LD_LIBRARY")
SUPERCHIP = "4 GB200"
_load = functools.cache(checks.load)  # the registry reads its folders each time


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Data that a check read from a machine, its findings, and the questions that it asked."""

    data: Any
    findings: list[Finding]
    asked: dict[Question, Any]


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine and what each check finds on it, read when it is first needed."""

    name: str
    host: Host
    expect: Expect
    superchip: bool = False  # its GPUs are joined to a Grace CPU by NVLink-C2C
    readings: dict[str, Reading] = field(default_factory=dict)

    def reading(self, check: str) -> Reading:
        if check not in self.readings:
            self.readings[check] = read(check, DamagedHost(self.host), self.expect)
        return self.readings[check]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A check on a machine, and the text answers that the check reads there."""

    node: Node
    check: str
    answers: Sequence[tuple[Question, Any]]


def read(check: str, host: DamagedHost, expect: Expect) -> Reading:
    """Read and judge as the runner does, without its thread."""
    module, data = _load(check), None
    try:
        data = module.read(WholeFiles(host))
        found = module.judge(data, expect)
    except Exception as exc:  # the runner makes an error of each
        found = error(f"{type(exc).__name__}: {exc}", action="")
    return Reading(data=data, findings=found if isinstance(found, list) else [found], asked=host.asked)


def scenes(folder: Path, *, faults: int | None = None) -> list[Scene]:
    """The recorded machine, the composed ones, and machines with one fault each (the first `faults` of each kind)."""
    found: list[Scene] = []

    def add(name: str, make: Callable[[Machine], None], names: Sequence[str], expect: Expect) -> None:
        machine = Machine(folder / name, of=H200)
        make(machine)
        node = Node(name=name, host=Snapshot(machine.host), expect=expect, superchip=name == SUPERCHIP)
        for check in names:
            asked = node.reading(check).asked
            answers = [(q, a) for q, a in asked.items() if _is_text(a) and not _is_setting(q)]
            if answers:
                found.append(Scene(node=node, check=check, answers=answers))

    add("recorded H200", lambda machine: None, checks.names(), Expect())
    add("2 H200", lambda machine: gpu_faults.make(machine, 2), gpu_faults.CHECKS, Expect())
    add(SUPERCHIP, lambda machine: gpu_nodes.shape(machine, gpu_nodes.NODES[SUPERCHIP]), gpu_faults.CHECKS, Expect())
    for name, compose in nodes.HEALTHY.items():
        add(name, compose, system_faults.MINE, Expect())
    for fault in system_faults.FAULTS[:faults]:
        add(fault.name, _both(fault.node, fault.break_it), [fault.check], Expect(**fault.expect))
    for broken in gpu_faults.FAULTS[:faults]:
        add(broken.name, _both(gpu_faults.make, broken.put), [broken.check], Expect(**broken.expect))
    return found


def _both(first: Callable[[Machine], None], second: Callable[[Machine], None]) -> Callable[[Machine], None]:
    def make(machine: Machine) -> None:
        first(machine)
        second(machine)

    return make


def _is_text(answer: Any) -> bool:
    return bool(answer.stdout if isinstance(answer, CommandResult) else answer) and isinstance(
        answer, (CommandResult, str)
    )


def _is_setting(question: Question) -> bool:
    return any(word in str(question[1]) for word in _SETTINGS)
