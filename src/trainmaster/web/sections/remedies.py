"""Drain and readmit one node from a page: the rules, the commands and the journal of `remedy` and `readmit`.

The evidence is the newest pre-flight of each node of the target. A pre-flight never has the comparisons between nodes,
and is never known to be a whole run: where those put a node out, the command line gives it back.

A machine of our own queue needs no evidence: whoever drains it states the reason, and gives it back.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster import targets
from trainmaster.control.queueing import machines
from trainmaster.core.errors import TargetError, TrainmasterError, UsageError
from trainmaster.core.health import ClusterHealth
from trainmaster.pages.parts import node_health
from trainmaster.pages.parts.node_journal import read_targets
from trainmaster.pages.parts.target_names import without_account
from trainmaster.store import audit, nodes
from trainmaster.store.database import Database
from trainmaster.store.nodes import NodeCheck

if TYPE_CHECKING:
    from trainmaster.cluster.remedy.remedy import Drain, Out
    from trainmaster.targets import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What would be done to a node. `refusal`: why it is not; then there is nothing to do but what it says."""

    node: str
    through: str  # the target
    reason: str = ""
    commands: tuple[str, ...] = ()
    refusal: str | None = None
    instead: tuple[str, ...] = ()  # commands to type where the page cannot act
    check: NodeCheck | None = None  # the evidence
    limit: int | None = None  # most nodes that may be out
    own: bool = False  # a machine of our own queue: no evidence is needed, a person states the reason
    drain: Drain | None = None
    scheduler: Scheduler | None = None


def plan_drain(db: Database, home: Path, node: str, *, most: int | None = None) -> Remedy:
    """Whether the node may be drained, with the commands. Changes nothing and asks no scheduler."""
    from trainmaster.cluster.health import journal
    from trainmaster.cluster.remedy.remedy import select, still_out

    with db.read() as conn:
        newest = nodes.list_newest_checks(conn)
        through = _through(newest, node)
        if (own := _find_own(db, home, node, through)) is not None:
            return own
        peers = {name: check for name, check in newest.items() if without_account(check.target) == through}
        checked = nodes.list_findings(conn, {check.attempt for check in peers.values()})
    found = _load(node, through, newest)
    if found.scheduler is None:
        return found
    newest_of = {(name, check.attempt) for name, check in peers.items()}
    health = ClusterHealth(
        asked=tuple(sorted(peers)),
        nodes=tuple(node_health.build(part) for part in checked if (part.node, part.attempt) in newest_of),
    )
    out = [entry.node for entry in still_out(journal.read(home / journal.REMEDIES))]
    plan = select(health, limit=most, already_out=out)
    drain = next((drain for drain in plan.drains if drain.node == node), None)
    left = next((why for name, why in plan.left if name == node), "its newest pre-flight found no fault")
    refusal = left if drain is None else plan.refusal
    return Remedy(
        node=node,
        through=through,
        reason=drain.reason if drain is not None else "",
        commands=_spell(found.scheduler.drain(node, drain.reason)) if drain is not None and refusal is None else (),
        refusal=refusal,
        check=newest[node],
        limit=plan.limit,
        drain=drain,
        scheduler=found.scheduler,
    )


def plan_readmit(db: Database, home: Path, node: str, *, allow_warn: bool = False) -> Remedy:
    """Whether a drained node may return. Asks the scheduler where the journal has not drained it."""
    from trainmaster.cluster.remedy.remedy import readmit

    with db.read() as conn:
        newest = nodes.list_newest_checks(conn, nodes=[node])
        check = newest.get(node)
        checked = nodes.list_findings(conn, [check.attempt]) if check is not None else []
        planned = nodes.list_planned(conn, check.attempt) if check is not None else ()
    through = _through(newest, node)
    if (own := _find_own(db, home, node, through)) is not None:
        return own
    found = _load(node, through, newest)
    if found.scheduler is None or check is None:
        return found
    try:
        entry = _find_out(found.scheduler, home, node)
    except TargetError as error:
        return Remedy(node=node, through=through, refusal=str(error), instead=_by_hand(through), check=check)
    if entry is None:
        return Remedy(node=node, through=through, refusal="it is not drained by Trainmaster", check=check)
    health = ClusterHealth(
        asked=(node,),
        nodes=tuple(node_health.build(part, planned=planned) for part in checked if part.node == node),
        # By our own clock, not the node's: the attempt was placed after the drain, or proves nothing.
        started_at=check.placed_at.isoformat(),
    )
    back, stay = readmit(health, [entry], allow_warn=allow_warn)
    refusal = dict(stay).get(node)
    return Remedy(
        node=node,
        through=through,
        commands=_spell(found.scheduler.resume(node)) if node in back else (),
        refusal=refusal,
        instead=_by_hand(through) if refusal is not None else (),
        check=check,
        scheduler=found.scheduler,
    )


def drain(db: Database, home: Path, plan: Remedy, *, by: str, reason: str = "") -> str | None:
    """Do it, by the code of `remedy --yes`; what went wrong, or None. Both outcomes are in the audit trail."""
    from trainmaster.cluster.remedy import drain as draining

    if plan.own:
        return _try(lambda: machines.drain(db, plan.node, reason=reason, by=by, checked_on=plan.through))
    assert plan.drain is not None and plan.scheduler is not None and plan.refusal is None
    fault = draining.drain(plan.drain, plan.scheduler, home, plan.through)
    _record(db, plan, action="node.drain", by=by, fault=fault)
    return fault


def resume(db: Database, home: Path, plan: Remedy, *, by: str) -> str | None:
    """Give the node back, by the code of `readmit --yes`; what went wrong, or None."""
    from trainmaster.cluster.remedy import drain as draining

    if plan.own:
        return _try(lambda: machines.readmit(db, plan.node, by=by))
    assert plan.scheduler is not None and plan.refusal is None
    fault = draining.resume(plan.node, plan.scheduler, home, plan.through)
    _record(db, plan, action="node.readmit", by=by, fault=fault)
    return fault


def _find_own(db: Database, home: Path, node: str, through: str) -> Remedy | None:
    """The plan for a machine of our own queue; None where the node is not one, or its target drains by itself."""
    stated = targets.find_traits(through) if through else None
    checked_on = read_targets(home).get(node)
    if stated is not None and stated.drains:
        return None
    if not (places := machines.list_places(db, node, checked_on=checked_on)):
        return None
    words = tuple(map(targets.spell_place, places))
    if len(words) == 1:
        return Remedy(node=node, through=words[0], own=True)
    refusal = f"it is a machine of several targets ({', '.join(words)})"
    instead = tuple(f"trainmaster nodes drain {node} --on {word} --reason TEXT" for word in words)
    return Remedy(node=node, through=", ".join(words), refusal=refusal, instead=instead, own=True)


def _try(act: Callable[[], None]) -> str | None:
    try:
        act()
    except UsageError as error:
        return str(error)
    return None


def _load(node: str, through: str, newest: Mapping[str, NodeCheck]) -> Remedy:
    """The scheduler of a node's target; without one the reason, and what to do."""
    from trainmaster.cluster.remedy import schedulers

    check = newest.get(node)
    if check is None:
        why = "no pre-flight of a job has checked it: there is no evidence to act on"
        return Remedy(node=node, through=through, refusal=why, instead=_by_hand("TARGET"))
    try:
        scheduler = schedulers.load(through)
    except TrainmasterError as error:
        why = str(error).removeprefix("--on ")
        stated = targets.find_traits(through)
        instead = _by_hand(targets.split(through)[1]) if stated is not None and stated.drains else ()
        return Remedy(node=node, through=through, refusal=why, instead=instead, check=check)
    return Remedy(node=node, through=through, check=check, scheduler=scheduler)


def _find_out(scheduler: Scheduler, home: Path, node: str) -> Out | None:
    from trainmaster.cluster.health import journal
    from trainmaster.cluster.remedy import drain as draining
    from trainmaster.cluster.remedy.remedy import still_out

    out = still_out(journal.read(home / journal.REMEDIES))
    known = next((entry for entry in out if entry.node == node), None)
    if known is not None:
        return known
    return next((entry for entry in draining.list_out(scheduler, besides=out) if entry.node == node), None)


def _through(newest: Mapping[str, NodeCheck], node: str) -> str:
    """The target of a node without the account of a project: the scheduler is asked as the server."""
    return without_account(newest[node].target) if node in newest else ""


def _by_hand(through: str) -> tuple[str, ...]:
    return (
        f"trainmaster check --on {through} --level 2 --out evidence/",
        f"trainmaster remedy evidence/ --on {through} --yes",
        f"trainmaster readmit evidence/ --on {through} --yes",
    )


def _spell(commands: list[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(shlex.join(command) for command in commands)


def _record(db: Database, plan: Remedy, *, action: str, by: str, fault: str | None) -> None:
    detail = {"through": plan.through, "reason": plan.reason, "fault": fault}
    with db.write() as conn:
        audit.record(conn, who=by, action=action, subject=f"node:{plan.node}", detail=detail)
