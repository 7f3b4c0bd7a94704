"""Write a file once: its bytes go to the hash and to the disk in the same pass."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from trainmaster.train.checkpoint.manifest import FileRecord

_SLICE_BYTES = 8 << 20  # hashed and written at one go: long against a lock of the interpreter, short against a stop
_SYNC_BYTES = 256 << 20  # handed to the disk this often, so that it works from the start and not at the end alone


def write(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """A new file with these bytes, safe on the disk when this returns; what was hashed is what was written."""
    digest, size, unsynced = hashlib.sha256(), 0, 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for piece in pieces:
            whole = memoryview(piece)
            for start in range(0, len(whole), _SLICE_BYTES):
                part = whole[start : start + _SLICE_BYTES]
                digest.update(part)
                while part:
                    part = part[os.write(fd, part) :]
            size += len(whole)
            unsynced += len(whole)
            if unsynced >= _SYNC_BYTES:
                os.fdatasync(fd)
                unsynced = 0
        os.fsync(fd)
    finally:
        os.close(fd)
    return FileRecord(size_bytes=size, sha256=digest.hexdigest())
