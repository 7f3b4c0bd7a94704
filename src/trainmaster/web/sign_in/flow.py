"""What a browser keeps between leaving for the provider and its return: one cookie, of which everything else is made.

State, nonce and PKCE verifier are derived from the cookie with the server's key, so that the server keeps nothing for a
sign-in that never ends, several servers share the work, and a changed cookie has another state. The state that returns
proves that this browser began this sign-in (no login CSRF).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass

COOKIE = "trainmaster-oidc"
PATH = "/login/oidc"
MAX_AGE_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One sign-in. `after` is the path to go to when it is done."""

    cookie: str
    state: str
    nonce: str
    verifier: str
    after: str

    @property
    def challenge(self) -> str:
        return _text(hashlib.sha256(self.verifier.encode()).digest())


def begin(key: bytes, *, after: str, now: float) -> Flow:
    """A new sign-in."""
    return _derive(key, f"{secrets.token_urlsafe(32)}.{int(now)}.{_text(after.encode())}", after)


def resume(key: bytes, cookie: str, *, state: str, now: float) -> Flow | None:
    """The sign-in of a cookie; None where it is not the one of this state, or is too old."""
    try:
        _, began, path = cookie.split(".")
        age_s = now - int(began)
        after = base64.urlsafe_b64decode(f"{path}==").decode()
    except ValueError:
        return None
    flow = _derive(key, cookie, after)
    same = hmac.compare_digest(flow.state.encode(), state.encode(errors="replace"))
    return flow if same and 0 <= age_s <= MAX_AGE_S else None


def _derive(key: bytes, cookie: str, after: str) -> Flow:
    def part(purpose: str) -> str:
        return _text(hmac.digest(key, f"{purpose}:{cookie}".encode(errors="replace"), "sha256"))

    return Flow(cookie=cookie, state=part("state"), nonce=part("nonce"), verifier=part("verifier"), after=after)


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
