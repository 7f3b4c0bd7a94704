"""Health report as one self-contained HTML file, with the style sheet of the job report."""

from __future__ import annotations

from markupsafe import Markup

from trainmaster import __version__
from trainmaster.core.results import Verdict
from trainmaster.report import chart, formats
from trainmaster.report.health import curves, heatmap
from trainmaster.report.health.cost import usd
from trainmaster.report.health.view import Node, View
from trainmaster.report.html import asset, environment, style_policy
from trainmaster.report.phrases import Figure

MOST_CURVES = 12
MOST_LOCATIONS = 24
# A cluster of 256 nodes × 60 checks × 8 GPUs has 100,000 findings. Faults are always shown; passes of healthy
# nodes in a large cluster are only counted, and health.json holds them.
MOST_ROWS = 20_000


def render(view: View) -> str:
    """The complete file: inline style, no script, no external address, and a strict content security policy."""
    style = asset("style.css") + asset("health/health.css")
    curve_list = curves.find(view.rows)
    return (
        environment()
        .get_template("health.html")
        .render(
            view=view,
            version=__version__,
            style=Markup(style),  # noqa: S704 (two files of this package, not values)
            policy=style_policy(style),
            heat=heatmap.render(view),
            figures=_figures(view),
            charts=[_chart(index, curve) for index, curve in enumerate(curve_list[:MOST_CURVES])],
            more_charts=max(0, len(curve_list) - MOST_CURVES),
            shown=_shown(view),
            counts=_counts,
            signs=heatmap.SIGNS,
            most_locations=MOST_LOCATIONS,
            wrong=(Verdict.FAIL, Verdict.ERROR, Verdict.WARN),
        )
    )


def _figures(view: View) -> list[Figure]:
    covered, cost = view.coverage, view.cost
    figures = [
        Figure(
            name="Nodes that answered",
            value=f"{covered.nodes_heard} / {covered.nodes_asked}",
            note="all of them" if covered.nodes_heard == covered.nodes_asked else "the others are named above",
            share=covered.nodes_heard / covered.nodes_asked if covered.nodes_asked else None,
        ),
        Figure(
            name="Checks that reported",
            value=f"{formats.count(covered.checks_reported)} / {formats.count(covered.checks_planned)}",
            note=f"{covered.not_measured} could not be measured" if covered.not_measured else "none is missing",
            share=covered.checks_reported / covered.checks_planned if covered.checks_planned else None,
        ),
        Figure(
            name="Measurements",
            value=formats.count(covered.measured),
            note=f"{formats.count(covered.skipped)} not applicable here",
        ),
        Figure(name="Time taken", value=formats.duration(view.took_s)),
    ]
    if cost.wasted_usd is not None and cost.check_usd is not None:
        note = f"{formats.trim(f'{cost.assumed_hours:.1f}')} h of {cost.nodes_priced} nodes"
        figures.append(Figure(name="A lost run would waste", value=usd(cost.wasted_usd), note=note))
        figures.append(Figure(name="This check cost", value=usd(cost.check_usd), note="at the same price"))
    return figures


def _chart(index: int, curve: curves.Curve) -> Markup:
    return chart.render_bandwidth(
        key=f"curve{index}",
        title=f"{curve.collective}, GB/s ({curve.where})",
        measured=[(point.size_bytes, point.gbps) for point in curve.points],
        baseline=[(point.size_bytes, point.gbps) for point in curve.baseline],
    )


def _shown(view: View) -> bool:
    """Whether all rows are shown, or only bad ones."""
    return sum(len(node.rows) for node in view.nodes) <= MOST_ROWS


def _counts(node: Node) -> str:
    verdicts = [row.verdict for row in node.rows]
    return ", ".join(f"{verdicts.count(word)} {word.value}" for word in Verdict if word in verdicts)
