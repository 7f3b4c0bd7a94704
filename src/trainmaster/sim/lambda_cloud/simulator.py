"""The whole simulator as one object.

with Simulator(Settings(folder=folder, time_factor=60)) as simulator:
    environment = simulator.environment()              # for the client
    simulator.inject("launch-500")                     # the next launch answers 500 and happens all the same
    simulator.inject("preempted", instance_id=found)   # now
    print(simulator.summary()["cost_usd"])
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import secrets
import shutil
import socket
from pathlib import Path
from typing import Self

from trainmaster.core.errors import UsageError
from trainmaster.core.files import write_whole
from trainmaster.sim.lambda_cloud.admin import PREFIX, Admin
from trainmaster.sim.lambda_cloud.answering import Answer, Answering, Request
from trainmaster.sim.lambda_cloud.catalog import load_catalog
from trainmaster.sim.lambda_cloud.clock import Clock
from trainmaster.sim.lambda_cloud.cloud import Cloud
from trainmaster.sim.lambda_cloud.faults import Faults
from trainmaster.sim.lambda_cloud.fleet import Fleet
from trainmaster.sim.lambda_cloud.machine import find_programs, remove_leftovers
from trainmaster.sim.lambda_cloud.server import Server
from trainmaster.sim.lambda_cloud.settings import Settings

_PORTS = range(20_000, 32_000)


class Simulator:
    """Started by `with` or start(); close() ends every process that it started and deletes the instances' files."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._folder = settings.folder.absolute()
        self._lock_fd: int | None = None
        self.leftovers = 0  # instances of a killed simulator in the same folder, removed at the start

    def start(self) -> Self:
        programs = find_programs()
        self._lock_fd = _lock(self._folder)
        try:
            self.leftovers = remove_leftovers(self._folder / "instances")
            shutil.rmtree(self._folder / "filesystems", ignore_errors=True)
            (self._folder / "instances").mkdir(exist_ok=True)
            self.api_key_file = self.settings.api_key_file or self._folder / "api-key"
            clock = Clock(self.settings.time_factor)
            self.cloud = Cloud(
                self.settings,
                clock=clock,
                catalog=load_catalog(),
                faults=Faults(seed=self.settings.seed, rates=self.settings.faults),
            )
            self._answering = Answering(self.cloud, api_key=_api_key(self.api_key_file))
            self.ssh_port = self.settings.ssh_port or _free_port()
            self._fleet = Fleet(
                self.cloud,
                folder=self._folder / "instances",
                programs=programs,
                ssh_port=self.ssh_port,
                cache=self.settings.cache,
            )
            self.admin = Admin(self._answering, self._fleet)
            self.inject, self.summary = self.admin.inject, self.admin.summary
            self.instances, self.refuse_next = self.admin.instances, self._answering.refuse_next
            self._server = Server(self.settings.port, self._respond, clock)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self.url = self._server.url
        self._server.start()
        self._fleet.start()
        return self

    def close(self) -> None:
        self._server.close()
        self._fleet.close()
        shutil.rmtree(self._folder / "instances", ignore_errors=True)
        shutil.rmtree(self._folder / "filesystems", ignore_errors=True)
        assert self._lock_fd is not None
        os.close(self._lock_fd)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def environment(self) -> dict[str, str]:
        """Variables that point the target `lambda` at this simulator."""
        variables = {
            "LAMBDA_API_URL": self.url,
            "LAMBDA_API_KEY_FILE": str(self.api_key_file),
            "LAMBDA_SSH_PORT": str(self.ssh_port),
            "LAMBDA_SSH_USER": getpass.getuser(),
        }
        if self.settings.time_factor > 1:
            variables["LAMBDA_PACE"] = f"{self.settings.time_factor:g}"
        return variables

    def _respond(self, request: Request) -> Answer:
        return (self.admin if request.path.startswith(PREFIX) else self._answering).answer(request)


def _lock(folder: Path) -> int:
    """Lock the folder: a second simulator would end the instances of the first."""
    if any(character.isspace() or character in "\"'\\%$`" for character in str(folder)):
        raise UsageError(f"--folder {folder}: sshd's configuration allows no spaces or quotes; choose another")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UsageError(f"another simulator uses {folder}; end it, or give another --folder") from None
    return fd


def _api_key(path: Path) -> str:
    """The key of the file; a new file gets a new key that only its owner can read."""
    key = f"secret_sim_{secrets.token_hex(16)}"
    try:
        write_whole(path, f"{key}\n", durable=False, mode=0o600, replace=False)
    except FileExistsError:
        key = path.read_text(encoding="utf-8").strip()
        if not key:
            raise UsageError(f"--api-key-file {path}: empty") from None
    return key


def _free_port() -> int:
    """A port that no socket of this machine uses. Below the range that the kernel gives out: it stays free."""
    for _ in range(1000):
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("0.0.0.0", port))  # noqa: S104 (nothing listens on it)
            return port
    raise UsageError("no port is free for the SSH servers; give one with --ssh-port")
