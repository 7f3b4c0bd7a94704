"""Acceptance report as Markdown, for tickets."""

from __future__ import annotations

from collections.abc import Iterator

from trainmaster.report.acceptance.view import View
from trainmaster.report.formats import duration, percent, short
from trainmaster.report.markdown import escape


def render(view: View) -> str:
    """The report without pictures. Values from nodes are escaped."""
    return "\n".join(_lines(view)).rstrip() + "\n"


def _lines(view: View) -> Iterator[str]:
    yield f"# {view.overall}: {escape(view.title)}\n"
    yield f"{escape(view.sentence)}\n"
    if view.resumed:
        names = ", ".join(map(escape, view.resumed))
        yield f"Resumed: {names} had finished before an interruption ({view.runs} runs).\n"
    yield from _measurements(view)
    yield "## Parts\n\n| Part | Verdict | Took | |\n|---|---|---|---|"
    for part in view.parts:
        word = part.overall.value if part.overall is not None else "left out"
        note = "; ".join(filter(None, ("finished before" if part.resumed else "", escape(part.note))))
        yield f"| {escape(part.title)} | {word} | {duration(part.took_s)} | {note} |"
    yield ""
    if view.problems:
        yield "## What is wrong\n\n| Verdict | Part | Check | Where | What was found |\n|---|---|---|---|---|"
        for problem in view.problems:
            act = f" → {escape(problem.action)}" if problem.action else ""
            cells = (problem.verdict.value, problem.part, problem.check, problem.where, problem.reason)
            yield f"| {' | '.join(map(escape, cells))}{act} |"
        yield ""
    yield from _section("What was not measured", view.not_measured)
    yield from _nodes(view)
    yield from _section("Recommendations", view.recommendations)
    yield from _section("Versions", [f"{name} {value}" for name, value in view.versions.items()])
    times = f"Started {escape(view.started_at)}, finished {escape(view.finished_at)}"
    yield f"{times}, trainmaster {escape(view.version)}.\n"
    yield "Accepted by (name, role): ______________________  Date: ____________  Signature: ______________________"


def _measurements(view: View) -> Iterator[str]:
    if not view.measurements:
        return
    yield "## Measurements\n\n| What | Measured | Baseline | Share | Verdict | Source |\n|---|---|---|---|---|---|"
    for measurement in view.measurements:
        baseline = f"{short(measurement.baseline)} {measurement.unit}" if measurement.baseline is not None else "–"
        measured = f"{short(measurement.measured)} {measurement.unit}"
        cells = (
            measurement.name,
            measured,
            baseline,
            percent(measurement.share),
            measurement.verdict.value,
            measurement.source,
        )
        yield f"| {' | '.join(map(escape, cells))} |"
    yield ""


def _nodes(view: View) -> Iterator[str]:
    if not view.nodes:
        return
    yield f"## Ranks by themselves\n\n| Node | {' | '.join(view.trainings)} |\n|---|{'---|' * len(view.trainings)}"
    for node in view.nodes:
        cells = [
            ", ".join(f"{cell.label} {cell.over:+.1%}" for cell in node.cells.get(name, ())) for name in view.trainings
        ]
        yield f"| {escape(node.name)} | {' | '.join(cells)} |"
    yield ""


def _section(title: str, lines: object) -> Iterator[str]:
    if isinstance(lines, list) and lines:
        yield f"## {title}\n"
        yield from (f"- {escape(str(line))}" for line in lines)
        yield ""
