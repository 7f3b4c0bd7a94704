"""Stand-in of the kubelets' log endpoint: `GET /containerLogs/NAMESPACE/POD/CONTAINER`, over TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

Lines = Callable[[str, str], list[tuple[datetime, bytes]] | None]


class Kubelet:
    """One server for all simulated nodes. `lines` gives the log of a pod; None where there is none."""

    def __init__(self, certificate: Path, key: Path, lines: Lines) -> None:
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(certificate, key)
        self._lines = lines
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen on a free port of the loopback interface; the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            status, body = self._answer(head.split(" ", 2)[1])
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def _answer(self, address: str) -> tuple[str, bytes]:
        path, asked = urlsplit(address).path.split("/"), parse_qs(urlsplit(address).query)
        found = self._lines(path[2], path[3]) if len(path) == 5 and path[1] == "containerLogs" else None
        if found is None:
            return "404 Not Found", b"no such container\n"
        if since := asked.get("sinceTime"):
            found = [one for one in found if one[0] >= datetime.fromisoformat(since[0])]
        if tail := asked.get("tailLines"):
            found = found[-int(tail[0]) :]
        stamps = "timestamps" in asked
        return "200 OK", b"".join((_stamp(at) if stamps else b"") + line + b"\n" for at, line in found)


def _stamp(at: datetime) -> bytes:
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z ").encode()
