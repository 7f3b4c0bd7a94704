"""What checks said of one node and its GPUs, or of one GPU on every node it was in, by its serial number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.api.codec import fill
from trainmaster.api.nodes import HistoryLine, NodeChange, NodeHistory
from trainmaster.core.results import Verdict
from trainmaster.pages.node_map import add_money, list_uses
from trainmaster.pages.parts import node_drains, node_health, node_standing
from trainmaster.pages.parts.node_journal import moment_of, read_history, read_out, read_targets
from trainmaster.pages.parts.node_standing import ORDER
from trainmaster.pages.parts.target_names import of_project
from trainmaster.store import audit
from trainmaster.store import nodes as store
from trainmaster.store.capacity import machines
from trainmaster.store.database import Database

if TYPE_CHECKING:
    from trainmaster.cluster.health.history import Entry

_MOST = 50  # runs of each source


def read(
    db: Database,
    *,
    node: str = "",
    gpu: str | None = None,
    home: Path | None = None,
    project: str | None = None,
    now: datetime | None = None,
) -> NodeHistory:
    """The history of a node, or of a GPU by its key, serial number or UUID; of a project's jobs, or of all."""
    word = gpu if gpu is not None else node
    history = read_history(home) if home is not None else ()
    with db.read() as conn:
        standing = node_standing.read(conn, history, project=project).get(node, []) if gpu is None else []
        if gpu is not None:
            attempts = store.list_gpu_checks(conn, _value(gpu), project=project, limit=_MOST)
        else:
            attempts = store.list_node_checks(conn, node, project=project, limit=_MOST)
        checked = store.list_findings(conn, attempts)
        target = store.find_target(conn, attempts[0]) if gpu is None and attempts else None
        holders = store.list_holders(conn, project=project) if gpu is None else []
        others = store.count_others(conn, project)[node] if gpu is None else 0
    if gpu is None and target is None and home is not None:
        target = read_targets(home).get(node)
    uses = list_uses(holders)
    words = {node: {holder.target for holder in holders if holder.open and node in holder.nodes}}
    words[node] |= {target} if target is not None else set()
    lines = [line for part in checked for line in _lines_of(part, node=node, gpu=gpu)]
    lines += [_line(entry) for entry in history if _is_asked(entry, node=node, gpu=gpu)][-_MOST * 20 :]
    # Worst last within a run, so that the newest first order shows the worst of a run before the rest.
    oldest = datetime.min.replace(tzinfo=UTC)
    lines.sort(key=lambda line: (line.at or oldest, line.verdict is Verdict.FAIL), reverse=True)
    lines = _fold(lines) if gpu is None else lines
    runs = {(line.job_id, line.at) for line in lines}
    failed = {(line.job_id, line.at) for line in lines if line.verdict is Verdict.FAIL}
    newest = [line.verdict for line in lines if (line.job_id, line.at) == (lines[0].job_id, lines[0].at)]
    verdict, decides = node_standing.judge(min(newest, key=ORDER.index, default=None), standing)
    asks = home is not None and gpu is None
    out = read_out(home).get(node) if home is not None and asks else None
    known = asks or (gpu is None and (len(lines) > 0 or node in uses))
    rows = [row for row in machines.list_machines(db) if known and row.machine == node and row.drained_at]
    here = node_drains.match(rows, words).get(node)
    own = here or next(iter(rows if asks else ()), None)  # the operator reads of a namesake too
    return NodeHistory(
        word=word,
        gpu=gpu is not None,
        lines=tuple(lines),
        runs=len(runs),
        failed=len(failed),
        target=of_project(target) if target is not None and project is not None else target,
        used_by=tuple(add_money(db, uses.get(node, ()), now=now or datetime.now(UTC)).values()),
        out_since=own.drained_at.isoformat() if own is not None and own.drained_at is not None else out,
        out_reason=node_drains.explain(own, elsewhere=here is None and bool(words[node])) if own and asks else None,
        verdict=verdict,
        standing=decides,
        used_by_others=others,
        changes=_list_changes(db, node) if asks else (),
        made_at=now or datetime.now(UTC),
    )


def merge(page: NodeHistory) -> list[HistoryLine | NodeChange]:
    """Checks and changes in one order, newest first."""
    oldest = datetime.min.replace(tzinfo=UTC)
    rows: list[HistoryLine | NodeChange] = [*page.changes, *page.lines]
    return sorted(rows, key=lambda row: row.at or oldest, reverse=True)


def _list_changes(db: Database, node: str) -> tuple[NodeChange, ...]:
    """Drains and give-backs as the audit trail has them."""
    rows = audit.list_audit(db, subject=f"node:{node}", limit=_MOST)
    return tuple(
        NodeChange(
            at=row.at, who=row.who, drained=row.action == "node.drain", reason=str((row.detail or {}).get("reason", ""))
        )
        for row in rows
        if row.action in ("node.drain", "node.readmit") and not (row.detail or {}).get("fault")
    )  # fmt: skip


def _lines_of(checked: store.Checked, *, node: str, gpu: str | None) -> list[HistoryLine]:
    from trainmaster.cluster.health import history

    entries = history.list_node(node_health.build(checked))
    return [
        _line(entry, at=checked.at, job_id=checked.job_id) for entry in entries if _is_asked(entry, node=node, gpu=gpu)
    ]


def _fold(lines: list[HistoryLine]) -> list[HistoryLine]:
    """The newest run whole; of each older one what is bad, and the rest in one line."""
    kept: list[HistoryLine] = []
    fine: dict[tuple[object, object], list[HistoryLine]] = {}
    newest = (lines[0].job_id, lines[0].at) if lines else None
    for line in lines:
        run = (line.job_id, line.at)
        if run == newest or line.verdict not in (Verdict.PASS, Verdict.SKIP):
            kept.append(line)
            continue
        if run not in fine:
            kept.append(line)
        fine.setdefault(run, []).append(line)
    return [_folded(line, fine.get((line.job_id, line.at), ())) for line in kept]


def _folded(line: HistoryLine, others: Sequence[HistoryLine]) -> HistoryLine:
    gpus = sum(other.device is not None for other in others)
    if line not in others or gpus < 2:
        return line
    return replace(line, key=f"node:{line.node}", device=None, reason=f"{gpus} GPUs pass")


def _line(entry: Entry, *, at: datetime | None = None, job_id: str | None = None) -> HistoryLine:
    return fill(HistoryLine, entry, at=at or moment_of(entry.at), job_id=job_id)


def _is_asked(entry: Entry, *, node: str, gpu: str | None) -> bool:
    return entry.node == node if gpu is None else entry.key == gpu or entry.key.partition(":")[2] == gpu


def _value(gpu: str) -> str:
    """What identifies the GPU in its findings: the serial number of serial:…, the bus of bus:NODE/…"""
    kind, _, value = gpu.partition(":")
    if kind not in ("serial", "uuid", "bus", "place"):
        return gpu
    return value.rpartition("/")[2] if kind in ("bus", "place") else value
