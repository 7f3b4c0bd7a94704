"""Protection of the browser: host check, cross-site check, body size limit, security headers.

Every web page that a user visits can send requests to a server on loopback. A foreign name that resolves to 127.0.0.1
(DNS rebinding) fails the host check; a form or script of another site (CSRF) fails the cross-site check; the content
security policy lets a page run our own script files only and have our own style, should a hostile value get past the
escaping.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainmaster.core.loopback import is_loopback_address
from trainmaster.web.errors import broken
from trainmaster.web.templating import sheet_hash

MAX_BODY = 1 << 20  # bytes; a spec is a page of text
# The style is in each page and allowed by its hash: no other style is, neither one in a page nor a file.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src '{style}'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",  # with `no-referrer` a browser sends our own forms with the origin `null`
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class GuardMiddleware:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str] = ()) -> None:
        self._app = app
        self._hosts = frozenset({"localhost", "127.0.0.1", "::1", *(host.lower() for host in hosts)})
        self._headers = {**HEADERS, "Content-Security-Policy": _POLICY.format(style=sheet_hash())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        started = False

        async def send_guarded(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(send_guarded, *refusal)
            return
        try:
            await self._app(scope, _limited(receive), send_guarded)
        except Exception as error:
            if started:
                raise
            # Not by the handler of the framework, which would omit the security headers.
            await broken(Request(scope), error)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        """Status, code and message of a refused request; None if it passes."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if _reached_by_loopback(scope) and _name(host) not in self._hosts:
            return (
                421,
                "wrong_host",
                f"{host!r} is not a name of this server; use http://127.0.0.1, or start it with --name",
            )
        if scope["method"] not in SAFE_METHODS and _cross_site(headers, host):
            return 403, "cross_site", "cross-site request refused"
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY:
            return 413, "too_large", f"the body exceeds {MAX_BODY:,} bytes"
        return None


def _reached_by_loopback(scope: Scope) -> bool:
    """The request arrived on 127.0.0.1 or ::1, whatever its Host header."""
    server = scope.get("server")
    return server is not None and is_loopback_address(server[0])


def _name(host: str) -> str:
    """The name of a Host header without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _cross_site(headers: Headers, host: str) -> bool:
    """The browser marks the request as cross-site. Programs send no such headers and pass.

    `same-site` is refused too: every port of localhost is the same site, and other programs listen there.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None and site not in ("same-origin", "none"):
        return True
    try:
        return origin is not None and urlsplit(origin).netloc.lower() != host.lower()
    except ValueError:  # no address at all, as "http://["
        return True


def _limited(receive: Receive) -> Receive:
    """The body cut off at the limit, for a request without Content-Length."""
    seen = 0

    async def receive_limited() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return message if seen <= MAX_BODY else {"type": "http.disconnect"}

    return receive_limited


async def _refuse(send: Send, status: int, code: str, message: str) -> None:
    body = json.dumps({"error": {"code": code, "message": message}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
