"""`trainmaster serve`: the API, the dashboard and the reconciler in one process."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import socket
import ssl
import sys
from pathlib import Path
from typing import Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, StorageOption, open_home, open_storage
from trainmaster.cli._jobs.home import SERVER_FILE
from trainmaster.core.errors import MissingExtra, UsageError
from trainmaster.core.files import write_whole
from trainmaster.core.loopback import is_loopback_host

DEFAULT_PORT = 8470


def serve(
    home: HomeOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback a token is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = DEFAULT_PORT,
    reconcile: Annotated[bool, typer.Option(help="Also drive the jobs, not only show them.")] = True,
    storage: StorageOption = None,
    require_token: Annotated[
        bool, typer.Option("--require-token", help="Ask for a token over loopback too, as behind a proxy.")
    ] = False,
    name: Annotated[list[str] | None, typer.Option("--name", help="A name that a proxy calls this server by.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM), for https.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
) -> None:
    """Serve the API and the dashboard, and drive the jobs until they are done.

    Jobs go on when this process dies; start it again and it continues where it was.

    [bold]Examples[/]

      trainmaster serve

      trainmaster serve --home /data/trainmaster --port 9000 --storage s3://bucket/trainmaster

      trainmaster token create me --role admin && trainmaster serve --host 0.0.0.0 --tls-cert c.pem --tls-key k.pem
    """
    try:
        import uvicorn

        from trainmaster.web.app import create_app
        from trainmaster.web.auth import may_bind
    except ModuleNotFoundError as missing:
        raise MissingExtra("the server", "server") from missing
    if (tls_cert is None) != (tls_key is None):
        raise UsageError("--tls-cert and --tls-key go together")
    if tls_cert is not None and tls_key is not None:
        _require_certificate(tls_cert, tls_key)
    folder, db = open_home(home)
    may_bind(db, host)
    kept = open_storage(storage, folder)
    listening = _listen(host, port)
    url = f"{'https' if tls_cert else 'http'}://{_bracket(host)}:{listening.getsockname()[1]}"
    note = folder / SERVER_FILE
    write_whole(note, json.dumps({"pid": os.getpid(), "url": url}), durable=False)
    _console.err.print(f"Trainmaster at [bold]{url}[/]  home {folder}  (Ctrl-C ends the server; jobs go on)")
    if not is_loopback_host(host) and tls_cert is None:
        _console.note(
            "tokens travel unencrypted; give --tls-cert and --tls-key, or stand behind a proxy that speaks https"
        )
    # uvicorn shuts down on a signal and then raises it again: without this we would die before tidying up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        # Beyond loopback everybody shows a token: a proxy on this machine would make strangers look like us.
        asked = require_token or not is_loopback_host(host)
        app = create_app(db, folder, reconcile=reconcile, hosts=name or (), storage=kept, require_token=asked)
        config = uvicorn.Config(
            app, log_level="warning", server_header=False, ssl_certfile=tls_cert, ssl_keyfile=tls_key,
            timeout_keep_alive=75,  # seconds; a client that asks every now and then keeps its connection
            timeout_graceful_shutdown=2,  # seconds; those who follow a job would hold us for as long as it runs
        )  # fmt: skip
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass  # Ctrl-C is how a server is meant to end
    finally:
        note.unlink(missing_ok=True)


def _require_certificate(cert: Path, key: Path) -> None:
    """Load both files now: uvicorn would find a fault only after the address was printed."""
    for path in (cert, key):
        try:
            path.open("rb").close()
        except OSError as wrong:
            raise UsageError(f"{path}: cannot be read ({wrong.strerror}); give PEM files") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except ssl.SSLError as wrong:
        reason = (wrong.reason or "not PEM").lower().replace("_", " ")
        raise UsageError(f"--tls-cert {cert} and --tls-key {key} cannot be used together: {reason}") from None


def _listen(host: str, port: int) -> socket.socket:
    address = ipaddress.ip_address(_number(host))
    listening = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((str(address), port))
        listening.listen(2048)  # from here on a caller waits instead of being refused, long before the app is up
    except OSError as wrong:
        listening.close()
        raise UsageError(f"port {port} cannot be used ({wrong.strerror}); choose another with --port") from None
    return listening


def _number(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
