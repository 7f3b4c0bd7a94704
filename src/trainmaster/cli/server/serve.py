"""`trainmaster serve`: the API, the dashboard and the reconciler in one process."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import SERVER_FILE, HomeOption, StorageOption, needing, open_home, open_storage
from trainmaster.core.errors import UsageError
from trainmaster.core.files import write_whole
from trainmaster.core.loopback import is_loopback_host

if TYPE_CHECKING:
    import uvicorn

    from trainmaster.store.database import Database
    from trainmaster.web.otlp.settings import Otlp
    from trainmaster.web.sign_in.oidc import SignIn

DEFAULT_PORT = 8470
_KEEP_ALIVE_S = 75  # longer than the interval of most pollers
_SHUTDOWN_S = 2  # an open stream would delay the end for as long as its job runs

SlotsOption = Annotated[
    int | None,
    typer.Option(
        envvar="TRAINMASTER_SLOTS",
        min=0,
        max=4096,
        help="Ranks without a GPU that run on this machine at once; 0: no limit.",
        show_default="as it is",
    ),
]

PriceOption = Annotated[
    float | None,
    typer.Option(
        "--gpu-hour-price",
        envvar="TRAINMASTER_GPU_HOUR_PRICE",
        min=0,
        max=1e6,
        help="Dollars for a GPU and an hour on this machine; a spec may state more, not less.",
        show_default="unknown",
    ),
]

JobUserOption = Annotated[
    str | None,
    typer.Option("--job-user", envvar="TRAINMASTER_JOB_USER", help="Unix user of other local jobs; needs root."),
]

AdminTokenOption = Annotated[
    Path | None, typer.Option(help="File with a token to let in as admin: tm_ and 43 letters or digits.")
]

OidcOption = Annotated[
    Path | None,
    typer.Option(
        envvar="TRAINMASTER_OIDC", help="Settings of the sign-in by OpenID Connect (YAML; docs/guides/server.md)."
    ),
]


def serve(
    home: HomeOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback a token is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = DEFAULT_PORT,
    reconcile: Annotated[bool, typer.Option(help="Also drive the jobs, not only show them.")] = True,
    storage: StorageOption = None,
    require_token: Annotated[
        bool, typer.Option("--require-token", help="Require a token over loopback too. This is the default.")
    ] = False,
    trust_loopback: Annotated[
        bool, typer.Option("--trust-loopback", help="Admit every account of this machine as admin, without a token.")
    ] = False,
    job_user: JobUserOption = None,
    trust_jobs: Annotated[
        bool, typer.Option("--trust-jobs", help="Let project tokens submit jobs that run as the server's user.")
    ] = False,
    slots: SlotsOption = None,
    gpu_hour_price: PriceOption = None,
    name: Annotated[list[str] | None, typer.Option("--name", help="A name that a proxy calls this server by.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate (PEM), for https.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM).")] = None,
    admin_token_file: AdminTokenOption = None,
    oidc: OidcOption = None,
) -> None:
    """Serve the API and the dashboard, and run the reconciler.

    Jobs continue when this process ends; the next start takes them over. The command line of the same Unix user reads
    its token from HOME/local.token by itself; the browser uses the one-time link that is printed here.

    [bold]Examples[/]

      trainmaster serve

      trainmaster serve --home /data/trainmaster --port 9000 --storage s3://bucket/trainmaster

      trainmaster token create me --role admin && trainmaster serve --host 0.0.0.0 --tls-cert c.pem --tls-key k.pem
    """
    with needing("the server"):
        import uvicorn

        from trainmaster.targets.local import local_jobs_are_isolated
        from trainmaster.web import connections
        from trainmaster.web.app import create_app, warm_up
        from trainmaster.web.auth import may_bind
        from trainmaster.web.sign_in.local_access import open_local_access
    if require_token and trust_loopback:
        raise UsageError("--require-token and --trust-loopback exclude each other")
    _require_certificate(tls_cert, tls_key)
    _state(JOB_USER=job_user or None, SLOTS=slots, GPU_HOUR_PRICE=gpu_hour_price)
    isolated = local_jobs_are_isolated()
    folder, db = open_home(home)
    _admit(db, admin_token_file)
    sign_in = _open_sign_in(oidc, folder)
    may_bind(db, host, sign_in=sign_in is not None)
    kept = open_storage(storage, folder)
    descriptors = connections.raise_descriptor_limit()
    local = None if trust_loopback else open_local_access(folder)
    listening = _listen(host, port)
    url = f"{'https' if tls_cert else 'http'}://{_bracket(host)}:{listening.getsockname()[1]}"
    note = folder / SERVER_FILE
    link = url + local.link if local is not None else url
    details = {"pid": os.getpid(), "url": url, "link": link, "storage": _absolute(storage)}
    write_whole(note, json.dumps(details), durable=False, mode=0o600)
    _announce(_openable(url, host), link, folder, beyond=not is_loopback_host(host), encrypted=tls_cert is not None)
    if not isolated and reconcile:
        _note_shared_user(trust_jobs=trust_jobs)
    # Beyond loopback every caller needs a token: a proxy on this machine makes remote callers look local.
    app = create_app(
        db, folder, reconcile=reconcile, hosts=name or (), storage=kept, local=local,
        require_token=not trust_loopback or not is_loopback_host(host), trust_jobs=trust_jobs, sign_in=sign_in,
        otlp=_open_otlp(),
    )  # fmt: skip
    http = connections.Connections(connections.connection_limit(descriptors)).protocol()
    config = uvicorn.Config(
        app, log_level="warning", server_header=False, ssl_certfile=tls_cert, ssl_keyfile=tls_key, http=http,
        backlog=connections.BACKLOG, timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_SHUTDOWN_S,
    )  # fmt: skip
    connections.bound_logs()
    _run(uvicorn.Server(config), listening, note, beside=lambda: warm_up(app))


def _state(**stated: object) -> None:
    """Put what was stated into the environment, where targets read it."""
    os.environ.update({f"TRAINMASTER_{name}": str(value) for name, value in stated.items() if value is not None})


def _admit(db: Database, file: Path | None) -> None:
    """Let in the token of a file, where one is given; the one that it held before is revoked."""
    from trainmaster.store import audit, tokens

    if file is None:
        return
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--admin-token-file {file}: cannot be read ({error})") from None
    if not tokens.SHAPE.fullmatch(token):
        raise UsageError(f"--admin-token-file {file}: not a token; write tm_ and 43 letters, digits, - or _")
    with db.write() as conn:
        name = tokens.admit(conn, token, at=datetime.now(UTC))
        if name is not None:
            audit.record(conn, who="control", action="token.create", subject=f"token:{name}", detail={"role": "admin"})


def _open_sign_in(file: Path | None, home: Path) -> SignIn | None:
    """The sign-in by OpenID Connect, where a file has its settings."""
    from trainmaster.web.sign_in import settings
    from trainmaster.web.sign_in.oidc import SignIn

    if file is None:
        return None
    with needing("sign-in by OpenID Connect", "oidc"):
        import joserfc  # noqa: F401
    client = settings.load(file)
    os.environ.pop(settings.VARIABLE, None)  # not for the jobs that this server starts
    return SignIn(client, home)


def _open_otlp() -> Otlp | None:
    """Where traces and metrics go by the variables of OpenTelemetry; None where these name no collector."""
    from trainmaster.web.otlp.settings import read_settings

    settings = read_settings(os.environ)
    if settings is not None:
        with needing("OTEL_EXPORTER_OTLP_ENDPOINT", "otlp"):
            import opentelemetry.proto  # noqa: F401
    for name in [name for name in os.environ if name.startswith("OTEL_") and name.endswith("_HEADERS")]:
        del os.environ[name]  # secrets, not for the jobs that this server starts
    return settings


def _absolute(storage: str | None) -> str | None:
    """The storage for commands that are started in another folder."""
    return storage if storage is None or "://" in storage else str(Path(storage).expanduser().absolute())


def _warm_up(server: uvicorn.Server, work: Callable[[], None]) -> None:
    while not server.started:  # which it would delay: both want the interpreter
        time.sleep(0.02)
    work()


def _run(server: uvicorn.Server, listening: socket.socket, note: Path, *, beside: Callable[[], None]) -> None:
    threading.Thread(target=_warm_up, args=(server, beside), name="warm-up", daemon=True).start()
    # uvicorn shuts down on a signal and then raises it again, which would skip the clean-up below.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass  # Ctrl-C ends a server
    finally:
        _remove_note(note)


def _remove_note(note: Path) -> None:
    """Remove our note from the home folder; that of a server which was started later stays."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if json.loads(note.read_text())["pid"] == os.getpid():
            note.unlink()


def _openable(url: str, host: str) -> str:
    """The address with this machine's name where it listens on all: nobody can open 0.0.0.0 from elsewhere."""
    return url.replace(f"//{_bracket(host)}:", f"//{socket.getfqdn()}:") if host in ("0.0.0.0", "::") else url  # noqa: S104


def _announce(url: str, link: str, home: Path, *, beyond: bool, encrypted: bool) -> None:
    _console.err.print(f"Trainmaster at [bold]{url}[/]  home {home}  (Ctrl-C ends the server; jobs continue)")
    if link != url and not beyond:
        _console.err.print(f"browser: {link}  (valid once)", soft_wrap=True)
    if beyond and not encrypted:
        _console.note("tokens are sent unencrypted; give --tls-cert and --tls-key, or use a proxy with https")


def _note_shared_user(*, trust_jobs: bool) -> None:
    advice = "give --job-user USER" if os.geteuid() == 0 else "start the server as root with --job-user USER"
    grant = "trainmaster target grant local --project P --user U"
    allowed = "" if trust_jobs else f" Tokens of projects submit to it after: {grant}"
    _console.note(f"jobs on `local` run as this user and can read this home folder: {advice}.{allowed}")


def _require_certificate(cert: Path | None, key: Path | None) -> None:
    """Load both files now: uvicorn would find a fault only after the address was printed."""
    if (cert is None) != (key is None):
        raise UsageError("--tls-cert and --tls-key go together")
    if cert is None or key is None:
        return
    for path in (cert, key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror}); give PEM files") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except ssl.SSLError as error:
        reason = (error.reason or "not PEM").lower().replace("_", " ")
        raise UsageError(f"--tls-cert {cert} and --tls-key {key} cannot be used together: {reason}") from None


def _listen(host: str, port: int) -> socket.socket:
    address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    listening = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((str(address), port))
        listening.listen(128)  # from here on a caller waits instead of being refused, long before the app is up
    except OSError as error:
        listening.close()
        raise UsageError(f"port {port} cannot be used ({error.strerror}); choose another with --port") from None
    return listening


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
