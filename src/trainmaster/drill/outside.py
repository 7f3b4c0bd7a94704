"""Strikes that come from outside the program: signals to its processes, a stop request to the agent."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainmaster.core.plan import STOP_FILE
from trainmaster.core.states import Reason
from trainmaster.drill import storage, witness_log
from trainmaster.drill.plan import LOOK_STEPS, Strike
from trainmaster.drill.witness_log import FOLDER_VARIABLE

_STOPPED_S = 2.0
_HEARD_S = 0.6  # the agent looks for its stop file five times a second
_PROC = Path("/proc")


@dataclass(slots=True)
class Outside:
    """Watches one attempt and strikes when the witness holds the program for it, or when a file grows."""

    strike: Strike | None
    folder: Path  # of the attempt
    witness: Path
    grow: tuple[Path, ...] = ()  # folders in which a file that grows is a save: for programs whose saves nobody hears
    disk: storage.Disk | None = None  # that a strike at the disk is about
    quiet_s: float | None = None  # without a new step for so long it hangs, and is killed; None: never
    hung: bool = False
    launcher: bool = False  # seen: the command's own process is not one that trains
    stopped_at: float | None = None
    struck: bool = False
    _sizes: dict[Path, int] | None = None
    _looked: float = 0.0
    _written: int = -1
    _moved: float = 0.0

    def look(self, agent: int) -> None:
        """Called again and again while the attempt runs."""
        if not self.launcher and (training := self._training()):
            self.launcher = not training & set(_commands(agent))
        if not self.hung and self._is_quiet():
            self.hung = True
            _send({*_commands(agent), *self._training()}, signal.SIGKILL)
        if self.strike is None:
            return
        if self.struck:
            self._end_if_started_again(agent)
        elif any(self.witness.glob("struck-*")) or self._is_saving():
            self.struck = True
            self._hit(agent)
            (self.witness / "go").touch()

    def _is_quiet(self) -> bool:
        """Nothing was written by the witness for longer than the undisturbed run allows: ranks wait for each other."""
        if self.quiet_s is None:
            return False
        now, written = time.monotonic(), sum(path.stat().st_size for path in self.witness.glob("*.jsonl"))
        if written != self._written:
            self._written, self._moved = written, now
        return now - self._moved > self.quiet_s

    def _is_saving(self) -> bool:
        if not self.grow:
            return False
        sizes = {path: path.stat().st_size for folder in self.grow for path in _files(folder)}
        before, self._sizes = self._sizes, sizes
        return before is not None and any(size > before.get(path, 0) for path, size in sizes.items())

    def _hit(self, agent: int) -> None:
        assert self.strike is not None
        training = self._training()
        everybody = {*_commands(agent), *training}
        match self.strike.name:
            case "term":
                self.stopped_at = time.monotonic()
                (self.folder / STOP_FILE).write_text(f"{Reason.PREEMPTED}: the drill strikes")
                time.sleep(_HEARD_S)
            case "launcher":
                _send(set(_commands(agent)) - training, signal.SIGKILL)
            case "power":
                _send(everybody, signal.SIGKILL)
            case "readonly" if self.disk is not None:
                self.disk.forbid()
            case "stop":
                _send(everybody, signal.SIGSTOP)
                time.sleep(_STOPPED_S)
                _send(everybody, signal.SIGCONT)
            case _ if self.grow:
                _send(everybody, signal.SIGKILL)
            case _:
                pass  # the witness has done it

    def _end_if_started_again(self, agent: int) -> None:
        """A launcher that starts its ranks again itself: what was to be seen has been seen after some steps."""
        assert self.strike is not None
        marks = list(self.witness.glob("struck-*"))
        if self.strike.name in ("term", "stop") or not marks or time.monotonic() < self._looked + 1.0:
            return
        # The file's time may be before the first step of the very process that was struck, where steps are quick.
        self._looked, since = time.monotonic(), max(mark.stat().st_mtime_ns for mark in marks) + storage.TICK_NS
        lives = witness_log.read(self.witness)
        if any(life.lines[0].at * 1e9 > since and len(life.lines) >= LOOK_STEPS for life in lives):
            _send({*_commands(agent), *self._training()}, signal.SIGKILL)

    def _training(self) -> set[int]:
        """Processes that the witness has seen and that still run. Numbers are used again: the environment tells."""
        mark = f"\0{FOLDER_VARIABLE}={self.witness}\0".encode()
        found = set()
        for path in self.witness.glob("*.jsonl"):
            with contextlib.suppress(OSError):
                if mark in b"\0" + (_PROC / path.stem / "environ").read_bytes():
                    found.add(int(path.stem))
        return found


def _commands(agent: int) -> list[int]:
    """Processes that the agent started as ranks; its guard is none of them."""
    with contextlib.suppress(OSError, ValueError):
        children = (_PROC / str(agent) / "task" / str(agent) / "children").read_text().split()
        return [int(pid) for pid in children if b"\0RANK=" in b"\0" + (_PROC / pid / "environ").read_bytes()]
    return []


def _files(folder: Path) -> Iterable[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
