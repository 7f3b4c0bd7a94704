"""A real HTTP receiver on loopback that remembers what came and answers as it is told."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Got:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Receiver:
    url: str
    got: list[Got] = field(default_factory=list)
    # Called with each request; a status, or a status and headers. It may also take its time.
    answer: Callable[[Got], int | tuple[int, dict[str, str]]] = lambda _got: 204

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextlib.contextmanager
def receiving(context: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    receiver: Receiver

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            got = Got(path=self.path, headers=dict(self.headers), body=body)
            receiver.got.append(got)
            said = receiver.answer(got)
            status, headers = said if isinstance(said, tuple) else (said, {})
            with contextlib.suppress(OSError):  # a sender that gave up is no failure of the receiver
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_GET = do_POST  # noqa: N815 (the name is the library's)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    scheme, host = ("https", "localhost") if context is not None else ("http", "127.0.0.1")
    receiver = Receiver(url=f"{scheme}://{host}:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
