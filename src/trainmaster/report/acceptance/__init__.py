"""Reports of acceptance suites: HTML, Markdown and JSON from one document.

    write_bundle(document, folder)     report.html, report.md beside the suite's report.json

All formats render one `view.View`. Pure: the same document gives the same bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster.core.files import write_whole
from trainmaster.report.acceptance import markdown
from trainmaster.report.acceptance.view import View, build

__all__ = ["View", "build", "render_html", "render_markdown", "write_bundle"]


def render_html(view: View) -> str:
    """The HTML report. Jinja is imported here: Markdown does without it."""
    from trainmaster.report.acceptance import html

    return html.render(view)


def render_markdown(view: View) -> str:
    return markdown.render(view)


def write_bundle(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write every format; the paths in order. Without Jinja there is no HTML."""
    view = build(document)
    written = [write_whole(folder / "report.md", render_markdown(view), durable=False)]
    with contextlib.suppress(ImportError):
        written.insert(0, write_whole(folder / "report.html", render_html(view), durable=False))
    return written
