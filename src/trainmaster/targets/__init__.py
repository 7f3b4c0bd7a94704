"""Places to run. One file per place; the folder is the registry, and this is the contract.

A target plans (pure, printable), submits, polls, lists files and reads them from a byte offset, cancels and releases.
Every call but `plan` may be repeated after a crash with the same attempt and must then find what is already there:
`submit` of an attempt that runs returns the same handle and starts nothing.

Errors: `TargetError` is a refusal; `Unreachable` says only that we could not ask. `poll` answers `unknown` then.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
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
    """An attempt to be placed: its name, its job, and the folder on this machine that is the job's own."""

    attempt: str  # "<job uuid>.<number>"
    spec: JobSpec
    job_folder: Path  # checkpoints live in it, and one folder per attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What would be done: files to be written, commands to be run, and the handle it will have. Printable."""

    handle: Handle
    files: Mapping[str, str]  # path → text
    commands: tuple[tuple[str, ...], ...]

    def render(self) -> str:
        parts = [f"# {path}\n{text.rstrip()}\n" for path, text in self.files.items()]
        parts += ["$ " + " ".join(command) for command in self.commands]
        return "\n".join(parts) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """What the target says of an attempt now."""

    state: TargetState
    exit: ExitRecord | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSize:
    """A file of an attempt: its name as `read` takes it, and its size when it was looked at."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """Something that lives at a target for an attempt, as the target itself says."""

    attempt: str
    handle: Handle  # what `release` takes to end it
    what: str  # for people


class Target(Protocol):
    """A place to run."""

    def plan(self, placement: Placement) -> Submission:
        """What `submit` would do. Pure: touches nothing, asks nobody."""
        ...

    async def submit(self, submission: Submission) -> Handle:
        """Start it, or find it started. Returns once it is certain that it will run or has run."""
        ...

    async def poll(self, handle: Handle) -> Poll:
        """How it stands. Never raises for "cannot reach": that is `unknown`."""
        ...

    async def read(self, handle: Handle, stream: str, *, offset: int, limit: int) -> bytes:
        """At most `limit` bytes of a stream from `offset`; empty where there is no more.

        A stream is a file name of core.plan, or a path under its `outputs/`.
        """
        ...

    async def list_files(self, handle: Handle) -> list[FileSize]:
        """Every file of the attempt that is worth keeping: what it wrote of itself, and all under `outputs/`."""
        ...

    async def cancel(self, handle: Handle, *, reason: str) -> None:
        """Ask it to save and stop; the agent kills it after the spec's grace. Returns at once."""
        ...

    async def release(self, handle: Handle) -> None:
        """Give back everything the attempt held, by force if need be. Logs and events stay readable."""
        ...


@runtime_checkable
class Lists(Protocol):
    """A target that can say by itself what lives there, so that nothing is forgotten with a database."""

    async def list_owned(self) -> list[Owned]:
        """Everything that runs there for an attempt of ours, whoever's database it is in."""
        ...


def names() -> list[str]:
    """Every target there is: the modules of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(word: str) -> Target:
    """The target a spec names: `local`, or `name:options`."""
    name, _, options = word.partition(":")
    if name not in names():
        raise UsageError(f"target: {name!r} is not one of {', '.join(names())}")
    target: Target = importlib.import_module(f"{__name__}.{name}").create(options)
    return target
