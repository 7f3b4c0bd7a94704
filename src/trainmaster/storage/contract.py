"""The contract of a store: what every backend offers, and the paths that every backend accepts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from trainmaster.core.errors import UsageError

SIGNED_LIMIT_S = 7 * 86400  # the longest signature that S3 accepts


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One object: its path under the store's prefix, its size and its version."""

    path: str
    size_bytes: int
    version: str = field(default="", compare=False)  # changes with every put; "": not known


class Store(Protocol):
    """A place for objects. Errors are StorageError and its kinds (core/errors.py)."""

    url: str

    def put(self, path: str, data: bytes | Path | Iterator[bytes]) -> None:
        """Write an object, whole or not at all; an existing one is replaced. If the pieces raise, nothing is put."""

    def put_new(self, path: str, data: bytes) -> bool:
        """Write an object only if there is none at this path; False where there is one. Of several writers one wins."""

    def get(self, path: str) -> bytes:
        """The object's bytes; ObjectMissing where there is none."""

    def read(self, path: str, *, start: int, size: int) -> bytes:
        """Exactly these bytes of the object; StorageError where it is shorter."""

    def list(self, prefix: str = "") -> list[Stored]:
        """Every object whose path begins with the folders of `prefix`, sorted by path."""

    def delete(self, path: str) -> None:
        """Remove an object. A missing object is no error: S3 does not report it either."""

    def exists(self, path: str) -> bool:
        """Whether the object is there. Missing permission is an error, never False."""

    def stat(self, path: str) -> Stored:
        """The object's size and version; ObjectMissing where there is none."""

    def sign(self, path: str, *, method: Literal["GET", "PUT"] = "GET", expires_s: int = 3600) -> str:
        """A URL that allows this access without credentials until it expires; NoSignedUrls where there are none.

        No network access: the object need not exist. The URL is a secret while it is valid.
        """


def check_expiry(expires_s: int) -> int:
    """Return the seconds if a signature may be valid that long; UsageError otherwise."""
    if not 1 <= expires_s <= SIGNED_LIMIT_S:
        raise UsageError(f"a signed URL may be valid for 1 to {SIGNED_LIMIT_S} seconds, not {expires_s}")
    return expires_s


def check_path(path: str) -> str:
    """Return the path if it stays inside its store on every backend; UsageError otherwise."""
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") for part in parts) or re.search(r"[\x00-\x1f\x7f\\]", path):
        raise UsageError(f"{path!r:.100} is not an object path: write names with single slashes between them")
    return path
