"""The health of a cluster in a few lines of plain text, for a terminal or a log. Colour is the caller's."""

from __future__ import annotations

from collections.abc import Iterator

from trainmaster.report.formats import duration
from trainmaster.report.health.view import View

MOST = 12  # actions and places; the rest is in the report


def render(view: View) -> list[str]:
    """The lines, the verdict first."""
    return list(_lines(view))


def _lines(view: View) -> Iterator[str]:
    yield f"{view.overall}  {view.title}. {view.sentence}"
    for node in view.silent:
        yield f"  no answer  {node.name}: {node.rows[0].reason}"
    for place, one in enumerate(view.actions[:MOST], 1):
        more = f" and {len(one.places) - MOST} more" if len(one.places) > MOST else ""
        yield f"  {place}. {one.action}"
        yield f"     {one.verdict}: {', '.join(one.places[:MOST])}{more}: {one.reason}"
    if len(view.actions) > MOST:
        yield f"  … and {len(view.actions) - MOST} more things to do; the report has them all"
    covered = view.coverage
    yield (
        f"  {covered.nodes_heard} of {covered.nodes_asked} nodes answered, {covered.checks_reported} of "
        f"{covered.checks_planned} planned checks reported, {covered.measured} measured, {covered.not_measured} not, "
        f"in {duration(view.took_s)}"
    )
    yield from (f"  {line}" for line in view.cost.lines)
