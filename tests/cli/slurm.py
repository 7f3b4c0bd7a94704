"""A real Slurm on this machine: munged, slurmctld and a few slurmd, in one temporary folder, on free ports."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NODES = ("n1", "n2", "n3")
START_S = 60.0
PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "sinfo")

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
"""


@contextlib.contextmanager
def start(folder: Path) -> Iterator[Path]:
    """The path of slurm.conf, while the cluster runs with all its nodes idle."""
    path = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: apt-get install slurm-wlm munge")
    conf = folder / "slurm.conf"
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    ports = free_ports(1 + len(NODES))
    text = CONF.format(host=socket.gethostname().split(".")[0], port=ports[0], user=getpass.getuser(), folder=folder)
    for place, name in enumerate(NODES, 1):
        text += (
            f"NodeName={name} NodeHostname={socket.gethostname().split('.')[0]} NodeAddr=127.0.0.{place + 1} "
            f"Port={ports[place]} CPUs=2 RealMemory=1000 State=UNKNOWN\n"
        )
    conf.write_text(text + f"PartitionName=gpu Nodes={','.join(NODES)} Default=YES State=UP\n")
    env = {**os.environ, "SLURM_CONF": str(conf), "PATH": path}
    running: list[subprocess.Popen[bytes]] = []

    def begin(name: str, *argv: str) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            # In the foreground, as our own children: what we started is what we end.
            running.append(subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True))

    try:
        begin(
            "munged", "munged", "--force", "--foreground", f"--socket={folder}/munge.sock",
            f"--key-file={folder}/munge.key", f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.err",
            f"--seed-file={folder}/seed",
        )  # fmt: skip
        wait_for((folder / "munge.sock").exists, running, folder)
        begin("slurmctld", "slurmctld", "-D", "-f", str(conf))
        for name in NODES:
            begin(name, "slurmd", "-D", "-N", name, "-f", str(conf))
        wait_for(lambda: idle(env) == set(NODES), running, folder)
        yield conf
    finally:
        for process in reversed(running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)


def idle(env: dict[str, str]) -> set[str]:
    argv = ["sinfo", "-h", "-N", "-o", "%N %T"]
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30, check=False)
    return set(re.findall(r"^(\S+) idle$", ran.stdout, flags=re.MULTILINE))


def state(node: str) -> str:
    """`idle`, `drained`, … and the reason, as sinfo tells a user."""
    argv = ["sinfo", "-h", "-N", "-n", node, "-o", "%T|%E"]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    return told.replace("*|", "|")  # the star says that it was not pinged since


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def wait_for(holds: Callable[[], bool], running: list[subprocess.Popen[bytes]], folder: Path) -> None:
    until = time.monotonic() + START_S
    while not holds():
        logs = {path.name: path.read_text(errors="replace")[-800:] for path in folder.glob("*.log")}
        assert all(process.poll() is None for process in running), logs
        assert time.monotonic() < until, logs
        time.sleep(0.1)
