"""View of a ClusterHealth for all formats: rows per node, check and device, ordered actions, silent nodes, coverage.

Everything planned but unknown becomes a row of its own (`error`), so a format that only walks the rows cannot lose it.
Text from nodes is sanitised here, once.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.money.prices import Prices
from trainmaster.core.results import CheckResult, Finding, Overall, Verdict
from trainmaster.report.health import sanitise
from trainmaster.report.health.cost import Cost, estimate

WEIGHT = {Verdict.SKIP: 0, Verdict.PASS: 1, Verdict.WARN: 2, Verdict.ERROR: 3, Verdict.FAIL: 4}
SEVERITY = {Overall.FAIL: 0, Overall.INCOMPLETE: 1, Overall.WARN: 2, Overall.PASS: 3}
BAD = (Verdict.FAIL, Verdict.ERROR, Verdict.WARN)
CLUSTER = "cluster"  # stands where a node's name would, in rows about all of them
_ANSWER = "answer"  # the check of a node that gave none
_COVERAGE = "coverage"  # the check that something was measured at all
_OVERALL = {Verdict.FAIL: Overall.FAIL, Verdict.ERROR: Overall.INCOMPLETE, Verdict.WARN: Overall.WARN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One finding, or its absence. `node` is None for findings about the cluster."""

    node: str | None
    check: str
    device: str | None
    verdict: Verdict
    reason: str
    action: str | None
    values: Mapping[str, Any]
    took_s: float
    cause: str | None = None  # the reason of the finding it follows from, where it names one ("see gpu_count")

    @property
    def where(self) -> str:
        return " ".join(filter(None, (self.node or CLUSTER, self.device)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One planned node, with its own findings and those of comparisons."""

    name: str
    index: int  # position in the plan, from 0
    overall: Overall
    rows: tuple[Row, ...]
    silent: bool
    heard: NodeHealth | None

    def worst(self, check: str) -> Verdict | None:
        return worst(row.verdict for row in self.rows if row.check == check)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One action, and where to take it."""

    action: str
    verdict: Verdict
    nodes: tuple[str, ...]
    checks: tuple[str, ...]
    locations: tuple[str, ...]
    reason: str  # of the first location


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Planned against measured findings. Findings, not checks: a check of 8 GPUs gives 8."""

    nodes_asked: int
    nodes_heard: int
    checks_planned: int
    checks_reported: int
    measured: int
    skipped: int
    not_measured: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Content of a report."""

    overall: Overall
    title: str
    sentence: str
    reasons: tuple[str, ...]
    nodes: tuple[Node, ...]  # the silent first, then the worst, then as they were asked
    cluster: tuple[Row, ...]  # about no single node
    checks: tuple[str, ...]  # of the nodes that answered, in the order they were planned
    actions: tuple[Action, ...]
    coverage: Coverage
    cost: Cost
    started_at: str
    took_s: float
    version: str
    notes: tuple[str, ...] = ()  # of whoever ran it
    digest: str = ""  # of the evidence beside the report

    @property
    def rows(self) -> Iterator[Row]:
        """Every row, the cluster's last."""
        for node in self.nodes:
            yield from node.rows
        yield from self.cluster

    @property
    def silent(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.silent)


def build(health: ClusterHealth, prices: Prices | None = None, *, digest: str = "") -> View:
    """The view of one run; `digest` is that of its evidence. Pure: the same health gives the same view."""
    names = list(dict.fromkeys(_name(name) for name in _names(health)))
    between = _between(health, set(names))
    nodes: list[Node] = []
    for node in health.nodes:
        # A name that came twice is two reports of one node: what is said between nodes belongs to the first.
        named = [row for row in between if row.node == _name(node.node)]
        nodes.append(_heard(node, [] if any(_name(node.node) == other.name for other in nodes) else named))
    heard = {node.name for node in nodes}
    nodes += [_silent(node.node, node.reason, node.action, node.took_s) for node in health.silent]
    known = {node.node for node in health.nodes} | {node.node for node in health.silent}
    nodes += [
        _silent(name, "it was asked, and nothing is known of it", "check it again, alone")
        for name in dict.fromkeys(health.asked)
        if name not in known
    ]
    # What was found between nodes about one that gave no answer still belongs to somebody.
    cluster = tuple(row for row in between if row.node is None or row.node not in heard)
    nodes.sort(key=lambda node: names.index(node.name))
    nodes = [dataclasses.replace(node, index=index) for index, node in enumerate(nodes)]
    nodes.sort(key=lambda node: (not node.silent, SEVERITY[node.overall], node.index))
    if not nodes:
        cluster += (_missing(None, _COVERAGE, "no node was asked", "name the nodes to check"),)
    rows = [row for node in nodes for row in node.rows] + list(cluster)
    coverage = _coverage(health, nodes, rows)
    reasons = tuple(
        f"{row.where}: {row.check}: {row.reason}"
        for verdict in (Verdict.FAIL, Verdict.ERROR, Verdict.WARN)
        for row in rows
        if row.verdict is verdict
    )
    return View(
        overall=health.overall,
        title=_TITLES[health.overall],
        sentence=_sentence(health.overall, nodes, rows, coverage),
        reasons=reasons,
        nodes=tuple(nodes),
        cluster=cluster,
        checks=_columns(health, nodes),
        actions=_actions(rows),
        coverage=coverage,
        cost=estimate(health, prices),
        started_at=sanitise.line(health.started_at),
        took_s=health.took_s,
        version=sanitise.line(next((node.version for node in health.nodes if node.version), "")),
        notes=tuple(sanitise.line(note) for note in health.notes),
        digest=digest,
    )


def worst(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The worst verdict; None of an empty input."""
    return max(verdicts, key=WEIGHT.__getitem__, default=None)


def _name(node: str) -> str:
    return sanitise.line(node) or "?"


def _names(health: ClusterHealth) -> Iterator[str]:
    yield from health.asked
    yield from (node.node for node in health.nodes)
    yield from (node.node for node in health.silent)


# --- rows ----------------------------------------------------------------------------------------------------------


def _heard(node: NodeHealth, between: Iterable[Row]) -> Node:
    name = _name(node.node)
    rows = [*_rows(name, node.results), *_unreported(name, node)]
    if not any(row.verdict in (Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.ERROR) for row in rows):
        action = "check at a higher level, or skip less"
        rows.append(_missing(name, _COVERAGE, "every check was skipped: nothing was measured", action))
    rows = [*_with_causes(rows), *between]
    overalls = [node.overall, *(_OVERALL[row.verdict] for row in rows if row.verdict in _OVERALL)]
    overall = min(overalls, key=SEVERITY.__getitem__)
    return Node(name=name, index=0, overall=overall, rows=tuple(rows), silent=False, heard=node)


def _silent(name: str, reason: str, action: str, took_s: float = 0.0) -> Node:
    name = _name(name)
    row = _missing(name, _ANSWER, sanitise.line(reason) or "no answer", sanitise.line(action), took_s)
    return Node(name=name, index=0, overall=Overall.INCOMPLETE, rows=(row,), silent=True, heard=None)


def _rows(node: str | None, results: Iterable[CheckResult]) -> Iterator[Row]:
    results = list(results)
    spoken = {result.check for result in results if result.findings}
    for result in results:
        for finding in result.findings:
            yield _row(node, result, finding)
        if result.check not in spoken:
            yield _missing(node, sanitise.line(result.check), "it ran and said nothing", "report it, with this bundle")


def _row(node: str | None, result: CheckResult, finding: Finding) -> Row:
    return Row(
        node=node,
        check=sanitise.line(result.check) or "?",
        device=sanitise.line(finding.device) or None if finding.device else None,
        verdict=finding.verdict,
        reason=sanitise.line(finding.reason),
        action=sanitise.line(finding.action) or None if finding.action else None,
        values=sanitise.plain(finding.values),
        took_s=result.took_s,
    )


def _unreported(name: str, node: NodeHealth) -> Iterator[Row]:
    there = {result.check for result in node.results}
    for check in dict.fromkeys(node.planned):
        if check not in there:
            action = "run it again on this node; its log says why it ended"
            yield _missing(name, sanitise.line(check) or "?", "it was planned and did not report", action)


def _missing(node: str | None, check: str, reason: str, action: str, took_s: float = 0.0) -> Row:
    return Row(
        node=node,
        check=check,
        device=None,
        verdict=Verdict.ERROR,
        reason=reason,
        action=action or None,
        values={},
        took_s=took_s,
    )


def _between(health: ClusterHealth, names: set[str]) -> tuple[Row, ...]:
    """Rows of comparisons and collectives. Their device is a node; the device on it is the value `on`."""
    rows = []
    for row in _rows(None, health.cluster):
        on = row.values.get("on")
        device = sanitise.line(on) or None if isinstance(on, str) else None
        rows.append(dataclasses.replace(row, node=row.device, device=device) if row.device in names else row)
    return tuple(rows)


_SEE = re.compile(r"see (\w+)\b")


def _with_causes(rows: list[Row]) -> list[Row]:
    """Add causes: a finding with the action "see CHECK" follows from that check's worst finding on its device."""
    explained = []
    for row in rows:
        match = _SEE.match(row.action or "")
        causes = [other for other in rows if match and other.check == match[1] and other.verdict in BAD]
        same = [other for other in causes if other.device == row.device] or causes
        cause = max(same, key=lambda other: WEIGHT[other.verdict], default=None)
        follows = cause is not None and cause is not row and row.verdict in BAD
        explained.append(dataclasses.replace(row, cause=f"{cause.check}: {cause.reason}") if follows and cause else row)
    return explained


# --- what to do, and how much is known -----------------------------------------------------------------------------


def _actions(rows: Iterable[Row]) -> tuple[Action, ...]:
    """Each action once: faults that stop a run before those that slow it, then by number of nodes."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.verdict in BAD and row.action and row.cause is None:
            groups.setdefault(row.action, []).append(row)
    actions = []
    findings: dict[str, int] = {}  # of each action: more findings of one verdict are a graver fault
    for action, members in groups.items():
        findings[action] = len(members)
        top = worst(row.verdict for row in members)
        assert top is not None
        actions.append(
            Action(
                action=action,
                verdict=top,
                nodes=tuple(dict.fromkeys(row.node for row in members if row.node is not None)),
                checks=tuple(dict.fromkeys(row.check for row in members)),
                locations=tuple(dict.fromkeys(row.where for row in members)),
                reason=members[0].reason,
            )
        )
    return tuple(
        sorted(
            actions,
            key=lambda item: (
                -WEIGHT[item.verdict],
                -len(item.nodes),
                -findings[item.action],
                -len(item.locations),
                item.action,
            ),
        )
    )


def _coverage(health: ClusterHealth, nodes: list[Node], rows: list[Row]) -> Coverage:
    verdicts = [row.verdict for row in rows]
    planned = sum(len(set(node.planned)) for node in health.nodes)
    reported = sum(len(set(node.planned) & {r.check for r in node.results if r.findings}) for node in health.nodes)
    return Coverage(
        nodes_asked=len(nodes),
        nodes_heard=sum(not node.silent for node in nodes),
        checks_planned=planned,
        checks_reported=reported,
        measured=sum(verdict in (Verdict.PASS, Verdict.WARN, Verdict.FAIL) for verdict in verdicts),
        skipped=verdicts.count(Verdict.SKIP),
        not_measured=verdicts.count(Verdict.ERROR),
    )


def _columns(health: ClusterHealth, nodes: list[Node]) -> tuple[str, ...]:
    planned = (sanitise.line(name) or "?" for node in health.nodes for name in node.planned)
    seen = (row.check for node in nodes for row in node.rows if not node.silent)
    return tuple(dict.fromkeys([*planned, *seen])) or (_ANSWER,)


# --- words ---------------------------------------------------------------------------------------------------------

_TITLES = {
    Overall.PASS: "Ready to train",
    Overall.WARN: "Ready to train, with warnings",
    Overall.FAIL: "Not fit to train",
    Overall.INCOMPLETE: "Not fully checked",
}


def _sentence(overall: Overall, nodes: list[Node], rows: list[Row], coverage: Coverage) -> str:
    many = len(nodes)
    sentences = []
    failures = [row for row in rows if row.verdict is Verdict.FAIL]
    if failures:
        failed = sum(any(row.verdict is Verdict.FAIL for row in node.rows) for node in nodes)
        sentences.append(f"{failed} of {_count(many, 'node')} failed." if failed else "The nodes failed together.")
        sentences.append(f"First: {_phrase(_gravest(failures))}")
    silent = [node.name for node in nodes if node.silent]
    if silent:
        sentences.append(f"{_count(len(silent), 'node')} gave no answer: {_list(silent)}.")
    errors = [row for row in rows if row.verdict is Verdict.ERROR and row.check != _ANSWER]
    if errors:
        sentences.append(
            f"{_count(len(errors), 'planned measurement')} could not be made, first {_phrase(_gravest(errors))}"
        )
    warned = [row for row in rows if row.verdict is Verdict.WARN]
    if overall is Overall.WARN:
        sentences.append(
            f"{_count(many, 'node')} answered, {_count(len(warned), 'warning')}, first {_phrase(_gravest(warned))}"
        )
    if overall is Overall.PASS:
        sentences.append(
            f"{_count(many, 'node')} answered, {_count(coverage.measured, 'measurement')}, nothing is wrong."
        )
    gpu_verdicts = [row.verdict for row in rows if row.check == "gpu_count"]
    if overall in (Overall.PASS, Overall.WARN) and gpu_verdicts and set(gpu_verdicts) == {Verdict.SKIP}:
        sentences.append("No GPU was checked: none found and none expected.")
    return " ".join(sentences)


def _gravest(rows: list[Row]) -> Row:
    """Of findings with one verdict the most frequent one: many checks that fail for one reason have one cause."""
    reasons = Counter((row.reason, row.action) for row in rows if row.cause is None)
    return max(rows, key=lambda row: reasons[row.reason, row.action])


def _phrase(row: Row) -> str:
    """A finding as part of a sentence."""
    phrase = f"{row.where}, {row.check}: {row.reason}".rstrip(" :")
    return phrase if phrase.endswith((".", "!", "?", "…")) else f"{phrase}."


def _count(many: int, word: str) -> str:
    return f"{many} {word}" if many == 1 else f"{many:,} {word}s"


def _list(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
