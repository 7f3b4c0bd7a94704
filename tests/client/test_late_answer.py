"""A server that answers late: what the client says, how long it waits for a set, and that it sends no second one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from trainmaster.cli._jobs.server import ServerJobs
from trainmaster.client import Client, ServerUnreachable
from trainmaster.core.config.sweep import parse_sweep

DOCUMENT = {"name": "lr", "command": ["true", "{x}"], "matrix": {"x": ["1", "2", "3", "4"]}}
LINE = {
    "id": "00000000-0000-4000-8000-000000000001", "name": "lr", "project": "lab", "status": "pending", "trials": 4,
    "counts": {}, "parallel": 4, "message": "", "cost_cents": None, "best_loss": None,
    "created_at": "2026-11-01T00:00:00Z", "submitted_by": None,
}  # fmt: skip


class Late:
    """A server whose n-th answer comes after so many seconds; the last of them for all further ones."""

    def __init__(self, *after_s: float) -> None:
        self.keys: list[str | None] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                outer.keys.append(self.headers["Idempotency-Key"])
                time.sleep(after_s[min(len(outer.keys), len(after_s)) - 1])
                body = json.dumps({"set": LINE, "trials": []}).encode()
                self.send_response(201 if len(outer.keys) == 1 else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def late(request: pytest.FixtureRequest) -> Iterator[Late]:
    server = Late(*request.param)
    yield server
    server.close()


@pytest.mark.parametrize("late", [(30,)], indirect=True)
def test_no_answer_is_not_called_unreachable_and_names_the_key(late: Late) -> None:
    with Client(late.url, timeout_s=0.1, retries=0) as client, pytest.raises(ServerUnreachable) as caught:
        ServerJobs(client).submit_set(parse_sweep(DOCUMENT), key=None)
    text = str(caught.value)
    assert "did not answer within" in text and "it may still do what was asked" in text
    assert "cannot be reached" not in text and "trainmaster show lr" in text and f"--key {late.keys[0]}" in text


@pytest.mark.parametrize("late", [(0.35,)], indirect=True)
def test_a_set_is_given_time_for_each_of_its_trials(late: Late) -> None:
    with Client(late.url, timeout_s=0.1, retries=0) as client:
        assert client.submit_set(DOCUMENT, key="k").new
        with pytest.raises(ServerUnreachable, match=r"did not answer within 0\.1 s"):
            client.submit({"name": "a", "command": ["true"]})


@pytest.mark.parametrize("late", [(30, 0)], indirect=True)
def test_a_set_is_asked_for_again_with_its_key_and_that_is_told(late: Late) -> None:
    told: list[str] = []
    with Client(late.url, timeout_s=0.1, retries=1, on_wait=told.append) as client:
        made = client.submit_set(DOCUMENT)
    assert not made.new and made.set.name == "lr"
    assert len(late.keys) == 2 and late.keys[0] == late.keys[1] is not None
    (line,) = told
    assert line.startswith(f"{late.url} did not answer within") and line.endswith("; trying again (1 of 1)")
