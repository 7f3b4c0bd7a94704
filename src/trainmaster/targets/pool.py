"""Target `pool:pool.yaml`: machines of your own, rented by the attempt. The smallest provider there is.

    access: {user: ubuntu, key: ~/.ssh/cluster}          for all machines; port, python, folder, lost_after_s too
    hosts:
      - {host: 10.0.0.2, gpus: 8, gpu: H100 80 GB}
      - {host: 10.0.0.3, gpus: 8, gpu: H100 80 GB, price_per_hour: 12.0, region: hall-2}

A machine belongs to one attempt at a time; who has which is kept in pool.yaml.rented beside the file, under a lock.
Host keys are pinned at each rent. The file holds no secret.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainmaster.core.errors import NoCapacity, Unreachable, UsageError
from trainmaster.core.files import write_whole
from trainmaster.core.schema import build, field
from trainmaster.targets._provider import Instance, InstanceState, LaunchRequest, Offer, SshAccess, Timing
from trainmaster.targets._queueing import NO_NAME, OWN_QUEUE
from trainmaster.targets._traits import Account, Traits
from trainmaster.targets.ssh.hosts import NAME_PATTERN

if TYPE_CHECKING:
    from trainmaster.targets._rented import Rented

T = TypeVar("T")

TRAITS = Traits(
    title="machines of your own, rented by the attempt",
    option="file",
    example="pool.yaml",
    starts="`{access: {user: ubuntu}, hosts: [{host: 10.0.0.2, gpus: 8, gpu: H100 80 GB}]}` (docs/how/providers.md)",
    required=True,
    instead={"remedy": "leave the machine out of the pool file"},
    queue=OWN_QUEUE,
    no_queue=NO_NAME,
    no_spares="a machine is taken when it is needed; `limits.attempts` takes another, and the run resumes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    host: str = field(doc="host name or address", pattern=NAME_PATTERN, example="10.0.0.2")
    port: int | None = field(default=None, ge=1, le=65535, doc="default: that of `access`")
    gpus: int = field(default=0, ge=0, doc="GPUs")
    gpu: str = field(default="", doc="GPU model")
    type: str = field(default="host", doc="name of its type, for `rent.types`")
    region: str = field(default="pool", doc="where it stands, for `rent.regions`")
    price_per_hour: float = field(default=0.0, ge=0, doc="dollars an hour")
    address: str | None = field(default=None, doc="address for the other nodes; default: the one SSH used")

    @property
    def id(self) -> str:
        return f"{self.host}:{self.port}" if self.port is not None else self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class _Access:
    user: str | None = field(default=None, doc="login")
    key: str | None = field(default=None, doc="private key file")
    port: int | None = field(default=None, ge=1, le=65535, doc="SSH port")
    python: str = field(default="python3", doc="Python 3.10 or newer there")
    folder: str = field(default="~/.trainmaster", doc="folder for jobs there")
    lost_after_s: float = field(default=600.0, gt=0, doc="a machine silent for so long is lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    hosts: tuple[_Host, ...] = field(doc="the machines")
    access: _Access = field(factory=_Access, doc="how to log in")


def create(options: str) -> Rented:
    """The target over the machines of a pool file."""
    from trainmaster.targets._rented import Rented

    if not options:
        raise UsageError("target: write pool:pool.yaml, with the path of a pool file")
    path = Path(options).absolute()
    return Rented(f"pool:{path}", lambda: Pool(path))


def runs_as(options: str, user: str | None) -> Account:  # noqa: ARG001 (the user of the file is the only one)
    """The user that logs in to the machines of the pool, whose disks the next attempt finds."""
    from trainmaster.targets.ssh.hosts import SshHost, describe_account

    create(options)
    pool = Pool(Path(options).absolute())
    return describe_account([SshHost(host=host.host, port=host.port, user=pool.access.user) for host in pool.hosts()])


def charges(options: str, user: str | None) -> bool:  # noqa: ARG001 (of every account)
    """Whether machines of the pool have a price."""
    create(options)
    return any(host.price_per_hour for host in Pool(Path(options).absolute()).hosts())


class Pool:
    """The machines of a pool file, and which of them are rented."""

    name = "pool"
    timing = Timing(listing_s=0.5, settle_s=2.0)  # a file answers at once

    def __init__(self, path: Path) -> None:
        self._path, self._state = path, path.with_name(f"{path.name}.rented")
        access = self._file().access
        self.access = SshAccess(
            user=access.user, key=access.key and str(Path(access.key).expanduser()), port=access.port,
            python=access.python, folder=access.folder, lost_after_s=access.lost_after_s,
        )  # fmt: skip

    async def list_offers(self) -> list[Offer]:
        """One offer per machine: the free ones are available."""
        rented = await self._with_state(lambda state: state)
        return [
            Offer(kind=host.type, region=host.region, price_cents_per_hour=host.price_per_hour * 100, gpus=host.gpus,
                  gpu=host.gpu, available=host.id not in rented)
            for host in self._file().hosts
        ]  # fmt: skip

    async def list_instances(self) -> list[Instance]:
        rented = await self._with_state(lambda state: state)
        hosts = {host.id: host for host in self._file().hosts}
        return [_instance(host_id, name, hosts.get(host_id)) for host_id, name in rented.items()]

    async def find_instance(self, instance_id: str) -> None:  # noqa: ARG002 (the listing is a file of ours: it has all)
        return None

    def may_launch(self) -> bool:
        return True

    async def launch(self, request: LaunchRequest) -> str:
        """Take a free machine; the same name gets the same machine again."""
        hosts = [host for host in self._file().hosts if (host.type, host.region) == (request.kind, request.region)]
        hosts.sort(key=lambda host: host.price_per_hour)

        def take(state: dict[str, str]) -> str:
            held = [host_id for host_id, name in state.items() if name == request.name]
            free = [host.id for host in hosts if host.id not in state]
            if not held and not free:
                raise NoCapacity(f"pool: no machine of type {request.kind} in {request.region} is free")
            chosen = (held or free)[0]
            state[chosen] = request.name
            return chosen

        return await self._with_state(take)

    async def terminate(self, ids: Sequence[str]) -> None:
        await self._with_state(lambda state: [state.pop(provider_id, None) for provider_id in ids])

    async def list_regions(self) -> list[str]:
        return sorted({host.region for host in self._file().hosts})

    async def list_file_systems(self) -> Mapping[str, str]:
        return {}

    def describe(self, request: LaunchRequest) -> str:
        return f"take a machine of type {request.kind} in {request.region} from {self._path} as {request.name}\n"

    def hosts(self) -> Sequence[_Host]:
        return self._file().hosts

    def _file(self) -> _File:
        from trainmaster.documents import yaml_file

        return yaml_file.load(self._path, what="target: pool file").read(lambda value: build(_File, value))

    async def _with_state(self, change: Callable[[dict[str, str]], T]) -> T:
        return await asyncio.to_thread(self._change, change)

    def _change(self, change: Callable[[dict[str, str]], T]) -> T:
        """Read and change host → name under a lock that other processes respect."""
        fd = os.open(self._state.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            before = self._read_state()
            state = dict(before)
            result = change(state)
            if state != before:
                write_whole(self._state, json.dumps(state, indent=2), durable=True, mode=0o600)
            return result
        finally:
            os.close(fd)

    def _read_state(self) -> dict[str, str]:
        """Host → name. A file that cannot be read says nothing: no machine counts as free or returned."""
        try:
            state = json.loads(self._state.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise Unreachable(f"pool: {self._state} cannot be read ({str(error)[:100]}); repair it") from None
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state.values()):
            raise Unreachable(f"pool: {self._state} is no list of rented machines; repair it")
        return state


def _instance(host_id: str, name: str, host: _Host | None) -> Instance:
    """A rented machine; one that left the file meanwhile is gone."""
    return Instance(
        id=host_id,
        name=name,
        state=InstanceState.ACTIVE if host is not None else InstanceState.GONE,
        kind=host.type if host is not None else "",
        region=host.region if host is not None else "",
        price_cents_per_hour=host.price_per_hour * 100 if host is not None else None,
        address=host.host if host is not None else None,
        port=host.port if host is not None else None,
        private_address=host.address if host is not None else None,
    )
