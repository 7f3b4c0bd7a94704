"""The HTTP server. From the standard library, because faults reach below HTTP: held and cut connections."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from trainmaster.core.errors import UsageError
from trainmaster.sim.lambda_cloud.answering import Answer, Request
from trainmaster.sim.lambda_cloud.clock import Clock

_MAX_BODY_BYTES = 4 << 20
_IDLE_S = 120


class Server(http.server.ThreadingHTTPServer):
    """One thread per connection; `respond` answers each request."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, respond: Callable[[Request], Answer], clock: Clock) -> None:
        self.respond, self.clock, self.closing = respond, clock, threading.Event()
        self._open: set[socket.socket] = set()
        self._guard = threading.Lock()
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UsageError(f"port {port} cannot be used ({error.strerror}); choose another with --port") from None
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="sim-http", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop answering and cut every connection."""
        self.closing.set()
        self.shutdown()
        self._thread.join()
        self.server_close()
        with self._guard:
            for connection in self._open:
                cut(connection)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._guard:
            self._open.add(request)
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._guard:
                self._open.discard(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away in the middle are part of the simulation; anything else is a mistake of ours."""
        import sys

        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    server_version, sys_version = "simulator", ""
    wbufsize = -1  # one packet per answer
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > _MAX_BODY_BYTES:
            self.close_connection = True
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(
            method=self.command, path=urlsplit(self.path).path, headers=headers, body=self.rfile.read(length)
        )
        answer = self.server.respond(request)
        if answer.delay_s and self.server.closing.wait(self.server.clock.real_s(answer.delay_s)):
            answer = Answer(status=0, body=b"", cut=True)
        if answer.cut:
            self.close_connection = True
            cut(self.connection)
            return
        self.send_response_only(answer.status, _phrase(answer.status))
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)
        self.wfile.flush()

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = _serve  # noqa: N815 (names of the standard library)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the standard library's signature)
        pass


def cut(connection: socket.socket) -> None:
    """End a connection at once, in both directions."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _phrase(status: int) -> str:
    with contextlib.suppress(ValueError):
        return HTTPStatus(status).phrase
    return ""
