"""Where the time of one job went, along it: bins with their money, stages of attempts, and a strip for each node."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from trainmaster.api.timeline import AttemptParts, BinCell, NodeMark, NodeStrip, Stage, StagePart, Timeline, Tone
from trainmaster.core.money.cost import Span
from trainmaster.core.money.goodput.bins import Bin
from trainmaster.core.money.goodput.history import to_us
from trainmaster.core.results import Verdict
from trainmaster.pages.goodput import Booked, moment_of
from trainmaster.pages.job_goodput import book_job
from trainmaster.store.database import Connection, Database
from trainmaster.store.page_rows.node_marks import AttemptNodes, Watched, list_attempt_nodes

CELLS = 600  # more than a screen has columns for
NODES = 32
_PARTS = 200  # of one attempt
_MARKS = 50  # of one node, the newest
_US = 1_000_000
_HOUR_US = 3_600_000_000
_STAGES: Mapping[Bin, Stage] = {
    Bin.QUEUED: "queued",
    Bin.PROVISIONING: "provisioning",
    Bin.CHECKING: "checking",
    Bin.STARTING: "starting",
    Bin.LOADING: "starting",
    Bin.COMPILING: "starting",
    Bin.STALLED: "stalled",
    Bin.IDLE: "idle",
    Bin.UNKNOWN: "unknown",
}  # fmt: skip  (the others are work)
_TONES: Mapping[Verdict, Tone] = {Verdict.FAIL: "bad", Verdict.ERROR: "bad", Verdict.WARN: "warn"}


def read(db: Database, job_id: str, *, now: datetime | None = None) -> Timeline | None:
    """The timeline of a job; None if there is no such job."""
    now = now or datetime.now(UTC)
    with db.read() as conn:
        booked = book_job(db, job_id, now=now)
        return build(conn, booked, now=now) if booked is not None else None


def build(conn: Connection, booked: Booked, *, now: datetime) -> Timeline:
    """The timeline from a ledger."""
    ledger = booked.ledger
    charges = booked.job.charges if booked.job.priced else None
    nodes, more = _strips(list_attempt_nodes(conn, booked.job.id), start=ledger.start)
    return Timeline(
        id=booked.job.id,
        start=moment_of(ledger.start),
        end=moment_of(ledger.end),
        cells=tuple(_cells(ledger.segments, ledger.start, ledger.end, charges, to_us(now))),
        attempts=tuple(_stages(ledger.segments, ledger.start)),
        nodes=nodes,
        more_nodes=more,
        whole=True,
    )


def empty(job_id: str, *, start: datetime, now: datetime) -> Timeline:
    """What is answered until a long run was read."""
    return Timeline(id=job_id, start=start, end=now, cells=(), attempts=(), nodes=(), more_nodes=0, whole=False)


@dataclass(slots=True)
class _Cell:
    start: int
    end: int
    attempt: int = 0
    us: dict[Bin, int] = field(default_factory=dict)
    cents: float = 0.0


def _cells(
    segments: Sequence[tuple[int, int, Bin, int]],
    start: int,
    end: int,
    charges: Mapping[int, Sequence[Span]] | None,
    now: int,
) -> Iterator[BinCell]:
    """The segments themselves, or equal parts of the whole where they are too many."""
    rates = {number: [_rate(span, now) for span in spans] for number, spans in (charges or {}).items()}
    width = max(1, math.ceil((end - start) / CELLS)) if len(segments) > CELLS else 0
    cell = _Cell(start, start)
    for low, high, bin_, number in segments:
        at = low
        while at < high:
            if at >= cell.end:
                if cell.us:
                    yield _shape(cell, start, priced=charges is not None)
                first = start + (at - start) // width * width if width else at
                cell = _Cell(first, first + width if width else high)
            until = min(high, cell.end)
            cell.us[bin_] = cell.us.get(bin_, 0) + until - at
            cell.attempt = number or cell.attempt
            paid = (max(0, min(until, b) - max(at, a)) * cents for a, b, cents in rates.get(number, ()))
            cell.cents += sum(paid)
            at = until
    if cell.us:
        yield _shape(cell, start, priced=charges is not None)


def _rate(span: Span, now: int) -> tuple[int, int, float]:
    """From, to, cents a microsecond."""
    end = to_us(span.end) if span.end is not None else now
    return to_us(span.start), end, (span.cents_per_hour or 0.0) / _HOUR_US


def _shape(cell: _Cell, start: int, *, priced: bool) -> BinCell:
    whole = sum(cell.us.values())
    return BinCell(
        start_s=(cell.start - start) / _US,
        end_s=(cell.start - start + whole) / _US,  # the last one may not be full
        attempt=cell.attempt,
        shares={bin_.value: round(us / whole, 4) for bin_, us in cell.us.items()},
        cents=round(cell.cents, 4) if priced else None,
    )


def _stages(segments: Iterable[tuple[int, int, Bin, int]], start: int) -> Iterator[AttemptParts]:
    """By attempt: its stages. Of very many, short ones join the one before: a strip is some hundred pixels wide."""
    by_attempt: dict[int, list[tuple[int, int, Stage]]] = {}
    for low, high, bin_, number in segments:
        parts = by_attempt.setdefault(number, [])
        _append(parts, low, high, _STAGES.get(bin_, "working"))
    for number, parts in sorted(by_attempt.items()):
        least = (parts[-1][1] - parts[0][0]) // _PARTS if len(parts) > _PARTS else 0
        kept: list[tuple[int, int, Stage]] = []
        for low, high, stage in parts:
            short = bool(kept) and high - low < least
            _append(kept, low, high, kept[-1][2] if short else stage)
        yield AttemptParts(
            attempt=number,
            parts=tuple(
                StagePart(start_s=(low - start) / _US, end_s=(high - start) / _US, stage=stage)
                for low, high, stage in kept
            ),
        )


def _append(parts: list[tuple[int, int, Stage]], low: int, high: int, stage: Stage) -> None:
    if parts and parts[-1][1] == low and parts[-1][2] == stage:
        parts[-1] = (parts[-1][0], high, stage)
    else:
        parts.append((low, high, stage))


def _strips(attempts: Iterable[AttemptNodes], *, start: int) -> tuple[tuple[NodeStrip, ...], int]:
    """A strip for each node, those of which something bad was said first; and how many are left out."""
    numbers: dict[str, list[int]] = {}
    marks: dict[str, list[NodeMark]] = {}
    for attempt in attempts:
        for node in attempt.nodes:
            numbers.setdefault(node, []).append(attempt.number)
        for check in attempt.checked:
            if check.at is not None:
                tone = _TONES.get(check.verdict, "good")
                text = f"pre-flight: {check.verdict.value}" + (f", {check.reason}" if check.reason else "")
                at_s = (to_us(check.at) - start) / _US
                marks.setdefault(check.node, []).append(NodeMark(at_s=at_s, kind="check", tone=tone, text=text))
        for event in attempt.watched:
            for node, mark in _said(event, attempt.nodes, start=start):
                marks.setdefault(node, []).append(mark)
    rank = {
        node: min((("bad", "warn", "good").index(mark.tone) for mark in marks.get(node, ())), default=2)
        for node in numbers
    }
    names = sorted(numbers, key=lambda node: (rank[node], node))
    strips = tuple(
        NodeStrip(node=node, attempts=tuple(numbers[node]), marks=tuple(marks.get(node, ())[-_MARKS:]))
        for node in names[:NODES]
    )
    return strips, len(names) - len(strips)


def _said(event: Watched, nodes: Sequence[str], *, start: int) -> Iterator[tuple[str, NodeMark]]:
    """The nodes that an event names by number, each with its mark."""
    if event.at is None:
        return
    at_s = (to_us(event.at) - start) / _US
    named = [event.data.get("node")] if event.event == "straggler" else event.data.get("nodes")
    for place in named if isinstance(named, list) else ():
        if not isinstance(place, int) or not 0 <= place < len(nodes):
            continue
        if event.event == "straggler":
            score, rank = event.data.get("score"), event.data.get("rank")
            share = f", {score:.0%} of a step behind" if isinstance(score, float) and 0 <= score < 100 else ""
            who = f"straggler: rank {rank}" if isinstance(rank, int) else "straggler"
            yield nodes[place], NodeMark(at_s=at_s, kind="straggler", tone="warn", text=f"{who}{share}")
        else:
            yield nodes[place], NodeMark(at_s=at_s, kind="hang", tone="bad", text="hang: its ranks are missing")
