"""Ranks of one node: start them as torchrun would, supervise them, stop them, diagnose their end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainmaster.agent import container, workfolder
from trainmaster.agent.diagnose import Outcome, count_oom_kills, find_full, judge, mask, read_tail
from trainmaster.agent.figures import Figures
from trainmaster.agent.folder import AttemptFolder
from trainmaster.agent.processes import reap
from trainmaster.agent.ranks import ForkServer, NotStarted, Rank, Starter
from trainmaster.agent.recovery import Recovery, is_possible
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
from trainmaster.node.emit import Emitter
from trainmaster.node.host import Host

TRAIN_FILE = "train.json"
_Copied = tuple[workfolder.GlobalFile, Figures]  # what becomes events while the ranks run
_SHORT_GRACE_S = 10.0  # for ranks of a program whose peer has failed
_TRAINER_GRACE_S = 1.0  # for ranks of our trainer then: a save needs every rank


@dataclass(slots=True)
class _Stopping:
    """The end has begun: on request (`stop`), or because these ranks failed first (`failed`)."""

    deadline: float
    stop: Stop | None = None
    failed: Sequence[Rank] = ()
    failure: Outcome | None = None  # of the first of them
    recovers: bool = False  # the ranks are started again once all are gone
    killed: int = 0
    forced: bool = False


def run(plan: Plan, folder: AttemptFolder, events: Emitter, watch: Watch) -> Outcome:
    """Run every rank to its end, and again in the same attempt where one has died of a cause that may pass."""
    shared = _shared_environment(plan)
    (folder.path / OUTPUTS_FOLDER).mkdir(exist_ok=True)
    try:
        work = workfolder.make(plan)
    except OSError as error:
        return Outcome(reason=Reason.SCRIPT_FAILED, message=f"the working folder cannot be made: {error}")
    if plan.spec.container is not None:
        refusal = container.prepare(plan, folder, work, watch)
        if refusal is not None:
            return refusal
    argv = _argv(plan, folder.path, work, shared)
    starter = _starter(plan, argv, shared, work)
    recovery = Recovery(plan, events)
    written = (workfolder.GlobalFile(plan, work, folder.path / EVENTS_FILE), Figures(plan, work))
    try:
        while True:
            stopping, outcome = _run_once(plan, starter, recovery, watch, written)
            if stopping is None or not stopping.recovers or watch.asked():
                return outcome
            folder.log(f"recovery {recovery.restart + 1} in place: {outcome.message}")
            refusal = recovery.begin(outcome)
            if refusal is not None:
                return replace(refusal, exit_codes=outcome.exit_codes)
    finally:
        for copied in written:
            copied.copy(last=True)
        starter.close()


def _starter(plan: Plan, argv: Sequence[str], shared: Mapping[str, str], work: Path) -> Starter:
    folder, each = Path(plan.folder), plan.spec.resources.processes_per_node
    first = plan.node_rank * each
    server = None
    if is_possible(plan):
        with contextlib.suppress(OSError):  # ranks are started as new processes then, and say what is wrong
            server = ForkServer(str(folder / TRAIN_FILE), shared, work=work, folder=folder)
    numbers = range(first, first + each)
    return Starter(argv=argv, environment=shared, numbers=numbers, work=work, folder=folder, server=server)


def _run_once(
    plan: Plan, starter: Starter, recovery: Recovery, watch: Watch, written: _Copied
) -> tuple[_Stopping | None, Outcome]:
    """Start the ranks and wait until none runs."""
    oom_before = count_oom_kills(Host())
    more = dict(recovery.environment)
    if recovery.restart:
        more["MASTER_PORT"] = str(plan.master_port or _free_port(plan.master_addr))  # the old one may still be taken
    try:
        ranks = starter.start(watch, more)
    except NotStarted as error:
        return None, _not_started(error, plan, starter.folder)

    def judge_failed(failed: Sequence[Rank]) -> Outcome:
        return _first_failure(failed, plan, count_oom_kills(Host()) - oom_before)

    stopping = _supervise(ranks, plan, watch, written, recovery=recovery, judge_failed=judge_failed)
    codes = {str(rank.number): rank.process.returncode or 0 for rank in ranks}
    resumable = RESUMABLE_EXIT in codes.values() and set(codes.values()) <= {0, RESUMABLE_EXIT}
    if stopping is None:
        return None, Outcome(reason=None, message="every rank exited with 0", exit_codes=codes)
    if stopping.stop is not None:
        return stopping, _stopped(stopping, plan, codes, resumable=resumable)
    assert stopping.failure is not None
    failure = stopping.failure
    if plan.spec.container is not None:
        failure = container.explain(failure)
    return stopping, replace(failure, exit_codes=codes)


def _supervise(
    ranks: Sequence[Rank],
    plan: Plan,
    watch: Watch,
    written: _Copied,
    *,
    recovery: Recovery,
    judge_failed: Callable[[Sequence[Rank]], Outcome],
) -> _Stopping | None:
    """Wait until no rank runs. None if all ended with exit code 0 without a stop request."""
    alive, stopping = list(ranks), None
    while True:
        for copied in written:
            copied.copy()
        died = [rank for rank in alive if rank.process.poll() is not None]
        alive = [rank for rank in alive if rank not in died]
        failed = [rank for rank in died if rank.process.returncode != 0]
        if not stopping and failed:
            stopping = _on_failure(failed, plan, watch, recovery=recovery, judge_failed=judge_failed)
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


def _on_failure(
    failed: Sequence[Rank],
    plan: Plan,
    watch: Watch,
    *,
    recovery: Recovery,
    judge_failed: Callable[[Sequence[Rank]], Outcome],
) -> _Stopping:
    grace_s = plan.spec.limits.grace_s
    if all(rank.process.returncode == RESUMABLE_EXIT for rank in failed):
        # They heard of it before we did, from the stop file or from somebody else, and one has finished saving: the
        # others get their full time.
        message = f"rank {failed[0].number} stopped to be resumed (exit {RESUMABLE_EXIT})"
        stop = watch.asked() or Stop(reason=Reason.PREEMPTED, message=message)
        return _Stopping(stop=stop, deadline=time.monotonic() + grace_s)
    failure = judge_failed(failed)
    recovers = recovery.may_follow(failure)
    short_s = _SHORT_GRACE_S if plan.spec.train is None else 0.0 if recovers else _TRAINER_GRACE_S
    deadline = time.monotonic() + min(grace_s, short_s)
    return _Stopping(failed=failed, failure=failure, recovers=recovers, deadline=deadline)


def _send(ranks: Sequence[Rank], number: signal.Signals) -> None:
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


def _first_failure(failed: Sequence[Rank], plan: Plan, oom_kills: int) -> Outcome:
    """Outcome of the first failure. Of several found at once, a rank that only lost its peer comes last."""
    environments = (os.environ, plan.spec.env)
    full = find_full((plan.folder, plan.checkpoints))
    outcomes = [
        judge(
            rank=rank.number,
            ranks=plan.spec.resources.ranks,
            code=rank.process.returncode or 0,
            # Before anything is cut: half a secret would pass the mask.
            lines=mask(read_tail(Path(plan.folder) / rank_log(rank.number), since=rank.log_start), environments),
            oom_kills=oom_kills,
            full=full,
        )
        for rank in failed
        if rank.process.returncode != RESUMABLE_EXIT
    ]
    return min(outcomes, key=lambda outcome: outcome.reason in SYMPTOMS)


def _not_started(error: NotStarted, plan: Plan, folder: Path) -> Outcome:
    """The program is not there or may not be run; what a shell would call 127 or 126. The sweep ends its peers."""
    message = f"rank {error.number} of {plan.spec.resources.ranks} could not start: {error.cause}"
    with contextlib.suppress(OSError), (folder / rank_log(error.number)).open("a") as log:
        log.write(message + "\n")
    code = 127 if isinstance(error.cause, FileNotFoundError) else 126
    return Outcome(reason=Reason.SCRIPT_FAILED, message=message, exit_codes={str(error.number): code})


def _argv(plan: Plan, folder: Path, work: Path, environment: Mapping[str, str]) -> Sequence[str]:
    if plan.spec.container is not None:
        return (str(container.write_script(plan, work, environment)),)
    if plan.spec.train is None:
        assert plan.spec.command, "a spec without train has a command"
        return plan.spec.command
    config = folder / TRAIN_FILE
    config.write_text(json.dumps(schema.to_plain(plan.spec.train), indent=2, sort_keys=True) + "\n")
    return (sys.executable, "-m", "trainmaster.train", str(config))


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


def _free_port(address: str) -> int:
    """A free port. Another program may take it first; that is diagnosed and retried."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
