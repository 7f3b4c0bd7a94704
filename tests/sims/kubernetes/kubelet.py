"""Stand-in of the kubelets' endpoints for logs (`/containerLogs/…`) and commands (`/exec/…`), over TLS."""

from __future__ import annotations

import asyncio
import base64
import bisect
import hashlib
import json
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
Lines = Callable[[str, str], list[tuple[datetime, bytes]] | None]


class Kubelet:
    """One server for all simulated nodes. `lines` gives the log of a pod, `answer` the output of a program."""

    def __init__(self, certificate: Path, key: Path, lines: Lines, answer: Callable[[str], bytes | None]) -> None:
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(certificate, key)
        self._lines, self._command_answer = lines, answer
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, asyncio.Event] = {}  # connections, and whether each is over

    async def start(self) -> int:
        """Listen on a free port of the loopback interface; the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop, and close what the API server keeps open for its next request."""
        if self._server is not None:
            self._server.close()
        for writer, over in list(self._open.items()):
            writer.transport.abort()
            await over.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one connection, until the API server closes it: a new one costs more than its answer."""
        over = self._open[writer] = asyncio.Event()
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                address = head.split(" ", 2)[1]
                if urlsplit(address).path.startswith("/exec/"):
                    writer.write(self._run(head, address))
                    await writer.drain()
                    return
                status, body = self._answer(address)
                length = f"Content-Length: {len(body)}"
                writer.write(f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\n{length}\r\n\r\n".encode() + body)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            del self._open[writer]
            over.set()

    def _run(self, head: str, address: str) -> bytes:
        """The whole of a WebSocket: output of the program on channel 1, how it ended on channel 3."""
        fields = {name.lower(): text.strip() for name, _, text in (line.partition(":") for line in head.split("\r\n"))}
        key = fields.get("sec-websocket-key", "").encode()
        accept = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest()).decode()
        answer = self._command_answer(parse_qs(urlsplit(address).query)["command"][0])
        status = {"status": "Success"} if answer is not None else {"status": "Failure", "message": "no such program"}
        messages = [b"\x01" + (answer or b""), b"\x03" + json.dumps(status).encode()]
        begin = (
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept}\r\nSec-WebSocket-Protocol: v4.channel.k8s.io\r\n\r\n"
        )
        return (
            begin.encode() + b"".join(b"\x82" + bytes([len(message)]) + message for message in messages) + b"\x88\x00"
        )

    def _answer(self, address: str) -> tuple[str, bytes]:
        path, query = urlsplit(address).path.split("/"), parse_qs(urlsplit(address).query)
        lines = self._lines(path[2], path[3]) if len(path) == 5 and path[1] == "containerLogs" else None
        if lines is None:
            return "404 Not Found", b"no such container\n"
        if since := query.get("sinceTime"):
            lines = lines[bisect.bisect_left(lines, datetime.fromisoformat(since[0]), key=lambda line: line[0]) :]
        if tail := query.get("tailLines"):
            lines = lines[-int(tail[0]) :]
        stamps = "timestamps" in query
        return "200 OK", b"".join((_stamp(at) if stamps else b"") + line + b"\n" for at, line in lines)


def _stamp(at: datetime) -> bytes:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z ").encode()
