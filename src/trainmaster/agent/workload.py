"""Ranks of one node: start them as torchrun would, supervise them, stop them, diagnose their end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainmaster.agent import container, workfolder
from trainmaster.agent.diagnose import Outcome, advise_on_start, count_oom_kills, find_full, judge, mask, read_tail
from trainmaster.agent.elastic import Elastic
from trainmaster.agent.figures import Figures
from trainmaster.agent.folder import AttemptFolder
from trainmaster.agent.group import Follower, Group
from trainmaster.agent.leader import Leader, free_port
from trainmaster.agent.processes import reap
from trainmaster.agent.ranks import ForkServer, NotStarted, Rank, Starter
from trainmaster.agent.recovery import Recovery, is_possible
from trainmaster.agent.stopped import StoppedRanks
from trainmaster.agent.watch import ORPHAN_GRACE_S, Stop, Watch
from trainmaster.core import schema
from trainmaster.core.failures import SYMPTOMS
from trainmaster.core.files import append_plain
from trainmaster.core.plan import (
    AGENT_VARIABLE,
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
from trainmaster.node import torch_install
from trainmaster.node.emit import Emitter
from trainmaster.node.host import Host
from trainmaster.node.owner import name_process

TRAIN_FILE = "train.json"
_Copied = tuple[workfolder.GlobalFile, Figures]  # what becomes events while the ranks run
_SHORT_GRACE_S = 10.0  # for ranks of a program whose peer has failed
_TRAINER_GRACE_S = 1.0  # for ranks of our trainer then: a save needs every rank


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the starts of an attempt have in common."""

    starter: Starter
    recovery: Recovery
    watch: Watch
    written: _Copied
    group: Group | None
    stopped: StoppedRanks
    elastic: Elastic | None


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
    recovery = Recovery(plan, events)
    try:
        group = _join(plan, recovery)
    except OSError as error:
        message = f"the agents cannot meet at {plan.master_addr} port {plan.master_port}: {error}"
        return Outcome(reason=Reason.TARGET_ERROR, message=message)
    if group is not None:
        watch.tend = group.pump
    argv = _argv(plan, folder.path, work, shared)
    starter = _starter(plan, argv, shared, work)
    written = (workfolder.GlobalFile(plan, work, folder.path / EVENTS_FILE), Figures(plan, work))
    outcome = None
    try:
        elastic = Elastic(plan, starter, recovery) if is_possible(plan) and plan.groups > 1 else None
        parts = _Parts(starter, recovery, watch, written, group, StoppedRanks(folder, events), elastic)
        outcome = _run_starts(plan, folder, parts)
        return outcome
    finally:
        for copied in written:
            copied.copy(last=True)
        starter.close()
        if group is not None:
            group.close(outcome)


def _join(plan: Plan, recovery: Recovery) -> Group | None:
    """The agents of the other nodes; None where there is none, or a dead rank ends the attempt on all of them."""
    if plan.spec.resources.nodes == 1 or not is_possible(plan):
        return None
    return Leader(plan, recovery) if plan.node_rank == 0 else Follower(plan)


def _run_starts(plan: Plan, folder: AttemptFolder, parts: _Parts) -> Outcome:
    """Start the ranks, and again for as long as each failure may pass."""
    group, recovery = parts.group, parts.recovery
    failure = refusal = None
    codes: Mapping[str, int] = {}
    while True:
        more: Mapping[str, str] = {}
        if group is not None:
            start = group.next_start(parts.watch, failure, refusal)
            if isinstance(start, Outcome):
                return replace(start, exit_codes=codes)
            recovery.restart, more = start.restart, start.environment
            parts.starter.take_place(start.node)
            folder.log(f"start {start.restart} of the ranks of node {start.node}")
        elif recovery.restart:
            # The old one may still be taken.
            more = {"MASTER_PORT": str(plan.master_port or free_port(plan.master_addr))}
        stopping, outcome = _run_once(plan, parts, more)
        if stopping is None or not stopping.recovers or parts.watch.asked():
            return outcome
        codes = outcome.exit_codes
        folder.log(f"recovery {recovery.restart + 1} in place: {outcome.message}")
        if group is None:
            recovery.begin(outcome)
        failure, refusal = outcome if stopping.failed else None, recovery.check()
        if group is None and refusal is not None:
            return replace(refusal, exit_codes=codes)


def _starter(plan: Plan, argv: Sequence[str], shared: Mapping[str, str], work: Path) -> Starter:
    folder, each = Path(plan.folder), plan.spec.resources.processes_per_node
    first = plan.node_rank * each
    server = None
    if is_possible(plan):
        with contextlib.suppress(OSError):  # ranks are started as new processes then, and say what is wrong
            server = ForkServer(str(folder / TRAIN_FILE), shared, work=work, folder=folder)
    numbers = range(first, first + each)
    return Starter(
        argv=argv,
        environment=shared,
        numbers=numbers,
        work=work,
        folder=folder,
        server=server,
        of_first=_one_run(plan, shared),
    )


def _one_run(plan: Plan, shared: Mapping[str, str]) -> dict[str, str]:
    """One run of Weights & Biases for all attempts of a job, unless the spec or the machine names one.

    Of rank 0 alone: a program that logs from every rank would write all of them into it. MLflow has no such variable:
    MLFLOW_RUN_ID must name a run that exists.
    """
    if {"WANDB_RUN_ID", "WANDB_RESUME"} & set(shared):
        return {}
    return {"WANDB_RUN_ID": plan.attempt.rpartition(".")[0], "WANDB_RESUME": "allow"}


def _run_once(plan: Plan, parts: _Parts, more: Mapping[str, str]) -> tuple[_Stopping | None, Outcome]:
    """Start the ranks with `more` variables, and wait until none runs."""
    oom_before = count_oom_kills(Host())
    try:
        if parts.elastic is not None:
            ranks = parts.elastic.start(parts.watch, more)
        else:
            ranks = parts.starter.start(parts.watch, {**parts.recovery.environment, **more})
    except NotStarted as error:
        return None, _not_started(error, plan, parts.starter.folder)

    def judge_failed(failed: Sequence[Rank]) -> Outcome:
        return _first_failure(failed, plan, count_oom_kills(Host()) - oom_before)

    stopping = _supervise(ranks, plan, parts, judge_failed)
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
    ranks: list[Rank], plan: Plan, parts: _Parts, judge_failed: Callable[[Sequence[Rank]], Outcome]
) -> _Stopping | None:
    """Wait until no rank runs. None if all ended with exit code 0 without a stop request.

    Ranks of a replica group that was lost alone are replaced in `ranks` by those that are started in their place.
    """
    alive, stopping, watch, group = list(ranks), None, parts.watch, parts.group
    while True:
        for copied in parts.written:
            copied.copy()
        watch.bound_events()
        died = [rank for rank in alive if rank.process.poll() is not None]
        alive = [rank for rank in alive if rank not in died]
        failed = [rank for rank in died if rank.process.returncode != 0]
        if not stopping and parts.elastic is not None and not watch.asked():
            failed, new = parts.elastic.look(ranks, parts.stopped.ranks, watch, judge_failed)
            alive += new
            parts.stopped.forget({rank.number for rank in new})
        if not stopping and failed:
            stopping = _on_failure(failed, plan, parts, judge_failed)
            _send(alive, signal.SIGTERM)
        elsewhere = group.look() if group is not None and not stopping and alive else None
        if elsewhere is not None:
            parts.recovery.see(elsewhere)
            stopping = _Stopping(failure=elsewhere, recovers=True, deadline=time.monotonic())
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
        if not stopping:
            parts.stopped.look(alive)
        if watch.beat(ranks=len(alive)):
            reap({rank.process.pid for rank in ranks})
        watch.sleep(*(group.sockets() if group is not None else ()))


def _on_failure(
    failed: Sequence[Rank], plan: Plan, parts: _Parts, judge_failed: Callable[[Sequence[Rank]], Outcome]
) -> _Stopping:
    grace_s, recovery = plan.spec.limits.grace_s, parts.recovery
    if all(rank.process.returncode == RESUMABLE_EXIT for rank in failed):
        # They heard of it before we did, from the stop file or from somebody else, and one has finished saving: the
        # others get their full time.
        message = f"rank {failed[0].number} stopped to be resumed (exit {RESUMABLE_EXIT})"
        stop = parts.watch.asked() or Stop(reason=Reason.PREEMPTED, message=message)
        return _Stopping(stop=stop, deadline=time.monotonic() + grace_s)
    failure = judge_failed(failed)
    recovery.see(failure)
    if parts.group is not None:  # the agents decide together, once no rank runs
        parts.group.tell(failure)
        recovers = True
    else:
        recovers = recovery.may_follow(failure)
    passing = recovers and recovery.is_passing(failure)
    short_s = _SHORT_GRACE_S if plan.spec.train is None else 0.0 if passing else _TRAINER_GRACE_S
    deadline = time.monotonic() + min(grace_s, short_s)
    return _Stopping(failed=failed, failure=failure, recovers=recovers, deadline=deadline)


def _send(ranks: Sequence[Rank], number: signal.Signals) -> None:
    for rank in ranks:
        rank.send(number)
        if number is signal.SIGTERM:
            rank.send(signal.SIGCONT)  # one that was stopped hears nothing, and would be waited for the whole grace


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
    message += f"; {advise_on_start(error.cause)}"
    with contextlib.suppress(OSError):
        append_plain(folder / rank_log(error.number), f"{message}\n".encode())
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
        "MASTER_PORT": plan.master_port or free_port(plan.master_addr),
        "TORCHELASTIC_RUN_ID": plan.attempt,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        ATTEMPT_VARIABLE: plan.mark,
        AGENT_VARIABLE: name_process(),
        EVENTS_VARIABLE: folder / EVENTS_FILE,
        CHECKPOINTS_VARIABLE: plan.checkpoints,
        STOP_VARIABLE: folder / STOP_FILE,
        OUTPUTS_VARIABLE: folder / OUTPUTS_FOLDER,
    }
    if plan.gpus:
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(plan.gpus)
    if plan.spec.resume_from is not None:
        ours[RESUME_VARIABLE] = plan.spec.resume_from
    own = dict(os.environ)
    if plan.spec.train is not None and plan.spec.container is None:
        own |= torch_install.bytecode_variables(own | plan.spec.env)
    if plan.spec.container is not None and plan.spec.container.login is not None:
        own.pop(plan.spec.container.login.password_from, None)  # for the login alone
    return defaults | own | plan.spec.env | {name: str(value) for name, value in ours.items()}
