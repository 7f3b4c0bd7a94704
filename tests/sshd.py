"""Real OpenSSH servers for tests: each a host of its own on a free port, all gone afterwards, also after a crash."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

SSHD = shutil.which("sshd") or next((p for p in ("/usr/sbin/sshd", "/usr/local/sbin/sshd") if Path(p).exists()), None)
needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh-keygen") is None,
    reason="no OpenSSH server here: apt-get install openssh-server (or make system-packages)",
)


@dataclass(frozen=True, kw_only=True)
class Sshd:
    """A running server: where it listens, its process, and the home folder its sessions have."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    home: Path
    log: Path

    def stop(self) -> None:
        """Stand still, as a machine whose kernel hangs: the port is open and nobody answers."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def connections(self) -> list[int]:
        """Processes of the server that hold its open connections."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(path.read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    found.append(int(path.parent.name))
        return found

    def cut(self, *, also_server: bool) -> None:
        """Cut the open connections, as a network would; with the server none comes back. Programs go on."""
        held = self.connections()
        if also_server:
            self.process.kill()
            self.process.wait()
        for pid in held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while also_server and self._takes_connections():  # a child that was just forked still has the socket
            time.sleep(0.02)

    def _takes_connections(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # reset or no answer: somebody still has the port
        return True


class Lab:
    """A folder with keys, and the servers that were started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = self._key("client")
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text("")
        self.hosts: list[Sshd] = []
        self._host_key = self._key("host")  # one for all but those that want their own: making keys takes time

    def start(
        self, name: str, *, own_key: bool = False, known: bool = True, environment: Mapping[str, str] | None = None,
        port: int | None = None, own_homes: bool = False,
    ) -> Sshd:  # fmt: skip
        """With `own_homes` each account has its own home folder, else all have one below this folder."""
        folder = self.folder / name
        home = folder / "home"
        home.mkdir(parents=True)
        key, port = self._key(f"host-{name}") if own_key else self._host_key, port or free_port()
        config = folder / "sshd_config"
        shared = {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache"}
        variables = " ".join(
            f"{key}={value}" for key, value in {**({} if own_homes else shared), **(environment or {})}.items()
        )
        config.write_text(
            f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {key}\nPidFile none\n"
            f"AuthorizedKeysFile {self.key}.pub\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            f"MaxStartups 100\nSubsystem sftp internal-sftp\n" + (f"SetEnv {variables}\n" if variables else "")
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # the privilege separation folder; a boot script makes it otherwise
        log = folder / "log"
        assert SSHD is not None
        # -D: our child, in the foreground. An absolute path: sshd starts itself again for each connection.
        # A test run that is killed takes its servers with it: the kernel sends them the signal.
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", SSHD, "-D", "-f", str(config), "-E", str(log)], start_new_session=True
        )
        host = Sshd(name=name, port=port, process=process, home=home, log=log)
        self.hosts.append(host)
        if known:
            public = Path(f"{key}.pub").read_text().split()
            with self.known_hosts.open("a") as file:
                file.write(f"[127.0.0.1]:{port} {public[0]} {public[1]}\n")
        return host

    def wait(self, *hosts: Sshd) -> None:
        """Until these servers listen, or all."""
        for host in hosts or self.hosts:
            while True:
                assert host.process.poll() is None, host.log.read_text()
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", host.port), timeout=1):
                    break

    def write_hosts(self, path: Path, **defaults: object) -> str:
        """A hosts file of all servers; the target that it makes."""
        hosts = [{"host": "127.0.0.1", "name": one.name, "port": one.port} for one in self.hosts]
        document = {
            "known_hosts": str(self.known_hosts),
            "defaults": {"key": str(self.key), "python": sys.executable, **defaults},
            "hosts": hosts,
        }
        path.write_text(yaml.safe_dump(document))
        return f"ssh:{path}"

    def close(self) -> None:
        for host in self.hosts:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(host.process.pid, signal.SIGKILL)
            host.process.wait()

    def _key(self, name: str) -> Path:
        path = self.folder / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        return path


@contextlib.contextmanager
def lab(folder: Path) -> Iterator[Lab]:
    made = Lab(folder)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def bench(name: str, hosts: int) -> Iterator[tuple[Lab, Path, str]]:
    """Servers for a benchmark in a temporary folder, a home folder, and the target over them."""
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:
        home = Path(folder) / "home"
        for place in (home, Path(folder) / "lab"):
            place.mkdir()
        with lab(Path(folder) / "lab") as machines:
            for number in range(hosts):
                machines.start(f"h{number}")
            machines.wait()
            yield machines, home, machines.write_hosts(home / "hosts.yaml")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
