"""`trainmaster train`: our trainer on this machine, in the foreground. The agent starts and watches the ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from trainmaster.cli import _console, interrupt
from trainmaster.cli._documents import kind
from trainmaster.cli._views.train_bar import TrainView, show_from
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import SpecError, UsageError
from trainmaster.core.files import read_small
from trainmaster.core.plan import (
    ATTEMPT_VARIABLE,
    CHECKPOINTS_VARIABLE,
    EXIT_FILE,
    OWNER_VARIABLE,
    PLAN_FILE,
    RESUMABLE_EXIT,
    STOP_FILE,
    ExitRecord,
    Plan,
    rank_log,
)
from trainmaster.core.schema import build_new
from trainmaster.core.spec import JobSpec, Limits, Preflight, Resources
from trainmaster.core.states import Reason
from trainmaster.documents import yaml_file

CONTEXT = {"ignore_unknown_options": True}  # `--max_steps 3` of AWS's sample is answered with our name
_LOOK_S = 0.2  # between two looks at rank 0's log
_SAVE_S = 1800.0  # a large model on a slow disk takes minutes; who does not want to wait types Ctrl-C again
_FRUITLESS = 2  # starts without a new checkpoint, after which a run is given up
_QUICK_S = 5.0  # rests of a reason up to here are for a busy server; a person waits here


def train(
    config: Annotated[Path, typer.Argument(help="The training config as YAML.")],
    values: Annotated[list[str] | None, typer.Argument(help="Values to put over the file's: key.path=value.")] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", "-n", min=1, help="Ranks; without: one per GPU, or one on CPUs.")
    ] = None,
    attempts: Annotated[
        int, typer.Option(min=1, help="Starts in all: a run that has saved goes on by itself after a failure.")
    ] = 3,
    stop_other: Annotated[
        bool, typer.Option("--stop-other", help="Let the run that trains in this folder save and end first.")
    ] = False,
    attach: Annotated[
        bool, typer.Option("--attach", help="Follow the run that trains in this folder; start none.")
    ] = False,
) -> None:
    """Train on this machine, or go on from the newest good checkpoint.

    Ctrl-C saves and stops (exit code 75), however long that takes; the same command then goes on. A second Ctrl-C ends
    it at once. After a failure the run goes on by itself from
    its checkpoint, and is given up after two starts without a new one. Logs and events of every start are kept in the
    folder `attempts` beside its checkpoints.

    [bold]Examples[/]

      trainmaster train llama.yaml

      trainmaster train llama.yaml steps=500 optimizer.lr=1e-3 --processes 2
    """
    words = yaml_file.join_options(values or [])
    document = yaml_file.load(config)
    kind.require_config(document, config)
    wanted, ranks = document.read(lambda value: _parse(yaml_file.override(value, words), processes), words)
    from trainmaster.cli.training import _second_start

    _second_start.settle(_checkpoints(wanted), stop=stop_other, attach=attach)
    code, fruitless = 1, 0
    for number in range(1, attempts + 1):
        plan = _plan(wanted, ranks)
        folder = Path(plan.folder)
        folder.mkdir(parents=True)
        (folder / PLAN_FILE).write_text(plan.to_json())
        _console.err.print(f"[dim]logs and events in {folder}[/]", soft_wrap=True)
        with _passing_on(folder) as asked:
            code = _run(folder, asked, mark=plan.mark)
        record = _read_record(folder)
        fruitless = 0 if record is not None and record.saved_since else fruitless + 1
        if asked or number == attempts or not _may_go_on(code, record, plan, fruitless):
            break
        reason = record.reason if record is not None and record.reason is not None else Reason.CRASHED
        _console.note(f"{reason}; start {number + 1} of {attempts} goes on from the newest checkpoint")
        time.sleep(reason.rule.rest_s if reason.rule.rest_s > _QUICK_S else 1.0)
    if asked and code in (1, -signal.SIGKILL):
        newest = any(Path(plan.checkpoints).glob("step-*"))
        _console.note(
            "ended; the same command goes on from the newest checkpoint"
            if newest
            else "interrupted before anything was saved"
        )
        code = interrupt.INTERRUPTED
    elif code == RESUMABLE_EXIT:
        _console.note("saved and stopped; the same command goes on from there")
    raise typer.Exit(code)


def _read_record(folder: Path) -> ExitRecord | None:
    """How the agent says that it ended; None for one that was killed."""
    try:
        return ExitRecord.read(read_small(folder / EXIT_FILE), attempt=folder.name)
    except OSError:
        return None


def _may_go_on(code: int, record: ExitRecord | None, plan: Plan, fruitless: int) -> bool:
    """Whether a run that failed goes on by itself: it has a checkpoint, and one of its last two starts saved."""
    if code in (0, RESUMABLE_EXIT, UsageError.exit_code) or fruitless >= _FRUITLESS:
        return False
    if fruitless and not any(Path(plan.checkpoints).glob("step-*")):
        return False
    reason = record.reason if record is not None and record.reason is not None else Reason.CRASHED
    if fruitless and reason is Reason.BAD_CHECKPOINT:  # the folder of another run, say: it stays one
        return False
    rule = reason.rule
    return rule.retry or rule.by_progress


def _parse(value: Any, processes: int | None) -> tuple[TrainConfig, int]:
    """The config and its number of ranks on this machine."""
    config = build_new(TrainConfig, value)
    ranks = processes or 1
    if faults := list(config.faults_on(ranks)):
        raise SpecError(faults)
    from trainmaster.cli.training.drill import count_gpus  # after the faults: torch takes seconds

    with interrupt.leaving_at_once():
        gpus = count_gpus(config)
    if processes is None and gpus is not None:
        ranks = gpus
    if faults := list(config.faults_on(ranks)):
        raise SpecError(faults)
    return config, ranks


def _checkpoints(config: TrainConfig) -> Path:
    return Path(config.checkpoint.folder or os.environ.get(CHECKPOINTS_VARIABLE) or "checkpoints").absolute()


def _plan(config: TrainConfig, processes: int) -> Plan:
    checkpoints = _checkpoints(config)
    attempt = f"{uuid.uuid4()}.1"
    started = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    spec = JobSpec(
        name="train",
        resources=Resources(processes_per_node=processes),
        preflight=Preflight(level=0),  # `trainmaster check` and `trainmaster submit` are the ways to check first
        train=config,
        limits=Limits(grace_s=_SAVE_S),
    )
    folder = checkpoints / "attempts" / f"{started}-{attempt[:8]}"
    # Relative paths of the config (data, checkpoints, init_from) start at the folder of the command.
    return Plan(attempt=attempt, spec=spec, folder=str(folder), checkpoints=str(checkpoints), work=str(Path.cwd()))


def _run(folder: Path, asked: Sequence[int], *, mark: str) -> int:
    """The agent in the foreground, with what rank 0 prints; its exit code. `asked` are the signals that came."""
    from trainmaster.node.owner import find_stopped, is_fork_server, name_process

    command = [sys.executable, "-m", "trainmaster.agent", str(folder / PLAN_FILE)]
    # Its own session: Ctrl-C reaches us alone, and the ranks hear of it once, from the agent.
    environment = {**os.environ, OWNER_VARIABLE: name_process(), ATTEMPT_VARIABLE: mark}
    agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
    log = folder / rank_log(0)
    with TrainView() as view:
        offset, heard = 0, 0  # `heard`: signals that came before it was said what another would do
        seen, told = set[int](), set[int]()  # processes that are stopped: at the last look, and told of
        while agent.poll() is None:
            offset = show_from(log, offset, view)
            if asked and not heard:
                heard = len(asked)
                _console.note("stopping: it saves first; Ctrl-C again ends it at once, without a save")
            if heard and signal.SIGINT in asked[heard:]:
                os.killpg(agent.pid, signal.SIGKILL)  # its ranks die with it
            stopped = set(find_stopped(agent.pid))
            if agent.pid in stopped and (folder / STOP_FILE).exists():
                os.killpg(agent.pid, signal.SIGCONT)  # a stopped agent cannot save and end
                stopped.clear()
            for pid in (stopped & seen) - told:
                name = "the agent" if pid == agent.pid else "the fork server" if is_fork_server(pid) else "a rank"
                _console.note(f"{name} (process {pid}) is stopped; `kill -CONT {pid}` lets it go on")
            seen, told = stopped, stopped & (seen | told)
            time.sleep(_LOOK_S)
        show_from(log, offset, view)
    return agent.returncode


@contextmanager
def _passing_on(folder: Path) -> Iterator[list[int]]:
    """Pass on to the agent that it is to stop, which saves first; this process ends when the agent has ended.

    By its stop file: a signal would end an agent, or a rank, that has only begun and does not listen yet. The numbers
    of the signals that came are in the list. SIGHUP is a terminal that was closed. Under nohup it is ignored, and
    stays so.
    """
    asked: list[int] = []

    def tell(number: int, _: object) -> None:
        asked.append(number)
        with suppress(OSError):  # on a full disk the file is there, and empty: that is a request too
            (folder / STOP_FILE).write_text(f"{Reason.USER_CANCELLED} interrupted\n")

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, tell) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
