"""Watch of the process that started this rank: a rank without its launcher ends, and one that waits for its peers
hears a stop request.

After SIGKILL of torchrun, or of a shell between our agent and a rank, nobody is left who could stop the rank, and under
torchrun the rendezvous store is gone with its launcher.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trainmaster.core.plan import RESUMABLE_EXIT
from trainmaster.node.owner import GONE, find_launcher, is_gone
from trainmaster.train.run_log import RunLog, flush_output
from trainmaster.train.watch.stop import Stop

_LOOK_S = 0.5
_SAVE_S = 3.5  # to save at the end of the step; with the look before it all is over within 5 s


class LauncherWatch:
    """Thread of one rank. It exits the process by itself; nothing else waits for it."""

    def __init__(self, environ: Mapping[str, str], *, stop: Stop, run_log: RunLog) -> None:
        self._launcher, self._stop, self._run_log = find_launcher(environ), stop, run_log
        self._waits = False  # for its peers, with nothing to save
        self._over = threading.Event()

    def __enter__(self) -> LauncherWatch:
        threading.Thread(target=self._watch, name="launcher watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    @contextmanager
    def waiting_for_peers(self) -> Iterator[None]:
        """A stop request inside ends this process at once: torch waits where no handler of a signal runs."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            why = self._stop.asked()
            if why is not None and self._waits:
                self._run_log.alarm(f"stopped while waiting for the other ranks ({why}); there is nothing to save")
                _exit(RESUMABLE_EXIT)
            if self._launcher is not None and is_gone(self._launcher):
                self._leave()

    def _leave(self) -> None:
        assert self._launcher is not None
        number = "" if self._launcher == GONE else f" (process {self._launcher.partition(':')[0]})"
        why = f"the launcher of this rank{number} is gone"
        self._run_log.alarm(f"stopping: {why}")
        self._stop.pass_on(why)
        if not self._waits:
            self._over.wait(_SAVE_S)
        self._run_log.alarm(f"failed: {why}, and saving did not end within {_SAVE_S:g} s")
        _exit(1)


def _exit(code: int) -> None:
    flush_output()
    os._exit(code)
