"""Writing files whole: a reader sees the old content or the new, never a part of it. Listing the files of a tree."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# Drafts share one prefix: a listing can leave them out, and a cleaner can find those that a killed writer left behind.
DRAFT_PREFIX = ".part-"
_DEPTH = 64  # folders below the first one
_KINDS = {
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A file of a tree; `fault` says why it cannot be read."""

    name: str
    size_bytes: int = 0
    fault: str = ""


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


def read_small(path: Path, *, limit_bytes: int = 1 << 20) -> bytes:
    """A small file in a folder that a job can write to, whole. OSError (EFBIG) where it is larger than any of ours:
    a sparse one of gigabytes would take the memory of whoever reads it. A pipe is not waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        data = b""
        while len(data) <= limit_bytes and (more := os.read(fd, limit_bytes + 1 - len(data))):
            data += more
    finally:
        os.close(fd)
    if len(data) > limit_bytes:
        raise OSError(errno.EFBIG, f"larger than the {limit_bytes:,} bytes that it may have", str(path))
    return data


def open_plain(path: Path, flags: int, mode: int = 0o644) -> int:
    """Open a file in a folder that a job can write to. OSError where a link, a pipe or a folder is in its place:
    a link would mislead, and a pipe would be waited for without end."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    os.set_blocking(fd, True)  # a program that gets it as its output finds it as usual
    return fd


def append_plain(path: Path, data: bytes) -> None:
    """Append to such a file, made where there is none, in one write."""
    fd = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk: a rename survives a power cut only after this."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file_system(folder: Path) -> None:
    """Write what a file system holds in memory to its disk: one call, where a call per file would take minutes."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(fd)


def is_hole(fd: int, start: int, size_bytes: int) -> bool:
    """Whether this part of a file was never written. It is zeros; to read it would fill the page cache with them."""
    if size_bytes <= 0 or start + size_bytes > os.fstat(fd).st_size:
        return False
    try:
        return os.lseek(fd, start, os.SEEK_DATA) >= start + size_bytes
    except OSError as error:
        return error.errno == errno.ENXIO  # no data up to the end; other errors: the file system cannot tell


def list_tree(root: Path, name: str) -> Iterator[Listed]:
    """Files below `root/name`, named from `root`; nothing where it is not there. No link is followed.

    What is no plain file, and a folder that cannot be listed, come with the reason.
    """
    waiting = [(name, 0)] if os.path.lexists(root / name) else []
    while waiting:
        above, depth = waiting.pop()
        if depth > _DEPTH:
            yield Listed(name=above, fault=f"deeper than {_DEPTH} folders")
            continue
        try:
            facts = (root / above).lstat()
            entries = list(os.scandir(root / above)) if stat.S_ISDIR(facts.st_mode) else None
        except OSError as error:
            yield Listed(name=above, fault=_text(error))
            continue
        if entries is None:  # the first one, or a folder that was replaced meanwhile
            yield Listed(name=above, fault=_describe(facts))
            continue
        for entry in entries:
            inner = f"{above}/{entry.name}"
            try:
                facts = entry.stat(follow_symlinks=False)
            except OSError as error:
                yield Listed(name=inner, fault=_text(error))
                continue
            if stat.S_ISDIR(facts.st_mode):
                waiting.append((inner, depth + 1))
            elif stat.S_ISREG(facts.st_mode):
                yield Listed(name=inner, size_bytes=facts.st_size)
            else:
                yield Listed(name=inner, fault=_describe(facts))


def _describe(facts: os.stat_result) -> str:
    kind = _KINDS.get(stat.S_IFMT(facts.st_mode))
    return f"{kind}, not a plain file" if kind else "not a folder"


def _text(error: OSError) -> str:
    return error.strerror or type(error).__name__
