"""Drain a machine of our own queue, and readmit it: nothing new starts there meanwhile, and what runs goes on."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import UTC, datetime

from trainmaster import targets
from trainmaster.control import submit as submitting
from trainmaster.core.errors import UsageError
from trainmaster.store import audit
from trainmaster.store.capacity import devices, machines
from trainmaster.store.database import Database
from trainmaster.targets import ListsDevices, Target

MOST = 300  # characters of a reason

Load = Callable[[str], Target]


def drain(
    db: Database, name: str, *, reason: str, on: str | None = None, by: str = submitting.LOCAL,
    load: Load = targets.load,
) -> None:  # fmt: skip
    """The queue starts nothing new on a machine; `reason` is shown wherever it is asked for."""
    place, words = find_place(db, name, on=on, load=load), " ".join(reason.split())
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
    place = find_place(db, name, on=on, load=load)
    with db.write() as conn:
        if not machines.readmit(conn, place, name):
            raise UsageError(f"{name} is not drained")
        detail = {"through": targets.spell_place(place)}
        audit.record(conn, who=by, action="node.readmit", subject=f"node:{name}", detail=detail)


def find_place(db: Database, name: str, *, on: str | None = None, load: Load = targets.load) -> str:
    """The place of a machine: of the target that is named, else the only one that is known to have it."""
    if on is not None:
        target = load(on)
        if not isinstance(target, ListsDevices):
            words = targets.traits(on).alternative("remedy") if not targets.traits(on).drains else "use `remedy`"
            raise UsageError(f"--on {on}: the server's queue gives out no machines there; {words}")
        if name not in (known := target.list_machines()):
            raise UsageError(f"--on {on}: no machine {name!r:.80} there; it has {', '.join(known[:10])}")
        return targets.find_place(on)
    places = list_places(db, name)
    if len(places) > 1:
        words = ", ".join(map(targets.spell_place, places))
        raise UsageError(f"{name} is a machine of several targets ({words}); say which with --on")
    if not places:
        raise UsageError(f"no machine {name!r:.80} of the queue is known; name its target, as --on ssh:hosts.yaml")
    return places[0]


def list_places(db: Database, name: str) -> list[str]:
    """Places that are known to have a machine of this name."""
    found = {row.place for row in devices.list_devices(db) if row.machine == name}
    found |= {row.place for row in machines.list_machines(db) if row.machine == name}
    here = [word for word in targets.names() if targets.traits(word).here] if name == socket.gethostname() else []
    return sorted(found | set(map(targets.find_place, here)))
