"""Files of a job onto this disk: whole, verified, and gone on with after a cut."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from trainmaster.client.errors import Download

if TYPE_CHECKING:
    from trainmaster.client import Client

_CHUNK = 1 << 20


class Described(Protocol):
    """What a file should be when it has come."""

    @property
    def path(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def sha256(self) -> str: ...


def fetch(client: Client, job_id: str, folder: Path) -> list[Path]:
    """Every artifact, then every log that only the target has so far; the files in their order."""
    written = []
    for artifact in client.artifacts(job_id):
        to = place(folder, artifact.path)
        client.download(job_id, artifact, to)
        written.append(to)
    for stream in client.log_streams(job_id):
        if not stream.stored:
            to = place(folder, f"attempts/{stream.attempt}/{stream.stream}")
            grow(to, lambda offset, s=stream: client.logs(job_id, s.stream, attempt=s.attempt, offset=offset))  # type: ignore[misc]
            written.append(to)
    return written


def place(folder: Path, path: str) -> Path:
    """Where a file of this name goes. A name comes from elsewhere, and must not lead out of the folder."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or any(part in ("", ".", "..") or "\x00" in part for part in path.split("/")):
        raise Download(f"{path!r:.100} is no name for a file; nothing was written")
    return folder.joinpath(*parts)


def download(
    pieces: Callable[[int], Iterator[bytes]], what: Described, to: Path, *, told: Callable[[int], None]
) -> None:
    """Bytes from `pieces(offset)` into a file, if they are what was described. A part of it stays for the next try."""
    if to.is_file() and to.stat().st_size == what.size_bytes and _sum(to) == what.sha256:
        told(what.size_bytes)
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(f".{to.name}.part")
    for try_ in range(2):
        have = part.stat().st_size if part.exists() else 0
        if have > what.size_bytes:
            part.unlink()
            have = 0
        told(have)
        with part.open("ab") as file:
            for piece in pieces(have) if have < what.size_bytes else ():
                file.write(piece)
                told(len(piece))
            file.flush()
            os.fsync(file.fileno())
        size, found = part.stat().st_size, _sum(part)
        if found == what.sha256 and size == what.size_bytes:
            part.replace(to)
            return
        part.unlink()  # what an earlier try left may be of another file; the second time all of it comes
        if have == 0 or try_:
            break
        told(-size)
    raise Download(f"{what.path}: {size:,} of {what.size_bytes:,} bytes came, SHA-256 {found[:12]}… is not as stored")


def grow(to: Path, read: Callable[[int], bytes]) -> None:
    """Add to a file what its source has beyond it."""
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
