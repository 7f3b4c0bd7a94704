"""What runs or is rented and belongs to no live job: find it, and end it.

Two sources, because each may be wrong: what a target says lives there (no database is asked), and what the rows say
was never given back. Of another home or another database nothing is ended: it is somebody else's, and only shown.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trainmaster import targets
from trainmaster.core.errors import TargetError, UsageError
from trainmaster.store import attempts, instances
from trainmaster.store.capacity import queue
from trainmaster.store.database import Database
from trainmaster.store.heads import find_head
from trainmaster.targets import Handle, Lists, Owned, Rents, Target

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Something that no live job owns."""

    attempt: str
    target: str
    what: str
    why: str
    ours: bool  # of this home: may be ended
    handle: Handle


async def find(
    db: Database | None,
    home: Path,
    words: Sequence[str],
    *,
    load: Callable[[str], Target] = targets.load,
    any_home: bool = False,
) -> list[Leftover]:
    """Everything at these targets, and in the rows, that no live job owns.

    Without a database ownership is unknown: everything that the targets run for this home is listed as ours, with
    `any_home` everything that any home folder started. Machines that Trainmaster did not rent are never ours.
    """
    leftovers: dict[str, Leftover] = {}
    for word in words:
        target = load(word)
        for owned in await target.list_owned() if isinstance(target, Lists) else ():
            left = _judge(db, home, word, owned, any_home=any_home)
            if left is not None:
                leftovers[left.attempt] = left
    for held in attempts.list_held(db) if db is not None else ():
        known = leftovers.get(held.attempt)
        what, why = f"{known.what}; {held.what}" if known else held.what, f"its job is {held.status}"
        leftovers[held.attempt] = Leftover(
            attempt=held.attempt, target=held.target, handle=held.handle, ours=True, what=what, why=why
        )
    return sorted(leftovers.values(), key=lambda left: (not left.ours, left.attempt))


async def sweep(db: Database, home: Path, *, load: Callable[[str], Target] = targets.load) -> list[Leftover]:
    """End what machines that were lost and are back still run of attempts that are over; what was ended."""
    ended = []
    for word in await asyncio.to_thread(queue.list_used_words, db):
        if (stated := targets.find_traits(word)) is not None and stated.here:
            continue  # this machine cannot be lost without us
        try:
            target = load(word)
            if isinstance(target, Rents):
                continue  # compared at every listing (rented_sweep.py)
            for owned in await target.list_owned(partial=True) if isinstance(target, Lists) else ():
                left = await asyncio.to_thread(_judge, db, home, word, owned)
                if left is not None and left.ours:
                    await target.release(left.handle)
                    ended.append(left)
        except (TargetError, UsageError) as error:
            log.info("%s could not be swept: %s", word, error)
    return ended


async def end(db: Database | None, left: Leftover, *, load: Callable[[str], Target] = targets.load) -> None:
    """End it by force, and note that it was given back. May be repeated."""
    assert left.ours, "what is not ours is not ended"
    await load(left.target).release(left.handle)
    if db is not None:
        machines = instances.list_of_attempt(db, left.attempt)
        with db.write() as conn:
            attempts.mark_released(conn, left.attempt, at=datetime.now(UTC))
            for row in machines:
                instances.mark_gone(conn, row.nonce, at=datetime.now(UTC), why="reaped")


def _judge(db: Database | None, home: Path, word: str, owned: Owned, *, any_home: bool = False) -> Leftover | None:
    """What is wrong with it, or None where a live job owns it."""
    if owned.foreign:
        why = "not rented by trainmaster; left alone"
        return Leftover(attempt=owned.attempt, target=word, what=owned.what, why=why, ours=False, handle=owned.handle)
    job_id, _, number = owned.attempt.rpartition(".")
    job = find_head(db, job_id) if db is not None else None
    # A target of this machine says in which folder an attempt lies; of another home it is not ours to end.
    handle, folder = owned.handle, owned.handle.get("folder")
    if folder is not None and (traits := targets.find_traits(word)) is not None and traits.here:
        # It is the word of a process, which may name any folder, and the lock is made there.
        folder = os.path.realpath(str(folder))
        if job is not None:
            folder = str(home.absolute() / "jobs" / job_id / "attempts" / number)
        handle = {**handle, "folder": folder}
    roots = (home, home.resolve())
    here = job is not None or (folder is not None and any(Path(str(folder)).is_relative_to(root) for root in roots))
    here = here or (any_home and db is None) or owned.handle.get("home") == targets.home_mark(home)
    if here and owned.handle.get("run") is not None:  # of a check or measurement: no job of a database
        if targets.is_running(home, owned.handle):
            return None
        why = "its run is gone"
    elif db is None:
        why = "no database to say who owns it" if here else "of another home; left alone"
    elif job is None:
        why = "no job of this database" if here else "of another home; left alone"
    elif job.final:
        why = f"its job is {job.status}"
    elif number.isdecimal() and int(number) < job.attempts:
        why = f"its job is at attempt {job.attempts}"
    else:
        return None
    return Leftover(attempt=owned.attempt, target=word, what=owned.what, why=why, ours=here, handle=handle)
