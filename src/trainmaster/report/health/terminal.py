"""Health summary in a few plain lines, for a terminal or a log. The caller adds colour."""

from __future__ import annotations

from collections.abc import Iterator

from trainmaster.report.formats import duration
from trainmaster.report.health.view import View

MOST = 12  # actions and locations; the rest is in the report


def render(view: View) -> list[str]:
    """The lines, verdict first."""
    return list(_lines(view))


def _lines(view: View) -> Iterator[str]:
    yield f"{view.overall}  {view.title}. {view.sentence}"
    for node in view.silent:
        yield f"  no answer  {node.name}: {node.rows[0].reason}"
    for index, action in enumerate(view.actions[:MOST], 1):
        more = f" and {len(action.locations) - MOST} more" if len(action.locations) > MOST else ""
        yield f"  {index}. {action.action}"
        yield f"     {action.verdict}: {', '.join(action.locations[:MOST])}{more}: {action.reason}"
    if len(view.actions) > MOST:
        yield f"  … and {len(view.actions) - MOST} more things to do; the report has them all"
    covered = view.coverage
    yield (
        f"  {covered.nodes_heard} of {covered.nodes_asked} nodes answered, {covered.checks_reported} of "
        f"{covered.checks_planned} planned checks reported, {covered.measured} measured, {covered.not_measured} not, "
        f"in {duration(view.took_s)}"
    )
    yield from (f"  {line}" for line in view.cost.lines)
