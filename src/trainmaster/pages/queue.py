"""The queue: every job that waits, its place, and why, as the last pass of its queue decided."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

from trainmaster import targets
from trainmaster.api.queue import ProjectShare, QueueLine, QueuePage
from trainmaster.core.config.queue import PRIORITIES
from trainmaster.pages.cost import Price, list_prices
from trainmaster.queueing.words import NEAREST, say_before
from trainmaster.store.capacity import after, devices, order, queue
from trainmaster.store.capacity.order import Order
from trainmaster.store.capacity.queue import WaitingRow
from trainmaster.store.database import Database

_KEPT_S = 30.0  # an order that is older was left by a server that has ended
_NOT_DRIVEN = "no server drives it: start `trainmaster serve`"
_STARTS = "it is about to start"


_Place = tuple[Order, int]  # where a job waits: its order, and its line there


def read(
    db: Database, *, project: str | None = None, limit: int = 200, offset: int = 0, now: datetime | None = None
) -> QueuePage:
    """Jobs that wait: in our own queues first, then in those of targets; of one project, or all."""
    now = now or datetime.now(UTC)
    with db.read() as conn:
        ids = queue.list_ids(db, project=project)
        placed, others = _find_places(db, ids, now)
        lines_of = ((each, n) for each, some in placed for n in some)
        places = {each.jobs[n]: (each, n) for each, n in itertools.islice(lines_of, offset, offset + limit)}
        count = sum(len(some) for _, some in placed)
        begin = max(0, offset - count)
        shown = [*places, *others[begin : begin + limit - len(places)]]
        rows = queue.list_rows(db, shown)
        own = count + len(others)
        left, skip = limit - len(shown), max(0, offset - own)
        pending, elsewhere = queue.list_pending(db, project=project, limit=left, offset=skip)
        reasons = after.list_reasons(db, [job for job in shown if job not in places])
        shares = devices.list_shares(db)
        held = devices.count_held(conn) if shares else {}
        prices = list_prices(db, [*rows, *(row.id for row in pending)])
    lines = [_line(rows[job], prices[job], places.get(job), ids, reasons.get(job)) for job in shown if job in rows]
    lines += [_line(row, prices[row.id], None, ids) for row in pending]
    stated = (
        ProjectShare(project=name, weight=share.weight, quota=share.quota, held=held.get(name, 0))
        for name, share in sorted(shares.items())
        if project is None or name == project
    )
    return QueuePage(
        jobs=tuple(lines), total=own + elsewhere, limit=limit, offset=offset, shares=tuple(stated), made_at=now
    )


def describe_before(page: QueuePage) -> dict[str, str]:
    """By job: what is before it, as words."""
    names = {line.job_id: line.name for line in page.jobs}
    return {line.job_id: say_before(line.position, line.before, names) for line in page.jobs}


def count_others(db: Database, *, project: str) -> int:
    """Jobs of other projects that wait: what is before those of one project is not nothing."""
    with db.read():
        own, ids = (queue.list_ids(db, project=which) for which in (project, None))
        (_, pending), (_, every) = (
            queue.list_pending(db, project=which, limit=0, offset=0) for which in (project, None)
        )
    return len(ids) - len(own) + every - pending


def _find_places(db: Database, ids: set[str], now: datetime) -> tuple[list[tuple[Order, list[int]]], list[str]]:
    """Lines of these jobs in our own queues, in order: as the last pass kept it, else decided from the rows.
    Beside it the jobs that have none, oldest first."""
    kept = order.list_kept(db, since=now - timedelta(seconds=_KEPT_S))
    placed = [(each, _find_lines(each, ids)) for each in kept]
    if not (unplaced := ids.difference(*(each.jobs for each in kept))):
        return placed, []
    queued = queue.list_queued(db, ids=unplaced)
    decided, undecided = {each.place for each in kept}, dict[str, list[str]]()
    for word in {job.target for job in queued if job.driven}:
        if targets.find_traits(word) is not None and targets.find_place(word) not in decided:
            undecided.setdefault(targets.find_place(word), []).append(word)
    for place, some in undecided.items():
        rows = [row for row in queue.list_waiting(db, driven=False, words=some) if row.lease_token is not None]
        alone = socket.gethostname() if targets.traits(some[0]).here else None
        found = order.decide(db, place, rows, now=now, alone=alone, may_cost=targets.may_cost)
        made = order.to_order(place, found.decisions.waits)
        placed.append((made, _find_lines(made, unplaced)))
        unplaced = unplaced.difference(made.jobs)
    return placed, [job.id for job in queued if job.id in unplaced]


def _find_lines(kept: Order, ids: set[str]) -> list[int]:
    """Lines of an order whose jobs are among these."""
    # Numbers, which the garbage collector leaves alone: with 10,000 tuples an answer took 0.1 s more at times.
    return list(itertools.compress(range(len(kept.jobs)), map(ids.__contains__, kept.jobs)))


def _list_before(place: _Place, ids: Collection[str]) -> tuple[str, ...]:
    """Jobs before one in its queue, the nearest first; of other projects left out."""
    kept, index = place
    ahead = kept.waits[max(0, index - NEAREST) : index]
    return tuple(job for job, position, *_ in reversed(ahead) if position and job in ids)


def _line(
    row: WaitingRow, price: Price, place: _Place | None, ids: Collection[str], held: str | None = None
) -> QueueLine:
    position, start_s, latest, before = None, None, False, tuple[str, ...]()
    reason = held or row.message or (_STARTS if row.lease_token else _NOT_DRIVEN)
    if place is not None:
        kept, index = place
        _, position, text, start_s = kept.waits[index]
        latest = row.id in kept.latest
        reason, before = kept.texts[text], _list_before(place, ids) if position else ()
    return QueueLine(
        job_id=row.id,
        name=row.name,
        project=row.project,
        target=row.request.target,
        priority=PRIORITIES[row.request.priority],
        nodes=row.request.nodes,
        processes_per_node=row.request.each,
        since=row.since,
        position=position or None,
        reason=reason,
        before=before,
        expected_at=datetime.fromtimestamp(start_s, UTC) if start_s is not None else None,
        expected_latest=latest,
        submitted_by=price.submitted_by,
        price_cents_per_hour=price.cents_per_hour,
    )
