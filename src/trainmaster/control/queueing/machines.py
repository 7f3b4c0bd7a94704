"""Drain a machine of our own queue, and readmit it: nothing new starts there meanwhile, and what runs goes on."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from datetime import UTC, datetime

from trainmaster import targets
from trainmaster.control import submit as submitting
from trainmaster.control.queueing import places
from trainmaster.core.errors import TrainmasterError, UsageError
from trainmaster.store import audit, known_targets
from trainmaster.store.capacity import devices, machines, queue
from trainmaster.store.database import Database
from trainmaster.targets import ListsDevices, Target

MOST = 300  # characters of a reason

Load = Callable[[str], Target]


def drain(
    db: Database, name: str, *, reason: str, on: str | None = None, by: str = submitting.LOCAL,
    load: Load = targets.load, checked_on: str | None = None,
) -> None:  # fmt: skip
    """The queue starts nothing new on a machine; `reason` is shown to callers who see the whole server. `checked_on`:
    the target through which the operator checked it, also one that no job has used."""
    place, words = find_place(db, name, on=on, load=load, checked_on=checked_on), " ".join(reason.split())
    if not words or len(words) > MOST:
        raise UsageError(f"--reason: write why {name} is drained, in at most {MOST} characters")
    with db.write() as conn:
        machines.drain(conn, place, name, reason=words, by=by, at=datetime.now(UTC))
        detail = {"through": targets.spell_place(place), "reason": words}
        audit.record(conn, who=by, action="node.drain", subject=f"node:{name}", detail=detail)


def readmit(
    db: Database, name: str, *, on: str | None = None, by: str = submitting.LOCAL, load: Load = targets.load
) -> None:
    """A drained machine takes jobs again."""
    places.respell(db)
    drained = [row.place for row in machines.list_machines(db) if row.machine == name and row.drained is not None]
    place = drained[0] if on is None and len(drained) == 1 else find_place(db, name, on=on, load=load)
    with db.write() as conn:
        # All of them: of a relative path of before nobody knows from where it was seen.
        if not [each for each in drained if places.is_same(each, place) and machines.readmit(conn, each, name)]:
            raise UsageError(f"{name} is not drained")
        detail = {"through": targets.spell_place(place)}
        audit.record(conn, who=by, action="node.readmit", subject=f"node:{name}", detail=detail)


def find_place(
    db: Database, name: str, *, on: str | None = None, load: Load = targets.load, checked_on: str | None = None
) -> str:
    """The place of a machine: of the target that is named, else the only one that is known to have it."""
    if on is not None:
        word = _find_word(db, on)
        target = load(word)
        if not isinstance(target, ListsDevices):
            stated = targets.traits(word)
            words = stated.alternative("remedy") if not stated.drains else "use `remedy`"
            raise UsageError(f"--on {on}: the server's queue gives out no machines there; {words}")
        if name not in (known := target.list_machines()):
            raise UsageError(f"--on {on}: no machine {name!r:.80} there; it has {', '.join(known[:10])}")
        return targets.find_place(word)
    found = list_places(db, name, load=load, checked_on=checked_on)
    if len(found) > 1:
        words = ", ".join(map(targets.spell_place, found))
        raise UsageError(f"{name} is a machine of several targets ({words}); say which with --on")
    if not found:
        raise UsageError(
            f"no machine {name!r:.80} of the queue is known: no job, `target add` or check has named its target; name "
            "it, as --on ssh:hosts.yaml"
        )
    return found[0]


def list_places(db: Database, name: str, *, load: Load = targets.load, checked_on: str | None = None) -> list[str]:
    """Places that have a machine of this name: by their rows, and by the targets that jobs used, an admin named or the
    operator's check went through."""
    places.respell(db)
    found = {row.place for row in devices.list_devices(db) if row.machine == name}
    found |= {row.place for row in machines.list_machines(db) if row.machine == name}
    here = [word for word in targets.names() if targets.traits(word).here] if name == socket.gethostname() else []
    with db.read() as conn:
        words = {*queue.list_used_words(db), *(known.word for known in known_targets.list_targets(conn))}
    words |= {checked_on} if checked_on else set()
    for word in words:
        with contextlib.suppress(TrainmasterError):  # its file is gone: it names no machine any more
            target = load(word)
            if isinstance(target, ListsDevices) and name in target.list_machines():
                found.add(targets.find_place(word))
    return sorted({*map(places.spell, found), *map(targets.find_place, here)})


def _find_word(db: Database, on: str) -> str:
    """The target behind a name that `target add` made known; every other word stands for itself."""
    with db.read() as conn:
        known = known_targets.find_target(conn, on)
    return known.word if known is not None else on
