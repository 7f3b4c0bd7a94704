"""Ranks of one node: start them as torchrun would, supervise them, stop them, diagnose their end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainmaster.agent import container, workfolder
from trainmaster.agent.diagnose import Outcome, count_oom_kills, find_full, judge, mask, read_tail
from trainmaster.agent.figures import Figures
from trainmaster.agent.folder import AttemptFolder
from trainmaster.agent.processes import reap
from trainmaster.agent.watch import ORPHAN_GRACE_S, Stop, Watch
from trainmaster.core import schema
from trainmaster.core.failures import SYMPTOMS
from trainmaster.core.plan import (
    ATTEMPT_VARIABLE,
    CHECKPOINTS_VARIABLE,
    EVENTS_FILE,
    EVENTS_VARIABLE,
    OUTPUTS_FOLDER,
    OUTPUTS_VARIABLE,
    RESUMABLE_EXIT,
    RESUME_VARIABLE,
    STOP_FILE,
    STOP_VARIABLE,
    Plan,
    rank_log,
)
from trainmaster.core.states import Reason
from trainmaster.node.host import Host
from trainmaster.node.owner import die_with

TRAIN_FILE = "train.json"
_SHORT_GRACE_S = 10.0  # for ranks of a program whose peer has failed
_TRAINER_GRACE_S = 1.0  # for ranks of our trainer then: a save needs every rank


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]

    def send(self, number: signal.Signals) -> None:
        """Signal the process group of a rank that has not been reaped: its pid cannot be another process's."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


@dataclass(slots=True)
class _Stopping:
    """The end has begun: on request (`stop`), or because these ranks failed first (`failed`)."""

    deadline: float
    stop: Stop | None = None
    failed: Sequence[_Rank] = ()
    killed: int = 0
    forced: bool = False


def run(plan: Plan, watch: Watch) -> Outcome:
    """Run every rank to its end."""
    folder = Path(plan.folder)
    oom_before = count_oom_kills(Host())
    shared = _shared_environment(plan)
    (folder / OUTPUTS_FOLDER).mkdir(exist_ok=True)
    try:
        work = workfolder.make(plan)
    except OSError as error:
        return Outcome(reason=Reason.SCRIPT_FAILED, message=f"the working folder cannot be made: {error}")
    if plan.spec.container is not None:
        refusal = container.prepare(plan, AttemptFolder(folder), work, watch)
        if refusal is not None:
            return refusal
    argv = _argv(plan, folder, work, shared)
    written, figures = workfolder.GlobalFile(plan, work, folder / EVENTS_FILE), Figures(plan, work)
    ranks: list[_Rank] = []
    for local in range(plan.spec.resources.processes_per_node):
        if watch.asked():
            break  # the ranks that have started are stopped below
        number = plan.node_rank * plan.spec.resources.processes_per_node + local
        try:
            environment = shared | _rank_environment(number, local)
            ranks.append(_start(argv, environment, folder / rank_log(number), number, work))
        except OSError as error:
            return _not_started(error, number, plan, folder)
    stopping = _supervise(ranks, plan, watch, written, figures)
    written.copy(last=True)
    figures.copy(last=True)
    codes = {str(rank.number): rank.process.returncode for rank in ranks}
    resumable = RESUMABLE_EXIT in codes.values() and set(codes.values()) <= {0, RESUMABLE_EXIT}
    if stopping is None:
        return Outcome(reason=None, message="every rank exited with 0", exit_codes=codes)
    if stopping.stop is not None:
        return _stopped(stopping, plan, codes, resumable=resumable)
    failure = _first_failure(stopping.failed, plan, count_oom_kills(Host()) - oom_before)
    if plan.spec.container is not None:
        failure = container.explain(failure)
    return replace(failure, exit_codes=codes)


def _supervise(
    ranks: Sequence[_Rank], plan: Plan, watch: Watch, written: workfolder.GlobalFile, figures: Figures
) -> _Stopping | None:
    """Wait until no rank runs. None if all ended with exit code 0 without a stop request."""
    alive, stopping = list(ranks), None
    while True:
        written.copy()
        figures.copy()
        died = [rank for rank in alive if rank.process.poll() is not None]
        alive = [rank for rank in alive if rank not in died]
        failed = [rank for rank in died if rank.process.returncode != 0]
        if not stopping and failed:
            stopping = _on_failure(failed, plan, watch)
            _send(alive, signal.SIGTERM)
        # Asked once more when all are gone: ranks that watch the stop file may have obeyed it before we saw it.
        if not stopping and (stop := watch.asked()):
            stopping = _Stopping(stop=stop, deadline=time.monotonic() + plan.spec.limits.grace_s)
            _send(alive, signal.SIGTERM)
        if not alive:
            return stopping
        if stopping and watch.orphaned_at is not None:
            stopping.deadline = min(stopping.deadline, watch.orphaned_at + ORPHAN_GRACE_S)
        if stopping and not stopping.forced and time.monotonic() >= stopping.deadline:
            stopping.forced, stopping.killed = True, len(alive)
            _send(alive, signal.SIGKILL)
        if watch.beat(ranks=len(alive)):
            reap({rank.process.pid for rank in ranks})
        watch.sleep()


def _on_failure(failed: Sequence[_Rank], plan: Plan, watch: Watch) -> _Stopping:
    grace_s = plan.spec.limits.grace_s
    if all(rank.process.returncode == RESUMABLE_EXIT for rank in failed):
        # They heard of it before we did, from the stop file or from somebody else, and one has finished saving: the
        # others get their full time.
        message = f"rank {failed[0].number} stopped to be resumed (exit {RESUMABLE_EXIT})"
        stop = watch.asked() or Stop(reason=Reason.PREEMPTED, message=message)
        return _Stopping(stop=stop, deadline=time.monotonic() + grace_s)
    short_s = _SHORT_GRACE_S if plan.spec.train is None else _TRAINER_GRACE_S
    return _Stopping(failed=failed, deadline=time.monotonic() + min(grace_s, short_s))


def _send(ranks: Sequence[_Rank], number: signal.Signals) -> None:
    for rank in ranks:
        rank.send(number)


def _stopped(stopping: _Stopping, plan: Plan, codes: Mapping[str, int], *, resumable: bool) -> Outcome:
    assert stopping.stop is not None
    if plan.spec.train is not None and set(codes.values()) == {0}:
        # Our trainer ends with 0 only after its last step. Of another program we cannot know: it may end with 0
        # on any stop request, and half a run must not count as a whole one.
        return Outcome(reason=None, message="every rank had finished before it could stop", exit_codes=codes)
    message = stopping.stop.message
    if stopping.killed:
        message += f"; {stopping.killed} of {len(codes)} ranks did not end in {plan.spec.limits.grace_s:g} s: killed"
    return Outcome(reason=stopping.stop.reason, message=message, exit_codes=codes, resumable=resumable)


def _first_failure(failed: Sequence[_Rank], plan: Plan, oom_kills: int) -> Outcome:
    """Outcome of the first failure. Of several found at once, a rank that only lost its peer comes last."""
    environments = (os.environ, plan.spec.env)
    full = find_full((plan.folder, plan.checkpoints))
    outcomes = [
        judge(
            rank=rank.number,
            ranks=plan.spec.resources.ranks,
            code=rank.process.returncode,
            # Before anything is cut: half a secret would pass the mask.
            lines=mask(read_tail(Path(plan.folder) / rank_log(rank.number)), environments),
            oom_kills=oom_kills,
            full=full,
        )
        for rank in failed
        if rank.process.returncode != RESUMABLE_EXIT
    ]
    return min(outcomes, key=lambda outcome: outcome.reason in SYMPTOMS)


def _not_started(error: OSError, number: int, plan: Plan, folder: Path) -> Outcome:
    """The program is not there or may not be run; what a shell would call 127 or 126. The sweep ends its peers."""
    message = f"rank {number} of {plan.spec.resources.ranks} could not start: {error}"
    with contextlib.suppress(OSError), (folder / rank_log(number)).open("a") as log:
        log.write(message + "\n")
    code = 127 if isinstance(error, FileNotFoundError) else 126
    return Outcome(reason=Reason.SCRIPT_FAILED, message=message, exit_codes={str(number): code})


def _argv(plan: Plan, folder: Path, work: Path, environment: Mapping[str, str]) -> Sequence[str]:
    if plan.spec.container is not None:
        return (str(container.write_script(plan, work, environment)),)
    if plan.spec.train is None:
        assert plan.spec.command, "a spec without train has a command"
        return plan.spec.command
    config = folder / TRAIN_FILE
    config.write_text(json.dumps(schema.to_plain(plan.spec.train), indent=2, sort_keys=True) + "\n")
    return (sys.executable, "-m", "trainmaster.train", str(config))


def _start(argv: Sequence[str], environment: Mapping[str, str], log: Path, number: int, work: Path) -> _Rank:
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            env=environment,
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its own group: a signal reaches its children, and none of the agent's
            preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 (two system calls; see die_with)
        )
    return _Rank(number, process)


def _shared_environment(plan: Plan) -> dict[str, str]:
    """Environment of every rank: ours over the spec's over the agent's."""
    resources, folder = plan.spec.resources, Path(plan.folder)
    defaults = {"PYTHONUNBUFFERED": "1"}  # the last lines of a killed rank must have reached its log
    if resources.processes_per_node > 1:
        defaults["OMP_NUM_THREADS"] = "1"  # as torchrun does: N ranks with N threads per core each stall
    # The names and meanings of torchrun: torch/distributed/elastic/agent/server/local_elastic_agent.py
    ours = {
        "WORLD_SIZE": resources.ranks,
        "LOCAL_WORLD_SIZE": resources.processes_per_node,
        "GROUP_RANK": plan.node_rank,
        "GROUP_WORLD_SIZE": resources.nodes,
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": resources.ranks,
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": plan.master_port or _free_port(plan.master_addr),
        "TORCHELASTIC_RUN_ID": plan.attempt,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        ATTEMPT_VARIABLE: plan.mark,
        EVENTS_VARIABLE: folder / EVENTS_FILE,
        CHECKPOINTS_VARIABLE: plan.checkpoints,
        STOP_VARIABLE: folder / STOP_FILE,
        OUTPUTS_VARIABLE: folder / OUTPUTS_FOLDER,
    }
    if plan.spec.resume_from is not None:
        ours[RESUME_VARIABLE] = plan.spec.resume_from
    own = dict(os.environ)
    if plan.spec.container is not None and plan.spec.container.login is not None:
        own.pop(plan.spec.container.login.password_from, None)  # for the login alone
    return defaults | own | plan.spec.env | {name: str(value) for name, value in ours.items()}


def _rank_environment(number: int, local: int) -> dict[str, str]:
    return {"RANK": str(number), "LOCAL_RANK": str(local), "ROLE_RANK": str(number)}


def _free_port(address: str) -> int:
    """A free port. Another program may take it first; that is diagnosed and retried."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
