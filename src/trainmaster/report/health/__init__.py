"""Health reports in every format: HTML, Markdown, JUnit XML, Prometheus text, metrics JSON, terminal lines.

    write_bundle(health, folder, cost=Prices(…))     all files of an evidence bundle, beside health.json
    FILES["report.md"](build(health))                one of them, as text

All formats render one `view.View`, so no two can disagree. Pure: the same health gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainmaster.core.files import write_whole
from trainmaster.core.health import ClusterHealth
from trainmaster.core.money.prices import Prices
from trainmaster.report.health import junit, markdown, metrics, prometheus, terminal
from trainmaster.report.health.view import View, build

__all__ = ["FILES", "build", "render_terminal", "write_bundle"]


def _html(view: View) -> str:
    """The HTML report. Jinja is imported here: the other formats do without it."""
    from trainmaster.report.health import html

    return html.render(view)


FILES: dict[str, Callable[[View], str]] = {
    "report.html": _html,
    "report.md": markdown.render,
    "junit.xml": junit.render,
    "metrics.prom": prometheus.render,
    "health_check_metrics.json": metrics.render,
}


def write_bundle(health: ClusterHealth, folder: Path, *, cost: Prices | None = None, digest: str = "") -> list[Path]:
    """Write every format into the folder, each atomically; the paths in order. Without Jinja there is no HTML."""
    view = build(health, cost, digest=digest)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, render in FILES.items():
        try:
            text = render(view)
        except ImportError:
            if name != "report.html":
                raise
            continue
        written.append(write_whole(folder / name, text, durable=False))
    return written


def render_terminal(health: ClusterHealth, *, cost: Prices | None = None) -> list[str]:
    """Verdict, silent nodes and first actions, as plain lines."""
    return terminal.render(build(health, cost))
