"""Files of a job: log streams and stored artifacts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStream:
    """One log stream of one attempt and its size."""

    attempt: int
    stream: str
    size_bytes: int
    stored: bool  # in storage; else at its target


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """Every log stream that can be read, by attempt."""

    streams: tuple[LogStream, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A stored file of a job; `url` is its download path."""

    path: str
    kind: str
    attempt: str | None
    size_bytes: int
    sha256: str
    stored_at: datetime
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifacts:
    artifacts: tuple[Artifact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """One file of a checkpoint. A script of one's own writes no checksums."""

    path: str
    size_bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """The newest checkpoint of a job. `name` is its folder."""

    step: int
    name: str
    files: tuple[CheckpointFile, ...]
