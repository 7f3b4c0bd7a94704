"""A provider that lies in every way, and callbacks that nobody asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from joserfc.jwk import RSAKey
from starlette.testclient import TestClient

from trainmaster.store import audit
from trainmaster.store.database import Database
from trainmaster.web.sign_in import flow, id_token
from trainmaster.web.sign_in import provider as provider_module
from web.furnished import read_page
from web.sign_in.openid import CLIENT_ID, HostileProvider, encode, reply, sign_in

pytestmark = pytest.mark.spawns  # a provider on a socket


@pytest.mark.parametrize("trouble", ["no cookie", "other cookie", "other state", "changed path", "old", "twice"])
def test_a_callback_that_this_browser_did_not_ask_for(
    client: TestClient, provider: HostileProvider, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = client.get("/login/oidc")
    back = provider.authorize(left.headers["location"])
    cookie = client.cookies[flow.COOKIE]
    first, began, _ = cookie.split(".")
    if trouble == "no cookie":
        client.cookies.clear()
    elif trouble == "other cookie":
        client.get("/login/oidc")
    elif trouble == "other state":
        back["state"] = "x" * 43
    elif trouble == "changed path":
        client.cookies.set(flow.COOKIE, f"{first}.{began}.{encode('/x')}", domain="127.0.0.1", path=flow.PATH)
    elif trouble == "old":
        monkeypatch.setattr(flow, "MAX_AGE_S", -1)
    else:
        assert client.get("/login/oidc/callback", params=back).status_code == 200
        client.cookies.set(flow.COOKIE, cookie, domain="127.0.0.1", path=flow.PATH)
        client.cookies.delete("trainmaster")
    answer = client.get("/login/oidc/callback", params=back)
    assert answer.status_code == (502 if trouble == "twice" else 400)
    assert "trainmaster" not in client.cookies and len(provider.forms) == (2 if trouble == "twice" else 0)


def change(**claims: Any) -> Callable[[HostileProvider], None]:
    def act(provider: HostileProvider) -> None:
        provider.change = lambda made: made.update(claims)

    return act


def drop(name: str) -> Callable[[HostileProvider], None]:
    def act(provider: HostileProvider) -> None:
        provider.change = lambda made: made.pop(name) and None

    return act


def swap_key(provider: HostileProvider) -> None:
    other = RSAKey.generate_key(2048, {"kid": "one"})
    provider.sign = lambda claims: provider.signed(claims, other)


def sign_none(provider: HostileProvider) -> None:
    provider.sign = lambda claims: f"{encode({'alg': 'none', 'kid': 'one'})}.{encode(claims)}."


def sign_none_in_capitals(provider: HostileProvider) -> None:
    provider.sign = lambda claims: f"{encode({'alg': 'NONE'})}.{encode(claims)}."


def sign_symmetric(provider: HostileProvider) -> None:
    provider.sign = provider.hs256_by_public_key


def offer_symmetric_key(provider: HostileProvider) -> None:
    """The JWK Set itself offers a shared key."""
    provider.published.append({"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0", "kid": "shared"})
    provider.sign = provider.hs256_by_public_key


def bring_own_key(provider: HostileProvider) -> None:
    """The header carries the key that signed it, as RFC 7515 allows."""
    other = RSAKey.generate_key(2048, {"kid": "one"})
    provider.sign = lambda claims: provider.signed(claims, other, jwk=other.as_dict(private=False))


def cut_signature(provider: HostileProvider) -> None:
    provider.sign = lambda claims: provider.signed(claims, provider.key).rpartition(".")[0] + "."


def change_after_signing(provider: HostileProvider) -> None:
    def sign(claims: dict[str, Any]) -> str:
        head, _, tail = provider.signed(claims, provider.key).split(".")
        return f"{head}.{encode({**claims, 'groups': ['ops']})}.{tail}"

    provider.sign = sign


REFUSED: dict[str, tuple[Callable[[HostileProvider], None], str]] = {
    "wrong issuer": (change(iss="https://evil.example"), "another issuer"),
    "issuer with a slash": (lambda p: change(iss=p.url + "/")(p), "another issuer"),
    "wrong audience": (change(aud="other"), "another client"),
    "audience that begins alike": (change(aud=CLIENT_ID + "x"), "another client"),
    "two audiences without azp": (change(aud=[CLIENT_ID, "other"]), "another client"),
    "other party": (change(aud=[CLIENT_ID, "other"], azp="other"), "another client"),
    "expired": (change(exp=time.time() - 3600), "expired"),
    "no expiry": (drop("exp"), "exp is missing"),
    "expiry is true": (change(exp=True), "exp is missing"),
    "expiry is NaN": (change(exp=float("nan")), "exp is missing"),
    "expiry beyond floats": (change(exp=10**400), "exp is missing"),
    "from the future": (change(iat=time.time() + 3600), "from the future"),
    "not valid yet": (change(nbf=time.time() + 3600), "not valid yet"),
    "replayed nonce": (change(nonce="of an earlier sign-in"), "nonce"),
    "no nonce": (drop("nonce"), "nonce"),
    "no subject": (drop("sub"), "subject"),
    "subject is a list": (change(sub=["u-1"]), "subject"),
    "swapped key": (swap_key, "no key of the provider signed it"),
    "alg none": (sign_none, "refused"),
    "alg NONE": (sign_none_in_capitals, "refused"),
    "HS256 with the public key": (sign_symmetric, "algorithm is not allowed"),
    "HS256 with a published key": (offer_symmetric_key, "algorithm is not allowed"),
    "key in the header": (bring_own_key, "no key of the provider signed it"),
    "no signature": (cut_signature, "refused"),
    "changed after signing": (change_after_signing, "no key of the provider signed it"),
    "not a token": (lambda p: setattr(p, "sign", lambda _: "<html>"), "refused"),
    "token is a number": (lambda p: setattr(p, "sign", lambda _: 7), "there is none"),
}  # fmt: skip


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("name", REFUSED)
def test_an_id_token_that_is_wrong(client: TestClient, db: Database, provider: HostileProvider, name: str) -> None:
    act, words = REFUSED[name]
    act(provider)
    answer = sign_in(client, provider)
    assert answer.status_code == 401 and words in answer.text
    assert "trainmaster" not in client.cookies and audit.list_audit(db) == []


def html(status: int) -> Callable[[], Any]:
    return lambda: (status, {"Content-Type": "text/html"}, b"<html><script>alert(1)</script></html>")


def slow() -> Any:
    time.sleep(4.0)
    return reply({})


ANSWERS: dict[str, tuple[Callable[[], Any], str]] = {
    "HTML with status 200": (html(200), "HTTP 200 without JSON"),
    "a page of a proxy": (html(503), "HTTP 503 without JSON"),
    "huge": (lambda: (200, {}, b'{"a": "' + b"x" * (2 << 20) + b'"}'), "more than 1,048,576 bytes"),
    "packed": (lambda: (200, {"Content-Encoding": "gzip"}, b"\x1f\x8b"), "compressed"),
    "slow": (slow, "no answer within 2 s"),
    "redirect to another host": (lambda: (302, {"Location": "http://127.0.0.1:1/"}, b""), "HTTP 302"),
    "a list": (lambda: reply([1]), "HTTP 200"),
    "nested without end": (lambda: (200, {}, b"[" * 100_000), "without JSON"),
}


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("path", ["/.well-known/openid-configuration", "/token", "/keys"])
def test_an_answer_that_is_none(
    make: Callable[..., TestClient], provider: HostileProvider, name: str, path: str
) -> None:
    client = make(timeout_s=2.0 if name == "slow" else 60.0)
    act, words = ANSWERS[name]
    provider.answers[path] = act
    left = client.get("/login/oidc")
    if path in ("/token", "/keys"):
        left = client.get("/login/oidc/callback", params=provider.authorize(left.headers["location"]))
    assert left.status_code == 502 and words in left.text and "<script>alert" not in left.text
    assert "trainmaster" not in client.cookies
    assert "slow" in name or provider.asked.count(path) == 1


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"issuer": "https://evil.example"}, "another issuer"),
        ({"authorization_endpoint": "javascript:alert(1)"}, "authorization_endpoint is not an https address"),
        ({"token_endpoint": "http://192.0.2.1/token"}, "token_endpoint is not an https address"),
        ({"jwks_uri": "file:///etc/passwd"}, "jwks_uri is not an https address"),
        ({"jwks_uri": "https://a:b@192.0.2.1/"}, "jwks_uri is not an https address"),
        ({"token_endpoint_auth_methods_supported": 7}, "not a list"),
    ],
)
def test_discovery_that_leads_elsewhere(
    client: TestClient, provider: HostileProvider, metadata: dict[str, Any], words: str
) -> None:
    provider.metadata = metadata
    answer = client.get("/login/oidc")
    assert answer.status_code == 502 and words in answer.text and "location" not in answer.headers


@pytest.mark.parametrize(
    "after",
    ["//evil.example", "https://evil.example/", "/\\evil.example", "javascript:alert(1)", "/\t/evil.example", ""],
)
def test_no_open_redirect(client: TestClient, provider: HostileProvider, after: str) -> None:
    done = sign_in(client, provider, after=after)
    page = read_page(done)
    assert 'content="0; url=/"' in page and "evil" not in page and "alert" not in page


def test_keys_change_and_old_ones_are_fetched_once(
    client: TestClient, provider: HostileProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sign_in(client, provider).status_code == 200
    assert sign_in(client, provider).status_code == 200 and provider.asked.count("/keys") == 1
    new = RSAKey.generate_key(2048, {"kid": "two"})
    provider.key, provider.published = new, [new.as_dict(private=False)]
    assert sign_in(client, provider).status_code == 401, "asked too short a time ago"
    monkeypatch.setattr(provider_module, "_AGAIN_S", 0.0)
    assert sign_in(client, provider).status_code == 200 and provider.asked.count("/keys") == 2


def test_keys_that_are_too_weak_or_of_another_use_are_none() -> None:
    small = RSAKey.generate_key(2048, {"kid": "a"}).as_dict(private=False)
    entries = [{**small, "n": "AQAB"}, {**small, "use": "enc"}, {"kty": "oct", "k": "AAAA"}, {"kty": "RSA"}, 7, small]
    assert [key.kid for key in id_token.parse_keys({"keys": entries})] == ["a"]
    assert id_token.parse_keys({"keys": "x"}) == [] == id_token.parse_keys({})


def test_the_answer_of_another_provider_and_a_refusal(
    make: Callable[..., TestClient], provider: HostileProvider
) -> None:
    client = make()

    def come_back(**more: str) -> Any:
        back = provider.authorize(client.get("/login/oidc").headers["location"])
        return client.get("/login/oidc/callback", params={**back, **more})

    assert come_back(iss="https://evil.example").status_code == 502
    assert come_back(iss=provider.url).status_code == 200
    denied = come_back(error="access_denied", error_description="<b>call 555</b>")
    assert denied.status_code == 401 and "refused the sign-in" in denied.text and "555" not in read_page(denied)
    provider.metadata = {"authorization_response_iss_parameter_supported": True}
    client = make()
    assert come_back().status_code == 502, "it promised to name itself"
    assert come_back(iss=provider.url).status_code == 200
