"""Sign-in by OpenID Connect: leave for the provider, return with a code, begin a session."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from trainmaster.control.notify.signing import derive_key
from trainmaster.core.clean_text import clean_line
from trainmaster.store import audit, people
from trainmaster.store.database import Database
from trainmaster.web import dependencies
from trainmaster.web.auth import COOKIE, count_guess
from trainmaster.web.sign_in import flow
from trainmaster.web.sign_in.id_token import BadToken
from trainmaster.web.sign_in.login import local_path
from trainmaster.web.sign_in.provider import Provider, ProviderError
from trainmaster.web.sign_in.settings import CALLBACK, Client, Grant, Settings, find_claim, find_grants
from trainmaster.web.templating import render

log = logging.getLogger(__name__)
router = APIRouter(include_in_schema=False)
_NOT_BEGUN = "This sign-in was not begun in this browser, or more than 10 minutes ago. Sign in again."
_DENIED = "The provider refused the sign-in."  # the person pressed Cancel, or may not use this server there
_FAILED = "The provider reports a failure. Sign in again; if it stays, tell the operator of this server."


class SignIn:
    """The provider, and the key of this server's sign-ins."""

    def __init__(self, client: Client, home: Path, *, provider: Provider | None = None) -> None:
        self.provider = provider if provider is not None else Provider(client)
        self.key = derive_key(home, "oidc")


@router.get(flow.PATH)
async def leave(request: Request, after: Annotated[str, Query(alias="next", max_length=2048)] = "/") -> Response:
    """Send the browser to the provider."""
    sign_in: SignIn = request.app.state.sign_in
    began = flow.begin(sign_in.key, after=local_path(after), now=time.time())
    try:
        url = await sign_in.provider.start_url(state=began.state, nonce=began.nonce, challenge=began.challenge)
    except ProviderError as error:
        return _refuse(sign_in, f"The provider of accounts cannot be used now. {error}", 502)
    answer = RedirectResponse(url, status_code=303)
    # Lax: the provider sends the browser back from another site.
    answer.set_cookie(
        flow.COOKIE, began.cookie, max_age=flow.MAX_AGE_S, path=flow.PATH, httponly=True, samesite="lax",
        secure=sign_in.provider.settings.secure,
    )  # fmt: skip
    return answer


@router.get(CALLBACK)
async def come_back(request: Request, db: dependencies.Db) -> Response:
    """Exchange the code of the provider for a session."""
    sign_in: SignIn = request.app.state.sign_in
    provider, sent = sign_in.provider, request.query_params
    cookie = request.cookies.get(flow.COOKIE, "")
    began = flow.resume(sign_in.key, cookie, state=sent.get("state", ""), now=time.time())
    if began is None:
        count_guess(request)
        return _refuse(sign_in, _NOT_BEGUN, 400)
    try:
        await provider.check_sender(sent.get("iss"))
        code = sent.get("code", "")
        if "error" in sent or not code:
            return _refuse(sign_in, _DENIED if sent.get("error") == "access_denied" else _FAILED, 401)
        claims = await provider.exchange(code, verifier=began.verifier, nonce=began.nonce)
    except ProviderError as failed:
        count_guess(request)
        return _refuse(sign_in, f"The provider of accounts cannot be used now. {failed}", 502)
    except BadToken as refused:
        count_guess(request)
        log.warning("refused an ID token of %s: %s", provider.settings.issuer, refused)
        return _refuse(sign_in, f"The ID token of the provider is refused: {refused}.", 401)
    grants = find_grants(provider.settings.roles, claims)
    name = _name(claims, provider.settings)
    if not grants:
        count_guess(request)
        await run_in_threadpool(_end_all, db, provider.settings.issuer, claims["sub"])
        return _refuse(sign_in, f"{name} has no role on this server. Its operator gives roles by claims.", 403)
    secret = await run_in_threadpool(_begin, db, provider.settings, claims["sub"], name, grants)
    # A page that goes on by itself, not a redirect: after one that began at another site a browser would not send the
    # Strict cookie, and ask for a sign-in again.
    answer = render("signed_in.html", after=local_path(began.after), name=name)
    answer.set_cookie(
        COOKIE, secret, max_age=int(provider.settings.session_hours * 3600), httponly=True, samesite="strict",
        secure=provider.settings.secure,
    )  # fmt: skip
    return _forget(answer)


def _begin(db: Database, settings: Settings, subject: str, name: str, grants: tuple[Grant, ...]) -> str:
    now = datetime.now(UTC)
    pairs = [(grant.role, grant.project) for grant in grants]
    with db.write() as conn:
        secret, name = people.sign_in(
            conn, issuer=settings.issuer, subject=subject, name=name, grants=pairs, at=now,
            expires_at=now + timedelta(hours=settings.session_hours),
        )  # fmt: skip
        detail = {"issuer": settings.issuer, "role": pairs[0][0].value, "project": pairs[0][1]}
        audit.record(conn, who=name, action="session.start", subject=f"person:{name}", detail=detail)
    return secret


def _end_all(db: Database, issuer: str, subject: str) -> None:
    with db.write() as conn:
        people.end_all(conn, issuer=issuer, subject=subject)


def _name(claims: Mapping[str, Any], settings: Settings) -> str:
    """How pages and the audit log call a person: always with an @, which the name of a token cannot have."""
    given = find_claim(claims, settings.name_claim)
    trusted = settings.name_claim != "email" or claims.get("email_verified") not in (False, "false")
    text = clean_line(given)[:200] if isinstance(given, str) and trusted else ""
    name = text or claims["sub"]
    name = name if "@" in name else f"{name}@{settings.issuer_host}"
    return name if len(name) <= 63 else f"{name[:54]}#{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _refuse(sign_in: SignIn, message: str, status: int) -> Response:
    label = sign_in.provider.settings.label
    return _forget(render("login.html", after="/", wrong=False, sign_in=label, trouble=message, status_code=status))


def _forget(answer: Response) -> Response:
    """The sign-in is over, whatever its result: the same cookie serves no second one."""
    answer.delete_cookie(flow.COOKIE, path=flow.PATH, httponly=True, samesite="lax")
    return answer
