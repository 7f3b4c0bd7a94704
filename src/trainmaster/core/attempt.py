"""An attempt as targets see it: its submission, its handle, how it stands, its files, what it holds."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmaster.core import schema
from trainmaster.core.plan import ExitRecord
from trainmaster.core.states import Reason, TargetState

Handle = Mapping[str, Any]  # JSON: what the target needs to find the attempt again; kept in the attempt's row


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """An object that the machines of a job fetch into the job's folder before it starts."""

    name: str  # as the spec names it
    url: str = field(repr=False)  # signed: a secret while it is valid; "" where `source` is to be sent instead
    source: Path | None  # file here
    to: str  # below the job's folder
    size_bytes: int
    version: str
    md5: str | None
    sha256: str | None
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A planned submission: files to write, commands to run, and the future handle. Printable."""

    handle: Handle
    files: Mapping[str, str]  # path → text
    commands: tuple[tuple[str, ...], ...]
    work: Path | None = None  # folder here whose files the nodes get as the job's working folder
    pulls: tuple[Pull, ...] = ()  # not printed: they hold signed addresses
    avoid: Mapping[str, str] = field(default_factory=dict)  # machines that take no new jobs, and why
    last: tuple[str, ...] = ()  # machines to take only where the others are too few: their newest check failed

    def render(self) -> str:
        parts = [f"# {path}\n{text.rstrip()}\n" for path, text in self.files.items()]
        parts += ["$ " + shlex.join(command) for command in self.commands]
        return "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """Present state of an attempt at its target."""

    state: TargetState
    exit: ExitRecord | None = None
    note: str = ""
    reason: Reason | None = None  # of `lost`, where the target knows it

    def to_json(self) -> str:
        return json.dumps(schema.to_plain(self))

    @classmethod
    def from_json(cls, text: str) -> Poll:
        plain = json.loads(text)
        return cls(
            state=TargetState(plain["state"]),
            exit=schema.build(ExitRecord, plain["exit"]) if plain["exit"] is not None else None,
            note=plain["note"],
            reason=Reason(plain["reason"]) if plain["reason"] is not None else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSize:
    """A file of an attempt: its name for `read`, and its size when listed.

    A name may hold any byte but NUL; bytes that are not UTF-8 are surrogate escapes, as `os.fsdecode` gives them.
    """

    name: str
    size_bytes: int
    fault: str = ""  # why it cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A resource at a target that belongs to an attempt, from the target's own listing."""

    attempt: str
    handle: Handle  # what `release` takes to end it
    what: str  # for people
    foreign: bool = False  # not of trainmaster: shown, never touched
