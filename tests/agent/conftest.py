"""A node in a temporary folder: plans written to it, real agents run on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import trainmaster
from rests import rests
from trainmaster.agent import processes
from trainmaster.core.plan import ATTEMPT_VARIABLE, EVENTS_FILE, EXIT_FILE, PLAN_FILE, ExitRecord, Plan
from trainmaster.core.spec import parse_spec

AGENT = (sys.executable, "-m", "trainmaster.agent")


def until(condition: Callable[[], Any], *, what: str, limit_s: float = 20.0) -> Any:
    """Wait for something that must come; the limit only ends a test that has failed."""
    end = time.monotonic() + limit_s
    for rest_s in rests(0.01, most_s=0.05):
        if value := condition():
            break
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(rest_s)
    return value


def alive(pid: int) -> bool:
    """It runs: a dead process that nobody has collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class Node:
    """One attempt's folder and the agents started on it."""

    alive = staticmethod(alive)
    until = staticmethod(until)

    def __init__(self, home: Path, number: int = 0) -> None:
        self.number = number  # of several nodes
        self.folder = home / "attempts" / ("1" if not number else f"1-node-{number}")
        self.checkpoints = home / "checkpoints"
        self.env = {**os.environ, "PYTHONPATH": str(Path(trainmaster.__file__).parents[1])}
        self.agents: list[subprocess.Popen[str]] = []
        self.marks: dict[Path, str] = {}  # of every plan
        self.marked = True  # as a target starts an agent; without its mark it starts once more to carry it

    def plan(self, *command: str, ranks: int = 1, attempt: str = "job.1", port: int | None = None, **spec: Any) -> Path:
        what = {} if "train" in spec else {"command": list(command)}
        mapping = {"name": "a", "resources": {"processes_per_node": ranks}, "preflight": {"level": 0}, **what, **spec}
        plan = Plan(
            attempt=f"{attempt}-{self.folder.parents[1].name}",  # no two tests may find each other's processes
            spec=parse_spec(mapping),
            folder=str(self.folder),
            checkpoints=str(self.checkpoints),
            node_rank=self.number,
            master_port=port,
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / PLAN_FILE
        path.write_text(plan.to_json())
        self.marks[path] = plan.mark
        return path

    def shell(self, script: str, **spec: Any) -> Path:
        return self.plan("sh", "-c", script, **spec)

    def start(self, plan: Path, *options: str) -> subprocess.Popen[str]:
        marked = self.marked and plan in self.marks and not options
        mark = {ATTEMPT_VARIABLE: self.marks[plan]} if marked else {}
        agent = subprocess.Popen(
            [*AGENT, *options, str(plan)], env={**self.env, **mark}, stderr=subprocess.PIPE, text=True
        )
        self.agents.append(agent)
        return agent

    def run(self, plan: Path, *options: str) -> tuple[int, str]:
        """The agent's exit code, and what it said."""
        agent = self.start(plan, *options)
        _, said = agent.communicate()
        return agent.returncode, said

    def wait_for(self, name: str) -> str:
        """The first word a workload writes into a file of the attempt."""
        path = self.folder / name
        return str(until(lambda: path.exists() and path.read_text().strip(), what=name))

    def over(self, *, limit_s: float = 20.0) -> ExitRecord:
        until((self.folder / EXIT_FILE).exists, what="the exit record", limit_s=limit_s)
        return self.record()

    def record(self) -> ExitRecord:
        return ExitRecord.from_json((self.folder / EXIT_FILE).read_text())

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / EVENTS_FILE).read_text().splitlines()]

    def names(self) -> list[str]:
        return [f"{event['phase']} {event['event']}" for event in self.events()]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    _end(node)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Three nodes of one attempt, on one disk."""
    three = [Node(tmp_path, number) for number in range(3)]
    yield three
    for node in three:
        _end(node)


def _end(node: Node) -> None:
    for agent in node.agents:
        if agent.poll() is None:
            agent.send_signal(signal.SIGKILL)
        agent.wait()
        if agent.stderr is not None:
            agent.stderr.close()
    for plan, mark in node.marks.items():
        if processes.living(mark):
            subprocess.run([*AGENT, "--kill", str(plan)], env=node.env, check=False, capture_output=True)
