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
from collections.abc import Sequence
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


class Desk:
    """The slots of one machine, for all jobs of this process. Kept as long as its session, which it must not hold."""

    def __init__(self) -> None:
        self.free = 0  # as of the last answer, without those that jobs here are taking
        self._taking = 0
        self._waiting: dict[str, asyncio.Future[Offer | TargetError]] = {}
        self._asking: asyncio.Task[None] | None = None

    def ask(self, session: Session, attempt: str) -> asyncio.Future[Offer | TargetError]:
        """The offer to an attempt, or why there is none. Who gives up waiting does not end it for the others."""
        future = self._waiting.setdefault(attempt, asyncio.get_running_loop().create_future())
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all(session), name=f"ssh {session.host.name}: offers")
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

    async def _ask_all(self, session: Session) -> None:
        while self._waiting:
            asked, self._waiting = self._waiting, {}
            try:
                found = await self._offers(session, list(asked))
            except TargetError as wrong:
                found = dict.fromkeys(asked, wrong)
            except BaseException:
                for future in (*asked.values(), *self._waiting.values()):
                    future.cancel()
                self._waiting = {}
                raise
            for attempt, future in asked.items():
                if not future.done():
                    future.set_result(found[attempt])

    async def _offers(self, session: Session, attempts: list[str]) -> dict[str, Offer | TargetError]:
        reply = await session.ask("offer", attempts=attempts, slots=session.host.slots)
        free, held, knows = reply.number("free"), reply.result.get("held"), reply.result.get("knows")
        if not isinstance(held, list) or not isinstance(knows, list):
            raise malformed(f"{session.host.name}: an offer without its lists")
        self.free = free - self._taking
        return {one: Offer(free=free, held=one in held, knows=one in knows) for one in attempts}


_DESKS: weakref.WeakKeyDictionary[Session, Desk] = weakref.WeakKeyDictionary()


async def claim(session: Session, attempt: str) -> bool:
    """Take a slot of a machine, or find it taken already."""
    return (await session.ask("claim", attempt=attempt, slots=session.host.slots)).flag("held")


async def reserve(sessions: Sequence[Session], attempt: str, wanted: int) -> list[Session]:
    """One slot on each of as many machines as wanted: first where it has one, then where its job was before."""
    desks = [_DESKS.setdefault(one, Desk()) for one in sessions]
    asked = [desk.ask(one, attempt) for desk, one in zip(desks, sessions, strict=True)]
    offers = await _collect(desks, asked, wanted)
    order = [
        (not offer.held, not offer.knows, position)
        for position, offer in enumerate(offers)
        if isinstance(offer, Offer) and (offer.held or offer.free > 0)
    ]
    left = [position for *_, position in sorted(order)]
    taken: list[Session] = []
    while len(taken) < wanted:
        chosen = [one for one in left if _is_open(desks[one], asked[one])][: wanted - len(taken)]
        if len(taken) + len(chosen) < wanted:  # a part of them helps nobody, and would keep another job waiting
            pairs = zip(sessions, offers, strict=True)
            before = [one for one, offer in pairs if isinstance(offer, Offer) and offer.held]
            for one in dict.fromkeys([*taken, *before]):  # also those of an earlier try that was cut off
                with contextlib.suppress(TargetError):  # a slot that is not used lapses by itself
                    await one.ask("release", attempt=attempt)
            raise _no_capacity(wanted, desks, offers)
        left = [one for one in left if one not in chosen]
        claims = [desks[one].take(sessions[one], attempt) for one in chosen]
        answers = await asyncio.gather(*claims, return_exceptions=True)
        for position, held in zip(chosen, answers, strict=True):
            if isinstance(held, TargetError) and not isinstance(held, Unreachable):
                offers[position] = held  # it refuses, as one with a full disk does: others are tried
            elif isinstance(held, BaseException):
                raise held
            elif held:
                taken.append(sessions[position])
    return taken


async def _collect(
    desks: Sequence[Desk], asked: Sequence[asyncio.Future[Offer | TargetError]], wanted: int
) -> list[Offer | TargetError]:
    """Offers of all machines. After a while, those that are late are waited for only until the others are enough."""
    until, waiting = time.monotonic() + _PATIENCE_S, set(asked)
    while waiting:
        left_s = until - time.monotonic()
        how = asyncio.ALL_COMPLETED if left_s > 0 else asyncio.FIRST_COMPLETED
        _, waiting = await asyncio.wait(waiting, timeout=left_s if left_s > 0 else None, return_when=how)
        if sum(_is_open(desk, future) for desk, future in zip(desks, asked, strict=True)) >= wanted:
            break
    late = Unreachable("it has not answered yet")
    return [future.result() if future.done() else late for future in asked]


def _is_open(desk: Desk, future: asyncio.Future[Offer | TargetError]) -> bool:
    offer = future.result() if future.done() else None
    return isinstance(offer, Offer) and (offer.held or desk.free > 0)


def _no_capacity(wanted: int, desks: Sequence[Desk], offers: Sequence[Offer | TargetError]) -> TargetError:
    """Why a job waits: busy machines cost nothing but time, machines that cannot be asked are named."""
    silent = [str(found) for found in offers if isinstance(found, TargetError)]
    answered = len(offers) - len(silent)
    pairs = zip(desks, offers, strict=True)
    free = sum(1 for desk, found in pairs if isinstance(found, Offer) and found.free > 0 and desk.free > 0)
    text = f"ssh: waiting for {wanted} free machines: {free} of {answered} are free"
    if silent:
        text += f"; {len(silent)} cannot be asked: {silent[0]}"
    return Unreachable(text) if not answered else NoCapacity(text)
