"""`python -m trainmaster.agent.pod PLAN.json [-- LAUNCHER …]`: the agent of one pod.

The plan is the same for all pods; the node's rank and the address where the ranks meet come from the environment that
the cluster sets. The agent's files are copied to standard output with their offsets, which is how they leave the pod.
Annotations of the pod ask for a stop or for lines again. The exit record is the container's termination message too.

With a launcher (hyperpodrun) that program starts the ranks, and restarts them by its own rules.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from trainmaster.agent.diagnose import judge, mask, read_tail
from trainmaster.agent.mirror import Mirror
from trainmaster.core.compat import UTC
from trainmaster.core.errors import UsageError
from trainmaster.core.files import read_small
from trainmaster.core.plan import (
    AGENT_LOG,
    ATTEMPT_VARIABLE,
    CHECKPOINTS_VARIABLE,
    EVENTS_FILE,
    EVENTS_VARIABLE,
    EXIT_FILE,
    MEMBERS_FILE,
    MEMBERS_LOG,
    OUTPUTS_FOLDER,
    OUTPUTS_VARIABLE,
    PLAN_FILE,
    RESUMABLE_EXIT,
    RESUME_VARIABLE,
    STOP_FILE,
    STOP_VARIABLE,
    WORK_FOLDER,
    ExitRecord,
    Plan,
)
from trainmaster.core.states import Reason
from trainmaster.node import ranks

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
BECOME_VARIABLE = "TRAINMASTER_BECOME"
ASK_FOLDER = Path("/trainmaster/ask")
TERMINATION_LOG = Path("/dev/termination-log")
WORK_ARCHIVE = "work.tar.gz"  # beside the plan
_LOOK_S = 0.2
_MESSAGE_BYTES = 4096  # the cluster keeps no more


def main(words: Sequence[str]) -> int:
    """Run the pod's share of the attempt; returns the exit code."""
    path = Path(words[0])
    launcher = list(words[2:]) if len(words) > 1 and words[1] == "--" else []
    _become(os.environ.get(BECOME_VARIABLE))
    plan = Plan.from_json(path.read_text())
    try:
        plan = locate(plan, os.environ) if not launcher else plan
    except UsageError as error:
        _put_message(_record(plan, Reason.TARGET_ERROR, str(error)))
        sys.stderr.write(f"{error}\n")
        return 2
    plan = replace(plan, folder=str(_make_folder(Path(plan.folder).parent)))
    _unpack(path.with_name(WORK_ARCHIVE), Path(plan.folder).parent.parent / WORK_FOLDER)
    own = Path(plan.folder) / PLAN_FILE
    own.write_text(plan.to_json() + "\n")
    command = launcher or [sys.executable, "-m", "trainmaster.agent", str(own)]
    return _run(plan, command, launched=bool(launcher))


def locate(plan: Plan, env: Mapping[str, str]) -> Plan:
    """The plan of this pod: its node rank, and where the ranks meet."""
    nodes = plan.spec.resources.nodes
    if nodes == 1:
        return replace(plan, node_rank=0, master_addr="127.0.0.1", master_port=None)
    if INDEX_VARIABLE in env:
        return replace(plan, node_rank=int(env[INDEX_VARIABLE]))
    layout = ranks.detect(env)
    if layout.nodes != nodes or layout.master_addr is None:
        raise UsageError(
            f"the plan has {nodes} nodes, the pod's environment {layout.nodes}; a Job needs Kubernetes 1.24 or newer "
            "(completionMode Indexed), other kinds their operator"
        )
    return replace(plan, node_rank=layout.node_rank, master_addr=layout.master_addr, master_port=layout.master_port)


def _run(plan: Plan, command: Sequence[str], *, launched: bool) -> int:
    folder = Path(plan.folder)
    mirror = Mirror(folder)
    with (folder / AGENT_LOG).open("ab") as log:
        child = subprocess.Popen(
            command,
            env={**os.environ, **(_variables(plan) if launched else {ATTEMPT_VARIABLE: plan.mark})},
            cwd=_work(plan) if launched else None,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: child.send_signal(received))
    asked: set[str] = set()
    while child.poll() is None:
        _answer(ASK_FOLDER, folder, mirror, asked)
        _note_members(plan)
        mirror.copy()
        time.sleep(_LOOK_S)
    record = _end(plan, child.returncode, launched=launched)
    _note_members(plan)
    mirror.copy(last=True)
    _put_message(record)
    return 0 if record.ok else child.returncode if child.returncode > 0 else 1


def _answer(asks: Path, folder: Path, mirror: Mirror, seen: set[str]) -> None:
    """Act on the annotations of the pod that were not seen before."""
    with contextlib.suppress(OSError):
        reason = read_small(asks / "stop").decode(errors="replace").strip()
        if reason and not (folder / STOP_FILE).exists():
            (folder / STOP_FILE).write_text(reason + "\n")
    with contextlib.suppress(OSError, ValueError):
        text = read_small(asks / "resend").decode().strip()
        if text and text not in seen:
            seen.add(text)
            for line in text.splitlines():
                stream, offset, *_ = line.split()
                mirror.resend(stream, int(offset))


def _note_members(plan: Plan) -> None:
    """Add a line when a spare has taken a place: the file that says so is written anew, and a log only grows.

    The first line is there before any spare can take one: a log without a line was rotated, and says nothing.
    """
    if plan.node_rank != 0 or not plan.spec.resources.spares:
        return
    folder = Path(plan.folder)
    with contextlib.suppress(OSError):
        told = folder / MEMBERS_FILE
        first = json.dumps(list(range(plan.spec.resources.nodes))).encode()
        text = (read_small(told).strip() if told.exists() else first) + b"\n"
        with (folder / MEMBERS_LOG).open("a+b") as log:
            log.seek(0)
            if not log.read().endswith(text):
                log.write(text)


def _end(plan: Plan, code: int, *, launched: bool) -> ExitRecord:
    """The agent's record, or one made from how the program ended."""
    path = Path(plan.folder) / EXIT_FILE
    if not launched and path.exists():
        try:
            return ExitRecord.read(read_small(path), attempt=plan.attempt)
        except OSError as error:  # not what the agent wrote: the attempt is over all the same
            return _record(plan, Reason.TARGET_ERROR, f"the agent's exit record cannot be read: {error}")
    if launched and code == 0:
        record = _record(plan, None, "the launcher exited with 0")
    elif launched and code == RESUMABLE_EXIT:
        record = replace(_record(plan, Reason.PREEMPTED, "stopped to be resumed"), resumable=True)
    else:
        lines = mask(read_tail(Path(plan.folder) / AGENT_LOG), (os.environ, plan.spec.env))
        outcome = judge(rank=0, ranks=plan.spec.resources.ranks, code=code, lines=lines, oom_kills=0, full=None)
        who = "the launcher" if launched else "the agent"
        text = f"{who} ended with {code}: {outcome.message}"
        record = replace(_record(plan, outcome.reason, text), evidence=outcome.evidence)
    if launched:
        path.write_text(record.to_json() + "\n")
    return record


def _record(plan: Plan, reason: Reason | None, message: str) -> ExitRecord:
    now = datetime.now(UTC).isoformat(timespec="microseconds")
    return ExitRecord(attempt=plan.attempt, ok=reason is None, ended_at=now, reason=reason, message=message)


def _put_message(record: ExitRecord) -> None:
    """Write the record as the container's termination message, without what does not fit."""
    for shown in (record, replace(record, evidence={}), replace(record, evidence={}, message=record.message[:500])):
        text = json.dumps(json.loads(shown.to_json()))
        if len(text.encode()) <= _MESSAGE_BYTES:
            if TERMINATION_LOG.exists():  # mounted by the kubelet
                with contextlib.suppress(OSError):
                    TERMINATION_LOG.write_text(text)
            return


def _variables(plan: Plan) -> dict[str, str]:
    """Environment of ranks that another launcher starts."""
    folder = Path(plan.folder)
    paths = {
        EVENTS_VARIABLE: folder / EVENTS_FILE,
        CHECKPOINTS_VARIABLE: plan.checkpoints,
        STOP_VARIABLE: folder / STOP_FILE,
        OUTPUTS_VARIABLE: folder / OUTPUTS_FOLDER,
        **({RESUME_VARIABLE: plan.spec.resume_from} if plan.spec.resume_from is not None else {}),
    }
    (folder / OUTPUTS_FOLDER).mkdir(exist_ok=True)
    Path(plan.checkpoints).mkdir(parents=True, exist_ok=True)
    return {**plan.spec.env, **{name: str(value) for name, value in paths.items()}}


def _work(plan: Plan) -> Path:
    work = Path(plan.folder).parent.parent / WORK_FOLDER
    work.mkdir(parents=True, exist_ok=True)
    return work


def _make_folder(attempts: Path) -> Path:
    """A folder of its own for each start of the container: an agent never begins twice in one."""
    attempts.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(entry.name) for entry in attempts.iterdir() if entry.name.isdecimal()), default=0)
    folder = attempts / str(number)
    folder.mkdir()
    return folder


def _unpack(archive: Path, work: Path) -> None:
    if archive.exists() and not work.exists():
        work.mkdir(parents=True)
        with tarfile.open(archive) as packed:
            packed.extractall(work, filter="data")


def _become(who: str | None) -> None:
    """Raise the limits of locked memory and open files, then become another user."""
    if who is None or os.geteuid() != 0:
        return
    user, _, group = who.partition(":")
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20))
    os.setgroups([int(group)])
    os.setgid(int(group))
    os.setuid(int(user))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
