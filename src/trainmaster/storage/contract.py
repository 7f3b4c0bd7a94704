"""Contract of a store: its methods, one stored object, and the rules of paths and signatures for every store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from trainmaster.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One object: its path under the store's own prefix, its size, and which version of it this is."""

    path: str
    size_bytes: int
    version: str = field(default="", compare=False)  # another one when the object was put again; "": not known


SIGNED_LIMIT_S = 7 * 86400  # S3's own limit: a signature of a week, not more


class Store(Protocol):
    """A place for objects. Errors are StorageError and its kinds (core/errors.py)."""

    url: str

    def put(self, path: str, data: bytes | Path | Iterator[bytes]) -> None:
        """Write an object, whole or not at all; one that is there is replaced. Pieces may raise, and nothing is put."""

    def get(self, path: str) -> bytes:
        """The object's bytes; ObjectMissing where there is none."""

    def read(self, path: str, *, start: int, size: int) -> bytes:
        """Exactly these bytes of the object; StorageError where it does not have so many."""

    def list(self, prefix: str = "") -> list[Stored]:
        """Every object whose path begins with the folders of `prefix`, sorted by path."""

    def delete(self, path: str) -> None:
        """Remove an object; one that is not there is no error, because S3 cannot tell either."""

    def exists(self, path: str) -> bool:
        """Whether the object is there. Not being allowed to know is an error, never False."""

    def stat(self, path: str) -> Stored:
        """The object's size and version; ObjectMissing where there is none."""

    def sign(self, path: str, *, method: Literal["GET", "PUT"] = "GET", expires_s: int = 3600) -> str:
        """A URL with which anyone may do this to the object until it expires; NoSignedUrls where there are none.

        Touches no network: the object need not be there. The URL is a secret for as long as it is good.
        """


def check_expiry(expires_s: int) -> int:
    """The same number of seconds, if a signature may be good for so long; UsageError otherwise."""
    if not 1 <= expires_s <= SIGNED_LIMIT_S:
        raise UsageError(f"a signed URL may be good for 1 to {SIGNED_LIMIT_S} seconds, not {expires_s}")
    return expires_s


def check_path(path: str) -> str:
    """The same path, if it stays inside its store on every backend; UsageError otherwise."""
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") for part in parts) or re.search(r"[\x00-\x1f\x7f\\]", path):
        raise UsageError(f"{path!r:.100} is no path of an object: write names with single slashes between them")
    return path
