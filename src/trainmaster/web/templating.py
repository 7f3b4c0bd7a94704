"""Jinja templates of the pages, and the static files they link to."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from jinja2 import ChoiceLoader, Environment, FileSystemLoader
from starlette.responses import HTMLResponse, Response

from trainmaster import __version__
from trainmaster.report import html

_FOLDER = Path(__file__).parent
_FILES = {
    "style.css": (html.FOLDER / "style.css", "text/css"),
    "chart.js": (html.FOLDER / "chart.js", "text/javascript"),
    "live.js": (_FOLDER / "static" / "live.js", "text/javascript"),
    "icon.svg": (_FOLDER / "static" / "icon.svg", "image/svg+xml"),
}
router = APIRouter(include_in_schema=False)


@router.get("/static/{name}")
def static(name: str, request: Request) -> Response:
    """A static file, with an ETag."""
    if name not in _FILES:
        raise HTTPException(404)
    body, tag = _file(name)
    headers = {"ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=_FILES[name][1], headers=headers)


def render(template: str, *, status_code: int = 200, **values: Any) -> HTMLResponse:
    """Render a template as a response."""
    text = _environment().get_template(template).render(version=__version__, **values)
    return HTMLResponse(text, status_code=status_code)


@functools.cache
def _environment() -> Environment:
    ours = FileSystemLoader(_FOLDER / "templates")
    return html.environment().overlay(loader=ChoiceLoader([ours, html.environment().loader or ours]))


@functools.cache
def _file(name: str) -> tuple[bytes, str]:
    body = _FILES[name][0].read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:24]}"'
