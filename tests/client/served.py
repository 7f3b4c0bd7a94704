"""A real server on a real port, and a line to it that can be cut after so many bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from trainmaster.web.streaming import Followers


@contextlib.contextmanager
def serve(
    db: Database, home: Path, *, reconcile: bool = False, pem: Path | None = None, **options: object
) -> Iterator[str]:
    """The address of a server over this database, in a thread; with TLS where a certificate is given."""
    listening = socket.create_server(("127.0.0.1", 0))
    followers = Followers(look_s=0.02)
    app = create_app(db, home, reconcile=reconcile, rate=None, followers=followers, **options)  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, ssl_certfile=pem))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        port = listening.getsockname()[1]
        yield f"https://localhost:{port}" if pem else f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        listening.close()


class Line:
    """Passes connections on; each is cut once `cuts` says so: bytes of the answer let through, in turn."""

    def __init__(self, url: str, cuts: list[int]) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._to, self.cuts, self.opened = (host, int(port)), cuts, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            self.opened += 1
            left = self.cuts.pop(0) if self.cuts else None
            threading.Thread(target=self._pass, args=(near, left), daemon=True).start()

    def _pass(self, near: socket.socket, left: int | None) -> None:
        far = socket.create_connection(self._to)
        threading.Thread(target=_pump, args=(near, far, None), daemon=True).start()
        _pump(far, near, left)


def _pump(source: socket.socket, sink: socket.socket, left: int | None) -> None:
    try:
        while piece := source.recv(4096 if left is None else min(4096, max(left, 1))):
            if left is not None:
                if left <= 0:
                    break
                left -= len(piece)
            sink.sendall(piece)
    except OSError:
        pass
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
