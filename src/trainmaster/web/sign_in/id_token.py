"""An ID token: its signature by a key of the provider, and the claims that OpenID Connect Core 3.1.3.7 checks."""

from __future__ import annotations

import base64
import hmac
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joserfc.jwk import Key

# Asymmetric alone: `none` proves nothing, and the key of HS256 would be something that others may know.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
LEEWAY_S = 60.0  # between two clocks
_KINDS = ("RSA", "EC", "OKP")
_LEAST_RSA_BITS = 2048  # RFC 7518, 3.3
_MOST_KEYS = 100
_LONGEST = 64 << 10


class BadToken(Exception):
    """An ID token that is refused. The message holds nothing of the token."""


class UnknownKey(BadToken):
    """No known key signed it; the provider may have changed its keys."""


def parse_keys(document: Mapping[str, Any]) -> list[Key]:
    """The public keys of a JWK Set that sign; others and unreadable ones are left out."""
    from joserfc.errors import JoseError
    from joserfc.jwk import import_key

    entries = document.get("keys")
    keys: list[Key] = []
    for entry in entries[:_MOST_KEYS] if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or entry.get("kty") not in _KINDS or entry.get("use", "sig") != "sig":
            continue
        if entry["kty"] == "RSA" and _bits(entry.get("n")) < _LEAST_RSA_BITS:
            continue
        try:
            keys.append(import_key({name: entry[name] for name in entry if name not in ("d", "key_ops")}))
        except (JoseError, ValueError, TypeError, KeyError):
            continue
    return keys


def _bits(number: object) -> int:
    try:
        raw = base64.urlsafe_b64decode(f"{number}==")
    except ValueError:
        return 0
    return int.from_bytes(raw, "big").bit_length()


def validate(
    token: object, keys: Sequence[Key], *, issuer: str, client_id: str, nonce: str, now: float
) -> dict[str, Any]:
    """The claims of an ID token; BadToken where anything is wrong with it."""
    claims = _verify(token, keys)
    if claims.get("iss") != issuer:
        raise BadToken("it is of another issuer")
    audience = claims.get("aud")
    everyone = audience if isinstance(audience, list) else [audience]
    party = claims.get("azp")
    if client_id not in everyone or (party is None and len(everyone) > 1) or party not in (None, client_id):
        raise BadToken("it is for another client")
    if not now < _time(claims, "exp") + LEEWAY_S:
        raise BadToken("it has expired")
    if not _time(claims, "iat") <= now + LEEWAY_S:
        raise BadToken("it is from the future")
    if "nbf" in claims and not _time(claims, "nbf") <= now + LEEWAY_S:
        raise BadToken("it is not valid yet")
    given = claims.get("nonce")
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(errors="replace"), nonce.encode()):
        raise BadToken("its nonce is not of this sign-in")
    subject = claims.get("sub")
    if not isinstance(subject, str) or not 0 < len(subject) <= 255 or not subject.isprintable():
        raise BadToken("its subject is missing")
    return claims


def _verify(token: object, keys: Sequence[Key]) -> dict[str, Any]:
    from joserfc import jws
    from joserfc.errors import BadSignatureError, JoseError

    if not isinstance(token, str) or len(token) > _LONGEST or not token.isascii():
        raise BadToken("there is none")
    registry = jws.JWSRegistry(algorithms=ALGORITHMS, strict_check_header=False)
    registry.max_header_length = 8192  # a certificate may stand there; 512 by default
    try:
        header = jws.extract_compact(token.encode(), registry=registry).headers()
        algorithm, key_id = header.get("alg"), header.get("kid")
        if algorithm not in ALGORITHMS:
            raise BadToken("its algorithm is not allowed")
        for key in keys:
            if None not in (key_id, key.kid) and key.kid != key_id:
                continue
            try:
                payload = jws.deserialize_compact(token, key, registry=registry).payload
                claims = json.loads(payload)
            except (BadSignatureError, JoseError):
                continue
            if not isinstance(claims, dict):
                raise BadToken("it holds no claims")
            return claims
    except (JoseError, ValueError, TypeError, AttributeError, RecursionError):
        raise BadToken("it cannot be read") from None
    raise UnknownKey("no key of the provider signed it")


def _time(claims: Mapping[str, Any], name: str) -> float:
    value = claims.get(name)
    try:
        moment = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
    except OverflowError:
        moment = math.nan
    if not math.isfinite(moment):
        raise BadToken(f"its {name} is missing")
    return moment
