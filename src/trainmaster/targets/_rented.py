"""A provider as a target: rent machines, run attempts on them over SSH, return them.

The control plane keeps a row for each machine and decides when to launch (control/rented.py); this module asks the
provider, shares one listing among all jobs, and reaches the machines. Host keys are pinned at the first login: the
handle carries them, so a machine that later gets the same address is not mistaken for ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from trainmaster.core.errors import NodeLost, Preempted, TargetError, Unreachable
from trainmaster.core.plan import OUTPUTS_FOLDER
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason, TargetState
from trainmaster.targets import FileSize, Handle, Owned, Placement, Poll, Submission
from trainmaster.targets._choose import rank_offers
from trainmaster.targets._provider import (
    Instance,
    InstanceState,
    Label,
    LaunchRequest,
    Listing,
    Offer,
    Provider,
    SshAccess,
    home_mark,
)

if TYPE_CHECKING:
    from trainmaster.targets._rented_ssh import RentedSsh

_RELEASE_S = 20.0  # that one `release` waits for the listing; then it is called again
_REGIONS_S = 600.0  # that a list of regions is used
_OFFERS_AGE = 2  # listings' ages that a list of offers may have
_LIVE = (InstanceState.BOOTING, InstanceState.ACTIVE, InstanceState.UNHEALTHY, InstanceState.UNKNOWN)


class Rented:
    """Attempts on rented machines."""

    fetches_inputs = True

    def __init__(self, word: str, make: Callable[[], Provider]) -> None:
        self._word, self._make = word, make

    def plan(self, placement: Placement) -> Submission:
        from trainmaster.targets.ssh.hosts import SshHost
        from trainmaster.targets.ssh.target import plan_on

        access = self._make().access
        hosts = [SshHost(host=f"NODE-{rank}", folder=access.folder) for rank in range(placement.spec.resources.nodes)]
        planned = plan_on(hosts, placement)
        home = home_mark(placement.job_folder.parent.parent)
        return Submission(
            handle={**planned.handle, "home": home, "instances": []},
            files=planned.files,
            commands=planned.commands,
            work=planned.work,
        )

    async def choose(self, spec: JobSpec, *, refused: Collection[tuple[str, str]]) -> list[Offer]:
        shared = self._shared()
        systems = await shared.provider.list_file_systems() if spec.rent.file_systems else None
        await self._refuse_unknown_regions(spec)
        offers = await shared.offers()
        return rank_offers(offers, spec, provider=self._word, file_systems=systems, refused=refused)

    async def _refuse_unknown_regions(self, spec: JobSpec) -> None:
        """A region that does not exist is never free: it is refused at once, not waited for."""
        if spec.rent.regions:
            known = await self._shared().regions()
            if unknown := [name for name in spec.rent.regions if name not in known]:
                words = f"unknown region {', '.join(unknown)} (rent.regions)"
                raise TargetError(f"{self._word}: {words}; it has {', '.join(sorted(known)) or 'none'}")

    def listing_s(self) -> float:
        return self._shared().provider.timing.listing_s

    def settle_s(self) -> float:
        return self._shared().provider.timing.settle_s

    def may_launch(self) -> bool:
        return self._shared().provider.may_launch()

    async def launch(self, request: LaunchRequest) -> str:
        return await self._shared().provider.launch(request)

    async def listing(self, *, since: datetime | None = None, known: Collection[str] = ()) -> Listing:
        return await self._shared().listing(since=since, known=known)

    async def terminate(self, ids: Sequence[str]) -> None:
        await self._shared().provider.terminate(ids)

    async def connect(self, handle: Handle, instances: Sequence[Instance]) -> Handle:
        from trainmaster.targets.ssh.connect import NoPython, read_host_key

        access, pinned = self._shared().provider.access, {item["id"]: item for item in handle.get("hosts", ())}
        hosts = []
        for instance in instances:
            assert instance.address is not None, "an active instance has an address"
            known = pinned.get(instance.id)
            if known is None or (known["host"], known["port"]) != (instance.address, instance.port or access.port):
                port = instance.port or access.port
                key = await read_host_key(instance.address, port)
                known = {
                    "id": instance.id, "name": _node_name(instance), "host": instance.address, "port": port, "key": key,
                    "address": instance.private_address,
                }  # fmt: skip
            hosts.append(known)
        ready = {**handle, "nodes": [item["name"] for item in hosts], "hosts": hosts}
        try:
            gpus = await _rented_ssh(access, {}).identify(ready)
        except NoPython as error:  # waiting changes no image, and each minute is paid
            action = f"choose another image (rent.image) or name its Python ({access.python_setting})"
            raise TargetError(f"{error.reason}; {action}") from None
        return {**ready, "hosts": [{**item, "gpus": serials} for item, serials in zip(hosts, gpus, strict=True)]}

    async def submit(self, submission: Submission) -> Handle:
        """As over SSH; a machine that the listing shows as gone is not waited for."""
        try:
            return await self._rented_ssh().submit(submission)
        except Unreachable:
            if (fate := await self._find_fate(submission.handle)) is None:
                raise
            raise (Preempted if fate.reason is Reason.PREEMPTED else NodeLost)(fate.note) from None

    async def poll(self, handle: Handle) -> Poll:
        """State as the machine answers; where it does not answer, the provider's listing decides."""
        poll = await self._rented_ssh().poll(handle)
        if poll.state is not TargetState.UNKNOWN:
            return poll
        try:
            fate = await self._find_fate(handle)
        except TargetError as error:
            return Poll(state=TargetState.UNKNOWN, note=f"{poll.note}; {error}")
        return fate or poll

    def count_nodes(self, handle: Handle) -> int:
        return len(handle["nodes"])

    async def read(self, handle: Handle, stream: str, *, offset: int, limit: int) -> bytes:
        try:
            return await self._rented_ssh().read(handle, stream, offset=offset, limit=limit)
        except Unreachable:
            if (fate := await self._find_fate(handle)) is not None:
                raise TargetError(f"{stream} is on a machine that is gone: {fate.note}") from None
            raise

    async def list_files(self, handle: Handle) -> list[FileSize]:
        if not handle.get("hosts"):
            return []
        try:
            return await self._rented_ssh().list_files(handle)
        except Unreachable:
            if (fate := await self._find_fate(handle)) is not None:
                return [FileSize(name=f"{OUTPUTS_FOLDER}/node-0", size_bytes=0, fault=fate.note)]
            raise

    async def cancel(self, handle: Handle, *, reason: str) -> None:
        try:
            await self._rented_ssh().cancel(handle, reason=reason)
        except Unreachable:
            if await self._find_fate(handle) is None:
                raise

    async def stop(self, handle: Handle) -> None:
        if handle.get("hosts"):
            try:
                await self._rented_ssh().release(handle)
            except Unreachable:
                if await self._find_fate(handle) is None:
                    raise

    async def release(self, handle: Handle) -> None:
        """Terminate every machine of the attempt until the listing shows none of them."""
        shared, attempt, requested = self._shared(), str(handle["attempt"]), set[str]()
        since, until = datetime.now(UTC), time.monotonic() + _RELEASE_S
        while True:
            try:
                listing = await shared.listing(since=since, known=_ids(handle))
            except Unreachable:
                await self._terminate_known(handle)
                raise
            owned = [instance for instance in listing.instances if _is_of(instance, attempt, handle)]
            left = [
                instance for instance in owned if instance.state in _LIVE or instance.state is InstanceState.TERMINATING
            ]
            if not left:
                await self._rented_ssh().close(handle)
                return
            if fresh := [instance.id for instance in left if instance.state in _LIVE and instance.id not in requested]:
                await shared.provider.terminate(fresh)
                requested.update(fresh)
            if time.monotonic() > until:
                words = ", ".join(instance.id for instance in left)
                raise Unreachable(f"{self._word}: {words} is asked to terminate and still listed")
            since = datetime.now(UTC)

    async def _terminate_known(self, handle: Handle) -> None:
        """Terminate by id what cannot be listed now: half an API may work, and each minute is paid. Never raises."""
        if ids := _ids(handle):
            with contextlib.suppress(TargetError, TimeoutError):
                async with asyncio.timeout(_RELEASE_S):
                    await self._shared().provider.terminate(ids)

    async def list_owned(self, *, partial: bool = False) -> list[Owned]:  # noqa: ARG002 (one listing: all or nothing)
        listing = await self.listing(since=datetime.now(UTC))
        live = [
            instance
            for instance in listing.instances
            if instance.state in _LIVE or instance.state is InstanceState.TERMINATING
        ]
        ours: dict[str, list[Instance]] = {}
        for instance in live:
            if instance.label is not None:
                ours.setdefault(instance.label.attempt, []).append(instance)
        owned = [_owned(attempt, instances) for attempt, instances in ours.items()]
        return [*owned, *(_foreign(instance) for instance in live if instance.label is None)]

    async def preview(self, spec: JobSpec) -> str:
        offers = await self.choose(spec, refused=())
        nodes, best = spec.resources.nodes, offers[0]
        cents = best.price_cents_per_hour
        lines = [f"# choice: {nodes} × {best.kind} in {best.region}, ${cents / 100:,.2f} an hour each"]
        lines += [
            f"#   then {offer.kind} in {offer.region}, ${offer.price_cents_per_hour / 100:,.2f}"
            for offer in offers[1:6]
        ]
        label = Label(attempt="00000000-0000-4000-8000-000000000000.1", home="0" * 8, nonce="0" * 8)
        request = _request(label.name, best.kind, best.region, spec)
        return "\n".join(lines) + "\n" + self._shared().provider.describe(request)

    async def _find_fate(self, handle: Handle) -> Poll | None:
        """What became of the attempt's machines by the listing; None while all of them are there.

        One that got another address is looked for there from now on: its pinned host key proves that it is the same.
        """
        if not handle.get("instances"):
            return None
        listing = await self.listing(known=_ids(handle))
        for item in handle["instances"]:
            instance = listing.find(str(item["name"]), provider_id=str(item["id"]))
            if instance is None:
                return Poll(state=TargetState.LOST, note=f"{item['id']}: {self._word} lists it no longer")
            if instance.state is InstanceState.PREEMPTED:
                note = f"{instance.id}: {self._word} took it back (preempted)"
                return Poll(state=TargetState.LOST, note=note, reason=Reason.PREEMPTED)
            if instance.state.over:
                return Poll(state=TargetState.LOST, note=f"{instance.id}: {self._word} lists it as {instance.state}")
            self._note_address(handle, instance)
        return None

    def _note_address(self, handle: Handle, instance: Instance) -> None:
        hosts = {str(item["id"]): str(item["host"]) for item in handle.get("hosts", ())}
        if instance.address is not None and instance.address != hosts.get(instance.id):
            self._shared().addresses[instance.id] = instance.address

    def _rented_ssh(self) -> RentedSsh:
        shared = self._shared()
        return _rented_ssh(shared.provider.access, shared.addresses)

    def _shared(self) -> _Shared:
        """Provider and listing, shared by all jobs of the running event loop."""
        ours = _SHARED.setdefault(asyncio.get_running_loop(), {})
        if self._word not in ours:
            ours[self._word] = _Shared(self._make())
        return ours[self._word]


def _request(name: str, kind: str, region: str, spec: JobSpec) -> LaunchRequest:
    return LaunchRequest(
        name=name, kind=kind, region=region, file_systems=spec.rent.file_systems, image=spec.rent.image
    )


class _Shared:
    """A provider with its newest listing and offers. Requests at the same time are one request."""

    def __init__(self, provider: Provider) -> None:
        self.provider = provider
        self._gate, self._offers_gate = asyncio.Lock(), asyncio.Lock()
        self._listing: Listing | None = None
        self._offers: tuple[float, Sequence[Offer]] | None = None
        self._regions: tuple[float, Collection[str]] | None = None
        self.addresses: dict[str, str] = {}  # of machines that did not answer at the address of their handle

    async def listing(self, *, since: datetime | None = None, known: Collection[str] = ()) -> Listing:
        """A machine of `known` that the listing lacks is asked for by its id: a listing may be empty for a minute."""
        async with self._gate:
            listing = await self._list(since)
            for wanted in known:
                if listing.find("", provider_id=wanted) is not None or wanted in listing.absent:
                    continue
                if (instance := await self.provider.find_instance(wanted)) is not None:
                    listing = replace(listing, instances=(*listing.instances, instance))
                else:
                    listing = replace(listing, absent=listing.absent | {wanted})
                self._listing = listing
            return listing

    async def _list(self, since: datetime | None) -> Listing:
        now = datetime.now(UTC)
        last = self._listing
        if last is not None and last.at > now:
            last = None  # the clock was set back: until it is there again this listing would count as new
        if last is not None and (since is None or last.at >= since):
            if (now - last.at).total_seconds() < self.provider.timing.listing_s:
                return last
        elif last is not None and since is not None:
            # Many jobs wait for a listing newer than theirs: the interval is kept, one listing serves all of them.
            rest_s = self.provider.timing.listing_s / 2 - (now - last.at).total_seconds()
            await asyncio.sleep(max(0.0, rest_s))
        at = datetime.now(UTC)
        self._listing = Listing(at=at, instances=tuple(await self.provider.list_instances()))
        return self._listing

    async def regions(self) -> Collection[str]:
        async with self._offers_gate:
            if self._regions is None or time.monotonic() - self._regions[0] > _REGIONS_S:
                self._regions = (time.monotonic(), await self.provider.list_regions())
            return self._regions[1]

    async def offers(self) -> Sequence[Offer]:
        async with self._offers_gate:
            age_s = self.provider.timing.listing_s * _OFFERS_AGE
            if self._offers is None or time.monotonic() - self._offers[0] > age_s:
                self._offers = (time.monotonic(), await self.provider.list_offers())
            return self._offers[1]


_SHARED: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Shared]] = weakref.WeakKeyDictionary()


def _rented_ssh(access: SshAccess, addresses: Mapping[str, str]) -> RentedSsh:
    from trainmaster.targets._rented_ssh import RentedSsh

    return RentedSsh(access, addresses)


def _ids(handle: Handle) -> list[str]:
    return [str(item["id"]) for item in handle.get("instances", ())]


def _node_name(instance: Instance) -> str:
    """Name of a machine among those of its attempt; ids of a pool are addresses and differ at their ends."""
    return f"i-{instance.id[:12]}" if instance.id.isalnum() else f"i-{instance.id[:60]}"


def _is_of(instance: Instance, attempt: str, handle: Handle) -> bool:
    label = instance.label
    return label is not None and (label.attempt == attempt or instance.id in _ids(handle))


def _owned(attempt: str, instances: Sequence[Instance]) -> Owned:
    label = instances[0].label
    assert label is not None
    handle = {
        "attempt": attempt,
        "nodes": [],
        "home": label.home,
        "instances": [{"id": instance.id, "name": instance.name} for instance in instances],
    }
    return Owned(attempt=attempt, handle=handle, what="; ".join(map(_words, instances)))


def _foreign(instance: Instance) -> Owned:
    return Owned(attempt=instance.name or instance.id, handle={}, what=_words(instance), foreign=True)


def _words(instance: Instance) -> str:
    price = (
        "price unknown"
        if instance.price_cents_per_hour is None
        else f"${instance.price_cents_per_hour / 100:,.2f} an hour"
    )
    return f"{instance.id}: {instance.kind} in {instance.region or '?'}, {instance.state}, {price}"
