"""What may interrupt an attempt (a signal, the stop file, the time limit), and the heartbeat that says it lives."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from trainmaster.agent.folder import AttemptFolder
from trainmaster.core.plan import OWNER_VARIABLE, Plan
from trainmaster.core.states import Reason
from trainmaster.node.emit import Emitter
from trainmaster.node.owner import is_gone

HEARTBEAT_S = 10.0
_LOOK_S = 0.2  # how often the stop file is looked for
ORPHAN_GRACE_S = 4.0  # for ranks to save after the command that started the agent was killed: all end within 5 s
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Somebody or something wants the attempt to end."""

    reason: Reason
    message: str


class Signals:
    """Notes a request to stop, and wakes a sleeping loop when that or a child's death comes."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)
        signal.set_wakeup_fd(self._in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # a handler, or the wake-up never comes
        for number in _STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.asked = self.asked or signal.Signals(number)

    def wake(self) -> None:
        """Let `sleep` return; safe from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._in, b"\0")

    def sleep(self, seconds: float, *also: socket.socket) -> None:
        waiting = select.poll()  # select() takes no descriptor above 1,023, and there may be as many agents
        for descriptor in (self._out, *(line.fileno() for line in also)):
            waiting.register(descriptor, select.POLLIN)
        waiting.poll(max(0.0, seconds) * 1000)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._out, 4096):
                pass


class Watch:
    """The clock of one attempt. Both of its parts, pre-flight and workload, turn around `sleep`, `beat` and `asked`."""

    def __init__(self, plan: Plan, folder: AttemptFolder, events: Emitter, signals: Signals) -> None:
        self._timeout_s = plan.spec.limits.timeout_s
        self._folder = folder
        self._events = events
        self._signals = signals
        self._began = time.monotonic()
        self._next_beat = self._began
        self._stop: Stop | None = None
        self._owner = os.environ.get(OWNER_VARIABLE, "")
        self.tend: Callable[[], None] = lambda: None  # what every loop must do within a second: agents of other nodes
        self.orphaned_at: float | None = None  # when the command that owns the agent was found to be gone

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def wake(self) -> None:
        self._signals.wake()

    def sleep(self, *also: socket.socket) -> None:
        """Until something happens, `also` at one of these, or it is time to look around again."""
        self._signals.sleep(_LOOK_S, *also)

    def beat(self, *, ranks: int) -> bool:
        """Emit a heartbeat when one is due; True if it was."""
        self.tend()
        if time.monotonic() < self._next_beat:
            return False
        self._next_beat = time.monotonic() + HEARTBEAT_S
        try:
            self._events.emit("HEARTBEAT", "alive", ranks=ranks)
        except OSError as error:  # a full disk is the workload's to report; it may free some yet
            self._folder.log(f"heartbeat not written: {error}")
        return True

    def bound_events(self) -> None:
        """Keep the event file from filling the disk."""
        with contextlib.suppress(OSError):
            self._events.bound()

    def asked(self) -> Stop | None:
        """The first request to stop, once there is one."""
        if self.orphaned_at is None and is_gone(self._owner):
            self.orphaned_at = time.monotonic()
        self._stop = self._stop or self._look()
        return self._stop

    def _look(self) -> Stop | None:
        if (text := self._folder.stop_text()) is not None:
            return parse_stop(text)
        if self.orphaned_at is not None:
            return Stop(reason=Reason.USER_CANCELLED, message="the command that started it was killed")
        if self._signals.asked is signal.SIGINT:
            return Stop(reason=Reason.USER_CANCELLED, message="interrupted")
        if self._signals.asked is not None:
            # Whoever ends a node's processes says so with SIGTERM: Slurm, Kubernetes, a shutdown.
            return Stop(reason=Reason.PREEMPTED, message=f"the agent got {self._signals.asked.name}")
        if self._timeout_s is not None and self.elapsed_s > self._timeout_s:
            return Stop(reason=Reason.TIMED_OUT, message=f"limits.timeout_s of {self._timeout_s:g} s is over")
        return None


def parse_stop(text: str) -> Stop:
    """What a stop file asks: a reason of ours and words, or words alone, which are a user's."""
    word, _, rest = text.partition(" ")
    with contextlib.suppress(ValueError):
        return Stop(reason=Reason(word.rstrip(":")), message=rest.strip() or "asked to stop")
    return Stop(reason=Reason.USER_CANCELLED, message=text[:500] or "asked to stop")
