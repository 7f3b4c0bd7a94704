"""Every machine and GPU that rows and the operator's checks know: last verdict, its age, who uses it, what is out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.api.codec import fill
from trainmaster.api.nodes import Gpu, MappedNode, NodeMap, NodeUse
from trainmaster.core.results import Verdict
from trainmaster.pages.cost import list_prices, list_spent
from trainmaster.pages.parts import node_drains, node_health, node_standing
from trainmaster.pages.parts.node_journal import moment_of, read_history, read_out, read_targets
from trainmaster.pages.parts.node_standing import ORDER
from trainmaster.pages.parts.target_names import of_project
from trainmaster.store import nodes as store
from trainmaster.store.capacity import machines
from trainmaster.store.capacity.machines import MachineRow
from trainmaster.store.database import Database
from trainmaster.store.nodes import Checked, Holder, NodeCheck

if TYPE_CHECKING:
    from trainmaster.cluster.health.history import Entry

MOST = 100  # nodes on one page: their findings are read whole
_NEWEST = 500  # ended jobs whose machines are on the map although no check has seen them
_BAD = (Verdict.FAIL, Verdict.ERROR)


def read(
    db: Database,
    *,
    home: Path | None = None,
    project: str | None = None,
    state: str | None = None,
    find: str | None = None,
    limit: int = 60,
    offset: int = 0,
    now: datetime | None = None,
) -> NodeMap:
    """The machines of a project's jobs, or of all; with a home also those that the operator has checked or drained."""
    now, limit = now or datetime.now(UTC), max(1, min(limit, MOST))
    history = read_history(home) if home is not None else ()
    with db.read() as conn:
        standing = node_standing.read(conn, history, project=project)
        checks = store.list_newest_checks(conn, project=project)
        holders = store.list_holders(conn, project=project, newest=_NEWEST)
        others = store.count_others(conn, project)
    journal = newest_entries(history)
    rows, places = machines.list_machines(db), node_drains.list_targets(checks, holders)
    drained = node_drains.match(rows, places)
    # The operator reads of all, with the reason.
    own = {**{row.machine: row for row in rows if row.drained_at}, **drained} if home is not None else {}
    health = read_out(home) if home is not None else {}
    uses = list_uses(holders)
    names = {*checks, *journal, *health, *own, *(node for holder in holders for node in holder.nodes)}
    out = {**health, **{name: _iso(row) for name, row in (own or drained).items()}}
    reasons = {
        name: node_drains.explain(row, elsewhere=name in places and name not in drained) for name, row in own.items()
    }
    newest = {name: newer(checks.get(name), journal.get(name, ())) for name in names}
    judged = {name: node_standing.judge(newest[name][0], standing.get(name, [])) for name in names}
    verdicts = {name: (judged[name][0], newest[name][1]) for name in names}
    fits: Mapping[str, Callable[[str], bool]] = {
        "bad": lambda name: verdicts[name][0] in _BAD,
        "used": lambda name: name in uses or name in others,
        "free": lambda name: not (name in uses or name in others or name in out or verdicts[name][0] in _BAD),
        "out": out.__contains__,
    }
    counts = {"all": len(names), **{word: sum(map(fit, names)) for word, fit in fits.items()}}
    keep = [
        name
        for name in names
        if (state is None or fits[state](name)) and (not find or _matches(find, name, checks.get(name)))
    ]
    keep.sort(key=lambda name: (ORDER.index(verdicts[name][0]), name))
    shown = keep[offset : offset + limit]
    with db.read() as conn:
        attempts = {checks[name].attempt for name in shown if verdicts[name][1] is None and name in checks}
        findings = {(part.node, part.attempt): part for part in store.list_findings(conn, attempts)}
    if project is not None:
        checks = {name: replace(check, target=of_project(check.target)) for name, check in checks.items()}
    known = add_money(db, (use for name in shown for use in uses.get(name, ())), now=now)
    targets = read_targets(home) if home is not None else {}
    targets |= {node: holder.target for holder in reversed(holders) for node in holder.nodes}
    if project is not None:
        targets = {node: of_project(word) for node, word in targets.items()}
    return NodeMap(
        nodes=tuple(
            _node(
                name, verdicts[name][0], checks.get(name), findings, verdicts[name][1],
                used_by=tuple(known.get(use.job_id, use) for use in uses.get(name, ())), target=targets.get(name),
                out_since=out.get(name), out_reason=reasons.get(name),
                standing=judged[name][1], others=others[name],
            )
            for name in shown
        ),
        total=len(keep),
        counts=counts,
        state=state,
        find=find,
        limit=limit,
        offset=offset,
        made_at=now,
    )  # fmt: skip


def list_uses(holders: Iterable[Holder]) -> dict[str, tuple[NodeUse, ...]]:
    """By node: the open jobs that hold it."""
    uses: dict[str, tuple[NodeUse, ...]] = {}
    for holder in holders:
        if not holder.open:
            continue
        use = NodeUse(job_id=holder.job_id, name=holder.name, project=holder.project, submitted_by=holder.submitted_by)
        for node in holder.nodes:
            uses[node] = (*uses.get(node, ()), use)
    return uses


def add_money(db: Database, uses: Iterable[NodeUse], *, now: datetime) -> dict[str, NodeUse]:
    """By job: its use of a node, with its price and its cost so far."""
    by_job = {use.job_id: use for use in uses}
    prices, spent = list_prices(db, by_job), list_spent(db, list(by_job), now=now)
    return {
        job_id: replace(use, price_cents_per_hour=prices[job_id].cents_per_hour, cost_cents=spent[job_id])
        for job_id, use in by_job.items()
        if job_id in prices
    }


def newest_entries(entries: Iterable[Entry]) -> dict[str, tuple[Entry, ...]]:
    """By node: the entries of the operator's newest run that has it."""
    newest: dict[str, tuple[Entry, ...]] = {}
    for entry in entries:
        held = newest.get(entry.node, ())
        if held and (held[0].at, held[0].run) == (entry.at, entry.run):
            newest[entry.node] = (*held, entry)
        elif not held or entry.at > held[0].at:
            newest[entry.node] = (entry,)
    return newest


def newer(check: NodeCheck | None, entries: tuple[Entry, ...]) -> tuple[Verdict | None, tuple[Entry, ...] | None]:
    """The verdict of a node, and the entries that it is from; None: from its newest pre-flight."""
    if check is None and not entries:
        return None, None
    # By the time of the pre-flight where its node states none: an old check must not hide a new one.
    when = (check.at or check.placed_at).isoformat() if check is not None else ""
    if check is not None and (not entries or when >= entries[0].at):
        return check.worst, None
    return min((entry.verdict for entry in entries), key=ORDER.index), entries


def _iso(row: MachineRow) -> str:
    return row.drained_at.isoformat() if row.drained_at is not None else ""


def _matches(find: str, name: str, check: NodeCheck | None) -> bool:
    return find.lower() in name.lower() or (check is not None and find.lower() in check.target.lower())


def _node(
    name: str,
    verdict: Verdict | None,
    check: NodeCheck | None,
    findings: Mapping[tuple[str, str], Checked],
    entries: tuple[Entry, ...] | None,
    *,
    used_by: tuple[NodeUse, ...],
    target: str | None,
    out_since: str | None,
    out_reason: str | None,
    standing: str,
    others: int,
) -> MappedNode:
    from trainmaster.cluster.health import history

    job_id: str | None
    at: datetime | None
    models: dict[str, str] = {}
    counts: dict[str, int] = {}
    if entries is None and check is not None:
        health = node_health.build(findings[name, check.attempt])
        models = {
            finding.device: str(finding.values["model"])
            for result in health.results
            for finding in result.findings
            if finding.device and finding.values.get("model")
        }
        entries = tuple(history.list_node(health))
        counts = {word.value: check.verdicts.count(word.value) for word in Verdict if word.value in check.verdicts}
        job_id, at = check.job_id, check.at or check.placed_at
    else:
        job_id, at = None, moment_of(entries[0].at) if entries else None
    rest = next((entry for entry in entries or () if entry.device is None), None)
    gpus = [fill(Gpu, entry, model=models.get(entry.device)) for entry in entries or () if entry.device is not None]
    return MappedNode(
        node=name,
        target=check.target if check is not None else target,
        verdict=verdict,
        at=at,
        checks=counts,
        reason=rest.reason if rest is not None else "",
        gpus=tuple(sorted(gpus, key=lambda gpu: (len(gpu.device), gpu.device))),
        used_by=used_by,
        job_id=job_id,
        out_since=out_since,
        out_reason=out_reason,
        standing=standing,
        used_by_others=others,
    )
