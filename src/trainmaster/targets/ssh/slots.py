"""Slots of machines: what each machine offers, and as many as a job wants reserved for it.

Many jobs ask at once, and a machine needs a look at all its processes to answer. So the jobs that wait while a question
to a machine is under way share the next one, and a slot that one job of this process is about to take is not tried by
the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainmaster.core.errors import NoCapacity, TargetError, Unreachable
from trainmaster.targets._answers import malformed
from trainmaster.targets.ssh.session import Session

_PATIENCE_S = 3.0  # with machines that have not answered, while others are free


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a machine offers to an attempt."""

    free: int
    held: bool  # the attempt has a slot there already
    knows: bool  # its job was there before
    bare: bool = True  # it has no GPU, as it can prove


class SlotTable:
    """The slots of one machine, for all jobs of this process. Kept as long as its session, which it must not hold."""

    def __init__(self) -> None:
        self.free = 0  # as of the last answer, without those that jobs here are taking
        self._taking = 0
        self._waiting: dict[str, asyncio.Future[Offer | TargetError]] = {}
        self._asking: asyncio.Task[None] | None = None

    def request_offer(self, session: Session, attempt: str) -> asyncio.Future[Offer | TargetError]:
        """The offer to an attempt, or the error. A caller that stops waiting does not cancel it for the others."""
        future = self._waiting.setdefault(attempt, asyncio.get_running_loop().create_future())
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._request_all(session), name=f"ssh {session.host.name}: offers")
        return future

    def take(self, session: Session, attempt: str) -> asyncio.Task[bool]:
        """Whether the attempt has a slot now. Others here do not count on it from the call on, before it is awaited."""
        self._taking, self.free = self._taking + 1, self.free - 1
        task = asyncio.create_task(self._take(session, attempt), name=f"ssh {session.host.name}: claim")
        task.add_done_callback(self._end_take)  # also of one that is cut off before its first step
        return task

    async def _take(self, session: Session, attempt: str) -> bool:
        held = await claim(session, attempt)
        if not held:
            self.free = 0
        return held

    def _end_take(self, _: asyncio.Task[bool]) -> None:
        self._taking -= 1

    async def _request_all(self, session: Session) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            try:
                offers = await self._offers(session, list(waiting))
            except TargetError as error:
                offers = dict.fromkeys(waiting, error)
            except BaseException:
                for future in (*waiting.values(), *self._waiting.values()):
                    future.cancel()
                self._waiting = {}
                raise
            for attempt, future in waiting.items():
                if not future.done():
                    future.set_result(offers[attempt])

    async def _offers(self, session: Session, attempts: list[str]) -> dict[str, Offer | TargetError]:
        reply = await session.request("offer", attempts=attempts, slots=session.host.slots)
        free, held, knows = reply.number("free"), reply.result.get("held"), reply.result.get("knows")
        bare = reply.flag("bare")
        if not isinstance(held, list) or not isinstance(knows, list):
            raise malformed(f"{session.host.name}: an offer without its lists")
        self.free = free - self._taking
        return {
            attempt: Offer(free=free, held=attempt in held, knows=attempt in knows, bare=bare) for attempt in attempts
        }


_TABLES: weakref.WeakKeyDictionary[Session, SlotTable] = weakref.WeakKeyDictionary()


_UNCOUNTED = 1 << 20  # jobs on a machine whose GPUs were given out: the queue counts those, not slots


async def claim(session: Session, attempt: str, *, counted: bool = True) -> bool:
    """Take a slot of a machine, or find it taken already."""
    most = session.host.slots if counted else _UNCOUNTED
    return (await session.request("claim", attempt=attempt, slots=most)).flag("held")


async def reserve(
    sessions: Sequence[Session], attempt: str, wanted: int, *, bare: bool = False, last: Collection[str] = ()
) -> list[Session]:
    """One slot on each of as many machines as wanted: first where it has one, then where its job was before.

    `bare`: only on machines that prove to have no GPU. `last`: machines to take where the others are too few.
    """
    tables = [_TABLES.setdefault(session, SlotTable()) for session in sessions]
    futures = [table.request_offer(session, attempt) for table, session in zip(tables, sessions, strict=True)]
    offers = await _collect(tables, futures, wanted)
    if bare:
        offers = [_refuse_gpus(session.host.name, offer) for session, offer in zip(sessions, offers, strict=True)]
    order = [
        (not offer.held, sessions[position].host.name in last, not offer.knows, position)
        for position, offer in enumerate(offers)
        if isinstance(offer, Offer) and (offer.held or offer.free > 0)
    ]
    left = [position for *_, position in sorted(order)]
    taken: list[Session] = []
    while len(taken) < wanted:
        chosen = [number for number in left if _is_open(tables[number], futures[number])][: wanted - len(taken)]
        if len(taken) + len(chosen) < wanted:  # a part of them helps nobody, and would keep another job waiting
            pairs = zip(sessions, offers, strict=True)
            before = [session for session, offer in pairs if isinstance(offer, Offer) and offer.held]
            for session in dict.fromkeys([*taken, *before]):  # also those of an earlier try that was cut off
                with contextlib.suppress(TargetError):  # a slot that is not used lapses by itself
                    await session.request("release", attempt=attempt)
            raise _no_capacity(wanted, tables, offers)
        left = [number for number in left if number not in chosen]
        claims = [tables[number].take(sessions[number], attempt) for number in chosen]
        answers = await asyncio.gather(*claims, return_exceptions=True)
        for position, held in zip(chosen, answers, strict=True):
            if isinstance(held, TargetError) and not isinstance(held, Unreachable):
                offers[position] = held  # it refuses, as one with a full disk does: others are tried
            elif isinstance(held, BaseException):
                raise held
            elif held:
                taken.append(sessions[position])
    return taken


def _refuse_gpus(name: str, offer: Offer | TargetError) -> Offer | TargetError:
    if isinstance(offer, Offer) and not offer.bare:
        return TargetError(f"{name} may have GPUs that the queue has not heard of; cancel the job and submit it again")
    return offer


async def _collect(
    tables: Sequence[SlotTable], futures: Sequence[asyncio.Future[Offer | TargetError]], wanted: int
) -> list[Offer | TargetError]:
    """Offers of all machines. After a while, those that are late are waited for only until the others are enough."""
    until, waiting = time.monotonic() + _PATIENCE_S, set(futures)
    while waiting:
        left_s = until - time.monotonic()
        how = asyncio.ALL_COMPLETED if left_s > 0 else asyncio.FIRST_COMPLETED
        _, waiting = await asyncio.wait(waiting, timeout=left_s if left_s > 0 else None, return_when=how)
        if sum(_is_open(table, future) for table, future in zip(tables, futures, strict=True)) >= wanted:
            break
    late = Unreachable("it has not answered yet")
    return [future.result() if future.done() else late for future in futures]


def _is_open(table: SlotTable, future: asyncio.Future[Offer | TargetError]) -> bool:
    offer = future.result() if future.done() else None
    return isinstance(offer, Offer) and (offer.held or table.free > 0)


def _no_capacity(wanted: int, tables: Sequence[SlotTable], offers: Sequence[Offer | TargetError]) -> TargetError:
    """Why a job waits: busy machines cost nothing but time, machines that cannot be asked are named."""
    silent = [str(offer) for offer in offers if isinstance(offer, TargetError)]
    answered = len(offers) - len(silent)
    pairs = zip(tables, offers, strict=True)
    free = sum(1 for table, offer in pairs if isinstance(offer, Offer) and offer.free > 0 and table.free > 0)
    text = f"ssh: waiting for {wanted} free {'machine' if wanted == 1 else 'machines'}: "
    if not answered:
        text += f"none of the {len(offers)} in the hosts file answers: {silent[0] if silent else 'it lists none'}"
    else:
        text += f"{free} of {answered} are free"
        text += f"; {len(silent)} cannot be asked: {silent[0]}" if silent else ""
    return Unreachable(text) if not answered else NoCapacity(text)
