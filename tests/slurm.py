"""A real Slurm on this machine: munged, slurmctld, three slurmd with fake GPUs; with accounting where a test wants it.

All of it is in one temporary folder and on free ports. Every daemon runs in the foreground as a child of this process
and is killed with it.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pytest

NODES = ("n1", "n2", "n3")
GPUS = 4  # of each node
START_S = 180.0
PATH = os.environ.get("PATH", "") + os.pathsep + "/usr/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol", "sinfo")
ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db", "mariadb")
HOST = socket.gethostname().split(".")[0]

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
SlurmdTimeout=10
KillWait=5
CompleteWait=0
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
PropagateResourceLimits=NONE
Prolog={folder}/prolog.sh
RequeueExit=99
SlurmdParameters=config_overrides
"""
NO_ACCOUNTING = "AccountingStorageType=accounting_storage/none\nJobAcctGatherType=jobacct_gather/none\n"
WITH_ACCOUNTING = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStorageTRES=gres/gpu
AccountingStoragePass={folder}/munge.sock
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
"""
DBD = """AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={dbd_port}
SlurmUser={user}
LogFile={folder}/slurmdbd.err
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql_port}
StorageUser=slurm
StoragePass=pw
StorageLoc=slurm_acct_db
"""


@dataclass(kw_only=True)
class Cluster:
    """A running Slurm: its configuration, and its daemons by name."""

    folder: Path
    accounting: bool
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def conf(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf), "PATH": PATH}

    def begin(self, name: str, *argv: str) -> None:
        """Start a daemon in the foreground. It is killed when this process ends, however that happens."""
        words = ["setpriv", "--pdeathsig", "KILL", *argv]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(words, env=self.env, stdout=log, stderr=log, start_new_session=True)

    def start_node(self, name: str, *, limits: Sequence[str] = ()) -> None:
        """Start the slurmd of a node; `limits` are words of prlimit for it and its jobs."""
        words = ["prlimit", *limits] if limits else []
        self.begin(name, *words, "slurmd", "-D", "-N", name, "-f", str(self.conf))

    def kill_node(self, name: str) -> None:
        """SIGKILL a slurmd, its step daemons and everything that its jobs run there: the machine is off."""
        process = self.running.pop(name)
        process.kill()
        process.wait(timeout=10)
        _kill_steps(name, self.folder)

    def restart_node(self, name: str, *, limits: Sequence[str] = ()) -> None:
        """Start a slurmd (again) and wait until its node is up."""
        if (process := self.running.pop(name, None)) is not None:
            process.kill()
            process.wait(timeout=10)
        began = int(time.time())
        self.start_node(name, limits=limits)
        try:
            self.wait(lambda: self._has_registered(name, since=began) and self._is_up(name))
        except AssertionError:
            raise AssertionError(self.call("scontrol", "show", "node", name)) from None

    def _has_registered(self, name: str, *, since: float) -> bool:
        """Whether slurmctld knows this slurmd: until then it shows the node as the one before left it."""
        shown = self.call("scontrol", "show", "node", name)
        started = re.search(r"SlurmdStartTime=(\d\S+)", shown)
        known = started is not None and datetime.fromisoformat(started[1]).timestamp() >= since
        return known and "NOT_RESPONDING" not in shown

    def _is_up(self, name: str) -> bool:
        state = self.node_state(name)
        if state.startswith("completing"):  # of a job whose end the dead slurmd never reported
            self.call("scontrol", "update", f"nodename={name}", "state=down", "reason=restarted")
            self.call("scontrol", "update", f"nodename={name}", "state=resume")
        return state.startswith(("idle", "drained"))

    def set_prolog(self, text: str) -> None:
        """Replace the program that every node runs before a job."""
        draft = self.folder / "prolog.draft"
        draft.write_text(f"#!/bin/sh\n{text}\n")
        draft.chmod(0o755)
        draft.rename(self.folder / "prolog.sh")

    def call(self, *argv: str, check: bool = True) -> str:
        ran = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=60, check=False)
        assert not check or ran.returncode == 0, (argv, ran.stdout, ran.stderr)
        return ran.stdout

    def node_state(self, name: str) -> str:
        """`idle`, `drained`, … and the reason, as sinfo prints them."""
        text = self.call("sinfo", "-h", "-N", "-n", name, "-o", "%T|%E").strip()
        return text.replace("*|", "|")  # the star: not pinged since

    def idle(self) -> set[str]:
        text = self.call("sinfo", "-h", "-N", "-o", "%N %T", check=False)
        return set(re.findall(r"^(\S+) idle$", text, re.MULTILINE))

    def wait(self, holds: Callable[[], bool], *, limit_s: float = START_S) -> None:
        until = time.monotonic() + limit_s
        while not holds():
            logs = {path.name: path.read_text(errors="replace")[-800:] for path in self.folder.glob("*.log")}
            dead = [name for name, process in self.running.items() if process.poll() is not None]
            assert not dead, (dead, logs)
            assert time.monotonic() < until, logs
            time.sleep(0.1)

    def close(self) -> None:
        for name in [*NODES, "slurmctld", "slurmdbd", "mariadbd", "munged"]:
            if (process := self.running.pop(name, None)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=10)
        for node in NODES:
            _kill_steps(node, self.folder)


@contextlib.contextmanager
def start(folder: Path, *, accounting: bool = False, extra: str = "") -> Iterator[Cluster]:
    """A cluster with all its nodes idle. Accounting takes a database server and several seconds more."""
    wanted = (*PROGRAMS, *(ACCOUNTING if accounting else ()))
    missing = [name for name in wanted if shutil.which(name, path=PATH) is None]
    if missing:
        packages = "slurm-wlm munge slurmdbd mariadb-server"
        pytest.skip(f"no {', '.join(missing)} here: apt-get install {packages} (or make system-packages)")
    cluster = Cluster(folder=folder, accounting=accounting)
    _configure(cluster, extra)
    try:
        cluster.begin(
            "munged", "munged", "--force", "--foreground", f"--socket={folder}/munge.sock",
            f"--key-file={folder}/munge.key", f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.err",
            f"--seed-file={folder}/seed",
        )  # fmt: skip
        cluster.wait((folder / "munge.sock").exists)
        if cluster.accounting:
            _start_accounting(cluster)
        cluster.begin("slurmctld", "slurmctld", "-D", "-f", str(cluster.conf))
        for name in NODES:
            cluster.start_node(name)
        cluster.wait(lambda: cluster.idle() == set(NODES))
        yield cluster
    finally:
        cluster.close()


def _configure(cluster: Cluster, extra: str) -> None:
    folder, ports = cluster.folder, free_ports(3 + len(NODES))
    (folder / "state").mkdir()
    cluster.set_prolog("exit 0")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    facts: Mapping[str, object] = {
        "host": HOST, "port": ports[0], "dbd_port": ports[1], "sql_port": ports[2], "user": getpass.getuser(),
        "folder": folder,
    }  # fmt: skip
    text = CONF.format(**facts) + extra + (WITH_ACCOUNTING.format(**facts) if cluster.accounting else NO_ACCOUNTING)
    gpus = _make_gpus(folder)
    for place, name in enumerate(NODES, 1):
        gres = f" Gres=gpu:h100:{GPUS}" if gpus else ""
        text += (
            f"NodeName={name} NodeHostname={HOST} NodeAddr=127.0.0.{place + 1} "
            f"Port={ports[2 + place]} CPUs=8 RealMemory=4000{gres} State=UNKNOWN\n"
        )
    cluster.conf.write_text(text + f"PartitionName=gpu Nodes={','.join(NODES)} Default=YES State=UP\n")
    if gpus:
        files = f"{folder}/dev/nvidia[0-{GPUS - 1}]"
        (folder / "gres.conf").write_text(f"AutoDetect=off\nNodeName=n[1-3] Name=gpu Type=h100 File={files}\n")
    if cluster.accounting:
        (folder / "slurmdbd.conf").write_text(DBD.format(**facts))
        (folder / "slurmdbd.conf").chmod(0o600)
        (folder / "sql_port").write_text(str(ports[2]))


def _make_gpus(folder: Path) -> bool:
    """Device files with the numbers of NVIDIA's; False where this user may make none."""
    (folder / "dev").mkdir()
    try:
        for number in range(GPUS):
            os.mknod(folder / "dev" / f"nvidia{number}", stat.S_IFCHR | 0o666, os.makedev(195, number))
    except PermissionError:
        return False
    return True


def _start_accounting(cluster: Cluster) -> None:
    folder = cluster.folder
    data, sock, port = folder / "sql", folder / "sql.sock", (folder / "sql_port").read_text()
    user = f"--user={getpass.getuser()}"
    subprocess.run(
        ["mariadb-install-db", "--no-defaults", user, f"--datadir={data}", "--skip-test-db",
         "--auth-root-authentication-method=normal"],
        env=cluster.env, check=True, capture_output=True,
    )  # fmt: skip
    cluster.begin(
        "mariadbd", "mariadbd", "--no-defaults", user, f"--datadir={data}", f"--socket={sock}", f"--port={port}",
        "--bind-address=127.0.0.1", "--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=32M",
        f"--pid-file={folder}/mariadb.pid",
    )  # fmt: skip
    sql = "create database slurm_acct_db; grant all on slurm_acct_db.* to 'slurm'@'%' identified by 'pw';"
    admin = ["mariadb", "--no-defaults", f"--socket={sock}", "-u", "root", "-e"]
    cluster.wait(lambda: subprocess.run([*admin, "select 1"], capture_output=True, check=False).returncode == 0)
    subprocess.run([*admin, sql], check=True, capture_output=True)
    cluster.begin("slurmdbd", "slurmdbd", "-D")
    ask = ["sacctmgr", "-i", "-n", "list", "cluster"]
    cluster.wait(lambda: subprocess.run(ask, env=cluster.env, capture_output=True, check=False).returncode == 0)
    cluster.call("sacctmgr", "-i", "add", "cluster", "test")
    cluster.call("sacctmgr", "-i", "add", "account", "lab", "Cluster=test")
    cluster.call("sacctmgr", "-i", "add", "user", getpass.getuser(), "Account=lab")


def _kill_steps(node: str, folder: Path) -> None:
    """Kill what runs in jobs on a node of this cluster, step daemons first: none of them reports an end any more."""
    marks = (f"SLURMD_NODENAME={node}\0".encode(), f"SLURM_CONF={folder}/slurm.conf\0".encode())
    tasks, daemons = [], []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            environment = (path / "environ").read_bytes()
            if not all(mark in environment for mark in marks):
                continue
            tasks.append(int(path.name))
            parent = Path("/proc") / (path / "stat").read_text().rpartition(")")[2].split()[1]
            if b"slurmstepd" in (parent / "cmdline").read_bytes():
                daemons.append(int(parent.name))
    for pid in [*dict.fromkeys(daemons), *tasks]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
