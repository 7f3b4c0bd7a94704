"""Provider contract: a source of machines by the hour. A provider has four main calls: prices, list, launch, terminate.

`targets/_rented.py` turns a provider into a target. To add one, see docs/how/providers.md.

    TargetError
    ├── Unreachable     no usable answer. After `launch` the outcome is unknown: only the listing can tell
    ├── NoCapacity      the offer is sold out; nothing was launched
    ├── NotNow          refused for the moment (rate limit); nothing was launched
    └── any other       refused for good; nothing was launched
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from trainmaster.core.errors import TargetError
from trainmaster.core.files import write_whole
from trainmaster.core.workdir import HOME_ID_FILE

_LABEL = re.compile(r"tm-([0-9a-f]{32})-([0-9]{1,6})-([0-9a-f]{8})-([0-9a-f]{8})")


class NotNow(TargetError):
    """The provider refuses launches for the moment. Nothing was launched."""


class InstanceState(StrEnum):
    """State of an instance in its provider's listing."""

    BOOTING = "booting"
    ACTIVE = "active"
    UNHEALTHY = "unhealthy"
    TERMINATING = "terminating"
    PREEMPTED = "preempted"
    GONE = "gone"
    UNKNOWN = "unknown"

    @property
    def over(self) -> bool:
        """The instance runs no job any more, by the provider's own word."""
        return self in (InstanceState.TERMINATING, InstanceState.PREEMPTED, InstanceState.GONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An instance type in one region, with its price."""

    kind: str
    region: str  # empty: every region that is not named, sold out
    price_cents_per_hour: float
    available: bool  # advisory: a launch may still be refused
    gpus: int
    gpu: str = ""  # the provider's description
    gpu_memory_gib: float | None = None
    memory_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A machine in the provider's listing."""

    id: str
    name: str  # the label of the attempt, where it is ours
    state: InstanceState
    kind: str
    region: str
    price_cents_per_hour: float | None = None
    address: str | None = None
    port: int | None = None  # of its SSH server, where it is not that of all instances
    private_address: str | None = None  # for the other nodes

    @property
    def label(self) -> Label | None:
        return Label.parse(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Every instance of the account, and when the request for it was sent."""

    at: datetime
    instances: tuple[Instance, ...]
    absent: frozenset[str] = frozenset()  # ids that were asked for one by one, and are not there

    def find(self, name: str, *, provider_id: str | None = None) -> Instance | None:
        """The instance with this id; without an id the one with this name, of several a live one before others."""
        if provider_id is not None:
            return next((instance for instance in self.instances if instance.id == provider_id), None)
        named = [instance for instance in self.instances if instance.name == name]
        return min(named, key=lambda instance: (instance.state.over, instance.id), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One machine to launch. `name` is committed to the database before the request is sent."""

    name: str
    kind: str
    region: str
    file_systems: tuple[str, ...] = ()
    image: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SshAccess:
    """How to log in to an instance of a provider."""

    user: str | None = None
    key: str | None = None  # private key file
    port: int | None = None
    python: str = "python3"
    python_setting: str = "access.python"  # what a user sets for another one
    folder: str = "~/.trainmaster"
    lost_after_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds: age of a shared listing, and how long an unseen launch may still appear in it."""

    listing_s: float = 5.0
    settle_s: float = 120.0


class Provider(Protocol):
    """A source of machines. One object is shared by all jobs of a process."""

    name: str  # the word of the target
    access: SshAccess
    timing: Timing

    async def list_offers(self) -> Sequence[Offer]:
        """Types and regions with prices, sold out ones too."""

    async def list_instances(self) -> Sequence[Instance]:
        """Every instance of the account, foreign ones too."""

    async def find_instance(self, instance_id: str) -> Instance | None:
        """An instance that the listing lacks, by its id; None: the provider says that there is none."""

    def may_launch(self) -> bool:
        """Whether the rate limit allows a launch now; True takes the turn."""

    async def launch(self, request: LaunchRequest) -> str:
        """Send one launch request, once; the instance's id. Unreachable: the outcome is unknown."""

    async def terminate(self, ids: Sequence[str]) -> None:
        """Request the end of instances. Those that are gone already are no error."""

    async def list_regions(self) -> Collection[str]:
        """Every region, sold out ones too."""

    async def list_file_systems(self) -> Mapping[str, str]:
        """Name → region of the file systems that instances can attach."""

    def describe(self, request: LaunchRequest) -> str:
        """The launch request as text for `--dry-run`. Pure; without secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """Name of an instance of ours: the attempt it was rented for, the home folder that rented it, and a nonce."""

    attempt: str
    home: str
    nonce: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def name(self) -> str:
        job, _, number = self.attempt.partition(".")
        return f"tm-{job.replace('-', '')}-{number}-{self.home}-{self.nonce}"

    @classmethod
    def parse(cls, name: str) -> Label | None:
        """None for the name of a foreign instance."""
        if (match := _LABEL.fullmatch(name)) is None:
            return None
        job = match[1]
        uuid = f"{job[:8]}-{job[8:12]}-{job[12:16]}-{job[16:20]}-{job[20:]}"
        return cls(attempt=f"{uuid}.{match[2]}", home=match[3], nonce=match[4])


def home_mark(home: Path) -> str:
    """Eight hex digits for a home folder: rented machines of another home are never touched.

    Random and kept in the folder, so that two servers with the same host name and path are told apart. Before the
    file is there nothing was rented: the digits are then of host name and path.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = (home / HOME_ID_FILE).read_text(encoding="ascii").strip()
        if re.fullmatch(r"[0-9a-f]{8}", text):
            return text
    return hashlib.sha256(f"{socket.gethostname()}\0{home.absolute()}".encode()).hexdigest()[:8]


def make_home_mark(home: Path) -> None:
    """Give a home folder its mark, once."""
    with contextlib.suppress(FileExistsError):
        write_whole(home / HOME_ID_FILE, secrets.token_hex(4) + "\n", durable=True, replace=False)
