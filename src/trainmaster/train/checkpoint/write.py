"""Write a file once: its bytes go to the hash and to the disk in the same pass."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from trainmaster.train.checkpoint.manifest import FileRecord

_SLICE_BYTES = 8 << 20  # hashed and written at one go: long against a lock of the interpreter, short against a stop
_SYNC_BYTES = 256 << 20  # handed to the disk this often, so that it works from the start and not at the end alone
_DIRECT = getattr(os, "O_DIRECT", 0)  # absent where the system is not Linux
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # of a file system that only takes bytes by way of the page cache
_BLOCK_BYTES = 4096  # a disk takes whole ones past the page cache


def write(path: Path, pieces: Iterable[bytes | memoryview], *, paged: bool = False, over: bool = False) -> FileRecord:
    """A file with these bytes, safe on the disk when this returns; what was hashed is what was written.

    It must be new, or with `over` may be an older one of the same name, whose memory is used again.
    `paged`: each piece begins at a page of memory. The disk then takes them from there, past the page cache, where the
    file system can: 2.2 GB/s on a disk of 1.8 by way of the cache (docs/LOG.md).
    """
    digest, size, unsynced = hashlib.sha256(), 0, 0
    file = _File(path, direct=paged, over=over)
    try:
        for piece in pieces:
            whole = memoryview(piece)
            for start in range(0, len(whole), _SLICE_BYTES):
                part = whole[start : start + _SLICE_BYTES]
                digest.update(part)
                file.write(part)
            size += len(whole)
            unsynced += len(whole)
            if unsynced >= _SYNC_BYTES and not file.direct:
                os.fdatasync(file.fd)
                unsynced = 0
        if over:
            os.ftruncate(file.fd, size)
        os.fsync(file.fd)
    finally:
        os.close(file.fd)
    return FileRecord(size_bytes=size, sha256=digest.hexdigest())


class _File:
    """A file to write; `direct` for as long as it is written past the page cache."""

    def __init__(self, path: Path, *, direct: bool, over: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | (os.O_NOFOLLOW if over else os.O_EXCL)
        self.direct = direct and _DIRECT != 0
        try:
            self.fd = os.open(path, flags | (_DIRECT if self.direct else 0), 0o644)
        except OSError as error:
            if not self.direct or error.errno not in _REFUSALS:
                raise
            path.unlink(missing_ok=True)  # some file systems refuse the flag after they have made the file
            self.fd, self.direct = os.open(path, flags, 0o644), False

    def write(self, part: memoryview) -> None:
        while part:
            if self.direct and len(part) < _BLOCK_BYTES:
                self._by_cache()  # the end of the file
            blocks = part[: len(part) // _BLOCK_BYTES * _BLOCK_BYTES] if self.direct else part
            try:
                part = part[os.write(self.fd, blocks) :]
            except OSError as error:
                if not self.direct or error.errno not in _REFUSALS:
                    raise
                self._by_cache()

    def _by_cache(self) -> None:
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~_DIRECT)
        self.direct = False
