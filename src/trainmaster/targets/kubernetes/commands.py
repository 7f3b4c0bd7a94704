"""A command in a container of a pod, over the API server: output as it comes, terminal size, exit code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainmaster.core.errors import TargetError, Unreachable
from trainmaster.targets.kubernetes.client import Client, path_of
from trainmaster.targets.kubernetes.websocket import WebSocket

# Version 4 is known since Kubernetes 1.4. Each message begins with the number of its channel.
_PROTOCOLS = ("v4.channel.k8s.io",)
_STDIN, _STDOUT, _STDERR, _RESULT, _RESIZE = range(5)


class Terminal:
    """The keyboard side of a command: bytes that were typed, and the size of the window. Filled by the caller."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[bytes] = asyncio.Queue()

    def type(self, data: bytes) -> None:
        self.events.put_nowait(bytes([_STDIN]) + data)

    def resize(self, columns: int, rows: int) -> None:
        self.events.put_nowait(bytes([_RESIZE]) + json.dumps({"Width": columns, "Height": rows}).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A container of a pod."""

    namespace: str
    pod: str
    container: str


async def run_command(
    client: Client,
    place: Place,
    words: Sequence[str],
    *,
    out: Callable[[bytes], None],
    err: Callable[[bytes], None],
    terminal: Terminal | None = None,
    keep_open: bool = False,
) -> int:
    """Run a command to its end; its exit code. Without a terminal it gets no input.

    `keep_open`: its standard input ends when the connection does, for a program that should end with it.
    """
    query = [("container", place.container), ("stdout", "true"), *(("command", word) for word in words)]
    # A terminal has one output: programs there write errors to the same screen.
    query += [("stdin", "true"), ("tty", "true")] if terminal is not None else [("stderr", "true")]
    query += [("stdin", "true")] if keep_open else []
    path = path_of("v1", "pods", namespace=place.namespace, name=place.pod) + "/exec"
    socket = await client.open_socket(path, query, _PROTOCOLS)
    typed = asyncio.create_task(_send(terminal, socket)) if terminal is not None else None
    try:
        return await _receive(socket, {_STDOUT: out, _STDERR: err}, place)
    finally:
        if typed is not None:
            typed.cancel()
            await asyncio.gather(typed, return_exceptions=True)
        await socket.close()


async def _send(terminal: Terminal, socket: WebSocket) -> None:
    while True:
        await socket.send(await terminal.events.get())


async def _receive(socket: WebSocket, channels: dict[int, Callable[[bytes], None]], place: Place) -> int:
    while (message := await socket.receive()) is not None:
        if message[:1] == bytes([_RESULT]) and len(message) > 1:
            return parse_result(message[1:])
        if message and message[0] in channels and len(message) > 1:
            channels[message[0]](message[1:])
    raise Unreachable(f"kubernetes: the connection to pod {place.pod} ended before the command did")


def parse_result(raw: bytes) -> int:
    """Exit code of a command from the status that ends it."""
    try:
        status: Any = json.loads(raw)
        if status["status"] == "Success":
            return 0
        causes = (status.get("details") or {}).get("causes") or ()
        codes = [int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TargetError(f"kubernetes: the end of the command cannot be read: {raw[:200]!r}") from None
    if codes:
        return codes[0]
    raise TargetError(f"kubernetes: the command did not start: {str(status.get('message'))[:500]}")
