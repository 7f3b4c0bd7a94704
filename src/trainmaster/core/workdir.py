"""Snapshot of a working folder: a manifest of its files, each a list of chunks named by their SHA-256.

    {"v": 1, "files": [{"path": "train.py", "size_bytes": 812, "chunks": ["<sha256>"], "executable": false}],
     "links": [{"path": "data/latest", "target": "2026-11"}]}

The SHA-256 of the manifest's bytes names the snapshot: `workdir: sha256:<hex>` in a spec. Chunks and manifests are
kept per project, so that a name that is known elsewhere gives nothing away.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass

from trainmaster.core.errors import Fault, SpecError
from trainmaster.core.schema import build, field, to_plain

HOME_ID_FILE = "home-id"  # in a home folder

CHUNK_BYTES = 1 << 20  # of one chunk, and so of one request
MOST_FILES = 20_000
MOST_BYTES = 4 << 30  # of one snapshot
MOST_MANIFEST_BYTES = 16 << 20
PREFIX = "sha256:"
_SHA256 = r"[0-9a-f]{64}"
_PATH_BYTES = 1000
_PART_BYTES = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkdirFile:
    """One file of a snapshot. Every chunk but the last has CHUNK_BYTES."""

    path: str = field(doc="relative path with `/`")
    size_bytes: int = field(ge=0, doc="size")
    chunks: tuple[str, ...] = field(default=(), doc="SHA-256 of each chunk")
    executable: bool = field(default=False, doc="mode 0755 instead of 0644")

    def faults(self) -> Iterator[Fault]:
        if message := _path_fault(self.path):
            yield Fault(path="path", message=message)
        if len(self.chunks) != -(-self.size_bytes // CHUNK_BYTES):
            yield Fault(path="chunks", message=f"{len(self.chunks)} do not make {self.size_bytes} bytes")
        if not all(is_digest(chunk) for chunk in self.chunks):
            yield Fault(path="chunks", message="not the SHA-256 of a chunk")

    def chunk_sizes(self) -> Iterator[tuple[str, int]]:
        """Each chunk with its size."""
        for number, chunk in enumerate(self.chunks):
            yield chunk, min(CHUNK_BYTES, self.size_bytes - number * CHUNK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkdirLink:
    """A symbolic link of a snapshot, to a place inside it."""

    path: str = field(doc="relative path with `/`")
    target: str = field(doc="relative target")

    def faults(self) -> Iterator[Fault]:
        if message := _path_fault(self.path):
            yield Fault(path="path", message=message)
        elif not is_inside(self.path, self.target):
            yield Fault(path="target", message=f"{self.target!r:.200} leads out of the folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All files and links of a snapshot."""

    v: int = field(default=1, ge=1, le=1, doc="version of this format")
    files: tuple[WorkdirFile, ...] = field(default=(), doc="files")
    links: tuple[WorkdirLink, ...] = field(default=(), doc="symbolic links")

    def faults(self) -> Iterator[Fault]:
        paths = [file.path for file in self.files] + [link.path for link in self.links]
        if len(paths) > MOST_FILES:
            yield Fault(path="files", message=f"{len(paths):,} entries are more than {MOST_FILES:,}")
        if self.size_bytes > MOST_BYTES:
            yield Fault(path="files", message=f"{self.size_bytes:,} bytes are more than {MOST_BYTES:,}")
        known = set(paths)
        if len(known) != len(paths):
            yield Fault(path="files", message="two entries have the same path")
        # A file below a link or below another file: written, it would land somewhere else.
        for path in paths:
            parts = path.split("/")
            if any("/".join(parts[:depth]) in known for depth in range(1, len(parts))):
                yield Fault(path="files", message=f"{path!r:.200} lies below an entry that is no folder")
                return

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def chunks(self) -> dict[str, int]:
        """Size of every chunk, by its SHA-256."""
        return {chunk: size for file in self.files for chunk, size in file.chunk_sizes()}

    def to_bytes(self) -> bytes:
        """The canonical form: the same folder gives the same bytes."""
        ordered = Manifest(
            files=tuple(sorted(self.files, key=lambda entry: entry.path)),
            links=tuple(sorted(self.links, key=lambda entry: entry.path)),
        )
        return json.dumps(to_plain(ordered), separators=(",", ":"), sort_keys=True).encode()


def parse_manifest(raw: bytes) -> Manifest:
    """A manifest from its bytes; SpecError with every fault."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise SpecError([Fault(path="", message=f"the manifest is not JSON: {error}")]) from error
    return build(Manifest, value)


def digest_of(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def is_digest(text: str) -> bool:
    return re.fullmatch(_SHA256, text) is not None


def find_digest(workdir: str | None) -> str | None:
    """The SHA-256 of the uploaded snapshot that a spec names; None where it names a folder, or nothing."""
    return workdir.removeprefix(PREFIX) if workdir is not None and workdir.startswith(PREFIX) else None


def is_inside(path: str, target: str) -> bool:
    """Whether a link at `path` leads to a place inside the folder."""
    if not target or target.startswith("/") or "\x00" in target:
        return False
    place = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return place != ".." and not place.startswith("../")


def _path_fault(path: str) -> str | None:
    if not path or path.startswith("/") or any(part in ("", ".", "..") for part in path.split("/")):
        return f"{path!r:.200} is not a relative path without `..`"
    if any(ord(letter) < 32 or "\ud800" <= letter <= "\udfff" for letter in path):
        return f"{path!r:.200} has a control character or is not UTF-8"
    if len(path.encode()) > _PATH_BYTES or any(len(part.encode()) > _PART_BYTES for part in path.split("/")):
        return f"{path!r:.80}… is too long"
    return None
