"""Being told to stop: SIGTERM, SIGUSR1, or a file that appears. Nothing is interrupted; the loop asks between steps."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

# SIGTERM is what Kubernetes, Slurm and our agent send; SIGUSR1 is what `sbatch --signal` is mostly given.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stop:
    """Whether this rank was told to stop. Ranks hear of it at different times; `agree.any_rank` makes it one."""

    def __init__(self, file: str | Path | None) -> None:
        self._file = Path(file) if file else None
        self._why: str | None = None

    def listen(self) -> None:
        """Take the signals from now on. Called first of all: one that comes while torch is imported counts too."""
        for number in SIGNALS:
            signal.signal(number, self._hear)

    def asked(self) -> str | None:
        """Why this rank should stop, or None."""
        if self._why is None and self._file is not None and self._file.exists():
            self._why = f"stop file {self._file}"
        return self._why

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._why = signal.Signals(number).name
