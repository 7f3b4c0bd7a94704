"""Half-open connections at a low descriptor limit: the server goes on answering, and its log stays small."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import trainmaster
from trainmaster.web import connections

SOURCE = str(Path(trainmaster.__file__).parents[1])


def until(path: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return str(json.loads(path.read_text())["url"])


def health(url: str) -> dict[str, str]:
    with urllib.request.urlopen(f"{url}/healthz", timeout=20) as answer:
        body: dict[str, str] = json.load(answer)
        return body


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
@pytest.mark.alone
def test_1100_half_open_connections_stop_neither_api_nor_reconciler(tmp_path: Path) -> None:
    home, log = tmp_path / "home", tmp_path / "server.log"
    env = {**os.environ, "PYTHONPATH": SOURCE, "TRAINMASTER_HOME": str(home)}
    command = f"ulimit -n 1024; exec '{sys.executable}' -m trainmaster serve --port 0"
    with log.open("wb") as out:
        server = subprocess.Popen(["bash", "-c", command], env=env, stdout=out, stderr=out)
    halves = []
    try:
        url = until(home / "server.json", server)
        health(url)
        host, port = url.removeprefix("http://").split(":")
        for number in range(1100):
            half = socket.create_connection((host, int(port)), timeout=20)
            half.sendall(b"GET /healthz HTTP/1.1\r\n" if number % 2 else b"")
            halves.append(half)
        for _ in range(3):
            assert health(url)["reconciler"] in ("running", "starting")
            time.sleep(1)
        assert health(url)["reconciler"] == "running"
        assert len(list(Path(f"/proc/{server.pid}/fd").iterdir())) < 1024 - 100, (
            "no descriptors are left for the reconciler"
        )
        assert log.stat().st_size < 100_000, log.read_text()[:1000]
    finally:
        for half in halves:
            half.close()
        server.terminate()
        server.wait(timeout=30)


async def answered(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), 30)  # to the end: the server closed the connection


def test_a_request_that_does_not_arrive_is_closed() -> None:
    """Nothing at all, half of the headers, headers without their body: each is closed in its time."""
    received: list[bytes] = []

    async def app(_scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def main() -> None:
        limits = connections.Connections(64, header_s=0.3, body_s=0.3)
        config = uvicorn.Config(
            app, port=0, log_level="error", lifespan="off", http=limits.protocol(), timeout_keep_alive=60
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        for part in (b"", b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n123"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(part)
            with contextlib.suppress(ConnectionResetError):
                received.append(await answered(reader))
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):  # an idle time between two whole requests is no half request
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"ok"), 30)
            await asyncio.sleep(0.5)
        writer.close()
        server.should_exit = True
        await serving

    asyncio.run(main())
    assert all(not answer for answer in received)


def test_the_limit_leaves_descriptors_for_the_reconciler() -> None:
    assert connections.connection_limit(1024) + connections.BACKLOG + connections.RESERVED <= 1024
    assert connections.connection_limit(100) > 0


def test_a_message_is_logged_a_bounded_number_of_times() -> None:
    bounded = connections.BoundedLog(most=3, every_s=3600)
    records = [logging.LogRecord("a", logging.ERROR, "", 1, "accept failed %s", (n,), None) for n in range(100)]
    assert sum(bounded.filter(record) for record in records) == 3
    assert bounded.filter(logging.LogRecord("a", logging.ERROR, "", 1, "another", (), None))
