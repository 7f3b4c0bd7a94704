"""Who wrote a webhook's message, and when. The key of each webhook is made from the home folder's key file, so that no
row holds it; every server that shares a database needs the same file.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainmaster import __version__
from trainmaster.core.errors import UsageError
from trainmaster.core.files import write_whole

KEY_FILE = "secret.key"
BODY_LIMIT = 64 << 10  # bytes; a message that is longer loses its details and says so


def signing_key(home: Path, webhook_id: str) -> str:
    """The key with which a webhook's messages are signed, as its receiver gets to see it once."""
    return derive_key(home, f"webhook:{webhook_id}").hex()


def derive_key(home: Path, purpose: str) -> bytes:
    """A key for one purpose, made from the home folder's key file."""
    return hmac.digest(_home_key(home), purpose.encode(), hashlib.sha256)


def sign(key: str, body: bytes, *, at: int) -> str:
    """The header that proves who wrote this body, and when: a message that is played again later has an old time."""
    digest = hmac.new(key.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


def render_body(message: Mapping[str, Any]) -> bytes:
    """A message as bytes, whatever its size was."""
    body = json.dumps(message, separators=(",", ":"), sort_keys=True, default=str).encode()
    if len(body) > BODY_LIMIT:
        body = json.dumps({**message, "data": None, "cut": True}, separators=(",", ":"), sort_keys=True).encode()
    return body


def webhook_headers(key: str, body: bytes, *, topic: str, delivery: str, at: float | None = None) -> dict[str, str]:
    """The headers of one sending. The delivery is the same at every try, so that a receiver can drop what it has."""
    return {
        "Content-Type": "application/json",
        "User-Agent": f"trainmaster/{__version__}",
        "Trainmaster-Topic": topic,
        "Trainmaster-Delivery": delivery,
        "Trainmaster-Signature": sign(key, body, at=int(time.time() if at is None else at)),
    }


def _home_key(home: Path) -> bytes:
    """32 random bytes that only the owner of the home folder can read; made when first needed."""
    path = home / KEY_FILE
    try:
        return _read_key(path)
    except FileNotFoundError:
        pass
    with suppress(FileExistsError):  # another process was first, and its key is the key
        write_whole(path, secrets.token_bytes(32), durable=True, mode=0o600, replace=False)
    return _read_key(path)


def _read_key(path: Path) -> bytes:
    key = path.read_bytes()
    if len(key) != 32:
        raise UsageError(f"{path}: not a key of 32 bytes; restore it, or remove it and make the webhooks again")
    if path.stat().st_mode & 0o077:
        raise UsageError(f"{path}: others may read it; chmod 600 it, and make the webhooks again")
    return key
