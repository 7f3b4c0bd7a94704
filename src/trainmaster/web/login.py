"""Login page: a token is exchanged for an HttpOnly cookie."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse, Response

from trainmaster.store import tokens
from trainmaster.web import dependencies
from trainmaster.web.auth import COOKIE, count_guess, from_loopback
from trainmaster.web.errors import Refused
from trainmaster.web.local_access import LocalAccess
from trainmaster.web.templating import render

_HOURS = 12
router = APIRouter(include_in_schema=False)


@router.get("/login")
def login_page(after: Annotated[str, Query(alias="next")] = "/") -> Response:
    return render("login.html", after=_ours(after), wrong=False)


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
        return render("login.html", after=_ours(after), wrong=True, status_code=401)
    return _log_in(request, token, after)


@router.get("/enter/{code}")
def enter(request: Request, code: str, after: Annotated[str, Query(alias="next")] = "/") -> Response:
    """The one-time link that `trainmaster serve` prints: log the browser of the server's own user in."""
    local: LocalAccess | None = request.app.state.local
    if local is None or not from_loopback(request) or not local.redeem(code):
        count_guess(request)
        return render("login.html", after=_ours(after), wrong=True, status_code=401)
    return _log_in(request, local.token, after)


def _log_in(request: Request, token: str, after: str) -> Response:
    answer = RedirectResponse(_ours(after), status_code=303)
    # Strict: no other site can make the browser send it, not even by a link.
    answer.set_cookie(
        COOKIE, token, max_age=_HOURS * 3600, httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )
    return answer


@router.post("/logout")
def log_out() -> Response:
    answer = RedirectResponse("/login", status_code=303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict")
    return answer


def _ours(path: str) -> str:
    """A path of this server; anything that a browser could read as another server becomes /."""
    return path if re.fullmatch(r"/(?![/\\])[\x21-\x5b\x5d-\x7e]*", path) else "/"
