"""Downloads of a job's files: verified, and continued after an interruption."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Protocol

from trainmaster.client.errors import Download

_CHUNK = 1 << 20


class Described(Protocol):
    """Name, size and checksum of a file to download."""

    @property
    def path(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def sha256(self) -> str | None: ...


def place(folder: Path, path: str) -> Path:
    """The path of a downloaded file. Its name comes from a job and must not lead out of the folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or any(part in ("", ".", "..") or "\x00" in part for part in path.split("/")):
        raise Download(f"{path!r:.100} is not a valid file name; nothing was written")
    return folder.joinpath(*parts)


def download(
    pieces: Callable[[int], Iterator[bytes]], what: Described, to: Path, *, on_progress: Callable[[int], None]
) -> None:
    """Write the bytes of `pieces(offset)` to a file and verify them. The next try continues an interrupted part."""
    if to.is_file() and to.stat().st_size == what.size_bytes and _sum(to) == what.sha256:
        on_progress(what.size_bytes)
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(f".{to.name}.part")
    if what.sha256 is None:
        part.unlink(missing_ok=True)  # it may be of another version: a part that cannot be verified is not continued
    for try_ in range(2):
        have = part.stat().st_size if part.exists() else 0
        if have > what.size_bytes:
            part.unlink()
            have = 0
        on_progress(have)
        with part.open("ab") as file:
            for piece in pieces(have) if have < what.size_bytes else ():
                file.write(piece)
                on_progress(len(piece))
            file.flush()
            os.fsync(file.fileno())
        size, digest = part.stat().st_size, _sum(part)
        if what.sha256 in (None, digest) and size == what.size_bytes:
            part.replace(to)
            return
        part.unlink()  # the part may be of another file; the second try downloads everything
        if have == 0 or try_:
            break
        on_progress(-size)
    raise Download(
        f"{what.path}: {size:,} of {what.size_bytes:,} bytes were received"
        + (f", SHA-256 {digest[:12]}… does not match" if what.sha256 else "; it may be being written: try again")
    )


def grow(to: Path, read: Callable[[int], bytes]) -> None:
    """Append the bytes that the source has beyond the end of the file."""
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("ab") as file:
        offset = file.tell()
        while piece := read(offset):
            file.write(piece)
            offset += len(piece)


def _sum(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            total.update(piece)
    return total.hexdigest()
