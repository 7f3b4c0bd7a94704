"""Login page: a token is exchanged for an HttpOnly cookie."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse, Response

from trainmaster.store import audit, people, tokens
from trainmaster.web import dependencies
from trainmaster.web.auth import COOKIE, count_guess, from_loopback
from trainmaster.web.errors import Refused
from trainmaster.web.sign_in.local_access import LocalAccess
from trainmaster.web.templating import render

_HOURS = 12
router = APIRouter(include_in_schema=False)


@router.get("/login")
def login_page(request: Request, after: Annotated[str, Query(alias="next")] = "/") -> Response:
    return _page(request, after)


@router.post("/login")
async def log_in(request: Request, db: dependencies.Db) -> Response:
    """Set the cookie for 12 hours; a wrong token counts against its address."""
    try:
        form = parse_qs((await request.body()).decode("utf-8", errors="replace"), max_num_fields=10)
    except (ClientDisconnect, ValueError) as error:
        raise Refused(400, "bad_form", "invalid form") from error
    token, after = (form.get(name, [""])[0].strip() for name in ("token", "next"))
    local: LocalAccess | None = request.app.state.local
    mine = local is not None and local.owns(token)
    if not mine and await run_in_threadpool(tokens.find_token, db, token) is None:
        count_guess(request)
        return _page(request, after, wrong=True, status_code=401)
    return _log_in(request, token, after)


@router.get("/enter/{code}")
def enter(request: Request, code: str, after: Annotated[str, Query(alias="next")] = "/") -> Response:
    """The one-time link that `trainmaster serve` prints: log the browser of the server's own user in."""
    local: LocalAccess | None = request.app.state.local
    if local is None or not from_loopback(request) or not local.redeem(code):
        count_guess(request)
        return _page(request, after, wrong=True, status_code=401)
    return _log_in(request, local.token, after)


def _page(request: Request, after: str, *, wrong: bool = False, status_code: int = 200) -> Response:
    sign_in = request.app.state.sign_in
    label = sign_in.provider.settings.label if sign_in is not None else None
    return render(
        "login.html", after=local_path(after), wrong=wrong, trouble="", sign_in=label, status_code=status_code
    )


def _log_in(request: Request, token: str, after: str) -> Response:
    answer = RedirectResponse(local_path(after), status_code=303)
    # Strict: no other site can make the browser send it, not even by a link.
    answer.set_cookie(
        COOKIE, token, max_age=_HOURS * 3600, httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )
    return answer


@router.post("/logout")
def log_out(db: dependencies.Db, who: dependencies.Viewer) -> Response:
    """Remove the cookie; a session of OpenID Connect ends on the server too."""
    if who.session is not None:
        with db.write() as conn:
            people.end(conn, who.session.id)
            audit.record(conn, who=who.name, action="session.end", subject=f"person:{who.name}")
    answer = RedirectResponse("/login", status_code=303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


def local_path(path: str) -> str:
    """A path of this server; anything that a browser could read as another server becomes /."""
    return path if re.fullmatch(r"/(?![/\\])[\x21-\x5b\x5d-\x7e]*", path) else "/"
