"""Connection between two agents of an attempt: JSON lines over TCP. Neither end ever waits for the other.

Each end says all that it has to say in every line, and again once a second: a line that was lost, or a connection that
was opened again, leaves nothing out.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from typing import Any

from trainmaster.agent.diagnose import Outcome
from trainmaster.core.states import Reason

BEAT_S = 1.0
_LINE_BYTES = 1 << 16
_MESSAGE_CHARACTERS = 2000


class Line:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.closed = False
        self._held = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a line. An end that takes none any more (stopped, or cut off) is given up: it may connect again."""
        data = json.dumps(message).encode() + b"\n"
        try:
            if self.closed or self.socket.send(data) == len(data):
                return
        except OSError:
            pass
        self.close()

    def receive(self) -> list[dict[str, Any]]:
        """Lines that have arrived. What is no JSON object closes the connection."""
        try:
            while not self.closed and (data := self.socket.recv(_LINE_BYTES)):
                self._held += data
                if len(self._held) > 4 * _LINE_BYTES:
                    break
            self.close()
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        *lines, self._held = self._held.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            messages = [None]
        if not all(isinstance(message, dict) for message in messages):
            self.close()
            return []
        return messages

    def close(self) -> None:
        self.closed = True
        self.socket.close()


def render_outcome(outcome: Outcome | None) -> dict[str, Any] | None:
    """An outcome for the other agents, without its evidence but for the rank."""
    if outcome is None:
        return None
    reason = None if outcome.reason is None else outcome.reason.value
    return {
        "reason": reason, "message": outcome.message[:_MESSAGE_CHARACTERS], "rank": outcome.evidence.get("rank"),
        "resumable": outcome.resumable,
    }  # fmt: skip


def parse_outcome(value: object) -> Outcome | None:
    """An outcome of another agent; None where there is none. ValueError for what is none."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("no outcome")
    reason, rank = value.get("reason"), value.get("rank")
    return Outcome(
        reason=None if reason is None else Reason(str(reason)),
        message=str(value.get("message", ""))[:_MESSAGE_CHARACTERS],
        evidence={"rank": rank} if isinstance(rank, int) else {},
        resumable=value.get("resumable") is True,
    )
