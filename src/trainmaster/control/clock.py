"""Durations that do not contain the steps of the wall clock.

Rows hold wall-clock times. When the clock is set (NTP after a bad boot, a hand, a virtual machine that was restored), a
difference of two such times is no duration: a forward step would end jobs as timed out or over budget. The kernel's
boot-time clock does not step. A change of the difference between the two clocks is a step; it is logged, kept in
HOME/clock/, and left out of every duration that contains it. Time in which this process did not run counts.

Each process writes a file of its own: the clock of another machine on this home has other steps, and of two processes
on one file the later one would take back what the earlier one has noted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from trainmaster.core.files import write_whole
from trainmaster.core.money.cost import Span

FOLDER = "clock"
STEP_S = 5.0  # a smaller difference is slewing, or a busy machine between two readings
_KEPT = 100  # steps

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: the wall clock as it should have been, and as it was. Seconds since 1970."""

    expected_s: float
    found_s: float

    @property
    def size_s(self) -> float:
        return self.found_s - self.expected_s


def _boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clock:
    """The wall clock and its steps."""

    def __init__(
        self,
        home: Path | None = None,
        *,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = _boot_time,
        boot: str | None = None,
        host: str | None = None,
        pid: int | None = None,
    ) -> None:
        self._wall, self._steady = wall, steady
        self._folder = home / FOLDER if home is not None else None
        self._host, self._pid = host or socket.gethostname(), pid if pid is not None else os.getpid()
        self._boot = boot if boot is not None else _boot_id()
        self._steps: list[Step] = []
        self._offset_s = wall() - steady()
        self._load()

    def now(self) -> datetime:
        """The time of the wall clock."""
        self.observe()
        return datetime.fromtimestamp(self._wall(), tz=UTC)

    def observe(self) -> None:
        """Compare the two clocks, and record a step."""
        wall, steady = self._wall(), self._steady()
        if abs(wall - steady - self._offset_s) < STEP_S:
            return
        step = Step(expected_s=steady + self._offset_s, found_s=wall)
        self._offset_s = wall - steady
        self._steps = [*self._steps, step][-_KEPT:]
        log.warning("the clock was set by %+.0f s; durations leave the step out", step.size_s)
        self._save()

    def elapsed_s(self, since: datetime, until: datetime) -> float:
        """Seconds that really passed between two wall-clock times, the second of them about now."""
        start, end = since.timestamp(), until.timestamp()
        if not self._steps:
            return end - start
        return end - start - sum(step.size_s for step in self._after(start, end))

    def correct(self, span: Span, *, now: datetime) -> Span:
        """A span of money as long as it really was: its start is moved by the steps inside it."""
        end = span.end if span.end is not None else now
        real_s = max(0.0, self.elapsed_s(span.start, end))
        return replace(span, start=datetime.fromtimestamp(end.timestamp() - real_s, tz=UTC))

    def _after(self, start: float, end: float) -> list[Step]:
        """Steps since the clock showed `start`. Where it did so more than once, the last time counts."""
        later: list[Step] = []
        latest = end + STEP_S  # that the clock showed behind the step that is looked at
        for step in reversed(self._steps):
            earliest = step.expected_s if step.size_s > 0 else step.found_s - STEP_S
            if earliest < start <= latest:
                return later
            later.append(step)
            latest = step.expected_s + STEP_S
        return later if start <= latest else []  # never shown: the time of another machine

    def _load(self) -> None:
        """Go on with what earlier processes of this machine have noted. The files of those that are gone go."""
        if self._folder is None:
            return
        earlier = [(path, record) for path in self._list() if (record := _parse(path)) is not None]
        if earlier:  # each has loaded those before it: the one with most steps knows all of them
            _, record = max(earlier, key=lambda item: (len(item[1].steps), item[0].stat().st_mtime))
            self._steps = list(record.steps)
            if record.boot == self._boot:
                self._offset_s = record.offset_s
                self.observe()  # the clock may have been set while no server ran
        if self._save():
            for path in self._list():
                if not Path("/proc", path.name.split(".")[-2]).exists():
                    path.unlink(missing_ok=True)

    def _list(self) -> list[Path]:
        """Files of this machine."""
        assert self._folder is not None
        prefix = f"{self._host}."
        return [
            path
            for path in self._folder.glob("*.json")
            if path.name.startswith(prefix) and path.name.removeprefix(prefix).removesuffix(".json").isdecimal()
        ]

    def _save(self) -> bool:
        if self._folder is None:
            return False
        steps = [[step.expected_s, step.found_s] for step in self._steps]
        text = json.dumps({"boot": self._boot, "offset_s": self._offset_s, "steps": steps})
        with contextlib.suppress(OSError):  # a full disk must not stop the clock
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_whole(self._folder / f"{self._host}.{self._pid}.json", text + "\n", durable=False, mode=0o600)
            return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """What a process has noted."""

    boot: str
    offset_s: float
    steps: tuple[Step, ...]


def _parse(path: Path) -> _Record | None:
    """The record of a file; None where it is damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text())
        steps = tuple(Step(expected_s=float(a), found_s=float(b)) for a, b in kept["steps"])[-_KEPT:]
        return _Record(boot=str(kept["boot"]), offset_s=float(kept["offset_s"]), steps=steps)
    return None


def _boot_id() -> str:
    """The kernel's id of this boot: the boot-time clock of another boot has another zero."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
