"""Health report as Markdown for tickets, pull requests and chats; long parts are folded."""

from __future__ import annotations

from collections.abc import Iterator

from trainmaster.core.results import Verdict
from trainmaster.report.formats import duration, short, size
from trainmaster.report.health import curves
from trainmaster.report.health.view import BAD, Row, View
from trainmaster.report.markdown import escape
from trainmaster.report.phrases import value_text

MOST_ROWS = 200  # of what is wrong; a ticket holds 65,536 characters, and report.html holds everything
MOST_LOCATIONS = 12


def render(view: View) -> str:
    """The report without pictures. Values from nodes are escaped."""
    return "\n".join(_lines(view)).rstrip() + "\n"


def _lines(view: View) -> Iterator[str]:
    yield f"# {view.overall}: {view.title}\n"
    yield f"{escape(view.sentence)}\n"
    for note in view.notes:
        yield f"- Note: {escape(note)}"
    if view.digest:
        yield f"- Evidence: sha256:{view.digest}"
    if view.notes or view.digest:
        yield ""
    if view.silent:
        yield "## No answer\n"
        for node in view.silent:
            row = node.rows[0]
            yield f"- **{escape(node.name)}**: {escape(row.reason)}{_do(row.action)}"
        yield ""
    if view.actions:
        yield "## What to do, in this order\n"
        for index, action in enumerate(view.actions, 1):
            yield f"{index}. {escape(action.action)} ({action.verdict}: {_locations(action.locations)})"
        yield ""
    yield from _wrong(view)
    yield from _collectives(view)
    yield from _nodes(view)
    covered = view.coverage
    yield (
        f"Coverage: {covered.nodes_heard} of {covered.nodes_asked} nodes answered; {covered.checks_reported} of "
        f"{covered.checks_planned} planned checks reported; {covered.measured} measured, {covered.not_measured} could "
        f"not be measured, {covered.skipped} not applicable.\n"
    )
    yield from (f"{escape(line)}\n" for line in view.cost.lines)
    yield f"Started {escape(view.started_at) or 'at an unknown time'}, took {duration(view.took_s)}."


def _wrong(view: View) -> Iterator[str]:
    rows = sorted((row for row in view.rows if row.verdict in BAD), key=lambda row: BAD.index(row.verdict))
    if not rows:
        return
    yield "## What is wrong\n\n| Verdict | Node | Device | Check | What was found | Values |\n|---|---|---|---|---|---|"
    folded = _fold(rows)
    for row, checks in folded[:MOST_ROWS]:
        cause = f" (follows from {escape(row.cause)})" if row.cause else ""
        values = ", ".join(
            f"{escape(name)}={escape(value_text(value)[:120])}"
            for name, value in row.values.items()
            if value is not None and not isinstance(value, (list, dict))
        )
        cells = (str(row.verdict), row.node or "cluster", row.device or "", checks, row.reason)
        yield f"| {' | '.join(map(escape, cells))}{cause}{_do(row.action)} | {values} |"
    if len(folded) > MOST_ROWS:
        yield f"\n{len(folded) - MOST_ROWS} more are in report.html and health.json."
    yield ""


def _fold(rows: list[Row]) -> list[tuple[Row, str]]:
    """Findings of one node that say the same, as one row with the names of their checks."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.verdict, row.node, row.device, row.reason, row.action, row.cause), []).append(row)
    return [(same[0], ", ".join(dict.fromkeys(row.check for row in same))) for same in groups.values()]


def _collectives(view: View) -> Iterator[str]:
    curve_list = curves.find(view.rows)
    if not curve_list:
        return
    yield "## Collectives\n\n| Collective | Where | Peak GB/s | at | Verdict |\n|---|---|---|---|---|"
    for curve in curve_list:
        rate, at = short(curve.peak.gbps), size(curve.peak.size_bytes)
        yield f"| {escape(curve.collective)} | {escape(curve.where)} | {rate} | {at} | {curve.row.verdict} |"
    yield ""


def _nodes(view: View) -> Iterator[str]:
    yield "## Nodes\n\n| Node | Overall | pass | warn | fail | error | skip |\n|---|---|---|---|---|---|---|"
    for node in view.nodes:
        counts = [sum(row.verdict is verdict for row in node.rows) for verdict in _ORDER]
        yield f"| {escape(node.name)} | {node.overall} | {' | '.join(map(str, counts))} |"
    yield ""


_ORDER = (Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.ERROR, Verdict.SKIP)


def _do(action: str | None) -> str:
    return f" → {escape(action)}" if action else ""


def _locations(locations: tuple[str, ...]) -> str:
    more = f" and {len(locations) - MOST_LOCATIONS} more" if len(locations) > MOST_LOCATIONS else ""
    return ", ".join(map(escape, locations[:MOST_LOCATIONS])) + more
