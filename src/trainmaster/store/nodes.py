"""Rented instances, and nodes: their newest check results, their history, and which attempts hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Text, cast, func, select

from trainmaster.api.iterations import CheckRecord
from trainmaster.api.nodes import Instance, Node
from trainmaster.core.results import Verdict
from trainmaster.core.states import Stage
from trainmaster.store import tables as t
from trainmaster.store.columns import fetch_at_once, slices
from trainmaster.store.database import Database

IDENTITY = "gpu_model"  # the check that states serial number, UUID and bus of each GPU
_BEGUN = tuple(stage.value for stage in Stage if stage is not Stage.QUEUED)
_WORST = (Verdict.FAIL, Verdict.ERROR, Verdict.WARN, Verdict.PASS, Verdict.SKIP)


def list_instances(
    db: Database,
    *,
    job_id: str | None = None,
    state: str | None = None,
    project: str | None = None,
    limit: int = 50,
    offset: int = 0,
) -> list[Instance]:
    """Rented machines, newest first: of a job, in a state, of a project, or all."""
    query = select(t.instances).order_by(t.instances.c.id.desc()).limit(limit).offset(offset)
    if state is not None:
        query = query.where(t.instances.c.state == state)
    wanted = [t.jobs.c.id == job_id] if job_id is not None else []
    wanted += [t.jobs.c.project == project] if project is not None else []
    if wanted:
        query = query.join(t.attempts, t.attempts.c.id == t.instances.c.attempt)
        query = query.join(t.jobs, t.jobs.c.id == t.attempts.c.job_id).where(*wanted)
    return [Instance(**row) for row in db.mappings(query)]


def list_returned(conn: Connection) -> set[str]:
    """Attempts whose rented machines are all gone."""
    i = t.instances.c
    gone = select(i.attempt).group_by(i.attempt).having(func.count() == func.count(i.gone_at))
    return set(conn.execute(gone).scalars())


def list_checks(db: Database, job_id: str) -> list[CheckRecord]:
    """The checks of all attempts of a job, in the order of the attempts."""
    query = (
        select(t.check_results)
        .join(t.attempts, t.attempts.c.id == t.check_results.c.attempt)
        .where(t.attempts.c.job_id == job_id)
        .order_by(t.attempts.c.number, t.check_results.c.node, t.check_results.c.id)
    )
    return [CheckRecord(**row) for row in db.mappings(query)]


def list_ended_checks(db: Database, attempt: str, streams: Sequence[str]) -> set[str]:
    """Those of the nodes' streams that say that the checks before the start are over."""
    e = t.events.c
    of_these = (e.attempt == attempt, e.stream.in_(streams), e.phase == "PREFLIGHT", e.event == "end")
    return set(db.scalars(select(e.stream).where(*of_these).distinct()))


def list_checked(db: Database, attempt: str) -> tuple[str, ...]:
    """The nodes on which checks of an attempt ran, by name."""
    c = t.check_results.c
    return tuple(db.scalars(select(c.node).where(c.attempt == attempt).distinct().order_by(c.node)))


def list_nodes(db: Database, *, project: str | None = None, limit: int = 50, offset: int = 0) -> list[Node]:
    """Every node that was ever checked, by name, with what its newest checks said."""
    c, j = t.check_results.c, t.jobs.c
    # The row that was written last names the attempt that looked last.
    newest = select(c.node, func.max(c.id).label("id")).where(*_of_project(project)).group_by(c.node)
    newest_page = newest.order_by(c.node).limit(limit).offset(offset).subquery()
    last = t.check_results.alias("last")
    where = last.join(newest_page, last.c.id == newest_page.c.id)
    rows = where.join(t.check_results, (c.attempt == last.c.attempt) & (c.node == last.c.node))
    rows = rows.join(t.attempts, t.attempts.c.id == c.attempt).join(t.jobs, j.id == t.attempts.c.job_id)
    query = select(c.node, c.attempt, j.id, j.project, c.verdict, c.at).select_from(rows).order_by(c.node, c.id)
    nodes: dict[str, list[tuple[str, str, str, str, datetime | None]]] = {}
    for node, *rest in db.rows(query):
        nodes.setdefault(node, []).append(tuple(rest))
    return [_node(name, checks) for name, checks in nodes.items()]


def _node(name: str, checks: list[tuple[str, str, str, str, datetime | None]]) -> Node:
    attempt, job_id, project = checks[0][:3]
    counts = dict(sorted(Counter(verdict for _, _, _, verdict, _ in checks).items()))
    at = max((when for *_, when in checks if when is not None), default=None)
    worst = worst_of(counts)
    return Node(node=name, attempt=attempt, job_id=job_id, project=project, at=at, verdict=worst, checks=counts)


def worst_of(verdicts: Iterable[str]) -> Verdict:
    """The worst of these; error where none is known."""
    said = set(verdicts)
    return next((word for word in _WORST if word.value in said), Verdict.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """The newest pre-flight of a node: whose it was, and the verdicts of its checks."""

    node: str
    attempt: str
    placed_at: datetime  # when the attempt was placed, by the clock of the control plane
    job_id: str
    project: str
    target: str
    at: datetime | None
    verdicts: tuple[str, ...]

    @property
    def worst(self) -> Verdict:
        return worst_of(self.verdicts)


def list_newest_checks(
    conn: Connection, *, project: str | None = None, nodes: Collection[str] | None = None
) -> dict[str, NodeCheck]:
    """By node: its newest pre-flight, of a project's jobs or of all."""
    c, a, j = t.check_results.c, t.attempts.c, t.jobs.c
    query = select(c.node, func.max(c.id)).where(*_of_project(project)).group_by(c.node)
    if nodes is not None:
        query = query.where(c.node.in_(nodes))
    newest = [row[1] for row in conn.execute(query)]
    heads: dict[tuple[str, str], Any] = {}
    for ids in slices(newest):
        head = select(c.node, c.attempt, a.created_at, j.id, j.project, j.target).where(c.id.in_(ids))
        head = head.join(t.attempts, a.id == c.attempt).join(t.jobs, j.id == a.job_id)
        heads |= {(row[0], row[1]): row for row in conn.execute(head)}
    verdicts: dict[tuple[str, str], list[tuple[str, datetime | None]]] = {}
    for ids in slices(sorted({attempt for _, attempt in heads})):
        for node, attempt, verdict, at in conn.execute(
            select(c.node, c.attempt, c.verdict, c.at).where(c.attempt.in_(ids))
        ):
            if (node, attempt) in heads:
                verdicts.setdefault((node, attempt), []).append((verdict, at))
    return {
        node: NodeCheck(
            node=node,
            attempt=attempt,
            placed_at=row[2],
            job_id=row[3],
            project=row[4],
            target=row[5],
            at=max((at for _, at in verdicts[node, attempt] if at is not None), default=None),
            verdicts=tuple(verdict for verdict, _ in verdicts[node, attempt]),
        )
        for (node, attempt), row in heads.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCheck:
    """The newest measurement of one check on one node."""

    node: str
    check: str
    verdict: Verdict
    at: datetime
    findings: Any


def list_measured(
    conn: Connection, *, project: str | None = None, besides: Iterable[tuple[str, str]] = ()
) -> dict[tuple[str, str], MeasuredCheck]:
    """By node and check the newest measurement, of checks that once failed or warned there and of those `besides`.

    A check that could not be run, or that does not apply, was not measured.
    """
    c, a, own = t.check_results.c, t.attempts.c, _of_project(project)
    bad = (Verdict.FAIL.value, Verdict.WARN.value)
    once = select(c.node, c.check, func.max(c.id)).where(t.BAD, *own).group_by(c.node, c.check)
    pairs = {**dict.fromkeys(besides, 0), **{(row[0], row[1]): row[2] for row in conn.execute(once)}}
    newest: list[int] = []
    for nodes in slices(sorted({node for node, _ in pairs})):
        wanted = {pair: first for pair, first in pairs.items() if pair[0] in set(nodes)}
        query = select(c.node, c.check, func.max(c.id)).where(c.node.in_(nodes), c.id >= min(wanted.values()), *own)
        query = query.where(c.check.in_({check for _, check in wanted}), c.verdict.in_((*bad, Verdict.PASS.value)))
        newest += [row[2] for row in conn.execute(query.group_by(c.node, c.check)) if (row[0], row[1]) in wanted]
    found: dict[tuple[str, str], MeasuredCheck] = {}
    for ids in slices(newest):
        rows = select(c.node, c.check, c.verdict, c.at, a.created_at, c.findings).where(c.id.in_(ids))
        for node, check, verdict, at, placed_at, findings in conn.execute(rows.join(t.attempts, a.id == c.attempt)):
            found[node, check] = MeasuredCheck(
                node=node, check=check, verdict=Verdict(verdict), at=at or placed_at, findings=findings
            )
    return found


def list_node_checks(conn: Connection, node: str, *, project: str | None = None, limit: int = 50) -> list[str]:
    """Attempts whose pre-flight looked at a node, newest first."""
    c = t.check_results.c
    query = select(c.attempt).where(c.node == node, *_of_project(project)).group_by(c.attempt)
    return list(conn.execute(query.order_by(func.max(c.id).desc()).limit(limit)).scalars())


def list_failed_nodes(conn: Connection, *, limit: int) -> list[str]:
    """Nodes of which a pre-flight ever failed, by name."""
    c = t.check_results.c
    failed = select(c.node).where(t.BAD, c.verdict == Verdict.FAIL.value).distinct()
    return list(conn.execute(failed.order_by(c.node).limit(limit)).scalars())


def find_target(conn: Connection, attempt: str) -> str | None:
    """Where the job of an attempt runs."""
    query = select(t.jobs.c.target).join(t.attempts, t.attempts.c.job_id == t.jobs.c.id)
    return conn.execute(query.where(t.attempts.c.id == attempt)).scalar_one_or_none()


def list_gpu_checks(conn: Connection, word: str, *, project: str | None = None, limit: int = 50) -> list[str]:
    """Attempts whose pre-flight named a GPU by this serial number, UUID or bus, newest first."""
    c = t.check_results.c
    # One check states who a GPU is: of the others the findings need not be read. The caller looks closer.
    named = cast(c.findings, Text).contains(word, autoescape=True)
    query = select(c.attempt).where(t.TELLING, c.check == IDENTITY, named, *_of_project(project))
    # Not grouped there: SQLite would then walk the index of attempts, and read every result.
    rows = conn.execute(query.order_by(c.id.desc())).scalars()
    return list(dict.fromkeys(rows))[:limit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """All checks of one attempt on one node, with their findings."""

    node: str
    attempt: str
    job_id: str
    at: datetime  # of the last check; where the node states none, when the attempt was placed
    rows: tuple[tuple[str, Any], ...]  # name of the check, its findings


def list_findings(conn: Connection, attempts: Collection[str]) -> list[Checked]:
    """What the pre-flights of these attempts found, by attempt and node."""
    c, a = t.check_results.c, t.attempts.c
    groups: dict[tuple[str, str], list[Any]] = {}
    for ids in slices(sorted(attempts)):
        query = select(c.attempt, c.node, c.check, c.findings, c.at, a.created_at).where(c.attempt.in_(ids))
        for row in conn.execute(query.join(t.attempts, a.id == c.attempt).order_by(c.id)):
            groups.setdefault((row[0], row[1]), []).append(row)
    return [
        Checked(
            node=node,
            attempt=attempt,
            job_id=attempt.rpartition(".")[0],
            at=max((row[4] for row in rows if row[4] is not None), default=rows[0][5]),
            rows=tuple((row[2], row[3]) for row in rows),
        )
        for (attempt, node), rows in groups.items()
    ]


def list_planned(conn: Connection, attempt: str) -> tuple[str, ...]:
    """Checks that the pre-flights of an attempt announced, of all its nodes."""
    e = t.events.c
    query = select(e.data).where(e.attempt == attempt, e.phase == "PREFLIGHT", e.event == "start")
    planned = [data.get("planned") for data in conn.execute(query).scalars() if isinstance(data, Mapping)]
    return tuple(dict.fromkeys(str(name) for names in planned if isinstance(names, list) for name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """An attempt and the nodes it was placed on, as far as its target names them."""

    attempt: str
    job_id: str
    name: str
    project: str
    target: str
    submitted_by: str | None
    open: bool
    nodes: tuple[str, ...]
    since: datetime  # when the attempt was placed


def list_placed(conn: Connection, *, project: str | None = None) -> list[Holder]:
    """The present attempt of every job that has begun and is not final, oldest first.

    Queued jobs are not looked at, ten thousand or more: what one of them tried before is released.
    """
    query = _holders(project).where(t.jobs.c.stage.is_not(None), t.jobs.c.stage.in_(_BEGUN))
    return _read_holders(conn, sorted(fetch_at_once(conn, query), key=lambda row: (row[9], row[0])))


def count_others(conn: Connection, project: str | None) -> Counter[str]:
    """By node: jobs there of other projects than this one; none where the caller sees all."""
    if project is None:
        return Counter()
    others = (holder for holder in list_placed(conn) if holder.open and holder.project != project)
    return Counter(node for holder in others for node in holder.nodes)


def list_holders(conn: Connection, *, project: str | None = None, newest: int = 0) -> list[Holder]:
    """The present attempt of every open job, and of the `newest` other jobs."""
    j, query = t.jobs.c, _holders(project)
    rows = list(conn.execute(query.where(j.stage.is_not(None))))
    if newest:
        rows += conn.execute(query.where(j.stage.is_(None)).order_by(j.created_at.desc(), j.id).limit(newest))
    return _read_holders(conn, rows)


def _holders(project: str | None) -> Select[Any]:
    a, j = t.attempts.c, t.jobs.c
    columns = (a.id, j.id, j.name, j.project, j.target, j.submitted_by, j.stage, a.handle, a.released_at, a.created_at)
    query = select(*columns).join(t.attempts, (a.job_id == j.id) & (a.number == j.attempts))
    return query.where(j.project == project) if project is not None else query


def _read_holders(conn: Connection, rows: Sequence[Sequence[Any]]) -> list[Holder]:
    c = t.check_results.c
    # A target that does not choose machines names none: there the checks say where the attempt is.
    silent = [row[0] for row in rows if row[6] is not None and not nodes_of(row[7])]
    checked: dict[str, set[str]] = {}
    for ids in slices(silent):
        for attempt, node in conn.execute(select(c.attempt, c.node).where(c.attempt.in_(ids)).distinct()):
            checked.setdefault(attempt, set()).add(node)
    return [
        Holder(
            attempt=row[0], job_id=row[1], name=row[2], project=row[3], target=row[4], submitted_by=row[5],
            open=row[6] is not None and row[8] is None,
            nodes=nodes_of(row[7]) or tuple(sorted(checked.get(row[0], ()))),
            since=row[9],
        )
        for row in rows
    ]  # fmt: skip


def nodes_of(handle: Any) -> tuple[str, ...]:
    """The machines that a handle names; none where its target does not choose them."""
    nodes = handle.get("nodes") if isinstance(handle, Mapping) else None
    return tuple(str(name) for name in nodes) if isinstance(nodes, list) else ()


def _of_project(project: str | None) -> list[ColumnElement[bool]]:
    if project is None:
        return []
    a, j = t.attempts.c, t.jobs.c
    own = select(a.id).join(t.jobs, j.id == a.job_id).where(j.project == project)
    return [t.check_results.c.attempt.in_(own)]
