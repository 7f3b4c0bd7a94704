"""Devices that our own queue gives out: what machines have, who holds what, and what each project may have.

A device is booked in the transaction that writes the intent of an attempt, and taken back in the one that notes its
release. Booking takes a lock that all servers share: of two that choose the same device one finds it taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, delete, func, insert, select, update

from trainmaster.queueing.state import Assigned, Device, Kind, Share
from trainmaster.store import tables as t
from trainmaster.store.columns import fetch_at_once, slices
from trainmaster.store.database import Database

_D = t.devices.c
_LOCK = 0x7472_6D71  # advisory lock of PostgreSQL for bookings, of all servers of a database


class DeviceRow(NamedTuple):
    """A device, and who holds it. A tuple: a thousand are read at every tick, and by every page that shows them."""

    place: str
    device: str
    machine: str
    kind: Kind
    model: str
    used: str | None
    seen_at: datetime
    attempt: str | None
    since: datetime | None


_ALL = select(*(_D[name] for name in DeviceRow._fields))


class DeviceTaken(Exception):
    """A device that was to be booked is held by another attempt, or its machine is drained. Nothing is written."""


def record(
    conn: Connection,
    place: str,
    kind: Kind,
    listed: Sequence[Device],
    *,
    at: datetime,
    silent: Mapping[str, str] | None = None,
) -> None:
    """Keep what a place has of a kind now. A booked device that is no longer listed stays until it is returned; those
    of a machine that does not answer stay, and are not given out."""
    _lock(conn)
    rows = {row.device: row for row in _list(conn, _ALL.where(_D.place == place, _D.kind == kind))}
    wholes = {device.id: device.parent or device.id for device in listed}
    holders: dict[str, set[str]] = {}  # GPU → attempts that hold it, or a slice of it
    for held, attempt in [(row.device, row.attempt) for row in rows.values() if row.attempt is not None]:
        holders.setdefault(wholes.get(held, held), set()).add(attempt)
    new, same = [], []
    for device in listed:
        stranger = device.used
        if stranger is not None and device.attempts and set(device.attempts) <= holders.get(wholes[device.id], set()):
            stranger = None  # they are the jobs that hold it
        row = rows.pop(device.id, None)
        if row is None:
            new.append({
                "place": place, "device": device.id, "machine": device.machine, "kind": kind, "model": device.model,
                "used": stranger, "seen_at": at,
            })  # fmt: skip
        elif (row.used, row.machine) == (stranger, device.machine):
            same.append(device.id)
        else:
            here = (_D.place == place) & (_D.device == device.id)
            # Of one that is held, too: when it is given back it is not free before it was seen to be.
            conn.execute(update(t.devices).where(here).values(used=stranger, machine=device.machine, seen_at=at))
    if new:
        conn.execute(insert(t.devices), new)
    for some in slices(same):  # a thousand GPUs are listed every two seconds
        seen = (_D.place == place) & _D.device.in_(some)
        conn.execute(update(t.devices).where(seen).values(seen_at=at))
    for name, row in rows.items():
        here = (_D.place == place) & (_D.device == name)
        if silent is not None and row.machine in silent:
            conn.execute(update(t.devices).where(here).values(used=silent[row.machine]))
        elif row.attempt is None:
            conn.execute(delete(t.devices).where(here, _D.attempt.is_(None)))
        else:
            conn.execute(update(t.devices).where(here).values(used="it is no longer listed"))


def record_fault(conn: Connection, place: str, fault: str) -> None:
    """Note why the devices of a place cannot be asked for: nothing is started there until they can, nor on those that
    are held now and given back before."""
    conn.execute(update(t.devices).where(_D.place == place).values(used=fault))


def book(conn: Connection, place: str, attempt: str, devices: Assigned, *, at: datetime) -> None:
    """Give devices to an attempt. DeviceTaken where another attempt has one, in this place or under another name."""
    _lock(conn)
    names = [name for some in devices.values() for name in some]
    held = select(_D.device).where(_D.device.in_(names), _D.attempt.is_not(None), _D.kind == "gpu").limit(1)
    if (taken := conn.execute(held).scalar_one_or_none()) is not None:
        raise DeviceTaken(taken)
    drained = t.machines.c.machine.in_(list(devices)) & t.machines.c.drained.is_not(None)
    here = select(t.machines.c.machine).where(t.machines.c.place == place, drained).limit(1)
    if (closed := conn.execute(here).scalar_one_or_none()) is not None:
        raise DeviceTaken(f"{closed} is drained")
    free = (_D.place == place) & _D.device.in_(names) & _D.attempt.is_(None) & _D.used.is_(None)
    if conn.execute(update(t.devices).where(free).values(attempt=attempt, since=at)).rowcount != len(names):
        raise DeviceTaken(", ".join(names))


def give_back(conn: Connection, attempt: str) -> None:
    """Nothing of the attempt is left: its devices are free."""
    conn.execute(update(t.devices).where(_D.attempt == attempt).values(attempt=None, since=None))


def list_devices(db: Database, *, place: str | None = None) -> list[DeviceRow]:
    """Every device, by machine."""
    query = _ALL.where(_D.place == place) if place is not None else _ALL
    with db.read() as conn:
        rows = _list(conn, query)
    return sorted(rows, key=lambda row: (row.place, row.machine, row.kind, len(row.device), row.device))


def list_shares(db: Database) -> Mapping[str, Share]:
    """What each project may have, where something is stated."""
    return {row.project: Share(weight=row.weight, quota=row.quota) for row in db.rows(select(t.shares))}


def count_held(conn: Connection) -> dict[str, int]:
    """By project: the devices that its jobs hold now."""
    query = (
        select(t.jobs.c.project, func.count())
        .select_from(t.devices)
        .join(t.attempts, t.attempts.c.id == _D.attempt)
        .join(t.jobs, t.jobs.c.id == t.attempts.c.job_id)
        .group_by(t.jobs.c.project)
    )
    return {row[0]: int(row[1]) for row in conn.execute(query)}


def set_share(conn: Connection, project: str, *, weight: float = 1.0, quota: int | None = None) -> None:
    """State what a project may have; the defaults take back what was stated."""
    conn.execute(delete(t.shares).where(t.shares.c.project == project))
    if Share(weight=weight, quota=quota) != Share():
        conn.execute(insert(t.shares).values(project=project, weight=weight, quota=quota))


def _lock(conn: Connection) -> None:
    """Wait for other bookings until the transaction ends. SQLite has one writer at a time anyway."""
    if conn.dialect.name == "postgresql":
        conn.execute(select(func.pg_advisory_xact_lock(_LOCK)))


def _list(conn: Connection, query: Select[Any]) -> list[DeviceRow]:
    return [DeviceRow._make(row) for row in fetch_at_once(conn, query)]
