"""Heatmap of nodes × checks: one square each, with colour and sign of its worst finding.

The sign works without colour (✕ fail, ? not measured, ! warn, ✓ pass, – does not apply). Up to EACH nodes have a row
each; above that, nodes with equal verdicts share a row with their count, so that 256 nodes fit and none is left out.
More checks than the page is wide go on below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trainmaster.core.results import Verdict
from trainmaster.report.health.view import Node, Row, View, worst

EACH = 48
SIGNS = {Verdict.FAIL: "✕", Verdict.ERROR: "?", Verdict.WARN: "!", Verdict.PASS: "✓", Verdict.SKIP: "–"}
WORDS = {
    Verdict.FAIL: "failed",
    Verdict.ERROR: "not measured",
    Verdict.WARN: "warning",
    Verdict.PASS: "passed",
    Verdict.SKIP: "does not apply",
}
_CELL, _GAP = 22, 2
_COLUMNS = 32  # that the page is wide enough for, beside the longest label
_LABEL_MAX, _CHECK_MAX = 30, 24  # characters shown; the whole name is in the title
_TITLE_ROWS, _TITLE_CHARS = 6, 160  # of a square's text
_EM = 7.0  # widest of the sheet's 12 px sans, about


@dataclass(frozen=True, slots=True, kw_only=True)
class _Band:
    """One row: one node, or several with equal verdicts."""

    label: str
    names: tuple[str, ...]
    nodes: tuple[Node, ...]


def render(view: View) -> Markup:
    """The heatmap and its legend; empty without nodes."""
    bands = _bands(view.nodes)
    if not bands:
        return Markup()
    many = (
        f"{len(view.nodes)} nodes × {len(view.checks)} checks" if len(view.nodes) != 1 else f"{len(view.checks)} checks"
    )
    maps = Markup("").join(_map(bands, checks, many) for checks in _split(view.checks))
    return Markup('<figure class="heat"><div class="scroll">{}</div><figcaption>{}</figcaption></figure>').format(
        maps, _legend()
    )


def _split(checks: Sequence[str]) -> list[Sequence[str]]:
    """The checks in equal parts, each as wide as the page at most."""
    size = math.ceil(len(checks) / max(1, math.ceil(len(checks) / _COLUMNS)))
    return [checks[start : start + size] for start in range(0, len(checks), max(1, size))]


def _map(bands: Sequence[_Band], checks: Sequence[str], many: str) -> Markup:
    shown = [_cut(check, _CHECK_MAX) for check in checks]
    left = 14 + _EM * max(len(_cut(band.label, _LABEL_MAX)) for band in bands)
    top = 10 + 0.82 * _EM * max(map(len, shown))  # the names stand at 55 degrees
    # The last name leans out to the right by the cosine of that angle.
    width = left + len(checks) * _CELL + 10 + 0.6 * _EM * max(map(len, shown))
    height = top + len(bands) * _CELL + 4
    body = [_header(left + index * _CELL, top, check) for index, check in enumerate(checks)]
    body += [_band(band, checks, left, top + index * _CELL) for index, band in enumerate(bands)]
    return Markup(
        '<svg role="img" aria-label="{many}; the nodes below say the same in words" width="{w:.0f}" height="{h:.0f}" '
        'viewBox="0 0 {w:.0f} {h:.0f}">{body}</svg>'
    ).format(many=many, w=width, h=height, body=Markup("").join(body))


def _bands(nodes: Sequence[Node]) -> list[_Band]:
    if len(nodes) <= EACH:
        return [_Band(label=node.name, names=(node.name,), nodes=(node,)) for node in nodes]
    groups: dict[tuple[tuple[str, Verdict], ...], list[Node]] = {}
    for node in nodes:
        checks = dict.fromkeys(row.check for row in node.rows)
        key = tuple(sorted((check, verdict) for check in checks if (verdict := node.worst(check)) is not None))
        groups.setdefault(key, []).append(node)
    return [
        _Band(
            label=members[0].name if len(members) == 1 else f"{len(members)} nodes: {members[0].name} …",
            names=tuple(node.name for node in members),
            nodes=tuple(members),
        )
        for members in groups.values()
    ]


def _header(x: float, y: float, check: str) -> Markup:
    return Markup(
        '<text class="col" transform="translate({:.1f} {:.1f}) rotate(-55)">{}<title>{}</title></text>'
    ).format(x + _CELL / 2 + 3, y - 5, _cut(check, _CHECK_MAX), check)


def _band(band: _Band, checks: Sequence[str], left: float, y: float) -> Markup:
    names = ", ".join(band.names[:40]) + (f" and {len(band.names) - 40} more" if len(band.names) > 40 else "")
    parts = [
        Markup('<text class="row" x="{:.1f}" y="{:.1f}">{}<title>{}</title></text>').format(
            left - 8, y + _CELL / 2, _cut(band.label, _LABEL_MAX), names
        )
    ]
    rows: dict[str, list[Row]] = {}
    for node in band.nodes:
        for row in node.rows:
            rows.setdefault(row.check, []).append(row)
    for index, check in enumerate(checks):
        # A silent node: a question mark for every check.
        shown = list(band.nodes[0].rows) if band.nodes[0].silent else rows.get(check)
        if shown:
            parts.append(_square(left + index * _CELL, y, band.label, shown))
    return Markup("").join(parts)


def _square(x: float, y: float, label: str, rows: list[Row]) -> Markup:
    verdict = worst(row.verdict for row in rows)
    assert verdict is not None
    worst_first = [row for row in rows if row.verdict is verdict]
    lines = [f"{row.where}: {row.reason}"[:_TITLE_CHARS] for row in worst_first[:_TITLE_ROWS]]
    if len(worst_first) > _TITLE_ROWS:
        lines.append(f"and {len(worst_first) - _TITLE_ROWS} more")
    title = "\n".join([f"{label} · {rows[0].check}: {WORDS[verdict]}", *lines])
    return Markup(
        '<g class="v-{v}"><title>{title}</title><rect x="{x:.1f}" y="{y:.1f}" width="{s}" height="{s}" rx="3"/>'
        '<text x="{cx:.1f}" y="{cy:.1f}">{sign}</text></g>'
    ).format(
        v=verdict.value,
        title=title,
        x=x,
        y=y,
        s=_CELL - _GAP,
        cx=x + (_CELL - _GAP) / 2,
        cy=y + (_CELL - _GAP) / 2,
        sign=SIGNS[verdict],
    )


def _legend() -> Markup:
    return Markup("").join(
        Markup(
            '<span class="sign"><svg width="18" height="18" aria-hidden="true"><g class="v-{v}">'
            '<rect width="18" height="18" rx="3"/><text x="9" y="9">{sign}</text></g></svg>{word}</span>'
        ).format(v=verdict.value, sign=sign, word=WORDS[verdict])
        for verdict, sign in SIGNS.items()
    )


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
