"""Upload of working folders: questions and answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingChunks:
    """Chunks that a project does not have."""

    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A chunk that a project has now."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWorkdir:
    """A snapshot that jobs of its project can name."""

    workdir: str  # for the spec: sha256:…
    missing: tuple[str, ...]  # chunks to send first; while there are any, the snapshot is not recorded
