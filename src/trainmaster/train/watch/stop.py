"""Stop requests: SIGTERM, SIGUSR1, SIGINT, SIGHUP, or the stop file.

Nothing is interrupted; the loop polls between steps.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from types import FrameType

# SIGTERM is what Kubernetes, Slurm and our agent send; SIGUSR1 is what `sbatch --signal` is mostly given, and what
# HyperPod's agent sends for a graceful stop. SIGINT is Ctrl-C, which torchrun passes on to its ranks; SIGHUP is a
# terminal that was closed.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)  # by a shell for background jobs, and by nohup: it is to go on then


class Stop:
    """Stop request of this rank. Ranks see it at different times; rank_sync makes it one decision."""

    def __init__(self, file: str | Path | None) -> None:
        self._file = Path(file) if file else None
        self._why: str | None = None
        self._signals: int | None = None  # where the numbers of signals arrive

    def listen(self) -> None:
        """Install the signal handlers. Called first: a signal during the import of torch counts too."""
        # Python runs its handlers between two lines of the main thread, and a compiler may hold that for a minute. The
        # number of the signal is written here at once, for whichever thread asks.
        self._signals, inlet = os.pipe()
        os.set_blocking(self._signals, False)
        os.set_blocking(inlet, False)
        signal.set_wakeup_fd(inlet, warn_on_full_buffer=False)
        for number in SIGNALS:
            if number not in _MAY_BE_IGNORED or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def asked(self) -> str | None:
        """Cause of the stop request, or None. Safe from any thread."""
        if self._why is None and self._signals is not None:
            with contextlib.suppress(BlockingIOError):
                for number in os.read(self._signals, 64):
                    if number in SIGNALS:
                        self._why = signal.Signals(number).name
        if self._why is None and self._file is not None and self._file.exists():
            self._why = f"stop file {self._file}"
        return self._why

    def pass_on(self, why: str) -> None:
        """Record the stop request of another rank."""
        self._why = self._why or why

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._why = signal.Signals(number).name
