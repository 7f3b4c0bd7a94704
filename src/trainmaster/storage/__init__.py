"""Objects by path, in a local folder or in an object store: one small API for both.

    store = open_store("/data/bundles")            needs nothing
    store = open_store("s3://bucket/prefix")       also gs:// and az://; pip install 'trainmaster[storage]'
    store.put("a/b.json", b"{}")                   bytes, pieces of bytes, or the path of a file
    store.put_new("a/lock", b"me")                 only if there is none
    store.read("a/b.json", start=0, size=100)      a part of it
    store.get("a/b.json"); store.list("a/"); store.exists("a/b.json"); store.delete("a/b.json")
    store.sign("a/b.json", expires_s=600)          a URL that needs no credentials; a folder has none

transfer.py moves whole files with checksums and continues downloads that were cut off.

Credentials and the endpoint come from the environment, as the vendors' own tools read them (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL for MinIO and its like, AWS_REGION; the role of the machine where there is one), never from a URL.
"""

from __future__ import annotations

import re
from pathlib import Path

from trainmaster.core.errors import UsageError
from trainmaster.storage.contract import Store, Stored

__all__ = ["Store", "Stored", "open_store", "upload_bundle"]

# Written last by upload_bundle: once it is there, the files beside it are complete.
LAST = "health.json"
SCHEMES = ("s3", "gs", "az")


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
