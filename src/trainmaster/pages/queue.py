"""The queue: every job that waits, its place, and why, as the last pass of its queue decided."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

from trainmaster import targets
from trainmaster.api.queue import ProjectShare, QueueLine, QueuePage
from trainmaster.core.config.queue import PRIORITIES
from trainmaster.store.capacity import devices, order, queue
from trainmaster.store.capacity.order import Place
from trainmaster.store.capacity.queue import Queued, WaitingRow
from trainmaster.store.database import Database

Page = QueuePage
_BEFORE = 5
_KEPT_S = 30.0  # an order that is older was left by a server that has ended
_NOT_DRIVEN = "no server drives it: start `trainmaster serve`"
_STARTS = "it is about to start"


def read(
    db: Database, *, project: str | None = None, limit: int = 200, offset: int = 0, now: datetime | None = None
) -> QueuePage:
    """Jobs that wait: in our own queues first, then in those of targets; of one project, or all."""
    now = now or datetime.now(UTC)
    with db.read():
        queued = {job.id: job for job in queue.list_queued(db)}
        places = _find_places(db, queued, now)
        own = [job for job in (*places, *(job for job in queued if job not in places)) if _sees(project, queued[job])]
        shown = own[offset : offset + limit]
        rows = queue.list_rows(db, shown)
        left, skip = limit - len(shown), max(0, offset - len(own))
        others, elsewhere = queue.list_pending(db, project=project, limit=left, offset=skip)
        shares = devices.list_shares(db)
    before = _list_before(places, shown, project, queued)
    lines = [_line(rows[job], places.get(job), before.get(job, ())) for job in shown if job in rows]
    lines += [_line(row, None, ()) for row in others]
    stated = (
        ProjectShare(project=name, weight=share.weight, quota=share.quota)
        for name, share in sorted(shares.items())
        if project is None or name == project
    )
    return QueuePage(
        jobs=tuple(lines), total=len(own) + elsewhere, limit=limit, offset=offset, shares=tuple(stated), made_at=now
    )


def _sees(project: str | None, job: Queued) -> bool:
    return project is None or job.project == project


def _find_places(db: Database, queued: Mapping[str, Queued], now: datetime) -> dict[str, Place]:
    """Place of each queued job in our own queues, in order: as the last pass kept it, else decided from the rows."""
    decided, kept = order.list_kept(db, since=now - timedelta(seconds=_KEPT_S))
    places = {job: place for job, place in kept.items() if job in queued}
    words = {job.target for job in queued.values() if job.driven and job.id not in places}
    undecided: dict[str, list[str]] = {}
    for word in words:
        if targets.find_traits(word) is not None and targets.find_place(word) not in decided:
            undecided.setdefault(targets.find_place(word), []).append(word)
    for place, some in undecided.items():
        rows = queue.list_waiting(db, driven=False, words=some)
        rows = [row for row in rows if row.lease_token is not None and row.id not in places]
        alone = socket.gethostname() if targets.traits(some[0]).here else None
        waits = order.decide(db, place, rows, now=now, alone=alone).decisions.waits
        places |= order.to_places(place, waits)
    return places


def _list_before(
    places: Mapping[str, Place], shown: Sequence[str], project: str | None, queued: Mapping[str, Queued]
) -> dict[str, tuple[str, ...]]:
    """Jobs before each of the shown ones in its queue, the nearest first; of other projects left out."""
    wanted, last = set(shown), dict[str, deque[str]]()
    before: dict[str, tuple[str, ...]] = {}
    for job, place in places.items():
        if place.position is None:
            continue
        ahead = last.setdefault(place.place, deque(maxlen=_BEFORE))
        if job in wanted:
            before[job] = tuple(other for other in ahead if _sees(project, queued[other]))
        ahead.appendleft(job)
    return before


def _line(row: WaitingRow, wait: Place | None, before: tuple[str, ...]) -> QueueLine:
    reason = wait.text if wait is not None else row.message or (_STARTS if row.lease_token else _NOT_DRIVEN)
    start_s = wait.start_s if wait is not None else None
    return QueueLine(
        job_id=row.id,
        name=row.name,
        project=row.project,
        target=row.request.target,
        priority=PRIORITIES[row.request.priority],
        nodes=row.request.nodes,
        processes_per_node=row.request.each,
        since=row.since,
        position=wait.position if wait is not None else None,
        reason=reason,
        before=before,
        expected_at=datetime.fromtimestamp(start_s, UTC) if start_s is not None else None,
    )
