"""What was said of the nodes of a job: on which each attempt was, their pre-flights, stragglers and hangs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, select

from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.results import Verdict
from trainmaster.store import tables as t
from trainmaster.store.nodes import nodes_of, worst_of

_FINE = (Verdict.PASS.value, Verdict.SKIP.value)
_MOST_WATCHED = 500  # events of one attempt, the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """The pre-flight of one node."""

    node: str
    at: datetime | None
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A WATCH event: a straggler, or a hang."""

    event: str
    at: datetime | None
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptNodes:
    """One attempt: its nodes in the order of their numbers, as far as they are known, and what was said of them."""

    number: int
    nodes: tuple[str, ...]
    checked: tuple[NodeVerdict, ...]
    watched: tuple[Watched, ...]


def list_attempt_nodes(conn: Connection, job_id: str) -> list[AttemptNodes]:
    """The attempts of a job, in order."""
    a, e = t.attempts.c, t.events.c
    query = select(e.event, e.ts, e.data).where(
        e.stream == EVENTS_FILE, e.phase == "WATCH", e.event.in_(("straggler", "hang"))
    )
    listed = []
    for attempt, number, handle in conn.execute(
        select(a.id, a.number, a.handle).where(a.job_id == job_id).order_by(a.number)
    ).all():
        checked = _list_verdicts(conn, attempt)
        newest = query.where(e.attempt == attempt).order_by(e.offset.desc()).limit(_MOST_WATCHED)
        watched = [
            Watched(event=event, at=at, data=data if isinstance(data, Mapping) else {})
            for event, at, data in conn.execute(newest)
        ]
        listed.append(
            AttemptNodes(
                number=number,
                # A target that does not choose machines names none: there the checks say where the attempt is.
                nodes=nodes_of(handle) or tuple(sorted(verdict.node for verdict in checked)),
                checked=tuple(checked),
                watched=tuple(reversed(watched)),
            )
        )
    return listed


def _list_verdicts(conn: Connection, attempt: str) -> list[NodeVerdict]:
    c = t.check_results.c
    times: dict[str, list[datetime]] = {}
    verdicts: dict[str, list[str]] = {}
    for node, at, verdict in conn.execute(select(c.node, c.at, c.verdict).where(c.attempt == attempt).order_by(c.id)):
        verdicts.setdefault(node, []).append(verdict)
        times.setdefault(node, []).extend([at] if at is not None else [])
    worst = {node: worst_of(words) for node, words in verdicts.items()}
    bad = select(c.node, c.check, c.verdict, c.findings).where(c.attempt == attempt, c.verdict.not_in(_FINE))
    reasons: dict[str, str] = {}
    for node, check, verdict, findings in conn.execute(bad.order_by(c.id)):
        if verdict == worst[node].value:
            reasons.setdefault(node, f"{check}: {_reason(findings)}")
    return [
        NodeVerdict(node=node, at=max(times[node], default=None), verdict=verdict, reason=reasons.get(node, ""))
        for node, verdict in worst.items()
    ]


def _reason(findings: Any) -> str:
    """The reason of the first finding that did not pass."""
    for finding in findings if isinstance(findings, list) else ():
        if isinstance(finding, Mapping) and finding.get("verdict") not in _FINE:
            return str(finding.get("reason") or "")[:200]
    return ""
