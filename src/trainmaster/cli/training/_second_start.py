"""A second `trainmaster train` in one checkpoint folder: the first is named, stopped on request, or followed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import typer

from trainmaster.cli import _console
from trainmaster.cli._views.train_bar import TrainView, show_from
from trainmaster.core.errors import UsageError
from trainmaster.core.files import read_small
from trainmaster.core.plan import EXIT_FILE, LOCK_FILE, RESUMABLE_EXIT, ExitRecord, rank_log

_LOOK_S = 0.2
_PATIENCE_S = 300.0  # a save of a large model takes minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A start that goes on: its folder and its agent."""

    folder: Path
    agent: int

    @property
    def is_over(self) -> bool:
        return not _is_held(self.folder / LOCK_FILE)


def settle(checkpoints: Path, *, stop: bool, attach: bool) -> None:
    """Return where nothing trains in the folder any more; else UsageError, or the exit of the run that was followed."""
    if (other := find_running(checkpoints)) is None:
        return
    if attach:
        raise typer.Exit(_follow(other))
    if not stop:
        raise UsageError(
            f"{checkpoints}: a run trains there now (agent process {other.agent}, logs in {other.folder}); "
            "--stop-other lets it save and end first, --attach follows it"
        )
    _console.note(f"stopping the run of agent process {other.agent}, which saves first")
    with contextlib.suppress(ProcessLookupError):
        os.kill(other.agent, signal.SIGINT)
        os.killpg(os.getpgid(other.agent), signal.SIGCONT)  # a stopped one hears nothing until it goes on
    end = time.monotonic() + _PATIENCE_S
    while not other.is_over:
        if time.monotonic() > end:
            raise UsageError(f"agent {other.agent} has not ended in {_PATIENCE_S:g} s; `kill -9 {other.agent}` ends it")
        time.sleep(_LOOK_S)


def find_running(checkpoints: Path) -> Running | None:
    """The start of an earlier command whose agent lives."""
    for lock in sorted(checkpoints.glob(f"attempts/*/{LOCK_FILE}")):
        if _is_held(lock):
            with contextlib.suppress(OSError, ValueError):
                return Running(folder=lock.parent, agent=int(lock.read_text().removeprefix("pid ")))
    return None


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _follow(other: Running) -> int:
    offset, log = 0, other.folder / rank_log(0)
    with TrainView() as view:
        while not other.is_over:
            offset = show_from(log, offset, view)
            time.sleep(_LOOK_S)
        show_from(log, offset, view)
    try:
        record = ExitRecord.read(read_small(other.folder / EXIT_FILE), attempt=other.folder.name)
    except OSError:
        return 1
    return 0 if record.ok else RESUMABLE_EXIT if record.resumable else 1
