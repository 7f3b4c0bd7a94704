"""Ranks that were stopped (SIGSTOP, a debugger) and do nothing until they are told to go on: told as WATCH events.

A rank of a `command` may be a launcher or a shell: the processes below it are looked at too. What is stopped at two
looks in a row counts; a profiler that stops a process to read its stack lets it go on at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from trainmaster.agent.folder import AttemptFolder
from trainmaster.agent.ranks import Rank
from trainmaster.node.emit import Emitter
from trainmaster.node.owner import find_stopped

_LOOK_S = 1.0


class StoppedRanks:
    """Looks at the ranks of one node once a second, and tells of each process that was stopped or goes on."""

    def __init__(self, folder: AttemptFolder, events: Emitter) -> None:
        self._folder, self._events = folder, events
        self._next = 0.0
        self._seen: Mapping[int, int] = {}  # process → its rank, at the last look
        self._told: dict[int, tuple[int, float]] = {}  # process → its rank, and since when

    @property
    def ranks(self) -> set[int]:
        """Ranks that are stopped, as far as it was told."""
        return {rank for rank, _ in self._told.values()}

    def forget(self, ranks: set[int]) -> None:
        """Other processes have taken the places of these ranks."""
        self._told = {pid: told for pid, told in self._told.items() if told[0] not in ranks}

    def look(self, alive: Sequence[Rank]) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_S
        stopped = {pid: rank.number for rank in alive for pid in find_stopped(rank.process.pid)}
        for pid, rank in stopped.items():
            if pid in self._seen and pid not in self._told:
                self._told[pid] = rank, now - _LOOK_S
                why = f"rank {rank} is stopped (process {pid}); `kill -CONT {pid}` lets it go on"
                self._folder.log(why)
                with contextlib.suppress(OSError):  # a full disk: the log line is lost too
                    self._events.emit("WATCH", "stopped", rank=rank, pid=pid, why=why)
        running = {rank.number for rank in alive}
        for pid in [pid for pid in self._told if pid not in stopped]:
            rank, since = self._told.pop(pid)
            if rank in running:
                why, seconds = f"rank {rank} (process {pid}) goes on", round(now - since, 1)
                self._folder.log(why)
                with contextlib.suppress(OSError):
                    self._events.emit("WATCH", "continued", rank=rank, pid=pid, seconds=seconds, why=why)
        self._seen = stopped
