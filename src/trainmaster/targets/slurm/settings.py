"""The cluster file of `slurm:FILE.yaml`: where Slurm's commands run, the shared folder, and defaults of the options.

    folder: /shared/trainmaster          on a file system that the login node and all compute nodes share
    login: {host: login-1, user: alice}  commands run there over SSH; not stated: on this machine
    python: /shared/venv/bin/python      of the compute nodes
    setup: ["module load cuda/12"]       lines of the batch script before the start
    defaults: {partition: gpu, account: lab, exclude: [n7]}
    priorities: {high: --qos=high}       option of sbatch for a word of `queue.priority`

The file holds no secret; `login` takes the fields of a host of a hosts file.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trainmaster.core.errors import Fault, SpecError, UsageError
from trainmaster.core.schema import build, field
from trainmaster.core.vendors.slurm import SlurmOptions
from trainmaster.targets.slurm.queue_options import PRIORITY
from trainmaster.targets.ssh import hosts as ssh_hosts
from trainmaster.targets.ssh.hosts import SshHost, SshHosts, parse_hosts

_FOLDER = r"(~|)/[^\x00\n\s'\"$`\\]*|~"
# Words of the batch script are quoted, so a space inside is safe; at an end it is a mistake.
_PATH = r"[A-Za-z0-9_./~+-]+( +[A-Za-z0-9_./~+-]+)*"


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    folder: str | None = field(
        default=None, pattern=_FOLDER, example="/shared/trainmaster", doc="shared folder of jobs"
    )
    login: Mapping[str, object] | None = field(default=None, doc="host whose Slurm commands are used, over SSH")
    known_hosts: str = field(default="~/.ssh/known_hosts", doc="the file with the login node's key")
    python: str | None = field(default=None, pattern=_PATH, example="python3", doc="Python 3.10 of the compute nodes")
    container_python: str = field(default="python3", pattern=_PATH, doc="Python 3.10 inside containers")
    commands: str | None = field(default=None, pattern=r"/[^\s]*", example="/opt/slurm/bin", doc="folder of sbatch")
    env: dict[str, str] = field(factory=dict, doc="environment of Slurm's commands, as {SLURM_CONF: /etc/slurm.conf}")
    setup: tuple[str, ...] = field(default=(), doc="shell lines of the batch script before the start")
    output: Literal["auto", "json", "text"] = field(default="auto", doc="of squeue and sacct; auto: JSON from 23.02 on")
    poll_s: float = field(default=2.0, ge=0, le=300, doc="longest age of a listing that serves all jobs")
    drain: bool = field(
        default=False, doc="drain a node whose pre-flight check failed; needs the rights of an operator"
    )
    defaults: SlurmOptions = field(factory=SlurmOptions, doc="options of every job that does not state them")
    priorities: dict[str, str] = field(
        factory=dict, doc="option of sbatch for a word of queue.priority: --qos=…, --nice=… or --priority=…"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """One Slurm cluster."""

    folder: str | None = None  # None: the folder of each job in the home folder of Trainmaster
    login: SshHost | None = None
    known_hosts: Path | None = None
    python: str = sys.executable
    container_python: str = "python3"
    commands: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    setup: tuple[str, ...] = ()
    output: str = "auto"
    poll_s: float = 2.0
    drain: bool = False
    defaults: SlurmOptions = SlurmOptions()
    priorities: tuple[tuple[str, str], ...] = ()


def parse_settings(document: object, folder: Path) -> SlurmSettings:
    """Settings from a plain mapping; relative paths start at `folder`. SpecError lists every fault."""
    file = build(_File, document)
    faults = []
    if file.login is None and file.folder is not None and file.folder.startswith("~"):
        file = replace(file, folder=str(Path(file.folder).expanduser()))
    for number, line in enumerate(file.setup):
        if "\n" in line:
            faults.append(Fault(path=f"setup[{number}]", message="one line of shell each; split it"))
    for word, option in file.priorities.items():
        if not PRIORITY.fullmatch(option):
            message = f"{option!r:.80} is no priority; write for example --qos=high, --nice=-100 or --priority=5000"
            faults.append(Fault(path=f"priorities.{word}", message=message))
    if faults:
        raise SpecError(faults)
    login, known_hosts = None, None
    if file.login is not None:
        shared = file.folder or "~/.trainmaster"
        stated = {"name": "slurm", **file.login, "folder": shared}
        hosts = parse_hosts({"hosts": [stated], "known_hosts": file.known_hosts}, folder)
        login, known_hosts = hosts.hosts[0], hosts.known_hosts
        file = replace(file, folder=shared)
    return SlurmSettings(
        folder=file.folder,
        login=login,
        known_hosts=known_hosts,
        python=file.python or ("python3" if login else sys.executable),
        container_python=file.container_python,
        commands=file.commands,
        env=tuple(sorted(file.env.items())),
        setup=file.setup,
        output=file.output,
        poll_s=file.poll_s,
        drain=file.drain,
        defaults=file.defaults,
        priorities=tuple(sorted(file.priorities.items())),
    )


def read_settings(path: Path) -> SlurmSettings:
    """Settings of a YAML file."""
    from trainmaster.documents import yaml_file

    document = yaml_file.load(path, what="target: cluster file")
    return document.read(lambda value: parse_settings(value, path.parent))


def with_user(settings: SlurmSettings, user: str | None) -> SlurmSettings:
    """The same cluster, where this user submits: one per project, through its own login over SSH."""
    if user is None:
        return settings
    if settings.login is None or settings.known_hosts is None:
        raise UsageError("slurm: a user of its own logs in to a login node; write `login: {host: …}` in a cluster file")
    own = ssh_hosts.with_user(SshHosts(hosts=(settings.login,), known_hosts=settings.known_hosts), user).hosts[0]
    return replace(settings, login=own, folder=own.folder)


def node_half(settings: SlurmSettings) -> str:
    """Folder of the node half where no job names it: checks."""
    return f"{(settings.folder or '~/.trainmaster').rstrip('/')}/packages/{package_digest()}"


@functools.cache
def package_digest() -> str:
    """Hash of the node half of this installation: jobs in the queue keep the version that submitted them."""
    from trainmaster.remote.package import pack

    return pack().digest[:32]
