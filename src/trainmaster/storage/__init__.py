"""Objects by path, in a local folder or in an object store: one small API for both.

    store = open_store("/data/bundles")            needs nothing
    store = open_store("s3://bucket/prefix")       also gs:// and az://; pip install 'trainmaster[storage]'
    store.put("a/b.json", b"{}")                   bytes, pieces of bytes, or a file's path: never read whole
    store.read("a/b.json", start=0, size=100)      a part of it
    store.get("a/b.json"); store.list("a/"); store.exists("a/b.json"); store.delete("a/b.json")
    store.sign("a/b.json", expires_s=600)          a URL for somebody without credentials; a folder has none

Whole files with checksums, and downloads that go on where they were cut off, are in transfer.py.

Credentials and the endpoint come from the environment, as the vendors' own tools read them (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL for MinIO and its like, AWS_REGION; the role of the machine where there is one), never from a URL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from trainmaster.core.errors import UsageError

# Written last by upload_bundle: a reader that sees it may trust what lies beside it.
LAST = "health.json"
SCHEMES = ("s3", "gs", "az")


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


def open_store(place: str | Path) -> Store:
    """The store at a folder, a file:// URL or an s3://, gs:// or az:// URL. Touches no network."""
    scheme, colon, rest = str(place).partition("://")
    if not colon or scheme == "file":
        from trainmaster.storage.folder import FolderStore

        return FolderStore(Path(rest if colon else place))
    if scheme not in SCHEMES:
        raise UsageError(f"{place}: a store is a folder or one of {', '.join(word + '://' for word in SCHEMES)}")
    if not re.fullmatch(r"[^/@?#:\s]+(/[^?#]*)?", rest):
        raise UsageError(f"{place}: write {scheme}://bucket/prefix; credentials and endpoint go into the environment")
    from trainmaster.storage.objects import ObjectStore

    return ObjectStore(f"{scheme}://{rest.rstrip('/')}")


def upload_bundle(folder: Path, place: str | Path) -> list[str]:
    """Put every file of an evidence bundle into a store, `health.json` last; the URLs in the order written."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; `trainmaster check --out DIR` makes one")
    # A link may lead out of the bundle to anything on this machine: only what lies in it is sent.
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    files = [path for path in files if path.resolve().is_relative_to(folder.resolve())]
    if not files:
        raise UsageError(f"{folder} holds no file")
    store = open_store(place)
    written = []
    for path in sorted(files, key=lambda path: path == folder / LAST):
        name = path.relative_to(folder).as_posix()
        store.put(name, path)
        written.append(f"{store.url}/{name}")
    return written


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
