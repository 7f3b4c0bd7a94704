"""Writing files whole: a reader sees the old content or the new, never a part of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

# Drafts share one prefix: a listing can leave them out, and a cleaner can find those that a killed writer left behind.
DRAFT_PREFIX = ".part-"


@contextmanager
def open_whole(path: Path, *, durable: bool, mode: int = 0o666, replace: bool = True) -> Iterator[BinaryIO]:
    """A file to write into that appears at `path` when the block ends without an error, and otherwise is removed.

    `durable` syncs the content and then the folder, so that neither is lost in a power cut; it costs two fsync calls.
    `mode` is reduced by the umask. Without `replace` an existing file stays and FileExistsError is raised.
    """
    draft = path.with_name(DRAFT_PREFIX + secrets.token_hex(8))  # not derived from the name: that may be 255 bytes long
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if replace:
            draft.replace(path)
        else:
            path.hardlink_to(draft)
            draft.unlink()
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def write_whole(path: Path, data: str | bytes, *, durable: bool, mode: int = 0o666, replace: bool = True) -> Path:
    """Write text (as UTF-8) or bytes; the options are those of `open_whole`. Returns `path`."""
    with open_whole(path, durable=durable, mode=mode, replace=replace) as file:
        file.write(data.encode() if isinstance(data, str) else data)
    return path


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk: a rename survives a power cut only after this."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
