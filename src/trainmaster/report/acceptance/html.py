"""Acceptance report as one self-contained HTML file: to read, to print, to sign."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from trainmaster import __version__
from trainmaster.report import chart
from trainmaster.report.acceptance.view import Cell, View
from trainmaster.report.health.heatmap import SIGNS
from trainmaster.report.html import asset, environment, style_policy

_CELL, _GAP, _EM = 22, 2, 7.0
_LABEL_MAX = 30
MOST_CURVES = 12


def render(view: View) -> str:
    """The complete file: inline style, no script, no external address, and a strict content security policy."""
    style = asset("style.css") + asset("health/health.css") + asset("acceptance/acceptance.css")
    return (
        environment()
        .get_template("acceptance.html")
        .render(
            view=view,
            version=__version__,
            style=Markup(style),  # noqa: S704 (files of this package, not values)
            policy=style_policy(style),
            heat=heat_map(view),
            charts=[
                chart.render_bandwidth(
                    key=f"curve{index}", title=curve.title, measured=curve.points, baseline=curve.baseline
                )
                for index, curve in enumerate(view.curves[:MOST_CURVES])
            ],
        )
    )


def heat_map(view: View) -> Markup:
    """Nodes × ranks of each training, each square with the verdict on the rank's own speed; empty without nodes."""
    if not view.nodes:
        return Markup()
    widths = {name: max(len(node.cells.get(name, ())) for node in view.nodes) for name in view.trainings}
    left = 14 + _EM * max(len(_cut(node.name)) for node in view.nodes)
    columns, x = {}, left
    for name, count in widths.items():
        columns[name] = x
        x += max(count * _CELL, _EM * len(name)) + 18
    body = [
        Markup('<text class="col" x="{:.0f}" y="14">{}</text>').format(columns[name], name) for name in view.trainings
    ]
    for row, node in enumerate(view.nodes):
        y = 24 + row * _CELL
        body.append(
            Markup('<text class="row" x="{:.1f}" y="{:.1f}">{}<title>{}</title></text>').format(
                left - 8, y + _CELL / 2, _cut(node.name), node.name
            )
        )
        for name, cells in node.cells.items():
            body += _squares(columns[name], y, f"{node.name}, {name}", cells)
    height = 28 + len(view.nodes) * _CELL
    return Markup(
        '<figure class="heat"><div class="scroll"><svg role="img" aria-label="Own speed of every rank, {count} nodes" '
        'width="{w:.0f}" height="{h:.0f}" viewBox="0 0 {w:.0f} {h:.0f}">{body}</svg></div></figure>'
    ).format(count=len(view.nodes), w=x, h=height, body=Markup("").join(body))


def _squares(x: float, y: float, where: str, cells: Sequence[Cell]) -> list[Markup]:
    return [
        Markup(
            '<g class="v-{v}"><title>{t}</title><rect x="{x:.1f}" y="{y:.1f}" width="{s}" height="{s}" rx="3"/>'
            '<text x="{cx:.1f}" y="{cy:.1f}">{sign}</text></g>'
        ).format(
            v=cell.verdict.value, t=f"{where}, {cell.label}: {cell.over:+.1%} against the median", x=x + i * _CELL, y=y,
            s=_CELL - _GAP, cx=x + i * _CELL + (_CELL - _GAP) / 2, cy=y + (_CELL - _GAP) / 2, sign=SIGNS[cell.verdict],
        )
        for i, cell in enumerate(cells)
    ]  # fmt: skip


def _cut(name: str) -> str:
    return name if len(name) <= _LABEL_MAX else name[: _LABEL_MAX - 1] + "…"
