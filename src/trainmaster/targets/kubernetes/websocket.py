"""WebSocket to an API server (RFC 6455), for commands in pods. Binary messages, no extensions."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from trainmaster import __version__
from trainmaster.core.errors import Unreachable
from trainmaster.targets.kubernetes.errors import parse, refusal
from trainmaster.targets.kubernetes.kubeconfig import Access

_CONNECT_S = 20.0
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
_CONTINUE, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0, 1, 2, 8, 9, 10
_MAX_MESSAGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _Frame:
    kind: int
    final: bool
    data: bytes


class WebSocket:
    """One open connection. `protocol` is the one that the server chose."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: str) -> None:
        self._reader, self._writer, self.protocol = reader, writer, protocol

    async def send(self, data: bytes) -> None:
        """Send one binary message."""
        await self._write(_BINARY, data)

    async def receive(self) -> bytes | None:
        """The next message; None where the other side has closed."""
        whole = b""
        while True:
            frame = await self._read()
            if frame is None or frame.kind == _CLOSE:
                return None
            if frame.kind == _PING:
                await self._write(_PONG, frame.data)
            elif frame.kind in (_CONTINUE, _TEXT, _BINARY):
                whole += frame.data
                if len(whole) > _MAX_MESSAGE_BYTES:
                    raise Unreachable("kubernetes: a message of the server is too large")
                if frame.final:
                    return whole

    async def close(self) -> None:
        with contextlib.suppress(Unreachable):
            await self._write(_CLOSE, struct.pack("!H", 1000))
        self._writer.close()
        try:
            async with asyncio.timeout(2):
                await self._writer.wait_closed()
        except OSError:  # TimeoutError is one
            self._writer.transport.abort()

    async def _read(self) -> _Frame | None:
        try:
            first, second = await self._reader.readexactly(2)
            size = second & 127
            if size >= 126:
                wide = size == 127
                (size,) = struct.unpack("!Q" if wide else "!H", await self._reader.readexactly(8 if wide else 2))
            if size > _MAX_MESSAGE_BYTES:
                raise Unreachable("kubernetes: a message of the server is too large")
            return _Frame(first & 15, bool(first & 128), await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def _write(self, kind: int, data: bytes) -> None:
        """A client masks what it sends (section 5.3)."""
        mask, size = os.urandom(4), len(data)
        if size < 126:
            head = bytes([128 | kind, 128 | size])
        elif size < 1 << 16:
            head = bytes([128 | kind, 128 | 126]) + struct.pack("!H", size)
        else:
            head = bytes([128 | kind, 128 | 127]) + struct.pack("!Q", size)
        key = (mask * (size // 4 + 1))[:size]
        masked = (int.from_bytes(data, "big") ^ int.from_bytes(key, "big")).to_bytes(size, "big")
        try:
            self._writer.write(head + mask + masked)
            await self._writer.drain()
        except OSError as wrong:
            raise Unreachable(f"kubernetes: {type(wrong).__name__}: {wrong}") from None


async def connect(
    access: Access, path: str, query: Sequence[tuple[str, str]], headers: Mapping[str, str], protocols: Sequence[str]
) -> WebSocket:
    """Open a connection; the server's refusal, or Unreachable, where there is none."""
    address = urlsplit(access.server)
    host, port = address.hostname or "", address.port or 443
    try:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=access.tls(), server_hostname=host)
    except OSError as wrong:
        raise Unreachable(f"kubernetes: {type(wrong).__name__}: {str(wrong)[:200]}") from None
    key = base64.b64encode(os.urandom(16))
    sent = {
        "Host": address.netloc, "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": key.decode(), "Sec-WebSocket-Protocol": ", ".join(protocols),
        "User-Agent": f"trainmaster/{__version__}", "Accept": "*/*", **headers,
    }  # fmt: skip
    lines = [
        f"GET {address.path}{path}?{urlencode(query)} HTTP/1.1",
        *(f"{name}: {text}" for name, text in sent.items()),
    ]
    try:
        async with asyncio.timeout(_CONNECT_S):
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
            await writer.drain()
            return WebSocket(reader, writer, await _shake_hands(reader, key, what=path.rpartition("/")[2]))
    except BaseException as wrong:
        writer.transport.abort()
        if isinstance(wrong, (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)):
            raise Unreachable(f"kubernetes: {type(wrong).__name__}: {str(wrong)[:200]}") from None
        raise


async def _shake_hands(reader: asyncio.StreamReader, key: bytes, *, what: str) -> str:
    """Read the answer to the request for an upgrade; the chosen protocol."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    fields = {name.strip().lower(): text.strip() for name, _, text in (line.partition(":") for line in head[1:])}
    words = head[0].split(" ", 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdecimal() else 500
    if status != 101:
        length = fields.get("content-length", "")
        size = min(int(length), _MAX_MESSAGE_BYTES) if length.isdecimal() else 0
        raise refusal(status if status >= 300 else 500, parse(await reader.readexactly(size)), what=what)
    wanted = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest()).decode()
    if fields.get("sec-websocket-accept") != wanted:
        raise Unreachable("kubernetes: the answer to the upgrade is not that of a WebSocket server")
    return fields.get("sec-websocket-protocol", "")
