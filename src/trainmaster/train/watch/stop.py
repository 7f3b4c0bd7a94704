"""Being told to stop: SIGTERM, SIGUSR1, or a file that appears. Nothing is interrupted; the loop asks between steps."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from types import FrameType

# SIGTERM is what Kubernetes, Slurm and our agent send; SIGUSR1 is what `sbatch --signal` is mostly given, and what
# HyperPod's agent sends for a graceful stop.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """Whether this rank was told to stop. Ranks hear of it at different times; `agree.any_rank` makes it one."""

    def __init__(self, file: str | Path | None) -> None:
        self._file = Path(file) if file else None
        self._why: str | None = None
        self._heard: int | None = None  # where the numbers of signals arrive

    def listen(self) -> None:
        """Take the signals from now on. Called first of all: one that comes while torch is imported counts too."""
        # Python runs its handlers between two lines of the main thread, and a compiler may hold that for a minute. The
        # number of the signal is written here at once, for whichever thread asks.
        self._heard, inlet = os.pipe()
        os.set_blocking(self._heard, False)
        os.set_blocking(inlet, False)
        signal.set_wakeup_fd(inlet, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, self._hear)

    def asked(self) -> str | None:
        """Why this rank should stop, or None. Any thread may ask."""
        if self._why is None and self._heard is not None:
            with contextlib.suppress(BlockingIOError):
                for number in os.read(self._heard, 64):
                    if number in SIGNALS:
                        self._why = signal.Signals(number).name
        if self._why is None and self._file is not None and self._file.exists():
            self._why = f"stop file {self._file}"
        return self._why

    def pass_on(self, why: str) -> None:
        """Another rank was told; whoever waits on this one for something else need not."""
        self._why = self._why or why

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._why = signal.Signals(number).name
