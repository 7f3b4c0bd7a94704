"""Selection of nodes to drain after a check, and of nodes that may return. Pure; cluster/remedy/drain.py acts.

A node is drained because it failed, never because its state is unknown (unless requested), and never more nodes than
a limit: a check that fails half of a cluster has most likely a fault of its own, or has found a fabric fault that
draining does not repair. A node returns only after a newer run in which it passed and every check that drained it was
measured again. A comparison with other nodes was measured again only if this node reported the value that differed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from trainmaster.cluster.health import compare
from trainmaster.cluster.health.reported_values import collect
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.results import CheckResult, Finding, Overall, Verdict
from trainmaster.targets import PREFIX

LIMIT_SHARE = 0.1
# A name that a scheduler could expand to several nodes (n[1-9], a,b, ALL) or read as an option is never passed on.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
REASON_CHARACTERS = 180
ANSWER = "answer"  # pseudo-check of a node that gave no answer
EVERY = "every check"  # pseudo-check of a reason that does not name all that failed
BUNDLE = "bundle"  # result of cluster/health/evidence.py for a bundle that is not whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A node to drain, and the reason."""

    node: str
    reason: str
    checks: tuple[str, ...]  # to be measured again before it returns


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Outcome of a selection. `refusal`: the reason that none of it may be done."""

    drains: tuple[Drain, ...]
    left: tuple[tuple[str, str], ...]  # nodes with a bad verdict that are not drained, with the reason
    limit: int
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Out:
    """A node drained by trainmaster, from the journal."""

    node: str
    at: str
    checks: tuple[str, ...]


def select(
    health: ClusterHealth, *, limit: int | None = None, include_unknown: bool = False, already_out: Iterable[str] = ()
) -> Selection:
    """Nodes to drain. Nodes already drained count against the limit: ten runs cannot drain a whole cluster."""
    asked = tuple(dict.fromkeys(health.asked))
    most = max(1, int(len(asked) * LIMIT_SHARE)) if limit is None else limit
    out = set(already_out)
    drains: list[Drain] = []
    left: list[tuple[str, str]] = []
    for name in dict.fromkeys([*asked, *(node.node for node in health.nodes), *(node.node for node in health.silent)]):
        overall, checks, why = _judge(health, name)
        if overall in (Overall.PASS, Overall.WARN):
            continue
        if name not in asked:
            left.append((name, "it answered but was not in the plan"))
        elif not _NAME.fullmatch(name) or name.upper() == "ALL":
            left.append((name, "its name could expand to several nodes"))
        elif name in out:
            left.append((name, "it is already drained"))
        elif overall is Overall.INCOMPLETE and not include_unknown:
            left.append((name, f"its state is unknown, not bad: {why}"))
        else:
            drains.append(Drain(node=name, reason=make_reason(why), checks=checks))
    left += [
        ("cluster", f"{result.check} failed without naming a node; run `trainmaster isolate`: {finding.reason}")
        for result in health.cluster
        for finding in result.findings
        if finding.verdict is Verdict.FAIL and finding.device not in asked
    ]
    touched = len(drains) + len(out)
    refusal = None
    torn = [finding.reason for result in health.cluster if result.check == BUNDLE for finding in result.findings]
    if torn:
        refusal = f"the bundle is not the one that the run wrote: {torn[0]}; check the nodes again"
    elif drains and touched > most:
        beside = f" beside {len(out)} already drained" if out else ""
        refusal = (
            f"this would drain {len(drains)} of {len(asked)} nodes{beside}; the limit is {most}. "
            "Look for a shared cause, or raise the limit with --max-nodes"
        )
    return Selection(drains=tuple(drains), left=tuple(left), limit=most, refusal=refusal)


def readmit(
    health: ClusterHealth, out: Sequence[Out], *, allow_warn: bool = False
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Of the drained nodes: those that may return, and the others with the reason why not."""
    back: list[str] = []
    stay: list[tuple[str, str]] = []
    for node in out:
        why = _why_not(health, node, allow_warn)
        if why is None:
            back.append(node.node)
        else:
            stay.append((node.node, why))
    return tuple(back), tuple(stay)


def still_out(journal: Iterable[Mapping[str, object]]) -> list[Out]:
    """Nodes that the journal drained and did not resume, in order."""
    out: dict[str, Out] = {}
    for row in journal:
        node, checks = str(row.get("node", "")), row.get("checks")
        if row.get("did") == "drain":
            names = tuple(map(str, checks)) if isinstance(checks, (list, tuple)) else ()
            out[node] = Out(node=node, at=str(row.get("at", "")), checks=names)
        elif row.get("did") in ("resume", "undo"):
            out.pop(node, None)
    return list(out.values())


def make_reason(why: str) -> str:
    """A reason for the scheduler: with the prefix, one line, no quotes, printable ASCII."""
    plain = re.sub(r"[^\x20-\x7e]|[\"'`\\$]", " ", why)
    return " ".join(f"{PREFIX} {plain}".split())[:REASON_CHARACTERS]


def _judge(health: ClusterHealth, name: str) -> tuple[Overall, tuple[str, ...], str]:
    """A node's verdict including the comparisons about it: (overall, deciding checks, reason)."""
    reports = [node for node in health.nodes if node.node == name]
    findings = [
        (result.check, finding)
        for result in (*(result for node in reports for result in node.results), *_about(health, name))
        for finding in result.findings
    ]
    failed = [(check, finding) for check, finding in findings if finding.verdict is Verdict.FAIL]
    if failed:
        check, finding = failed[0]
        device = f" {finding.device}" if finding.device and finding.device != name else ""
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return Overall.FAIL, _distinct(_deciding(*pair) for pair in failed), f"{check}{device}: {finding.reason}{more}"
    silent = next((node for node in health.silent if node.node == name), None)
    if silent is not None or not reports:
        why = silent.reason if silent is not None else "it was in the plan and has no result"
        return Overall.INCOMPLETE, (ANSWER,), f"no answer: {why}"
    errors = [(check, finding) for check, finding in findings if finding.verdict is Verdict.ERROR]
    missing = [check for node in reports for check in node.planned if check not in {r.check for r in node.results}]
    if errors or missing or any(node.overall is Overall.INCOMPLETE for node in reports):
        checks = _distinct([*(check for check, _ in errors), *missing]) or (ANSWER,)
        why = f"{errors[0][0]}: {errors[0][1].reason}" if errors else f"not measured: {', '.join(checks[:5])}"
        return Overall.INCOMPLETE, checks, why
    warned = any(finding.verdict is Verdict.WARN for _, finding in findings)
    return Overall.WARN if warned else Overall.PASS, (), ""


def _deciding(check: str, finding: Finding) -> str:
    """Name of a check in the journal; of a comparison with the value that differed, `drift:driver`."""
    what = finding.values.get("what")
    return f"{check}:{what}" if check in compare.NAMES and what else check


def _about(health: ClusterHealth, name: str) -> list[CheckResult]:
    return [
        dataclasses.replace(result, findings=tuple(f for f in result.findings if f.device == name))
        for result in health.cluster
    ]


def _why_not(health: ClusterHealth, out: Out, allow_warn: bool) -> str | None:
    began, went = _moment(health.started_at), _moment(out.at)
    if began is None or went is None:
        return "it is unknown whether this run began after the drain"
    if began <= went:
        return f"this run began {health.started_at}, before the drain ({out.at}); check it again"
    reports = [node for node in health.nodes if node.node == out.node]
    if len(reports) != 1:
        return "it is not in this run" if not reports else "it is in this run more than once"
    overall, _, why = _judge(health, out.node)
    if overall in (Overall.FAIL, Overall.INCOMPLETE):
        return f"{overall}: {why}"
    if (unnamed := _why_unnamed(health, out, allow_warn)) is not None:
        return unnamed
    if overall is Overall.WARN and not allow_warn:
        return "WARN: it must pass; --allow-warn accepts warnings"
    again = _measured(health, reports[0])
    missing = [check for check in out.checks if check != ANSWER and check not in again]
    if missing:
        return f"{', '.join(missing)} drained it and {'was' if len(missing) == 1 else 'were'} not measured again"
    return None


def _why_unnamed(health: ClusterHealth, out: Out, allow_warn: bool) -> str | None:
    """A fault of the run that names none of its nodes may be this one's: of two that differ, none is named."""
    for result in health.cluster:
        for finding in result.findings:
            if finding.device in health.asked or finding.verdict in (Verdict.PASS, Verdict.SKIP):
                continue
            drained = {_deciding(result.check, finding), result.check} & set(out.checks)
            if finding.verdict is not Verdict.WARN or drained or not allow_warn:
                hint = "; --allow-warn accepts warnings" if finding.verdict is Verdict.WARN and not drained else ""
                return f"{result.check} names no node: {finding.reason}{hint}"
    return None


def _measured(health: ClusterHealth, node: NodeHealth) -> set[str]:
    """Checks with a finding that passes or warns. Skipped is not measured, nor is a run that left this node out."""
    seen = (Verdict.PASS, Verdict.WARN)
    measured = {result.check for result in node.results if any(finding.verdict in seen for finding in result.findings)}
    measured |= set() if node.left_out else {EVERY}
    facts = [fact for fact in collect(health.nodes) if fact.value is not None]
    others = {fact.name for fact in facts if fact.node != node.node}
    shared = {fact.name for fact in facts if fact.node == node.node} & others
    for result in health.cluster:
        good = [finding for finding in result.findings if finding.verdict in seen]
        if result.check in compare.NAMES:
            measured |= {result.check, *(f"{result.check}:{name}" for name in shared)} if good else set()
        elif any(finding.device == node.node or node.node in _took_part(finding) for finding in good):
            measured.add(result.check)
    return measured


def _took_part(finding: Finding) -> Sequence[object]:
    nodes = finding.values.get("nodes")
    return nodes if isinstance(nodes, (list, tuple)) else ()


def _moment(text: str) -> datetime | None:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    return when if when.tzinfo is not None else None


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
