"""A real PostgreSQL server for tests: a cluster of its own on a free port, gone afterwards, also after a crash.

Each test gets an empty database. Durability is off: what a test kills is our process, not the server's machine.
"""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

_PROGRAMS = ("initdb", "pg_ctl", "createdb")
_OPTIONS = (
    "-c listen_addresses=127.0.0.1 -c fsync=off -c synchronous_commit=off -c full_page_writes=off "
    "-c shared_buffers=64MB -c max_connections=120"
)


def binaries() -> Path | None:
    """Folder that has all the server's programs; None where it is not installed."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True)
    if (found := shutil.which("initdb")) is not None:
        places += [Path(found).parent, Path(found).resolve().parent]
    return next((place for place in places if all((place / name).exists() for name in _PROGRAMS)), None)


class Postgres:
    """One server. It refuses to run as root, so under root it runs as `postgres`."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="tm-pg-"))
        self._user = "postgres" if os.geteuid() == 0 else None
        if self._user is not None:
            account = pwd.getpwnam(self._user)
            os.chown(self.folder, account.pw_uid, account.pw_gid)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._run(
            "initdb", "-D", "data", "-A", "trust", "-U", "postgres", "--no-sync", "-E", "UTF8", "--locale=C.UTF-8"
        )
        atexit.register(self.close)
        self.start()

    def start(self) -> None:
        options = f"-p {self.port} -k {self.folder} {_OPTIONS}"
        self._run("pg_ctl", "-D", "data", "-w", "-l", "log", "-o", options, "start")

    def stop(self) -> None:
        """As if its machine were gone: connections are cut, none is waited for."""
        self._run("pg_ctl", "-D", "data", "-m", "immediate", "-w", "stop")

    def close(self) -> None:
        if not self.folder.exists():
            return
        try:
            pid = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
            os.kill(pid, signal.SIGQUIT)
            deadline = time.monotonic() + 10
            while (self.folder / "data" / "postmaster.pid").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
        except (OSError, ValueError):
            pass  # it was stopped before
        shutil.rmtree(self.folder, ignore_errors=True)

    def create(self, *, encoding: str = "UTF8", template: str | None = None) -> str:
        """A new database, empty or a copy of another; its URL."""
        name, other = f"t{uuid.uuid4().hex}", ("-E", encoding, "--locale=C", "-T", "template0")
        more = other if encoding != "UTF8" else ("-T", template) if template is not None else ()
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", *more, name)
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{name}"

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        done = subprocess.run(
            command, cwd=self.folder, user=self._user, capture_output=True, text=True, timeout=60, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"
