"""An OpenID provider that can be told to misbehave, on a real socket of this machine."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote_plus, urlsplit

from joserfc import jws
from joserfc.jwk import Key, RSAKey
from starlette.testclient import TestClient

CLIENT_ID = "trainmaster-test"
SECRET = "a secret/of:the client+"
REDIRECT = "http://127.0.0.1:8470/login/oidc/callback"
CLAIMS = {"sub": "u-1", "email": "ann@example.org", "email_verified": True, "groups": ["lab"]}

Answer = tuple[int, dict[str, str], bytes]


def encode(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


@functools.cache
def _key() -> RSAKey:
    """Made once: it takes half a second."""
    return RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})


class HostileProvider:
    """A right provider; a test replaces one part. `answers` are whole answers by path, before any other."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.key = _key()
        self.published: list[dict[str, Any]] = [self.key.as_dict(private=False)]
        self.claims: dict[str, Any] = dict(CLAIMS)
        self.metadata: dict[str, Any] = {}
        self.change: Callable[[dict[str, Any]], None] = lambda _: None  # of the claims of an ID token
        self.sign: Callable[[dict[str, Any]], str] = lambda claims: self.signed(claims, self.key)
        self.answers: dict[str, Callable[[], Answer]] = {}
        self.asked: list[str] = []
        self.forms: list[dict[str, str]] = []
        self._codes: dict[str, dict[str, str]] = {}

    @staticmethod
    def signed(claims: dict[str, Any], key: Key, **header: Any) -> str:
        protected = {"alg": "RS256", "kid": key.kid, **header}
        return jws.serialize_compact(protected, json.dumps(claims), key, algorithms=[protected["alg"]])

    def hs256_by_public_key(self, claims: dict[str, Any]) -> str:
        """Signed with what everybody knows: a naive verifier takes the public key for the shared secret."""
        text = f"{encode({'alg': 'HS256', 'kid': 'one'})}.{encode(claims)}"
        mac = hmac.digest(self.key.as_pem(private=False), text.encode(), "sha256")
        return f"{text}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"

    def authorize(self, location: str) -> dict[str, str]:
        """What the browser of a person who agrees brings back."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(location).query).items()}
        assert (asked["response_type"], asked["client_id"], asked["redirect_uri"]) == ("code", CLIENT_ID, REDIRECT)
        assert asked["code_challenge_method"] == "S256" and "openid" in asked["scope"].split()
        code = secrets.token_urlsafe(16)
        self._codes[code] = asked
        return {"code": code, "state": asked["state"]}

    def answer(self, method: str, path: str, form: dict[str, str], authorization: str) -> Answer:
        self.asked.append(path)
        if path in self.answers:
            return self.answers[path]()
        if path == "/.well-known/openid-configuration":
            return reply({
                "issuer": self.url, "authorization_endpoint": f"{self.url}/authorize?tenant=7",
                "token_endpoint": f"{self.url}/token", "jwks_uri": f"{self.url}/keys",
                "userinfo_endpoint": f"{self.url}/userinfo", **self.metadata,
            })  # fmt: skip
        if path == "/keys":
            return reply({"keys": self.published})
        if path == "/userinfo":
            return reply({"sub": self.claims["sub"], "groups": ["lab"], "from": authorization})
        assert (method, path) == ("POST", "/token")
        return self._exchange(form, authorization)

    def _exchange(self, form: dict[str, str], authorization: str) -> Answer:
        self.forms.append(form)
        if authorization:
            pair = base64.b64decode(authorization.removeprefix("Basic ")).decode().split(":")
            client = [unquote_plus(word) for word in pair]
        else:
            client = [form.get("client_id", ""), form.get("client_secret", "")]
        asked = self._codes.pop(form["code"], None)  # once only
        challenge = hashlib.sha256(form["code_verifier"].encode()).digest()
        if asked is None or client != [CLIENT_ID, SECRET] or form["redirect_uri"] != REDIRECT:
            return reply({"error": "invalid_grant", "error_description": "<script>alert(1)</script>"}, 400)
        if base64.urlsafe_b64encode(challenge).decode().rstrip("=") != asked["code_challenge"]:
            return reply({"error": "invalid_grant"}, 400)
        now = int(time.time())
        claims = {
            "iss": self.url,
            "aud": CLIENT_ID,
            "iat": now,
            "exp": now + 300,
            "nonce": asked["nonce"],
            **self.claims,
        }
        self.change(claims)
        return reply({"access_token": "access-token-of-ann", "token_type": "Bearer", "id_token": self.sign(claims)})


def reply(value: object, status: int = 200) -> Answer:
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


@contextlib.contextmanager
def hostile_provider() -> Iterator[HostileProvider]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", "0"))
            form = {name: values[0] for name, values in parse_qs(self.rfile.read(length).decode()).items()}
            path = urlsplit(self.path).path
            status, headers, body = provider.answer(self.command, path, form, self.headers.get("authorization", ""))
            with contextlib.suppress(OSError):  # a reader that has had enough
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider = HostileProvider(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sign_in(client: TestClient, provider: HostileProvider, *, after: str = "/") -> Any:
    """Press the button, agree at the provider, return: the last answer of the server."""
    left = client.get("/login/oidc", params={"next": after})
    assert left.status_code == 303, left.text
    return client.get("/login/oidc/callback", params=provider.authorize(left.headers["location"]))
