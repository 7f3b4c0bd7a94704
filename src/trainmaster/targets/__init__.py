"""Targets: where attempts run. One file per target; the folder is the registry, this module is the contract.

A target plans (pure, printable), submits, polls, lists files and reads them from a byte offset, cancels and releases.
Every call but `plan` may be repeated after a crash with the same attempt and must then find what is already there:
`submit` of an attempt that runs returns the same handle and starts nothing.

A word names a target: `local`, `ssh:hosts.yaml`. One that the control plane made from a grant begins with the account
of the project's jobs there: `tm-lab@ssh:hosts.yaml`; a spec cannot spell that.

Errors: `TargetError` is a refusal; `Unreachable` means that no answer was possible, and `poll` returns `unknown`.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import pkgutil
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Protocol, runtime_checkable

from trainmaster.core.attempt import FileSize, Handle, Owned, Poll, Pull, Submission
from trainmaster.core.errors import Fault, SpecError, TrainmasterError, UsageError
from trainmaster.core.spec import JobSpec
from trainmaster.queueing.state import DeviceListing
from trainmaster.targets._answers import check_files
from trainmaster.targets._cluster_job import ClusterJob, ClusterJobEnd, RunsClusterJobs, find_unequal
from trainmaster.targets._drain import PREFIX, DrainState, ListsDrained, RunCommand, Scheduler
from trainmaster.targets._nodes import Node, NodeAccess, Program, ReachesNodes, Result, Transfer
from trainmaster.targets._provider import (
    Instance,
    InstanceState,
    Label,
    LaunchRequest,
    Listing,
    NotNow,
    Offer,
    home_mark,
    make_home_mark,
)
from trainmaster.targets._queueing import OWN_QUEUE, describe_queue, find_queue_faults
from trainmaster.targets._runs import Run, is_left_over, is_running
from trainmaster.targets._traits import Account, Traits

__all__ = [
    "PREFIX",
    "Account",
    "ClusterJob",
    "ClusterJobEnd",
    "DrainState",
    "FileSize",
    "Handle",
    "HasNodes",
    "Instance",
    "InstanceState",
    "Label",
    "LaunchRequest",
    "Listing",
    "Lists",
    "ListsDevices",
    "ListsDrained",
    "Node",
    "NodeAccess",
    "NotNow",
    "Offer",
    "Owned",
    "Placement",
    "Places",
    "Poll",
    "Program",
    "Pull",
    "ReachesNodes",
    "Rents",
    "Result",
    "Run",
    "RunCommand",
    "RunsClusterJobs",
    "Scheduler",
    "Submission",
    "Target",
    "Traits",
    "Transfer",
    "check_files",
    "close",
    "describe_queue",
    "find_place",
    "find_traits",
    "find_unequal",
    "home_mark",
    "identifies",
    "identify",
    "is_free",
    "is_left_over",
    "is_running",
    "load",
    "load_scheduler",
    "make_home_mark",
    "may_cost",
    "names",
    "refuse_queue",
    "runs_as",
    "spell",
    "spell_all",
    "spell_place",
    "split",
    "traits",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """An attempt to submit: its name, its job, and the job's own folder on this machine."""

    attempt: str  # "<job uuid>.<number>"
    spec: JobSpec
    job_folder: Path  # checkpoints live in it, and one folder per attempt


class Target(Protocol):
    """Where attempts run."""

    def plan(self, placement: Placement) -> Submission:
        """The submission, without side effects."""

    async def submit(self, submission: Submission) -> Handle:
        """Start the attempt, or find it started. Returns once it is certain to run or to have run."""

    async def poll(self, handle: Handle) -> Poll:
        """State of the attempt. Unreachable is `unknown`, never an exception."""

    async def read(self, handle: Handle, stream: str, *, offset: int, limit: int) -> bytes:
        """At most `limit` bytes of a stream from `offset`; empty at the end.

        A stream is a file name of core.plan, or a path under its `outputs/`.
        """

    async def list_files(self, handle: Handle) -> list[FileSize]:
        """Every file to keep: the attempt's own records, and everything under `outputs/`."""

    async def cancel(self, handle: Handle, *, reason: str) -> None:
        """Request save and stop; the agent kills the workload after the spec's grace period. Returns at once."""

    async def release(self, handle: Handle) -> None:
        """Free everything the attempt holds, by force if needed. Logs and events stay readable."""


@runtime_checkable
class Places(Protocol):
    """A target that chooses machines. Its choice is in the database before anything is started there."""

    async def place(self, submission: Submission) -> Handle:
        """Reserve machines for the attempt, or find them reserved; the handle with their names. Starts nothing.

        NoCapacity while all are in use. What was reserved and never submitted becomes free by itself.
        """


@runtime_checkable
class HasNodes(Protocol):
    """A target whose attempts have an event file on each of several nodes; `core.plan.node_file` names them."""

    def count_nodes(self, handle: Handle) -> int:
        """Nodes of a placed attempt. Pure."""


@runtime_checkable
class ListsDevices(Protocol):
    """A target that has no queue of its own: ours gives out its devices (control/queueing/dispatch.py).

    The handle of an attempt that has some names them, `devices: {machine: [device, …]}`.
    """

    async def list_devices(self) -> DeviceListing:
        """Devices of each kind that is given out, taken ones too. Without any, jobs start at once."""

    def list_machines(self) -> list[str]:
        """Names of its machines, as handles and devices have them. Asks none of them."""


@runtime_checkable
class FetchesInputs(Protocol):
    """A target whose `submit` brings `Submission.pulls` to its machines."""

    fetches_inputs: bool


@runtime_checkable
class ReadsMany(Protocol):
    """A target that reads many small files in one request: a round trip for each would take longer than the bytes."""

    async def read_many(self, handle: Handle, streams: Sequence[str], *, limit: int) -> list[bytes | None]:
        """At most `limit` first bytes of each stream; None where it cannot be read. All together under 64 MiB."""


@runtime_checkable
class Lists(Protocol):
    """A target that lists its own resources, so that none is forgotten when a database is lost."""

    async def list_owned(self, *, partial: bool = False) -> list[Owned]:
        """Every resource of an attempt of trainmaster, in any database.

        Unreachable where a part of the target cannot be asked; with `partial` the others are listed.
        """


@runtime_checkable
class Rents(Protocol):
    """A target that rents machines. The name of each is in the database before its launch request is sent.

    `launch` and `listing` are the only sources of truth: a launch without an answer is found, or not, in the listing.
    """

    def listing_s(self) -> float:
        """Seconds between two listings, shared by all jobs."""

    def settle_s(self) -> float:
        """Seconds after which a launch without an answer that no listing shows did not happen."""

    async def choose(self, spec: JobSpec, *, refused: Collection[tuple[str, str]]) -> list[Offer]:
        """Offers that meet the spec, cheapest first, without the refused types and regions."""

    def may_launch(self) -> bool:
        """Whether the rate limit allows a launch now; True takes the turn."""

    async def launch(self, request: LaunchRequest) -> str:
        """Launch a machine; its id. Unreachable: the outcome is unknown. Every other error: nothing was launched."""

    async def listing(self, *, since: datetime | None = None, known: Collection[str] = ()) -> Listing:
        """Every machine of the account; one listing is shared by all jobs. Not requested before `since`.

        A machine of `known` that the listing lacks is asked for by its id.
        """

    async def terminate(self, ids: Sequence[str]) -> None:
        """Request the end of machines."""

    async def connect(self, handle: Handle, instances: Sequence[Instance]) -> Handle:
        """Log in to machines that have just booted; the handle with their pinned host keys and their GPUs."""

    async def release(self, handle: Handle) -> None:
        """Terminate every machine of the attempt; returns when the listing shows none of them."""

    async def stop(self, handle: Handle) -> None:
        """Kill the attempt on its machines; its files stay readable until `release` returns the machines."""

    async def preview(self, spec: JobSpec) -> str:
        """The choice and the launch request as text, for `--dry-run`."""


_CLOSERS = (
    "ssh.session",
    "kubernetes.session",
    "lambda_cloud.provider",
)  # modules that keep connections per event loop
_MODULES = {"lambda": "lambda_cloud"}  # a word that no module can be called
_OTHER_NAMES = {"k8s": "kubernetes", "localhost": "local", "here": "local", "lambda_cloud": "lambda"}


async def close() -> None:
    """Close connections that targets opened in the running event loop."""
    for name in _CLOSERS:
        if (module := sys.modules.get(f"{__name__}.{name}")) is not None:
            await module.close_all()


def names() -> list[str]:
    """All targets: the modules of this folder."""
    return sorted(_find_modules(tuple(__path__)))


def split(word: str) -> tuple[str | None, str, str]:
    """Account, name and option of a word. What stands before an `@` in the name is the account, never in the option."""
    head, _, option = word.partition(":")
    account, at, name = head.rpartition("@")
    return (account if at else None), name, option


def spell(word: str, user: str | None) -> str:
    """The word for the same target, with its jobs as this user."""
    return word if user is None else f"{user}@{word}"


def load(word: str) -> Target:
    """The target named in a spec: `local`, or `name:options`; with an account before it, acting as that one."""
    account, name, option = split(word)
    module = _import(word)
    if account is None:
        target: Target = module.create(option)
        return target
    if not module.TRAITS.accounts:
        raise UsageError(f"target: {name} has no accounts; what its settings state is the account of its jobs")
    target = module.create(option, user=account)
    return target


def runs_as(word: str) -> Account | None:
    """The account and the disk of jobs there, from the target's own settings; None where it does not say.

    UsageError where its settings cannot be used, or the account is none.
    """
    account, name, option = split(word)
    module = _import(word)
    if not hasattr(module, "runs_as"):
        return None
    if account is not None and not module.TRAITS.accounts:
        raise UsageError(f"target: {name} has no accounts; what its settings state is the account of its jobs")
    stated: Account = module.runs_as(option, account)
    return stated


def identifies(word: str) -> bool:
    """Whether the target can say which account it really is, however its settings spell it."""
    return hasattr(_import(word), "identify")


def identify(word: str) -> dict[str, str]:
    """Place → the account that answered there. Asks every machine; UsageError where one cannot, or can run no job.

    Empty for a target that has no such question: its settings name the account for all the world.
    """
    account, _, option = split(word)
    module = _import(word)
    if not hasattr(module, "identify"):
        return {}
    stated: dict[str, str] = asyncio.run(module.identify(option, account))
    return stated


def find_place(word: str) -> str:
    """Key of the machines of a word: one for all accounts there and for all spellings of a path, and for this machine
    one by its name."""
    _, name, option = split(word)
    stated = traits(word)
    place = stated.make_absolute(f"{name}:{option}") if option else name
    return f"{place}@{socket.gethostname()}" if stated.here else place


def spell_place(place: str) -> str:
    """The target of a place, as people write it."""
    return place.rpartition("@")[0] or place


def load_scheduler(word: str) -> Scheduler:
    """What drains the nodes of a target whose traits say that it `drains`."""
    scheduler: Scheduler = _import(word).create_scheduler(split(word)[2])
    return scheduler


def traits(word: str) -> Traits:
    """What the target of a word states about itself: `ssh` and `ssh:hosts.yaml` alike."""
    stated: Traits = _import(word).TRAITS
    return stated


def find_traits(word: str) -> Traits | None:
    """The same; None where there is no such target: a row may be of another version, a word anything."""
    return traits(word) if split(word)[1] in _find_modules(tuple(__path__)) else None


def waits_here(word: str) -> bool:
    """Whether jobs of the target wait in our own queue."""
    stated = find_traits(word)
    return stated is not None and stated.queue is OWN_QUEUE


def refuse_queue(word: str, spec: JobSpec) -> None:
    """SpecError for each field of `queue:` that the target cannot do, and for spares where it keeps none."""
    stated, name = find_traits(word), split(word)[1]
    if stated is None:
        return
    faults = list(find_queue_faults(name, stated, spec.queue))
    if spec.resources.spares and not stated.spares:
        message = f"{name} cannot do this: {stated.no_spares}"
        faults.append(Fault(path="resources.spares", message=message))
    if faults:
        raise SpecError(faults)


def spell_all(verb: str | None = None) -> list[str]:
    """Targets as help and errors write them: all, or those besides this machine that have a verb over nodes."""
    stated = {name: traits(name) for name in names()}
    return [
        target.spell(name) for name, target in stated.items() if verb is None or (target.has(verb) and not target.here)
    ]


def is_free(word: str) -> bool:
    """Whether an attempt costs nothing where nobody states a price. Of an unknown target that is unknown too."""
    stated = find_traits(word)
    return stated is not None and not stated.paid


def may_cost(word: str, *, stated: float | None) -> bool:
    """Whether an attempt may cost something: by the price that its spec states, and what is known before its machines
    are chosen. A stated 0 does not make machines free that have a price of their own."""
    if stated or find_traits(word) is None or (stated is None and not is_free(word)):
        return True
    module, (account, _, option) = _import(word), split(word)
    try:
        return hasattr(module, "charges") and bool(module.charges(option, account))
    except TrainmasterError:  # a file that cannot be read: planning says so
        return True


def _import(word: str) -> ModuleType:
    name = split(word)[1]
    modules = _find_modules(tuple(__path__))
    if name not in modules:
        meant = _OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, names(), n=1)), None)
        hint = f"; did you mean {meant}?" if meant else ""
        raise UsageError(f"target: {name!r} is not one of {', '.join(names())}{hint}")
    return importlib.import_module(f"{__name__}.{modules[name]}")


@functools.cache  # a page asks for every job that it lists
def _find_modules(folders: tuple[str, ...]) -> Mapping[str, str]:
    """Word → module."""
    words = {module: word for word, module in _MODULES.items()}
    names = [module.name for module in pkgutil.iter_modules(folders) if not module.name.startswith("_")]
    return {words.get(name, name): name for name in names}
