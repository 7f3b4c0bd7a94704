"""Whole objects with their checksums: put and read back, fetched and compared, gone on with where a fetch was cut off.

upload(store, "run/model.bin", file)  → Receipt     the object holds these bytes: they were read back and compared
download(store, "run/model.bin", to)  → Receipt     the file is there whole, or not at all
verify(store, "run/model.bin", receipt)            Damaged where the object holds something else
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainmaster.core.errors import Damaged, ObjectMissing, StorageError
from trainmaster.storage.contract import Store

CHUNK = 4 << 20  # bytes of an object that are in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What was moved, so that anyone can compare."""

    size_bytes: int
    sha256: str


def upload(store: Store, path: str, data: bytes | Path | Iterator[bytes]) -> Receipt:
    """Put an object, read it back and compare. To be tried again as a whole after an error."""
    if isinstance(data, Path):
        receipt = _of_file(data)
        store.put(path, data)  # as a file: its size determines the parts; if it grows meanwhile, verify fails
    else:
        digest = _Digest()
        store.put(path, digest.through(iter([data]) if isinstance(data, bytes) else data))
        receipt = digest.receipt()
    verify(store, path, receipt)
    return receipt


def verify(store: Store, path: str, receipt: Receipt) -> None:
    """Read an object through and compare it with what is known of it: Damaged, or ObjectMissing."""
    stored, digest = store.stat(path), _Digest()
    if stored.size_bytes == receipt.size_bytes:
        for start in range(0, stored.size_bytes, CHUNK):
            digest.update(store.read(path, start=start, size=min(CHUNK, stored.size_bytes - start)))
        if digest.receipt() == receipt:
            return
    raise Damaged(f"{store.url}/{path} does not hold the {receipt.size_bytes} bytes that were stored; store it again")


def download(store: Store, path: str, to: Path, *, sha256: str | None = None, chunk: int = CHUNK) -> Receipt:
    """Fetch an object into a file, which appears when all of it is there and right.

    What came is kept beside it until then: a download that was cut off goes on there, in any later process, as long as
    the object is still the same one.
    """
    stored = store.stat(path)
    part = _part(to, stored.version)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        _remove_parts(to, but=part)  # of an object that was replaced
        with part.open("ab") as out:
            for start in range(out.tell(), stored.size_bytes, chunk):
                out.write(store.read(path, start=start, size=min(chunk, stored.size_bytes - start)))
                out.flush()
            os.fsync(out.fileno())
        receipt = _of_file(part)
        if store.stat(path).version != stored.version:
            part.unlink()
            raise StorageError(f"{store.url}/{path} was replaced while it was read; fetch it again")
        if receipt.size_bytes != stored.size_bytes or sha256 not in (None, receipt.sha256):
            part.unlink()  # going on from wrong bytes would never end
            raise Damaged(f"{store.url}/{path} is not what was stored: {receipt.sha256}, expected {sha256}")
        part.replace(to)
    except ObjectMissing:
        part.unlink(missing_ok=True)  # removed while it was read
        raise
    except OSError as error:
        raise StorageError(f"{to} cannot be written: {error.strerror or error}") from None
    return receipt


def _part(to: Path, version: str) -> Path:
    """Where the bytes of this version wait. Its name holds the version: those of another are never gone on with."""
    return to.with_name(f".{to.name}.{hashlib.sha256(version.encode()).hexdigest()[:16]}.part")


def _remove_parts(to: Path, *, but: Path) -> None:
    name = re.compile(rf"\.{re.escape(to.name)}\.[0-9a-f]{{16}}\.part")
    for old in to.parent.iterdir():
        if name.fullmatch(old.name) and old != but:
            old.unlink(missing_ok=True)


class _Digest:
    """Counts and hashes what passes."""

    def __init__(self) -> None:
        self._sha256, self._size = hashlib.sha256(), 0

    def update(self, piece: bytes) -> None:
        self._sha256.update(piece)
        self._size += len(piece)

    def through(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self.update(piece)
            yield piece

    def receipt(self) -> Receipt:
        return Receipt(size_bytes=self._size, sha256=self._sha256.hexdigest())


def _of_file(path: Path) -> Receipt:
    digest = _Digest()
    try:
        with path.open("rb") as file:
            while piece := file.read(CHUNK):
                digest.update(piece)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from None
    return digest.receipt()
