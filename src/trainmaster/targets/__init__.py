"""Targets: where attempts run. One file per target; the folder is the registry, this module is the contract.

A target plans (pure, printable), submits, polls, lists files and reads them from a byte offset, cancels and releases.
Every call but `plan` may be repeated after a crash with the same attempt and must then find what is already there:
`submit` of an attempt that runs returns the same handle and starts nothing.

Errors: `TargetError` is a refusal; `Unreachable` means that no answer was possible, and `poll` returns `unknown`.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from trainmaster.core.errors import UsageError
from trainmaster.core.plan import ExitRecord
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import TargetState

Handle = Mapping[str, Any]  # JSON: what the target needs to find the attempt again; kept in the attempt's row


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """An attempt to submit: its name, its job, and the job's own folder on this machine."""

    attempt: str  # "<job uuid>.<number>"
    spec: JobSpec
    job_folder: Path  # checkpoints live in it, and one folder per attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A planned submission: files to write, commands to run, and the future handle. Printable."""

    handle: Handle
    files: Mapping[str, str]  # path → text
    commands: tuple[tuple[str, ...], ...]
    work: Path | None = None  # folder here whose files the nodes get as the job's working folder

    def render(self) -> str:
        parts = [f"# {path}\n{text.rstrip()}\n" for path, text in self.files.items()]
        parts += ["$ " + " ".join(command) for command in self.commands]
        return "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """Present state of an attempt at its target."""

    state: TargetState
    exit: ExitRecord | None = None
    note: str = ""


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


class Target(Protocol):
    """Where attempts run."""

    def plan(self, placement: Placement) -> Submission:
        """The submission, without side effects."""
        ...

    async def submit(self, submission: Submission) -> Handle:
        """Start the attempt, or find it started. Returns once it is certain to run or to have run."""
        ...

    async def poll(self, handle: Handle) -> Poll:
        """State of the attempt. Unreachable is `unknown`, never an exception."""
        ...

    async def read(self, handle: Handle, stream: str, *, offset: int, limit: int) -> bytes:
        """At most `limit` bytes of a stream from `offset`; empty at the end.

        A stream is a file name of core.plan, or a path under its `outputs/`.
        """
        ...

    async def list_files(self, handle: Handle) -> list[FileSize]:
        """Every file to keep: the attempt's own records, and everything under `outputs/`."""
        ...

    async def cancel(self, handle: Handle, *, reason: str) -> None:
        """Request save and stop; the agent kills the workload after the spec's grace period. Returns at once."""
        ...

    async def release(self, handle: Handle) -> None:
        """Free everything the attempt holds, by force if needed. Logs and events stay readable."""
        ...


@runtime_checkable
class Places(Protocol):
    """A target that chooses machines. Its choice is in the database before anything is started there."""

    async def place(self, submission: Submission) -> Handle:
        """Reserve machines for the attempt, or find them reserved; the handle with their names. Starts nothing.

        NoCapacity while all are in use. What was reserved and never submitted becomes free by itself.
        """
        ...


@runtime_checkable
class ReadsMany(Protocol):
    """A target that reads many small files in one request: a round trip for each would take longer than the bytes."""

    async def read_many(self, handle: Handle, streams: Sequence[str], *, limit: int) -> list[bytes | None]:
        """At most `limit` first bytes of each stream; None where it cannot be read. All together under 64 MiB."""
        ...


@runtime_checkable
class Lists(Protocol):
    """A target that lists its own resources, so that none is forgotten when a database is lost."""

    async def list_owned(self, *, partial: bool = False) -> list[Owned]:
        """Every resource of an attempt of trainmaster, in any database.

        Unreachable where a part of the target cannot be asked; with `partial` the others are listed.
        """
        ...


async def close() -> None:
    """Close connections that targets opened in the running event loop."""
    if (sessions := sys.modules.get(f"{__name__}.ssh.session")) is not None:
        await sessions.close_all()


def names() -> list[str]:
    """All targets: the modules of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(word: str) -> Target:
    """The target named in a spec: `local`, or `name:options`."""
    name, _, options = word.partition(":")
    if name not in names():
        raise UsageError(f"target: {name!r} is not one of {', '.join(names())}")
    target: Target = importlib.import_module(f"{__name__}.{name}").create(options)
    return target
