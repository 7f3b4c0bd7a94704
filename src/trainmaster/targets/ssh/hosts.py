"""The hosts file: machines and how to reach each. Takes a plain mapping; the CLI reads the YAML.

    known_hosts: known_hosts            file with their keys; default ~/.ssh/known_hosts
    defaults: {user: ubuntu, key: ~/.ssh/cluster}
    hosts:
      - gpu-01
      - {host: 10.0.0.2, name: gpu-02, port: 2222, rack: r1}
      - {host: 10.1.0.3, jump: ops@bastion.example.org, slots: 2, price_per_hour: 1.5}

There is no password field: use keys or the SSH agent. The file holds no secret.
"""

from __future__ import annotations

import os
import pwd
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainmaster.core.errors import Fault, SpecError, UsageError
from trainmaster.core.schema import build, field
from trainmaster.targets._traits import Account

# A name is also a folder name in the bundle, and part of the shell commands in messages.
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}"
_USER = r"[A-Za-z0-9_][A-Za-z0-9._@\\+-]{0,127}"
_FILE = r"[^\x00-\x1f\x7f]{1,4096}"
_JUMP = r"([A-Za-z0-9_][A-Za-z0-9._-]{0,63}@)?[A-Za-z0-9][A-Za-z0-9.-]{0,252}(:[0-9]{1,5})?"
_KEYS = "known_hosts"  # of the whole file


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHost:
    """One machine."""

    host: str = field(doc="host name or address", pattern=NAME_PATTERN, example="gpu-01")
    name: str = field(
        default="", doc="name in results, if it differs from host", pattern=NAME_PATTERN, example="gpu-01"
    )
    port: int | None = field(default=None, ge=1, le=65535, doc="default: ~/.ssh/config, else 22")
    user: str | None = field(default=None, doc="default: ~/.ssh/config, else the current user", pattern=_USER)
    key: str | None = field(
        default=None, doc="private key file; default: the SSH agent and the usual files", pattern=_FILE
    )
    python: str = field(default="python3", doc="Python 3.10 or newer on that machine")
    rack: str | None = field(default=None, doc="rack, for findings about switches")
    jump: str | None = field(
        default=None, doc="machine to connect through, [user@]host[:port]", pattern=_JUMP, example="ops@bastion"
    )
    folder: str = field(
        default="~/.trainmaster",
        doc="folder for jobs there; on a shared file system any host can resume a run",
        pattern=r"(~|)/[^\x00\n]*|~",
        example="/shared/trainmaster",
    )
    lost_after_s: float = field(
        default=600.0, gt=0, doc="a machine that does not answer for so long is lost, and its jobs go elsewhere"
    )
    slots: int = field(default=1, ge=1, le=1024, doc="jobs at the same time, where the host has no GPU")
    price_per_hour: float | None = field(
        default=None, ge=0, le=1_000_000, doc="dollars an hour, for `cost` and budgets"
    )
    address: str | None = field(
        default=None,
        doc="address for the other nodes; default: the one SSH used",
        pattern=NAME_PATTERN,
        example="10.0.0.2",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SshHosts:
    """All machines, and the file with their keys."""

    hosts: tuple[SshHost, ...]
    known_hosts: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    hosts: tuple[object, ...] = field(doc="names, or mappings with at least `host`", example="[gpu-01, gpu-02]")
    defaults: Mapping[str, object] = field(factory=dict, doc="fields for every host that does not state them")
    known_hosts: str = field(default="~/.ssh/known_hosts", doc="the file with the machines' keys", pattern=_FILE)


def parse_hosts(document: object, folder: Path) -> SshHosts:
    """The machines of a document; relative paths start at `folder`. SpecError lists every fault."""
    file = build(_File, {"hosts": document} if isinstance(document, list) else document)
    hosts: list[SshHost] = []
    faults: list[Fault] = [_no_password(f"defaults.{name}") for name in file.defaults if _secret(name)]
    if _KEYS in file.defaults:
        faults.append(_misplaced(f"defaults.{_KEYS}"))
    defaults = {name: value for name, value in file.defaults.items() if name != _KEYS}
    for number, entry in enumerate(file.hosts):
        stated = {"host": entry} if isinstance(entry, str) else entry
        path = f"hosts[{number}]"
        if isinstance(stated, Mapping):
            faults += [_no_password(f"{path}.{name}") for name in stated if _secret(name)]
            if _KEYS in stated:
                faults.append(_misplaced(f"{path}.{_KEYS}"))
            stated = {**defaults, **{name: value for name, value in stated.items() if name != _KEYS}}
        try:
            host = build(SshHost, stated, path=path)
        except SpecError as error:
            faults += error.faults
            continue
        if host.jump is not None and not 0 < int(host.jump.rpartition("@")[2].partition(":")[2] or 22) < 65536:
            faults.append(Fault(path=f"{path}.jump", message="its port is out of range 1 to 65535"))
        hosts.append(replace(host, name=host.name or host.host, key=host.key and str(_path(host.key, folder))))
    for name, times in Counter(host.name for host in hosts).items():
        if times > 1:
            faults.append(Fault(path="hosts", message=f"{times} hosts are called {name}; give each its own `name`"))
    if not file.hosts:
        faults.append(Fault(path="hosts", message="no host is listed"))
    if faults:
        raise SpecError(faults)
    return SshHosts(hosts=tuple(hosts), known_hosts=_path(file.known_hosts, folder))


def with_user(hosts: SshHosts, user: str | None) -> SshHosts:
    """The same machines, where this user logs in. In a folder that all share it has one of its own."""
    if user is None:
        return hosts
    if not re.fullmatch(_USER, user):
        raise UsageError(f"target: {user!r:.80} is no user name")
    own = (replace(host, user=user, folder=own_folder(host.folder, user)) for host in hosts.hosts)
    return replace(hosts, hosts=tuple(own))


def own_folder(folder: str, user: str) -> str:
    """The folder of a user's jobs: its home folder is its own, every other place is shared."""
    return folder if folder.startswith("~") else f"{folder.rstrip('/')}/{user}"


def describe_account(hosts: Sequence[SshHost]) -> Account:
    """The account that logs in to these machines."""
    users = {host.user for host in hosts}
    server = ""
    if None in users:
        server = "the hosts file names no user, and the server's own logs in"
    elif users & {"root", pwd.getpwuid(os.geteuid()).pw_name}:
        server = "root, or the user of the server itself, logs in"
    return Account(
        name=", ".join(sorted(user for user in users if user)), places=frozenset(map(place_of, hosts)), server=server
    )


def place_of(host: SshHost) -> str:
    """A host as its file spells it."""
    return f"{host.host}:{host.port or 22}"


def read_known_hosts(path: Path) -> bytes:
    """Trusted keys. A missing file trusts no host; an unreadable one is an error."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UsageError(f"known_hosts {path} cannot be read: {error.strerror}") from None


def _path(text: str, folder: Path) -> Path:
    try:
        return folder / Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{text[:200]}: this machine has no user of that name") from None


def _secret(name: object) -> bool:
    return any(word in str(name).lower() for word in ("passw", "passphrase", "secret"))


def _misplaced(path: str) -> Fault:
    return Fault(path=path, message=f"one file is for all hosts: write `{_KEYS}: FILE` at the top, beside `hosts:`")


def _no_password(path: str) -> Fault:
    return Fault(path=path, message="secrets are not allowed in this file; use a key or the SSH agent")
