"""A target that does what its script says, and remembers what was asked of it. For what no real place does on call."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable

from trainmaster.core.errors import UsageError
from trainmaster.core.plan import EVENTS_FILE, ExitRecord
from trainmaster.core.states import Reason, TargetState
from trainmaster.store import leases
from trainmaster.store.database import Database
from trainmaster.targets import FileSize, Handle, Placement, Poll, Submission

EVENTS = b'{"phase":"PREFLIGHT","event":"end","data":{"overall":"PASS"}}\n{"phase":"STEP","event":"metrics"}\n'


def ended(report: TargetState, reason: Reason | None = None) -> Poll:
    if report is TargetState.LOST:
        return Poll(state=report, note="gone")
    record = ExitRecord(
        attempt="x", ok=reason is None, ended_at="2025-03-01T12:00:00+00:00", reason=reason, message="m"
    )
    return Poll(state=report, exit=record)


def at_once(_reason: Reason, _attempt: int) -> float:
    """The rest between two attempts, for tests."""
    return 0.0


def take_over(db: Database) -> str:
    """The token of a new reconciler that holds every open job; all others are dead to it."""
    token = str(uuid.uuid4())
    with db.write() as conn:
        leases.take(conn, token, owner="a test", dead=list(leases.others(db, token)))
    return token


RUNNING = Poll(state=TargetState.RUNNING)
GOOD = ended(TargetState.SUCCEEDED)


class Scripted:
    """Attempts run until told: `polls` are given one after the other, the last for ever."""

    def __init__(self, *polls: Poll) -> None:
        self.polls = list(polls) or [RUNNING]
        self.calls: list[tuple[str, str]] = []  # (what, attempt), in the order they came
        self.alive: set[str] = set()  # attempts that hold something
        self.started: list[str] = []  # attempts that were really begun; a repeated submit finds them
        self.forgetful = False  # submit begins again what it has begun: a broken target
        self.events = EVENTS
        self.outputs: dict[str, bytes] = {}  # by name, as `read` takes it
        self.before: dict[str, Callable[[str], Awaitable[None]]] = {}  # what happens first in a call
        self._given: Counter[str] = Counter()

    def load(self, word: str) -> Scripted:
        if word != "scripted":
            raise UsageError(f"target: {word!r} is not one of scripted")
        return self

    @property
    def files(self) -> dict[str, bytes]:
        return {EVENTS_FILE: self.events, **self.outputs}

    def made(self, what: str) -> int:
        return sum(call == what for call, _ in self.calls)

    def plan(self, placement: Placement) -> Submission:
        return Submission(handle={"attempt": placement.attempt}, files={}, commands=())

    async def submit(self, submission: Submission) -> Handle:
        attempt = await self._asked("submit", submission.handle)
        if attempt not in self.started or self.forgetful:
            self.started.append(attempt)
            self.alive.add(attempt)
        return {**submission.handle, "submitted": True}

    async def poll(self, handle: Handle) -> Poll:
        attempt = await self._asked("poll", handle)
        poll = self.polls[min(self._given[attempt], len(self.polls) - 1)]
        self._given[attempt] += 1
        return poll

    async def read(self, handle: Handle, stream: str, *, offset: int, limit: int) -> bytes:
        attempt = await self._asked("read", handle)
        content = self.events if stream == EVENTS_FILE else self.outputs.get(stream, b"")
        return content[offset : offset + limit] if attempt in self.started else b""

    async def list_files(self, handle: Handle) -> list[FileSize]:
        if await self._asked("list", handle) not in self.started:
            return []
        return [FileSize(name=name, size_bytes=len(content)) for name, content in sorted(self.files.items())]

    async def cancel(self, handle: Handle, *, reason: str) -> None:
        await self._asked("cancel", handle)
        self.polls = [ended(TargetState.FAILED, Reason(reason.partition(":")[0]))]

    async def release(self, handle: Handle) -> None:
        self.alive.discard(await self._asked("release", handle))

    async def _asked(self, what: str, handle: Handle) -> str:
        attempt = str(handle["attempt"])
        self.calls.append((what, attempt))
        await asyncio.sleep(0)
        if what in self.before:
            await self.before[what](attempt)
        return attempt
