"""Reports: a job page as one HTML file, as Markdown, as JSON. The file's suffix chooses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainmaster.api.codec import to_json
from trainmaster.api.jobs import JobPage
from trainmaster.core.errors import UsageError
from trainmaster.core.files import write_whole
from trainmaster.report.markdown import render_markdown

__all__ = ["FORMATS", "render_html", "render_json", "render_markdown", "write"]


def render_html(page: JobPage) -> str:
    """The page as one HTML file. Jinja is imported here: the other formats do without it."""
    from trainmaster.report import html

    return html.render_html(page)


def render_json(page: JobPage) -> str:
    """The whole page as JSON."""
    return to_json(page, indent=2) + "\n"


FORMATS: dict[str, Callable[[JobPage], str]] = {"html": render_html, "md": render_markdown, "json": render_json}


def write(page: JobPage, path: Path) -> Path:
    """Write the report to `path`, in the format its suffix names; whole or not at all."""
    render = FORMATS.get(path.suffix.lstrip(".").lower())
    if render is None:
        raise UsageError(f"{path}: a report is one of {', '.join('.' + name for name in FORMATS)}")
    text = render(page)
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, text, durable=False)
