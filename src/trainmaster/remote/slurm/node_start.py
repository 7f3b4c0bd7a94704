"""Node program of a Slurm job: `python -m trainmaster.remote.slurm.node_start BASE`, started by srun once per node.

It writes the plan of this node, with its rank and the address where the ranks meet, runs the agent, and ends with the
agent's exit code; with 0 where the run was stopped and can go on, and where a spare takes its place. After a restart by
Slurm (`--requeue`) it first ends the earlier agents and takes over their event files and logs. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from trainmaster.core.compat import UTC
from trainmaster.core.container import SECRETS_FOLDER
from trainmaster.core.errors import TargetError, TrainmasterError
from trainmaster.core.files import read_small, write_whole
from trainmaster.core.plan import (
    AGENT_LOG,
    ATTEMPT_VARIABLE,
    EVENTS_FILE,
    EXIT_FILE,
    LOCK_FILE,
    MEMBERS_FILE,
    OUTPUTS_FOLDER,
    PLAN_FILE,
    RESUMABLE_EXIT,
    STOP_FILE,
    ExitRecord,
    Plan,
)
from trainmaster.core.states import Reason
from trainmaster.remote.members import find_members, parse_members
from trainmaster.remote.slurm import layout
from trainmaster.remote.slurm.layout import OWNER_FILE, RELEASED_FILE, node_folder, read_restart, restart_file

_FENCE_S = 60.0  # beside the spec's grace: for earlier agents to save and end
_MEET_S = 300.0  # for the first node to publish its address
_LOOK_S = 0.2
_REASON_CHARACTERS = 180


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainmaster.remote.slurm.node_start")
    parser.add_argument("--drain", action="store_true", help="drain this node if its pre-flight check fails")
    parser.add_argument("base", type=Path)
    options = parser.parse_args(words)
    try:
        plan = prepare(options.base, os.environ)
    except (TrainmasterError, OSError) as error:
        sys.stderr.write(f"node_start: {error}\n")
        return 1
    code = _run(plan)
    if options.drain:
        drain_if_failed(Path(plan.folder), os.environ)
    if code in (0, RESUMABLE_EXIT):
        return 0
    dispensable = is_dispensable(plan, options.base, os.environ)
    if plan.spec.resources.spares and plan.node_rank and (not dispensable or misses_first(plan)):
        failed = layout.failed_file(options.base, _read_count(os.environ))
        write_whole(failed, datetime.now(UTC).isoformat(timespec="microseconds"), durable=True)
    return 0 if dispensable else code


def prepare(base: Path, environ: Mapping[str, str]) -> Plan:
    """Plan of this node, written to its folder. TargetError where this job may not run the attempt."""
    template = Plan.from_json((base / PLAN_FILE).read_text())
    array = environ.get("SLURM_ARRAY_TASK_ID")
    task = int(array) if array else None
    node, restart = int(environ.get("SLURM_NODEID", "0")), _read_count(environ)
    job = environ.get("SLURM_ARRAY_JOB_ID") if array else environ.get("SLURM_JOB_ID")
    _own(base, str(job))
    folder = node_folder(base, task, node, restart)
    if restart:
        _take_over(base, task, node, restart, template.spec.limits.grace_s)
    folder.mkdir(parents=True, exist_ok=True)
    address, port = "127.0.0.1", None
    if template.spec.resources.nodes > 1:
        address, port = _choose_rendezvous(base, task, node, restart, environ)
    checkpoints, attempt = template.checkpoints, template.attempt
    if task is not None:  # tasks are runs of their own, and two of them may share a machine
        checkpoints, attempt = f"{checkpoints}/task-{task}", f"{attempt}/{task}"
    plan = replace(
        template, attempt=attempt, folder=str(folder), checkpoints=checkpoints, node_rank=node, master_addr=address,
        master_port=port,
    )  # fmt: skip
    _copy_secrets(base, folder)
    write_whole(folder / PLAN_FILE, plan.to_json() + "\n", durable=True, mode=0o600)
    # After the folder exists: a stop request is written to the base first, then to every folder that is there.
    if (base / STOP_FILE).exists() and not (folder / STOP_FILE).exists():
        shutil.copyfile(base / STOP_FILE, folder / STOP_FILE)
    return plan


def _read_count(environ: Mapping[str, str]) -> int:
    """How often Slurm has restarted the job."""
    return int(environ.get("SLURM_RESTART_COUNT", "0"))


def _own(base: Path, job: str) -> None:
    """Refuse a second Slurm job of the same attempt, and one whose attempt was released."""
    if (base / RELEASED_FILE).exists():
        raise TargetError(f"{base}: the attempt was released; nothing started")
    with contextlib.suppress(FileExistsError):
        write_whole(base / OWNER_FILE, job, durable=True, replace=False)
    owner = read_small(base / OWNER_FILE).decode(errors="replace")
    if owner != job:
        raise TargetError(f"{base}: Slurm job {owner} runs this attempt; job {job} starts nothing")


def _take_over(base: Path, task: int | None, node: int, restart: int, grace_s: float) -> None:
    """End the agents of earlier restarts and continue their files. Fails where one of them does not end."""
    earlier = [folder for number in range(restart) for folder in _folders(base, task, number)]
    for folder in earlier:
        if not (folder / EXIT_FILE).exists() and not (folder / STOP_FILE).exists():
            write_whole(folder / STOP_FILE, f"{Reason.NODE_LOST.value}: Slurm restarted the job\n", durable=True)
    until = time.monotonic() + grace_s + _FENCE_S
    while alive := [folder for folder in earlier if _is_locked(folder / LOCK_FILE)]:
        if time.monotonic() > until:
            raise TargetError(
                f"{alive[0]}: an agent of the attempt from before the restart still runs; nothing started"
            )
        time.sleep(_LOOK_S)
    if node == 0:
        write_whole(restart_file(base, task), str(restart), durable=True)
    else:
        while read_restart(base, task) < restart and time.monotonic() < until + _FENCE_S:
            time.sleep(_LOOK_S)
    # Copied after the marker: a reader that saw the old folder until then has read nothing that is not copied.
    old, new = (node_folder(base, task, node, number) for number in (_latest(base, task, node, restart), restart))
    if old.is_dir() and not (new / EVENTS_FILE).exists():
        new.mkdir(parents=True, exist_ok=True)
        for name in (EVENTS_FILE, AGENT_LOG, *(path.name for path in old.glob("rank-*.log"))):
            if (old / name).is_file():
                shutil.copyfile(old / name, new / name)
        if (old / OUTPUTS_FOLDER).is_dir() and not (old / OUTPUTS_FOLDER).is_symlink():
            shutil.copytree(old / OUTPUTS_FOLDER, new / OUTPUTS_FOLDER, symlinks=True, dirs_exist_ok=True)


def _latest(base: Path, task: int | None, node: int, restart: int) -> int:
    numbers = [number for number in range(restart) if node_folder(base, task, node, number).is_dir()]
    return numbers[-1] if numbers else 0


def _folders(base: Path, task: int | None, restart: int) -> list[Path]:
    stem, again = node_folder(base, task, 0).name[:-1], f"-r{restart}" if restart else ""
    pattern = re.compile(rf"{re.escape(stem)}[0-9]+{again}")
    return [path for path in base.parent.iterdir() if pattern.fullmatch(path.name)]


def _is_locked(path: Path) -> bool:
    """Whether an agent holds the lock. Asking takes it for a moment; no agent begins there any more."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _choose_rendezvous(
    base: Path, task: int | None, node: int, restart: int, environ: Mapping[str, str]
) -> tuple[str, int]:
    """Address and port where the ranks meet: chosen by the first node, read by the others."""
    path = base / f"rendezvous-{task or 0}-{restart}.json"
    if node == 0:
        address = _own_address(environ)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
        write_whole(path, json.dumps({"address": address, "port": port}), durable=False)
    until = time.monotonic() + _MEET_S
    while not path.exists():
        if time.monotonic() > until:
            raise TargetError(f"the first node published no address in {_MEET_S:g} s ({path})")
        with contextlib.suppress(OSError):
            list(base.iterdir())  # makes a network file system look again
        time.sleep(_LOOK_S)
    place = json.loads(read_small(path))
    return str(place["address"]), int(place["port"])


def _own_address(environ: Mapping[str, str]) -> str:
    """The address under which Slurm itself reaches this node; its host name where that is not told."""
    name = environ.get("SLURMD_NODENAME", "")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(
            ["scontrol", "show", "node", name, "--oneliner"], check=True, capture_output=True, text=True, timeout=30
        ).stdout
        match = re.search(r"\bNodeAddr=(\S+)", shown)
        if match is not None:
            socket.getaddrinfo(match[1], None)  # a name that does not resolve is of no use to the others
            return match[1]
    return socket.gethostname()


def _copy_secrets(base: Path, folder: Path) -> None:
    """Each agent reads and removes its own copy."""
    if (base / SECRETS_FOLDER).is_dir():
        (folder / SECRETS_FOLDER).mkdir(mode=0o700, exist_ok=True)
        for path in (base / SECRETS_FOLDER).iterdir():
            write_whole(folder / SECRETS_FOLDER / path.name, path.read_text(), durable=False, mode=0o600)


def _run(plan: Plan) -> int:
    """The agent as a child. Slurm signals every process of the step, so nothing is forwarded."""
    command = [sys.executable, "-m", "trainmaster.agent", str(Path(plan.folder) / PLAN_FILE)]
    agent = subprocess.Popen(command, env={**os.environ, ATTEMPT_VARIABLE: plan.mark})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return agent.wait()


def is_dispensable(plan: Plan, base: Path, environ: Mapping[str, str]) -> bool:
    """Whether the attempt goes on without this node: srun ends all of them for one exit code but 0.

    Without an exit record its agent was killed, and that of node 0 judges: it has a spare, or ends the attempt.
    """
    resources = plan.spec.resources
    if not resources.spares or plan.node_rank == 0:
        return False
    if not (Path(plan.folder) / EXIT_FILE).exists():
        return True
    first = node_folder(base, None, 0, _read_count(environ))
    try:
        told = parse_members(read_small(first / MEMBERS_FILE))
    except OSError:
        told = None
    return plan.node_rank not in find_members(told, places=resources.nodes, nodes=resources.machines)


def misses_first(plan: Plan) -> bool:
    """Whether this is a spare that ended because node 0 was not heard any more."""
    try:
        record = ExitRecord.read(read_small(Path(plan.folder) / EXIT_FILE), attempt=plan.attempt)
    except OSError:
        return False
    return plan.node_rank >= plan.spec.resources.nodes and record.reason is Reason.NODE_LOST


def drain_if_failed(folder: Path, environ: Mapping[str, str]) -> None:
    """Drain this node in Slurm where its exit record shows a failed check. Without the right to, the log has it."""
    try:
        record = ExitRecord.read(read_small(folder / EXIT_FILE), attempt=folder.name)
    except OSError:
        return
    if record.reason is not Reason.CHECK_FAILED:
        return
    plain = re.sub(r"[^\x20-\x7e]|[\"'`\\$]", " ", record.message.removeprefix("pre-flight FAIL: "))
    # With its time: Slurm's own changes when a retest drains the node again.
    since = datetime.now(UTC).isoformat(timespec="seconds")
    reason = " ".join(f"trainmaster: {plain}".split())[:_REASON_CHARACTERS] + f" (since {since})"
    words = ["scontrol", "update", f"nodename={environ['SLURMD_NODENAME']}", "state=drain", f"reason={reason}"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=30)
        outcome = f" failed: {done.stderr.strip()[:300]}" if done.returncode else ""
        sys.stderr.write(f"node_start: drain of {environ['SLURMD_NODENAME']} ({reason}){outcome}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
