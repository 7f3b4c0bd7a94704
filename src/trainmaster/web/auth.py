"""Authentication and authorisation. Every request passes `AuthMiddleware`; a path without a rule is closed.

A caller is identified by a token in the Authorization header (programs) or in the cookie of the login page (browsers),
or by the session that a sign-in with OpenID Connect began (browsers).
Over loopback none is needed unless the server requires one. A request that a proxy forwarded is not a loopback request.
"""

from __future__ import annotations

import ipaddress
import math
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from trainmaster.api.access import Token
from trainmaster.core.errors import UsageError
from trainmaster.core.loopback import is_loopback_address
from trainmaster.core.roles import RANK, Role
from trainmaster.store import people, tokens
from trainmaster.store.database import Database
from trainmaster.store.page_rows import backlog
from trainmaster.store.people import Session
from trainmaster.web.errors import Refused, answer, for_programs, unavailable
from trainmaster.web.guard import SAFE_METHODS
from trainmaster.web.rate_limit import ASKING, GUESSING, Limiter, Rate
from trainmaster.web.sign_in.local_access import LocalAccess

COOKIE = "trainmaster"
LOOPBACK = "loopback"
LOCAL = "local"  # the server's own Unix user, by the token in HOME/local.token
_SIGN_IN = ("/login", "/login/oidc", "/login/oidc/callback")
PUBLIC = frozenset({"/healthz", "/readyz", "/api/hello", "/v1/openapi.json", *_SIGN_IN})
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
_QUERY_NAMES = frozenset({"token", "access_token", "api_key", "apikey", "authorization"})
_MOST_PARTS = 100  # of a query; no path has ten
_TOUCH_S = 60.0  # between two notes of a token's last use: reading must not become writing


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller of a request."""

    name: str
    role: Role
    project: str | None  # None: every project
    token_id: int | None = None  # None: over loopback, or by a session
    by_cookie: bool = False
    session: Session | None = None

    def sees(self, project: str) -> bool:
        return self.project is None or self.project == project

    @property
    def runs_server(self) -> bool:
        """An admin of the whole server, not of one project: the only one who acts with the server's own rights."""
        return self.role is Role.ADMIN and self.project is None

    def may(self, role: Role) -> bool:
        return RANK[self.role] >= RANK[role]

    @property
    def label(self) -> str:
        """The caller in a message."""
        return self.name if self.session is not None else f"token {self.name}"


def may_bind(db: Database, host: str, *, sign_in: bool = False) -> None:
    """UsageError where a server on this address could be reached by other machines, and nobody could sign in."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise UsageError(f"--host {host}: not an address; write 127.0.0.1, ::1 or 0.0.0.0") from None
    if not address.is_loopback and not sign_in and not tokens.any_live(db):
        raise UsageError(
            f"--host {host}: other machines could reach it, and there is no token to keep them out; create one first "
            "with `trainmaster token create NAME --role admin`, or listen on 127.0.0.1 and use an SSH tunnel"
        )


class AuthMiddleware:
    """Attach the `Caller` to a request, or refuse it: 401, 403, 429."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        db: Database,
        loopback: bool,
        local: LocalAccess | None = None,
        issuer: str | None = None,
        asking: Rate | None = ASKING,
        guessing: Rate = GUESSING,
    ) -> None:
        self._app, self._db, self._loopback, self._local = app, db, loopback, local
        self._issuer = issuer  # of sessions
        self._asking = Limiter(asking) if asking is not None else None
        self._guessing = Limiter(guessing)
        self._touched: dict[int, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        scope.setdefault("state", {})["guessing"] = self._guessing
        try:
            scope["state"]["who"] = who = await self._let_in(request)
            # Checked here and at each route: a route that omits its role must not let a viewer change anything.
            if who is not None and request.method not in SAFE_METHODS and not _is_open(scope["path"]):
                need(who, Role.USER)
        except Refused as error:
            await self._refuse(request, error)(scope, receive, send)
            return
        except backlog.GONE as error:
            await answer(request, unavailable(error))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _let_in(self, request: Request) -> Caller | None:
        _refuse_token_in_query(request)
        address = _address(request)
        given, by_cookie = _given(request)
        # The path as it came, which is what is routed by. `request.url` is put together from the Host header and read
        # again, so that a Host of `127.0.0.1/healthz?` would make any path look like an open one.
        path: str = request.scope["path"]
        public = _is_public(path)
        if given is None or (public and by_cookie):
            who = self._stranger(request, public=public)
        elif self._local is not None and self._local.owns(given) and from_loopback(request):
            who = Caller(name=LOCAL, role=Role.ADMIN, project=None, by_cookie=by_cookie)
        elif by_cookie and self._issuer is not None and people.SHAPE.fullmatch(given):
            who = await run_in_threadpool(self._find_person, given, self._issuer)
        else:
            token = await run_in_threadpool(self._find, given)
            if token is None:
                count_guess(request)
                raise Refused(401, "bad_token", "unknown or revoked token", headers=_BEARER)
            who = Caller(
                name=token.name, role=token.role, project=token.project, token_id=token.id, by_cookie=by_cookie
            )
        if self._asking is not None:
            known = who is not None and (who.token_id is not None or who.session is not None)
            _spend(self._asking, who.label if who and known else f"address {address}", "requests")
        return who

    def _stranger(self, request: Request, *, public: bool) -> Caller | None:
        if self._loopback and from_loopback(request):
            return Caller(name=LOOPBACK, role=Role.ADMIN, project=None)
        if public:
            return None
        raise Refused(401, "no_token", "send a token: `Authorization: Bearer tm_…`", headers=_BEARER)

    def _find(self, token: str) -> Token | None:
        row = tokens.find_token(self._db, token)
        if row is not None and time.monotonic() - self._touched.get(row.id, -math.inf) > _TOUCH_S:
            self._touched[row.id] = time.monotonic()
            with self._db.write() as conn:
                tokens.touch(conn, row.id, at=datetime.now(UTC))
        return row

    def _find_person(self, secret: str, issuer: str) -> Caller:
        session = people.find_session(self._db, secret, issuer=issuer, at=datetime.now(UTC))
        if session is None:  # not counted as a guess: every session ends, and the browser sends its cookie once more
            raise Refused(401, "session_over", "the session is over; sign in again", headers=_BEARER)
        return Caller(name=session.name, role=session.role, project=session.project, by_cookie=True, session=session)

    @staticmethod
    def _refuse(request: Request, error: Refused) -> ASGIApp:
        if error.status == 401 and request.method == "GET" and not for_programs(request):
            query = request.scope["query_string"].decode("latin-1")
            path = request.scope["path"] + (f"?{query}" if query else "")
            back = RedirectResponse(f"/login?next={quote(path, safe='')}", status_code=303)
            back.delete_cookie(COOKIE)
            return back
        return answer(request, error)


def _is_public(path: str) -> bool:
    return path in PUBLIC or path.startswith(("/static/", "/enter/"))


def _is_open(path: str) -> bool:
    """Whether any caller may change something there: sign in or out, or choose another of their own roles."""
    return _is_public(path) or path in ("/logout", "/settings/project")


def count_guess(request: Request) -> None:
    """Count a wrong token against its address; too many are refused with 429.

    A valid token still passes: it has 256 random bits and cannot be guessed, and a lock of the address would lock out
    every user behind the same proxy.
    """
    _spend(request.state.guessing, _address(request), "wrong tokens")


def _spend(limiter: Limiter, caller: str, what: str) -> None:
    wait = math.ceil(limiter.take(caller))
    if wait:
        after = {"Retry-After": str(wait)}
        raise Refused(429, "too_many", f"too many {what}; retry in {wait} s", headers=after)


_BEARER = {"WWW-Authenticate": 'Bearer realm="trainmaster"'}


def need(who: Caller, role: Role, *, project: str | None = None) -> None:
    """Refuse a caller without this role, or without access to the project."""
    if not who.may(role):
        raise Refused(403, "forbidden", f"{who.label} has the role {who.role}; this needs the role {role}")
    if project is not None and not who.sees(project):
        own = f"; it is of {who.project}: write project={who.project}"
        raise Refused(403, "forbidden", f"{who.label} has no access to the project {project}{own}")


def _given(request: Request) -> tuple[str | None, bool]:
    """The token of a request, and whether it came in a cookie."""
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, token = header.partition(" ")
        if scheme.lower() != "bearer":
            raise Refused(401, "bad_token", "only the scheme `Authorization: Bearer` is supported", headers=_BEARER)
        return token.strip(), False
    cookie = request.cookies.get(COOKIE)
    return (cookie, True) if cookie else (None, False)


def _address(request: Request) -> str:
    return request.client.host if request.client else "?"


def from_loopback(request: Request) -> bool:
    """Both ends are loopback addresses, and no proxy forwarded it."""
    ends = (request.client.host if request.client else "", (request.scope.get("server") or ("",))[0])
    return all(is_loopback_address(end) for end in ends) and not any(name in request.headers for name in _FORWARDED)


def _refuse_token_in_query(request: Request) -> None:
    # URLs end up in logs, browser histories and the Referer header.
    raw = request.scope["query_string"].decode("latin-1")
    if raw.count("&") >= _MOST_PARTS:
        raise Refused(400, "unknown_parameter", f"a URL has at most {_MOST_PARTS} parameters")
    for name, value in parse_qsl(raw, keep_blank_values=True):
        if name.lower() in _QUERY_NAMES or tokens.SHAPE.search(value):
            advice = "Revoke this one and use the Authorization header"
            raise Refused(400, "token_in_query", f"do not send tokens in the URL: it may have been logged. {advice}")
