"""Machines that take no jobs: drained by a person, or not able to say which GPUs they have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from trainmaster.queueing.state import Kind, Machine
from trainmaster.store import tables as t
from trainmaster.store.capacity.devices import DeviceRow
from trainmaster.store.database import Database

_M = t.machines.c


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """Why a machine takes no jobs."""

    place: str
    machine: str
    unknown: str | None  # why nobody knows which GPUs it has
    drained: str | None  # the reason
    drained_by: str | None
    drained_at: datetime | None


def list_machines(db: Database, *, place: str | None = None) -> list[MachineRow]:
    """Machines that take no jobs."""
    query = select(t.machines).order_by(_M.place, _M.machine)
    query = query.where(_M.place == place) if place is not None else query
    return [MachineRow(**row) for row in db.mappings(query)]


def find_kinds(devices: Iterable[DeviceRow], closed: Iterable[MachineRow]) -> frozenset[Kind]:
    """Kinds of devices that a place gives out. One that never said which GPUs it has may have some."""
    kinds: set[Kind] = {row.kind for row in devices}
    return frozenset(kinds | {"gpu"} if any(row.unknown for row in closed) else kinds)


def to_machines(
    rows: Iterable[DeviceRow], closed: Iterable[MachineRow], suspects: Collection[str] = ()
) -> tuple[Machine, ...]:
    """Machines of one place for the queue. `suspects`: those that jobs get last."""
    names: dict[str, list[DeviceRow]] = {}
    for row in rows:
        names.setdefault(row.machine, []).append(row)
    why = {row.machine: row for row in closed}
    return tuple(
        Machine(
            name=name,
            gpus=tuple(row.device for row in names.get(name, ()) if row.kind == "gpu"),
            slots=tuple(row.device for row in names.get(name, ()) if row.kind == "slot"),
            used={row.device: row.used for row in names.get(name, ()) if row.used is not None and row.attempt is None},
            closed=explain(why[name]) if name in why else "",
            suspect=name in suspects,
            unknown=name in why and why[name].unknown is not None,
        )
        for name in dict.fromkeys([*names, *why])
    )


def explain(row: MachineRow, *, words: bool = False) -> str:
    """Why a machine takes no jobs. The reason of a drain is the operator's own text and may name a customer or another
    project: it is left out unless `words` asks for it, on behalf of a caller who sees the whole server."""
    if row.drained is not None:
        since = f"drained since {row.drained_at:%Y-%m-%d %H:%M} UTC" if row.drained_at is not None else "drained"
        return f"{since}: {row.drained}" if words else since
    return f"its GPUs are not known: {row.unknown}"


def record_unknown(conn: Connection, place: str, unknown: Mapping[str, str]) -> None:
    """Keep which machines of a place never said what GPUs they have, and why; all others of it have said."""
    rows = {row.machine: row.unknown for row in conn.execute(select(t.machines).where(_M.place == place))}
    for machine, why in unknown.items():
        if machine not in rows:
            conn.execute(insert(t.machines).values(place=place, machine=machine, unknown=why))
        elif rows[machine] != why:
            conn.execute(update(t.machines).where(_here(place, machine)).values(unknown=why))
    for machine, why_before in rows.items():
        if why_before is not None and machine not in unknown:
            conn.execute(update(t.machines).where(_here(place, machine)).values(unknown=None))
    _tidy(conn, place)


def drain(conn: Connection, place: str, machine: str, *, reason: str, by: str, at: datetime) -> None:
    """Nothing new starts on the machine from now on. Drained again, it has the new reason."""
    values = {"drained": reason, "drained_by": by, "drained_at": at}
    if not conn.execute(update(t.machines).where(_here(place, machine)).values(values)).rowcount:
        conn.execute(insert(t.machines).values(place=place, machine=machine, **values))


def readmit(conn: Connection, place: str, machine: str) -> bool:
    """The machine takes jobs again; False where it was not drained."""
    drained = _here(place, machine) & _M.drained.is_not(None)
    values = {"drained": None, "drained_by": None, "drained_at": None}
    found = conn.execute(update(t.machines).where(drained).values(values)).rowcount == 1
    _tidy(conn, place)
    return found


def rename_place(conn: Connection, before: str, after: str) -> None:
    """Give the machines of a place its new key. One that is drained stays so."""
    rows = {row.machine: row for row in conn.execute(select(t.machines).where(_M.place == after))}
    for row in conn.execute(select(t.machines).where(_M.place == before)).all():
        if row.machine not in rows:
            conn.execute(update(t.machines).where(_here(before, row.machine)).values(place=after))
        elif row.drained is not None and rows[row.machine].drained is None:
            drain(conn, after, row.machine, reason=row.drained, by=row.drained_by, at=row.drained_at)
    conn.execute(delete(t.machines).where(_M.place == before))


def is_drained(conn: Connection, place: str, machine: str) -> bool:
    return conn.execute(select(_M.machine).where(_here(place, machine), _M.drained.is_not(None))).first() is not None


def _here(place: str, machine: str) -> ColumnElement[bool]:
    return (_M.place == place) & (_M.machine == machine)


def _tidy(conn: Connection, place: str) -> None:
    """A machine that takes jobs again has no row."""
    conn.execute(delete(t.machines).where(_M.place == place, _M.unknown.is_(None), _M.drained.is_(None)))
