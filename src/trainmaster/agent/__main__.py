"""`python -m trainmaster.agent`: exit 0 done, 75 stopped and can go on, 1 not done, 2 a bad plan."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainmaster.agent import attempt, container, processes
from trainmaster.agent.folder import AttemptFolder, Refused, fence
from trainmaster.agent.watch import Signals
from trainmaster.core.errors import Fault, SpecError
from trainmaster.core.plan import AGENT_BEGUN, AGENT_LOG, ATTEMPT_VARIABLE, RESUMABLE_EXIT, Plan

_KILL_S = 30.0


def main(words: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainmaster.agent", description="Run one attempt on this node.")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--detach", action="store_true", help="return once the agent is certain to run")
    how.add_argument("--kill", action="store_true", help="end whatever still runs of the attempt, and never start it")
    how.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)  # the detached agent reports its start here
    parser.add_argument("plan", type=Path, metavar="PLAN.json")
    args = parser.parse_args(words)
    try:
        plan = load_plan(args.plan)
    except SpecError as error:
        for fault in error.faults:
            _say(f"{args.plan}: {fault}")
        return 2
    if args.kill:
        return _kill(plan)
    if args.detach:
        return _detach(plan, args.plan)
    if os.environ.get(ATTEMPT_VARIABLE) != plan.mark:
        # The agent is found by its environment like every process of the attempt, and the kernel shows the environment
        # a program was started with: start once more, in this same process.
        os.environ[ATTEMPT_VARIABLE] = plan.mark
        os.execv(sys.executable, [sys.executable, "-m", "trainmaster.agent", *words])  # noqa: S606 (no shell wanted)
    return _run(plan, ready_fd=args.ready_fd)


def load_plan(path: Path) -> Plan:
    """Load a plan from a file; SpecError with every fault."""
    try:
        plan = Plan.from_json(path.read_text())
    except SpecError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        kind = "not JSON: " if isinstance(error, json.JSONDecodeError) else ""
        raise SpecError([Fault(path="", message=f"{kind}{error}")]) from error
    faults = []
    if plan.v != 1:
        faults.append(Fault(path="v", message=f"{plan.v} is not a version this agent reads; use 1"))
    nodes = plan.spec.resources.machines  # spares are numbered after the others
    if not 0 <= plan.node_rank < nodes:
        faults.append(Fault(path="node_rank", message=f"{plan.node_rank} is none of {nodes} nodes, counted from 0"))
    if plan.master_port is None and plan.spec.resources.nodes > 1:
        faults.append(Fault(path="master_port", message="missing; nodes must agree on one, write for example 29500"))
    faults += [
        Fault(path=name, message=f"{value!r} is not absolute; write the whole path")
        for name, value in (("folder", plan.folder), ("checkpoints", plan.checkpoints), ("work", plan.work or "/"))
        if not Path(value).is_absolute()
    ]
    if faults:
        raise SpecError(faults)
    return plan


def _run(plan: Plan, *, ready_fd: int | None) -> int:
    signals = Signals()  # before the attempt is ours: a signal must not end us without a record
    folder = AttemptFolder(plan.folder)
    try:
        folder.begin()
    except (Refused, OSError) as error:
        _say(str(error))
        _answer(ready_fd, str(error).encode())
        return 1
    _answer(ready_fd, AGENT_BEGUN)
    record = attempt.run(plan, folder, signals)
    if not record.ok:
        _say(f"{record.reason}: {record.message}")
    return 0 if record.ok else RESUMABLE_EXIT if record.resumable else 1


def _answer(ready_fd: int | None, answer: bytes) -> None:
    if ready_fd is not None:
        with contextlib.suppress(OSError):  # the launcher is gone; the attempt runs all the same
            os.write(ready_fd, answer)
        os.close(ready_fd)


def _detach(plan: Plan, path: Path) -> int:
    """Start the agent in its own session; returns when it has begun, or reports why it has not."""
    folder = AttemptFolder(plan.folder)
    if folder.over:
        return 0
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        ours, theirs = os.pipe()
        with (folder.path / AGENT_LOG).open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "trainmaster.agent", "--ready-fd", str(theirs), str(path)],
                env={**os.environ, ATTEMPT_VARIABLE: plan.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(theirs,),
            )
    except OSError as error:
        _say(str(error))
        return 1
    os.close(theirs)
    with open(ours, "rb") as answers:  # noqa: PTH123 (a pipe has no path)
        answer = answers.read()
    if answer == AGENT_BEGUN or folder.over:
        child.returncode = 0  # it lives on without us; not ours to wait for
        return 0
    code = child.wait()
    _say(
        answer.decode(errors="replace")
        or f"the agent ended with {code} before it began; see {AGENT_LOG} in {folder.path}"
    )
    return 1


def _kill(plan: Plan) -> int:
    """Kill the attempt: its agent, its ranks and their leftovers; no agent can begin it afterwards."""
    end = time.monotonic() + _KILL_S
    container.remove(plan)
    while True:
        left = processes.kill_all(plan.mark, within_s=max(0.0, end - time.monotonic()))
        try:
            # Fenced after the killing and then looked at again: an agent may have been about to begin.
            if not left and fence(Path(plan.folder)) and not processes.living(plan.mark):
                return 0
        except OSError as error:
            _say(str(error))
            return 1
        if time.monotonic() > end:
            _say(f"{plan.attempt}: still there after {_KILL_S:g} s: {sorted(left) or 'an agent that cannot be seen'}")
            return 1
        time.sleep(0.05)


def _say(text: str) -> None:
    sys.stderr.write(f"trainmaster.agent: {text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
