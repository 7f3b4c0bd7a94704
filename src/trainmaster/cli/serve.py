"""`trainmaster serve`: the API, the dashboard and the reconciler in one process."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainmaster.cli import _say
from trainmaster.cli._home import HomeOption, open_home
from trainmaster.core.errors import MissingExtra, UsageError

DEFAULT_PORT = 8470
SERVER_FILE = "server.json"  # in the home folder while a server runs: {"pid", "url"}


def serve(
    home: HomeOption = None,
    host: Annotated[str, typer.Option(help="Loopback address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = DEFAULT_PORT,
    reconcile: Annotated[bool, typer.Option(help="Also drive the jobs, not only show them.")] = True,
) -> None:
    """Serve the API and the dashboard, and drive the jobs until they are done.

    Jobs go on when this process dies; start it again and it continues where it was.

    [bold]Examples[/]

      trainmaster serve

      trainmaster serve --home /data/trainmaster --port 9000
    """
    try:
        import uvicorn

        from trainmaster.web.app import create_app
    except ModuleNotFoundError as missing:
        raise MissingExtra("the server", "server") from missing
    listening = _listen(host, port)
    folder, db = open_home(home)
    url = f"http://{_bracket(host)}:{listening.getsockname()[1]}"
    note = folder / SERVER_FILE
    _write(note, {"pid": os.getpid(), "url": url})
    _say.err.print(f"Trainmaster at [bold]{url}[/]  home {folder}  (Ctrl-C ends the server; jobs go on)")
    # uvicorn shuts down on a signal and then raises it again: without this we would die before tidying up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        config = uvicorn.Config(create_app(db, folder, reconcile=reconcile), log_level="warning", server_header=False)
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass  # Ctrl-C is how a server is meant to end
    finally:
        note.unlink(missing_ok=True)


def _listen(host: str, port: int) -> socket.socket:
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise UsageError(f"--host {host}: not an address; write 127.0.0.1 or ::1") from None
    if not address.is_loopback:
        raise UsageError(
            f"--host {host}: only loopback is served while there are no access tokens; "
            f"reach it through a tunnel: ssh -L {port}:127.0.0.1:{port} THIS-MACHINE"
        )
    listening = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((str(address), port))
    except OSError as wrong:
        listening.close()
        raise UsageError(f"port {port} cannot be used ({wrong.strerror}); choose another with --port") from None
    return listening


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _write(path: Path, value: object) -> None:
    """Whole or not at all: a reader never sees half of it."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(value))
    draft.replace(path)
