"""Machines of every target that was used: their devices, who has them and since when, and their last verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trainmaster import targets
from trainmaster.api.queue import DeviceLine, MachineLine, MachinesPage, MachineUse
from trainmaster.core.results import Verdict
from trainmaster.pages.cost import Price, list_prices
from trainmaster.pages.node_map import newer, newest_entries
from trainmaster.pages.parts import node_standing
from trainmaster.pages.parts.node_journal import moment_of, read_history, read_out, read_targets
from trainmaster.pages.parts.target_names import without_account
from trainmaster.store import nodes
from trainmaster.store.capacity import devices, queue
from trainmaster.store.capacity import machines as store
from trainmaster.store.capacity.devices import DeviceRow
from trainmaster.store.capacity.queue import Holder
from trainmaster.store.database import Database
from trainmaster.store.nodes import NodeCheck

if TYPE_CHECKING:
    from trainmaster.cluster.health.history import Entry, Measured

_NO_PRICE = Price(None, None)


@dataclass(frozen=True, slots=True)
class Holding:
    """Devices of one machine that one job has, or that cannot be had for one reason."""

    job_id: str | None
    job: str | None
    project: str | None
    used: str | None
    since: datetime | None  # of the first
    devices: list[str]


def fold(machine: MachineLine) -> tuple[int, list[Holding]]:
    """How many devices of a machine are free, and who has the others: a machine of eight GPUs is one line."""
    free, held = 0, dict[tuple[str | None, str | None], Holding]()
    for line in machine.devices:
        if line.job_id is None and line.used is None:
            free += 1
            continue
        key = line.job_id, line.used
        if key not in held:
            held[key] = Holding(line.job_id, line.job, line.project, line.used, line.since, [])
        held[key].devices.append(line.device)
    return free, list(held.values())


def read(
    db: Database, *, home: Path | None = None, project: str | None = None, now: datetime | None = None
) -> MachinesPage:
    """All machines, with a home also those that its operator has checked, and the operator's reasons of drains: it is
    given for callers who see the whole server. The newest verdict counts.

    Jobs of other projects are not named to one that asks for its own.
    """
    history = read_history(home) if home is not None else ()
    with db.read() as conn:
        rows = devices.list_devices(db)
        closed = {(row.place, row.machine): row for row in store.list_machines(db)}
        holders = queue.list_names(db, [row.attempt for row in rows if row.attempt is not None])
        checks = nodes.list_newest_checks(conn, project=project)
        standing = node_standing.read(conn, history, project=project)
        attempts = [holder for holder in nodes.list_placed(conn, project=project) if holder.open]
    journal, out = newest_entries(history), read_out(home) if home is not None else {}
    checked = {
        name: _checked(checks.get(name), journal.get(name, ()), standing.get(name, [])) for name in (*checks, *journal)
    }
    shown = {row.job_id for row in holders.values() if project in (None, row.project)}
    prices = list_prices(db, shown | {holder.job_id for holder in attempts})
    uses = _list_uses(attempts, prices)
    machines: dict[tuple[str, str], list[DeviceRow]] = {key: [] for key in closed}
    for row in rows:
        machines.setdefault((row.place, row.machine), []).append(row)
    owned = {
        attempt: _owner(attempt, holders.get(attempt or ""), project, prices)
        for attempt in {row.attempt for row in rows}
    }
    lines = [
        MachineLine(
            target=_target(place, project),
            machine=machine,
            devices=tuple(_device(row, owned[row.attempt]) for row in some),
            seen_at=max((row.seen_at for row in some), default=None),
            verdict=checked[machine][0] if machine in checked else None,
            checked_at=checked[machine][1] if machine in checked else None,
            closed=store.explain(closed[place, machine], words=home is not None)
            if (place, machine) in closed
            else None,
            drained_at=closed[place, machine].drained_at if (place, machine) in closed else None,
            drained_by=closed[place, machine].drained_by if (place, machine) in closed and project is None else None,
            used_by=uses.get(machine, ()) if not some else (),
        )
        for (place, machine), some in sorted(machines.items())
    ]
    # Nodes of which our queue gives out no device are known from their jobs and the checks of those.
    words = read_targets(home) if home is not None else {}
    words |= {name: check.target for name, check in checks.items()}
    words |= {node: holder.target for holder in attempts for node in holder.nodes}
    for name in sorted({*checked, *words} - {machine for _, machine in machines}):
        verdict, at = checked.get(name, (None, None))
        lines.append(
            MachineLine(
                target=_target(without_account(words[name]), project) if name in words else "",
                machine=name,
                devices=(),
                seen_at=at,
                verdict=verdict,
                checked_at=at,
                drained_at=moment_of(out[name]) if name in out else None,
                used_by=uses.get(name, ()),
            )
        )
    return MachinesPage(machines=tuple(lines), made_at=now or datetime.now(UTC))


def _list_uses(attempts: Sequence[nodes.Holder], prices: Mapping[str, Price]) -> dict[str, tuple[MachineUse, ...]]:
    uses: dict[str, tuple[MachineUse, ...]] = {}
    for holder in attempts:
        by, cents = prices.get(holder.job_id, _NO_PRICE)
        use = MachineUse(
            job_id=holder.job_id, job=holder.name, project=holder.project, since=holder.since,
            submitted_by=by, price_cents_per_hour=cents,
        )  # fmt: skip
        for node in holder.nodes:
            uses[node] = (*uses.get(node, ()), use)
    return uses


def _checked(
    check: NodeCheck | None, entries: tuple[Entry, ...], standing: list[Measured]
) -> tuple[Verdict | None, datetime | None]:
    newest, used = newer(check, entries)
    verdict, _ = node_standing.judge(newest, standing)
    if used:
        return verdict, moment_of(used[0].at)
    return verdict, (check.at or check.placed_at) if check is not None else None


def _target(place: str, project: str | None) -> str:
    """The target of a place. The path of a hosts file is for those who see every project."""
    word = targets.spell_place(place)
    return word if project is None else word.partition(":")[0]


class _Owner(NamedTuple):
    """What a device says of the job that has it: once for all of an attempt's, a thousand of a page."""

    job_id: str | None
    job: str | None
    project: str | None
    used: str | None
    price: Price


_NOBODY = _Owner(None, None, None, None, _NO_PRICE)


def _owner(attempt: str | None, holder: Holder | None, project: str | None, prices: Mapping[str, Price]) -> _Owner:
    if attempt is None:
        return _NOBODY
    if holder is None:
        return _NOBODY._replace(used=f"attempt {attempt}, of which no row is left")
    if project not in (None, holder.project):
        return _NOBODY._replace(used="a job of another project")
    return _Owner(holder.job_id, holder.name, holder.project, None, prices.get(holder.job_id, _NO_PRICE))


def _device(row: DeviceRow, owner: _Owner) -> DeviceLine:
    return DeviceLine(
        device=row.device,
        kind=row.kind,
        model=row.model,
        job_id=owner.job_id,
        job=owner.job,
        project=owner.project,
        since=row.since,
        used=row.used if row.attempt is None else owner.used,
        submitted_by=owner.price.submitted_by,
        price_cents_per_hour=owner.price.cents_per_hour,
    )
