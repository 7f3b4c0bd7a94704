"""A server with two projects, each with an account of its own on a real target: this machine, sshd, Slurm, kubelets."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

import kube_nodes
import slurm
import trainmaster
from accounts import accounts
from hostile.tenant_attempts import CANARY
from sshd import lab
from trainmaster.client import Client
from trainmaster.remote.confine import find_fault

PYTHON = "/usr/bin/python3"  # one that other accounts may execute
SOURCE = str(Path(trainmaster.__file__).parents[1])
PACKAGES = os.pathsep.join([SOURCE, *(entry for entry in sys.path if entry.endswith("site-packages"))])
PROJECTS = ("lab", "evil")


@dataclass(frozen=True, kw_only=True)
class Bed:
    """A running server, its target under a name, and what an insider knows of it."""

    kind: str
    folder: Path  # everything of the test is below it
    home: Path
    url: str
    target: str
    accounts: tuple[str, str]
    uids: tuple[int, int]
    facts: Mapping[str, Any] = field(default_factory=dict)
    python: str = PYTHON

    def client(self, token: str | None = None) -> Client:
        return Client(self.url, token or (self.home / "local.token").read_text().strip())


@contextlib.contextmanager
def open_bed(kind: str) -> Iterator[Bed]:
    """The bed of a kind of target, with the project lab and the project evil; skips where it cannot be had."""
    reach = subprocess.run(
        ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", PYTHON, "-c", "import trainmaster.agent"],
        check=False, env={"PYTHONPATH": SOURCE}, capture_output=True,
    )  # fmt: skip
    if reach.returncode != 0:
        pytest.skip("this checkout cannot be read by another account")
    with contextlib.ExitStack() as stack:
        users, folder = stack.enter_context(accounts(*PROJECTS))
        for user in users:  # as many machines have them: what protects is what we make in them
            Path(user.pw_dir).chmod(0o755)
        make = {"local": _local, "ssh": _ssh, "slurm": _slurm, "kubernetes": _kubernetes}[kind]
        yield stack.enter_context(_serve(kind, folder, users, stack, make))


@contextlib.contextmanager
def _serve(
    kind: str, folder: Path, users: list[pwd.struct_passwd], stack: contextlib.ExitStack, make: Callable[..., Any]
) -> Iterator[Bed]:
    (settings := folder / "settings").mkdir(mode=0o700)
    word, names, facts = make(folder, settings, users, stack)
    home = folder / "home"
    home.mkdir(mode=0o755)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TRAINMASTER_")},
        "PYTHONPATH": PACKAGES, "TRAINMASTER_HOME": str(home), "OF_THE_SERVER": CANARY,
        "SSH_AUTH_SOCK": f"{settings}/agent",
    }  # fmt: skip
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [PYTHON, "-m", "trainmaster", "serve", "--port", "0"], env=environment, stdout=out, stderr=out
        )
    log.chmod(0o600)
    try:
        _wait((home / "server.json").exists, process, log)
        url = json.loads((home / "server.json").read_text())["url"]
        target = "local" if word is None else "gpus"
        with Client(url, (home / "local.token").read_text().strip()) as root:
            if word is not None:
                root.add_target("gpus", word)
                root.add_target("of-lab", word)
                root.grant_target("of-lab", "lab", user=names[0])
            for project, name in zip(PROJECTS, names, strict=True):
                root.grant_target(target, project, user=name)
        uids = (users[0].pw_uid, users[1].pw_uid) if kind != "kubernetes" else (1000, 1000)
        facts = {"shared": f"{folder}/[st]*", "files": [str(path) for path in settings.iterdir()], **facts}
        yield Bed(
            kind=kind, folder=folder, home=home, url=url, target=target, accounts=names, uids=uids, facts=facts,
            python=os.path.realpath(sys.executable) if kind == "kubernetes" else PYTHON,
        )  # fmt: skip
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(holds: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


Made = tuple[str | None, tuple[str, str], dict[str, Any]]


def _local(folder: Path, settings: Path, users: list[pwd.struct_passwd], stack: contextlib.ExitStack) -> Made:
    if fault := find_fault():
        pytest.skip(f"this machine has no namespaces for jobs: {fault}")
    (settings / "key").write_text(CANARY)
    return None, (users[0].pw_name, users[1].pw_name), {}


def _login(folder: Path, settings: Path, stack: contextlib.ExitStack, **more: str) -> tuple[dict[str, Any], int]:
    """A real sshd where both accounts may log in with the server's key; its entry in a hosts file, and its port."""
    (keys := folder / "ssh").mkdir(mode=0o755)
    made = stack.enter_context(lab(keys))
    host = made.start("machine", own_homes=True, environment=more)
    made.wait()
    for name in ("client", "known_hosts"):
        shutil.move(keys / name, settings / name)
    entry = {"host": "127.0.0.1", "port": host.port, "key": f"{settings}/client", "python": PYTHON}
    return entry, host.port


def _ssh(folder: Path, settings: Path, users: list[pwd.struct_passwd], stack: contextlib.ExitStack) -> Made:
    entry, port = _login(folder, settings, stack)
    document = {"known_hosts": f"{settings}/known_hosts", "hosts": [{**entry, "name": "machine", "slots": 4}]}
    (settings / "hosts.yaml").write_text(yaml.safe_dump(document))
    return f"ssh:{settings}/hosts.yaml", (users[0].pw_name, users[1].pw_name), {"port": port}


def _slurm(folder: Path, settings: Path, users: list[pwd.struct_passwd], stack: contextlib.ExitStack) -> Made:
    (place := folder / "slurm").mkdir(mode=0o755)
    cluster = stack.enter_context(slurm.start(place))
    (shared := folder / "shared").mkdir(mode=0o755)
    for user in users:  # the operator makes a folder for each
        (shared / user.pw_name).mkdir(mode=0o755)
        os.chown(shared / user.pw_name, user.pw_uid, user.pw_gid)
    entry, port = _login(folder, settings, stack, SLURM_CONF=str(cluster.conf))
    document = {
        "folder": str(shared), "login": entry, "known_hosts": f"{settings}/known_hosts", "poll_s": 0.3,
        "env": {"SLURM_CONF": str(cluster.conf)}, "python": PYTHON,
    }  # fmt: skip
    (settings / "cluster.yaml").write_text(yaml.safe_dump(document))
    facts = {"port": port, "cluster": str(cluster.conf)}
    return f"slurm:{settings}/cluster.yaml", (users[0].pw_name, users[1].pw_name), facts


def _kubernetes(folder: Path, settings: Path, users: list[pwd.struct_passwd], stack: contextlib.ExitStack) -> Made:
    cluster = stack.enter_context(kube_nodes.cluster())
    for name in PROJECTS:
        cluster.kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    (settings / "cluster.yaml").write_text(yaml.safe_dump(cluster.settings("default")))
    facts = {"api": cluster.kube.url, "shared": "/shared"}
    return f"kubernetes:{settings}/cluster.yaml", PROJECTS, facts
