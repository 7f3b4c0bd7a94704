"""Half-open connections at a low descriptor limit: the server goes on answering, and its log stays small."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

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
        found: dict[str, str] = json.load(answer)
        return found


@pytest.mark.alone
def test_1100_half_open_connections_stop_neither_api_nor_reconciler(tmp_path: Path) -> None:
    home, log = tmp_path / "home", tmp_path / "server.log"
    env = {**os.environ, "PYTHONPATH": SOURCE, "TRAINMASTER_HOME": str(home)}
    command = f"ulimit -n 1024; exec {sys.executable} -m trainmaster serve --port 0"
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


def test_the_limit_leaves_descriptors_for_the_reconciler() -> None:
    assert connections.connection_limit(1024) + connections.BACKLOG + connections.RESERVED <= 1024
    assert connections.connection_limit(100) > 0


def test_a_message_is_logged_a_bounded_number_of_times() -> None:
    bounded = connections.BoundedLog(most=3, every_s=3600)
    records = [logging.LogRecord("a", logging.ERROR, "", 1, "accept failed %s", (n,), None) for n in range(100)]
    assert sum(bounded.filter(record) for record in records) == 3
    assert bounded.filter(logging.LogRecord("a", logging.ERROR, "", 1, "another", (), None))
