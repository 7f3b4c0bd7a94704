"""Jinja templates of the pages, and the static files they link to."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from jinja2 import ChoiceLoader, Environment, FileSystemLoader
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response

from trainmaster import __version__
from trainmaster.core.clean_text import clean
from trainmaster.report import html
from trainmaster.web.navigation import Entry

_FOLDER = Path(__file__).parent
_STATIC = _FOLDER / "static"
# In every page itself: a page is painted when its sheet is there, and a second request to a busy server takes a while.
_SHEETS = (html.FOLDER / "style.css", _STATIC / "frame.css", _STATIC / "pages.css")
# By name: the files it is made of, one after the other.
_FILES = {
    "page.js": ((html.FOLDER / "chart.js", _STATIC / "live.js", _STATIC / "frame.js"), "text/javascript"),
    "compare.js": ((_STATIC / "compare.js",), "text/javascript"),
    "plot.js": ((_STATIC / "plot.js",), "text/javascript"),
    "curves.js": ((_STATIC / "curves.js",), "text/javascript"),
    "timeline.js": ((_STATIC / "timeline.js",), "text/javascript"),
    "logs.js": ((_STATIC / "logs.js",), "text/javascript"),
    "icon.svg": ((_STATIC / "icon.svg",), "image/svg+xml"),
}
_FRESH_S = 60  # a browser that goes from page to page does not ask again; after an upgrade it does within a minute
_FRESH_TAGGED_S = 365 * 86_400  # an address with the hash of the file, which is another after an upgrade
router = APIRouter(include_in_schema=False)


@router.get("/static/{name}")
async def static(name: str, request: Request) -> Response:
    """A static file, with an ETag. It is in memory: a thread would take longer to get than the answer."""
    if name not in _FILES:
        raise HTTPException(404)
    body, tag = _file(name)
    same = request.query_params.get("v") == _version(name)
    fresh = f"max-age={_FRESH_TAGGED_S}, immutable" if same else f"max-age={_FRESH_S}"
    headers = {"ETag": tag, "Cache-Control": fresh}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=_FILES[name][1], headers=headers)


def compile_all() -> None:
    """Compile every template: the first page of each kind would wait for its own."""
    environment = _environment()
    for name in environment.list_templates(extensions=["html"]):
        environment.get_template(name)


def navigate(entries: Sequence[Entry]) -> None:
    """Show these entries in the navigation of every page: the application knows its routes, a template does not."""
    _environment().globals["navigation"] = tuple(entries)


def render(template: str, *, status_code: int = 200, **values: Any) -> HTMLResponse:
    """Render a template as a response."""
    text = _environment().get_template(template).render(version=__version__, **values)
    return HTMLResponse(text, status_code=status_code)


def crumbs(*parts: tuple[str, str | None]) -> Markup:
    """The way to a page, as pairs of a name and a path; the page itself has none."""
    links = [
        Markup('<li><a href="{}">{}</a></li>').format(path, clean(name))
        if path is not None
        else Markup('<li aria-current="page">{}</li>').format(clean(name))
        for name, path in parts
    ]
    return Markup('<nav class="trail" aria-label="Breadcrumbs"><ol>{}</ol></nav>').format(Markup("").join(links))


@functools.cache
def sheet() -> Markup:
    """The style of every page. It is our own text: a value of a user in it would be a hole."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in _SHEETS)
    return Markup(text)  # noqa: S704 (files of this package)


def sheet_hash() -> str:
    """What a content policy allows the style by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(sheet().encode()).digest()).decode()}"


def _link(name: str) -> str:
    """The address of a static file, with its hash: a browser keeps it until the file is another."""
    return f"/static/{name}?v={_version(name)}"


@functools.cache
def _environment() -> Environment:
    ours = FileSystemLoader(_FOLDER / "templates")
    environment = html.environment().overlay(loader=ChoiceLoader([ours, html.environment().loader or ours]))
    environment.globals.setdefault("navigation", ())
    environment.globals.update(crumbs=crumbs, sheet=sheet, static=_link)
    return environment


@functools.cache
def _file(name: str) -> tuple[bytes, str]:
    body = b"\n".join(path.read_bytes() for path in _FILES[name][0])
    return body, f'"{hashlib.sha256(body).hexdigest()[:24]}"'


def _version(name: str) -> str:
    return _file(name)[1].strip('"')
