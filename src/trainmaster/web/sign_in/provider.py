"""The OpenID provider over HTTP: discovery, keys, the exchange of a code, userinfo.

Answers are hostile until parsed: JSON of bounded size within a bounded time, no redirects, every address https.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus, urlencode, urlsplit, urlunsplit

from trainmaster import __version__
from trainmaster.core.loopback import is_loopback_host
from trainmaster.web.sign_in import id_token
from trainmaster.web.sign_in.settings import Client, is_safe_url

if TYPE_CHECKING:
    import httpx
    from joserfc.jwk import Key

log = logging.getLogger(__name__)
MOST_BYTES = 1 << 20  # of an answer; those of large providers have some 10 KB
TIMEOUT_S = 10.0  # of each answer, with all of its bytes
_KEEP_S = 3600.0  # discovery and keys
_AGAIN_S = 10.0  # between two requests for the keys because a token has an unknown one
_ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri", "userinfo_endpoint")


class ProviderError(Exception):
    """The provider did not answer as it must. The message holds nothing that it sent but a short code."""


class Provider:
    """One provider, with its discovery document and keys kept for an hour. Of one event loop."""

    def __init__(self, client: Client, *, timeout_s: float = TIMEOUT_S) -> None:
        self.settings, self._secret, self._timeout_s = client.settings, client.secret, timeout_s
        self._found: dict[str, Any] = {}
        self._keys: list[Key] = []
        self._found_at = self._keys_at = -_KEEP_S
        self._lock = asyncio.Lock()

    async def start_url(self, *, state: str, nonce: str, challenge: str) -> str:
        """The address at the provider where a sign-in begins."""
        found = await self._discover()
        parts = urlsplit(str(found["authorization_endpoint"]))
        query = urlencode(
            {
                "response_type": "code",
                "client_id": self.settings.client_id,
                "redirect_uri": self.settings.redirect_uri,
                "scope": " ".join(self.settings.scopes),
                "state": state,
                "nonce": nonce,
                "code_challenge": challenge,
                "code_challenge_method": "S256",
            }
        )
        return urlunsplit(parts._replace(query=f"{parts.query}&{query}" if parts.query else query))

    async def check_sender(self, issuer: str | None) -> None:
        """Refuse an answer that another provider sent (RFC 9207)."""
        found = await self._discover()
        promised = found.get("authorization_response_iss_parameter_supported") is True
        if issuer != self.settings.issuer and (issuer is not None or promised):
            raise ProviderError("the answer is of another provider")

    async def exchange(self, code: str, *, verifier: str, nonce: str) -> dict[str, Any]:
        """The claims of the person for whom this code was issued; ProviderError, or BadToken."""
        found = await self._discover()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.settings.redirect_uri,
            "code_verifier": verifier,
        }
        auth: tuple[str, str] | None = None
        if self._secret is None:
            form["client_id"] = self.settings.client_id
        elif "client_secret_basic" in found.get("token_endpoint_auth_methods_supported", ["client_secret_basic"]):
            auth = quote_plus(self.settings.client_id), quote_plus(self._secret)  # RFC 6749, 2.3.1
        else:
            form |= {"client_id": self.settings.client_id, "client_secret": self._secret}
        answer = await self._ask("the token endpoint", found["token_endpoint"], form=form, auth=auth)
        claims = await self._validate(answer.get("id_token"), nonce)
        if self.settings.userinfo:
            claims = {**await self._userinfo(found, answer.get("access_token"), claims["sub"]), **claims}
        return claims

    async def _validate(self, token: object, nonce: str) -> dict[str, Any]:
        settings = self.settings
        expected: dict[str, Any] = {"issuer": settings.issuer, "client_id": settings.client_id, "nonce": nonce}
        keys = await self._read_keys(max_age_s=_KEEP_S)
        try:
            return id_token.validate(token, keys, now=time.time(), **expected)
        except id_token.UnknownKey:
            keys = await self._read_keys(max_age_s=_AGAIN_S)  # the provider may have new ones
            return id_token.validate(token, keys, now=time.time(), **expected)

    async def _userinfo(self, found: Mapping[str, Any], access_token: object, subject: str) -> dict[str, Any]:
        url = found.get("userinfo_endpoint")
        if url is None or not isinstance(access_token, str) or not re.fullmatch(r"[\x21-\x7e]{1,16384}", access_token):
            raise ProviderError("it offers no userinfo; remove `userinfo` from the settings")
        claims = await self._ask("userinfo", url, bearer=access_token)
        if claims.get("sub") != subject:
            raise ProviderError("userinfo is of another person")
        return claims

    async def _discover(self) -> dict[str, Any]:
        async with self._lock:
            if time.monotonic() - self._found_at >= _KEEP_S:
                url = self.settings.issuer.rstrip("/") + "/.well-known/openid-configuration"
                self._found = self._checked(await self._ask("discovery", url))
                self._found_at = time.monotonic()
            return self._found

    def _checked(self, found: dict[str, Any]) -> dict[str, Any]:
        if found.get("issuer") != self.settings.issuer:
            raise ProviderError("discovery names another issuer than the settings; both must be the same to the letter")
        loopback = is_loopback_host(self.settings.issuer_host)
        for name in _ENDPOINTS:
            url = found.get(name)
            optional = name == "userinfo_endpoint" and url is None
            if not optional and not (isinstance(url, str) and is_safe_url(url, loopback=loopback)):
                raise ProviderError(f"discovery: {name} is not an https address")
        methods = found.get("token_endpoint_auth_methods_supported", [])
        if not isinstance(methods, list):
            raise ProviderError("discovery: token_endpoint_auth_methods_supported is not a list")
        return found

    async def _read_keys(self, *, max_age_s: float) -> list[Key]:
        found = await self._discover()
        async with self._lock:
            if time.monotonic() - self._keys_at >= max_age_s:
                self._keys = id_token.parse_keys(await self._ask("its keys", found["jwks_uri"]))
                self._keys_at = time.monotonic()
            return self._keys

    async def _ask(
        self, what: str, url: str, *, form: Mapping[str, str] | None = None, auth: tuple[str, str] | None = None,
        bearer: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """The JSON object at an address."""
        import httpx

        # Not compressed: a small answer could unpack to gigabytes.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        headers["User-Agent"] = f"trainmaster/{__version__}"
        if bearer is not None:
            headers["Authorization"] = f"Bearer {bearer}"
        try:
            async with asyncio.timeout(self._timeout_s), httpx.AsyncClient(follow_redirects=False) as http:
                method = "GET" if form is None else "POST"
                async with http.stream(method, url, data=form, auth=auth, headers=headers) as answer:
                    body = await _read(what, answer)
        except TimeoutError:
            raise ProviderError(f"{what}: no answer within {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            log.warning("OpenID provider, %s at %s: %s", what, urlsplit(url).netloc, type(error).__name__)
            raise ProviderError(f"{what}: cannot be reached ({type(error).__name__})") from None
        return _parse(what, answer.status_code, body)


async def _read(what: str, answer: httpx.Response) -> bytes:
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise ProviderError(f"{what}: a compressed answer")
    body = b""
    async for piece in answer.aiter_raw():
        body += piece
        if len(body) > MOST_BYTES:
            raise ProviderError(f"{what}: more than {MOST_BYTES:,} bytes")
    return body


def _parse(what: str, status: int, body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise ProviderError(f"{what}: HTTP {status} without JSON") from None
    if status != 200 or not isinstance(value, dict):
        code = value.get("error") if isinstance(value, dict) else None
        shown = f" ({code})" if isinstance(code, str) and re.fullmatch(r"[a-z_]{1,40}", code) else ""
        raise ProviderError(f"{what}: HTTP {status}{shown}")
    return value
