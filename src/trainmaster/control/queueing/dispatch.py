"""Our own queue at work: ask targets for their devices, decide who starts, tell the others why they wait.

For targets that have no queue of their own (`ListsDevices`). A pass reads the rows of a place, calls `schedule`, and
keeps what it gave to the jobs of this process in `Context.bookings`; the stage handler of a queued job books it in the
transaction that writes the attempt's intent. Nothing here has to survive: another server decides the same from the
same rows, and of two bookings of one device one is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime

from trainmaster import targets
from trainmaster.control.context import Context, log_failure
from trainmaster.control.queueing import places as place_names
from trainmaster.core.errors import Fault, TargetError, UsageError
from trainmaster.core.spec import JobSpec
from trainmaster.queueing.schedule import find_misfit
from trainmaster.queueing.state import Assigned, Decisions, DeviceListing, Kind, Share
from trainmaster.store import attempts, costs
from trainmaster.store.capacity import devices, machines, order, queue
from trainmaster.store.capacity.queue import WaitingRow
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow
from trainmaster.targets import ListsDevices

_ASK_S = 2.0  # between two questions for devices while jobs wait: a program that is not ours may have taken one
_ASK_IDLE_S = 30.0  # the same where a place gives out nothing: a driver may be installed
_PATIENCE_S = 0.2  # with a place that is asked: an answer in time saves the jobs there a tick
_LATE_S = 5.0  # a question open for longer: what is known of the GPUs there is too old to start on
_REST = 4.0  # times as long as a pass took are left to other work
_UNCHANGED = 20.0  # times as long as a pass took, what it decided holds where no row has changed
_KEEP_S = 10.0  # an order that has not changed is written again: pages take one of up to 30 s
_READ = 10  # jobs at the head of the queue whose whole specs are read at every pass: those of all would take too long
_READ_MORE = 8  # times as many where one was found that cannot be read: each round decides the whole place again
_TOLD = 50  # jobs at the head of the queue whose message says why they wait; `trainmaster queue` says it of all
_LATE = f"the GPUs were asked for more than {_LATE_S:g} s ago, no answer came yet; nothing starts on them until it does"

log = logging.getLogger(__name__)


def may_start(context: Context, job: JobRow) -> bool:
    """Whether a queued job has its devices, or needs none."""
    if context.kinds is None or _is_booked(context, job):
        return True
    try:
        if not isinstance(context.load(job.target), ListsDevices):
            return True
    except (TargetError, UsageError):
        return True  # planning says what is wrong with it
    place = targets.find_place(job.target)
    if place in context.drained:
        return False
    kinds = context.kinds.get(place)
    return kinds is not None and queue.find_request(job.spec).need(kinds) is None


def take_booking(context: Context, job: JobRow) -> Assigned:
    """The devices that the queue gave to the next attempt of a job, once; none where it needs none."""
    booked = _is_booked(context, job)
    _, assigned = context.bookings.pop(job.id, (0, {}))
    return assigned if booked else {}


def _is_booked(context: Context, job: JobRow) -> bool:
    # A pass that read the rows before an attempt began writes its booking afterwards: it is not for the attempt after
    # that one, or a job that was preempted would start again before the one that it was stopped for.
    return context.bookings.get(job.id, (0, {}))[0] == job.attempts + 1


class Places:
    """Devices, closed machines and quotas as the rows have them; each is read once."""

    def __init__(self, db: Database) -> None:
        self._db = db

    @functools.cached_property
    def _devices(self) -> Mapping[str, Sequence[devices.DeviceRow]]:
        places: dict[str, list[devices.DeviceRow]] = {}
        for row in devices.list_devices(self._db):
            places.setdefault(row.place, []).append(row)
        return places

    @functools.cached_property
    def _closed(self) -> Sequence[machines.MachineRow]:
        return machines.list_machines(self._db)

    @functools.cached_property
    def _shares(self) -> Mapping[str, Share]:
        return devices.list_shares(self._db)

    def find_faults(self, word: str, spec: JobSpec) -> list[Fault]:
        """Why a job can never start on the machines that are known of its target, and where it would."""
        if targets.find_traits(word) is None:
            return []
        place = targets.find_place(word)
        kept, shut = self._devices.get(place, ()), [row for row in self._closed if row.place == place]
        kinds, request = machines.find_kinds(kept, shut), queue.find_request(spec)
        if (need := request.need(kinds)) is None:
            return []
        if need.kind == "gpu" and spec.env.get(queue.HIDES_GPUS):
            message = 'the queue assigns the GPUs; leave it out, or write "" for a job that uses none'
            return [Fault(path=f"env.{queue.HIDES_GPUS}", message=message)]
        quota = self._shares.get(spec.project, Share()).quota
        if quota is not None and need.devices > quota:
            message = f"{need.devices} are more than the quota of project {spec.project}, {quota}: it could never start"
            return [Fault(path="resources", message=message)]
        misfit = find_misfit(need, machines.to_machines(kept, shut))
        if misfit is None:
            return []
        fitting = [
            targets.spell_place(other_place)
            for other_place, rows in self._devices.items()
            if other_place != place
            and (other := request.need({row.kind for row in rows}))
            and not find_misfit(other, machines.to_machines(rows, ()))
        ]
        where = f"; it would fit at {', '.join(sorted(fitting))}" if fitting else ""
        return [Fault(path="resources.processes_per_node", message=f"{misfit}: it could never start{where}")]


class Dispatcher:
    """The queue of one reconciler."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._asked: dict[str, float] = {}  # place → when it last answered, or failed to, what it has
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._began: dict[str, float] = {}  # place → when that began
        self._kept: dict[str, tuple[order.Order, float]] = {}  # place → its order as it was last written, and when
        self._passed: dict[str, tuple[object, float, set[str]]] = {}  # place → what it was made of, until when, waits
        self._unreadable: set[str] = set()  # jobs; nobody changes a spec that cannot be read
        self._rest_until = 0.0
        self._waiting: frozenset[str] = frozenset()

    async def decide(self) -> frozenset[str]:
        """Decide for every place at which jobs wait; jobs that stay in the queue and need no step. Never raises."""
        if time.monotonic() < self._rest_until:
            return self._waiting - self._context.bookings.keys()
        begin, waiting = time.monotonic(), set[str]()
        try:
            places = await self._list_places()
            if not self._asked:
                await asyncio.to_thread(place_names.respell, self._context.db)
            await self._ask_all(places)
            drained = await asyncio.to_thread(self._list_drained, places)
            self._context.drained.intersection_update(drained)
            self._context.drained.update(drained)
            for place, words in places.items():
                if self._kinds.get(place) or place in self._context.drained:
                    waiting |= await asyncio.to_thread(self._pass_if_changed, place, words, late=self._is_late(place))
        except Exception as error:
            log_failure(log, "the queue could not be decided; trying again at the next tick", error)
        self._waiting = frozenset(waiting)
        self._rest_until = time.monotonic() + _REST * (time.monotonic() - begin)
        return self._waiting

    @property
    def _kinds(self) -> dict[str, frozenset[Kind]]:
        kinds = self._context.kinds
        assert kinds is not None, "made with a context that has a queue"
        return kinds

    async def _list_places(self) -> dict[str, list[str]]:
        """Places that our queue serves and at which jobs wait, each with the words that lead there."""
        places: dict[str, list[str]] = {}
        for word in await asyncio.to_thread(queue.list_words, self._context.db):
            with contextlib.suppress(TargetError, UsageError):  # the job's own step says what is wrong with it
                if isinstance(self._context.load(word), ListsDevices):
                    places.setdefault(targets.find_place(word), []).append(word)
        return places

    def _list_drained(self, places: Mapping[str, Sequence[str]]) -> frozenset[str]:
        """Places whose only machine is drained: not even jobs that need no device start there."""
        here = {place for place, words in places.items() if targets.traits(words[0]).here}
        host, rows = socket.gethostname(), machines.list_machines(self._context.db) if here else []
        return frozenset(here & {row.place for row in rows if row.drained is not None and row.machine == host})

    async def close(self) -> None:
        """End what is being asked."""
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    async def _ask_all(self, places: Mapping[str, Sequence[str]]) -> None:
        """Ask places whose answer is old. One that is slow, as with a driver that hangs, is not waited for."""
        for place, words in places.items():
            task = self._asking.get(place)
            every_s = _ASK_S if self._kinds.get(place) else _ASK_IDLE_S
            old = place not in self._asked or time.monotonic() - self._asked[place] >= every_s
            if old and (task is None or task.done()):
                self._began[place] = time.monotonic()
                self._asking[place] = asyncio.create_task(self._ask(place, words[0]), name=f"devices of {place}")
        if under_way := [task for task in self._asking.values() if not task.done()]:
            await asyncio.wait(under_way, timeout=_PATIENCE_S)

    def _is_late(self, place: str) -> bool:
        """Whether a place does not answer: a program that is not ours may have taken its GPUs since it last did."""
        task = self._asking.get(place)
        return task is not None and not task.done() and time.monotonic() - self._began[place] > _LATE_S

    async def _ask(self, place: str, word: str) -> None:
        """Keep what a place has now. Never raises."""
        try:
            await self._request(place, word)
        except Exception as error:
            log_failure(log, f"{place}: its devices could not be kept", error)
        self._asked[place] = time.monotonic()

    async def _request(self, place: str, word: str) -> None:
        target, context = self._context.load(word), self._context
        assert isinstance(target, ListsDevices)
        try:
            listed = await context.call("list", target.list_devices())
        except (TargetError, UsageError) as error:
            log.warning("%s: %s", place, error)
            await asyncio.to_thread(self._note_fault, place, str(error))
        else:
            await asyncio.to_thread(self._record, place, listed)
        self._kinds[place] = await asyncio.to_thread(self._read_kinds, place)

    def _read_kinds(self, place: str) -> frozenset[Kind]:
        db = self._context.db
        return machines.find_kinds(devices.list_devices(db, place=place), machines.list_machines(db, place=place))

    def _record(self, place: str, listed: DeviceListing) -> None:
        rows = {row.device: row for row in devices.list_devices(self._context.db, place=place)}
        closed = machines.list_machines(self._context.db, place=place)
        unknown = _find_unknown(listed, rows.values())
        if not any(listed.devices.values()) and not rows and not closed and not unknown:
            return  # most laptops: nothing to give out, nothing to write
        with self._context.db.write() as conn:
            machines.record_unknown(conn, place, unknown)
            for kind, some in listed.devices.items():
                silent = _find_silent(listed, rows.values()) if kind == "gpu" else None
                devices.record(conn, place, kind, some, at=self._context.now(), silent=silent)

    def _note_fault(self, place: str, fault: str) -> None:
        with self._context.db.write() as conn:
            devices.record_fault(conn, place, fault)

    def _pass_if_changed(self, place: str, words: Collection[str], *, late: bool) -> set[str]:
        """Decide for one place. Where nothing has changed since the last pass it is not made again for a while: with
        10,000 jobs it takes a second, and what only time changes (ages, expected ends) can wait for so long."""
        db, begin = self._context.db, time.monotonic()
        with db.read() as conn:
            kept = devices.list_devices(db, place=place)
            rows = [(row.device, row.machine, row.used, row.attempt) for row in kept]
            closed, shares = machines.list_machines(db, place=place), devices.list_shares(db)
            stamp = (late, queue.read_stamp(db, words), rows, closed, shares, costs.list_budgets(conn))
        before, until, waits = self._passed.get(place, (None, 0.0, set[str]()))
        if stamp == before and begin < until:
            return waits
        waits, starts = self._pass(place, words, late=late)
        end = time.monotonic()
        # A start that is refused, as its device was taken meanwhile, changes no row: it is decided again.
        self._passed[place] = stamp if not starts else None, end + _UNCHANGED * (end - begin), waits
        return waits

    def _pass(self, place: str, words: Collection[str], *, late: bool) -> tuple[set[str], bool]:
        """Decide for one place; jobs that wait, and whether any starts. While it is late with its answer nobody starts
        on its GPUs."""
        context, now = self._context, self._context.now()
        host = socket.gethostname() if any(targets.traits(word).here for word in words) else None
        rows, unreadable = queue.list_waiting(context.db, host=host, words=words), self._unreadable
        count = _READ
        while rows := [row for row in rows if row.id not in unreadable]:
            decided = order.decide(
                context.db, place, rows, now=now, rules=context.rules, alone=host, late=_LATE if late else "",
                may_cost=targets.may_cost, checks=context.checks(),
            )  # fmt: skip
            if not (found := queue.find_unreadable(context.db, _list_first(decided.decisions, count))):
                break
            unreadable |= found
            count *= _READ_MORE
        else:
            return set(), False
        self._keep(place, decided.decisions)  # first: who reads a message finds the order that it is of
        self._apply(decided.decisions, {row.id: row for row in rows}, decided.projects)
        waits = {wait.job for wait in decided.decisions.waits}
        waits -= {row.id for row in rows if row.request.max_wait_s is not None}
        return waits, bool(decided.decisions.starts)

    def _apply(self, decided: Decisions, rows: dict[str, WaitingRow], projects: Mapping[str, str]) -> None:
        context = self._context
        ours = {job for job, row in rows.items() if row.lease_token == context.token}
        for start in decided.starts:
            if start.job in ours:
                context.bookings[start.job] = rows[start.job].attempts + 1, start.devices
        for wait in decided.waits:
            context.bookings.pop(wait.job, None)  # of an earlier pass whose booking was refused
        # Those without a place stand last, and what they were told before, as a place at the head, is wrong now.
        first = (*decided.waits[:_TOLD], *(wait for wait in decided.waits[_TOLD:] if not wait.position))
        new = (wait for wait in first if wait.job in ours and rows[wait.job].message != wait.text)
        told = list(itertools.islice(new, 2 * _TOLD))
        if told or decided.preempts:
            with context.db.write() as conn:
                for wait in told:
                    queue.set_reason(conn, wait.job, wait.text)
                for preempt in decided.preempts:
                    # The members of a project may not see the jobs of another.
                    alike = projects[preempt.job] == rows[preempt.by].project
                    who = f"job {preempt.by} ({rows[preempt.by].name})" if alike else "a job of another project"
                    text = f"stopped for {who}, which has a higher priority"
                    attempts.preempt(conn, preempt.job, message=text, at=context.now())

    def _keep(self, place: str, decided: Decisions) -> None:
        """Let others see the order; written again where it has changed, or is so old that it would be decided anew."""
        made, now = order.to_order(place, decided.waits), time.monotonic()
        before, at = self._kept.get(place, (None, 0.0))
        if made != before or now - at > _KEEP_S:
            order.keep(self._context.db, made, at=self._context.now())
            self._kept[place] = made, now


def _list_first(decided: Decisions, count: int) -> set[str]:
    """Jobs that decide over others, and as many of those that wait.

    A job that can never start must not be given devices, have them kept free or stop others for it, nor hold back the
    later jobs of its project where it is the first that waits for the quota.
    """
    first = {start.job for start in decided.starts} | {preempt.by for preempt in decided.preempts}
    first |= {wait.job for wait in decided.waits if wait.why == "first"}
    over_quota: dict[str, str] = {}  # by text, which names project and quota: that of the first is its own
    for wait in decided.waits:
        if wait.why == "quota":
            over_quota.setdefault(wait.text, wait.job)
    return first | {*over_quota.values()} | {wait.job for wait in decided.waits[:count]}


def _find_silent(listed: DeviceListing, rows: Iterable[devices.DeviceRow]) -> dict[str, str]:
    """Machines whose GPUs stay as they were and are not given out, and why.

    One that had GPUs and lists none has lost its driver or its nvidia-smi: without its rows every job that waits there
    would start at once, on no GPU.
    """
    seen: dict[str, list[datetime]] = {}
    for row in rows:
        if row.kind == "gpu":
            seen.setdefault(row.machine, []).append(row.seen_at)
    have = {device.machine for device in listed.devices.get("gpu", ())}
    lost = [machine for machine in listed.answered if machine in seen and machine not in have]
    gone = "gone since {:%Y-%m-%d %H:%M} UTC: nvidia-smi lists none of the {} GPUs seen before"
    return {machine: gone.format(max(seen[machine]), len(seen[machine])) for machine in lost} | dict(listed.silent)


def _find_unknown(listed: DeviceListing, rows: Iterable[devices.DeviceRow]) -> dict[str, str]:
    """Machines that never said which GPUs they have, and why not: unknown is not none.

    Where others of the place say that they have none, and nobody lists one, jobs go there by slots: a host that is
    away must not hold up a cluster without GPUs, and the target leaves out machines that may have some.
    """
    seen = {row.machine for row in rows if row.kind == "gpu"}
    have = {device.machine for device in listed.devices.get("gpu", ())}
    if set(listed.answered) - have - seen and not have and not seen:
        return {}
    return {machine: why for machine, why in listed.silent.items() if machine not in seen}
