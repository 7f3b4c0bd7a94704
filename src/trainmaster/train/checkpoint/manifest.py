"""The manifest of a checkpoint and the folder of checkpoints. Plain files; no torch, no ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.core import schema
from trainmaster.core.compat import file_digest
from trainmaster.core.errors import CheckpointError, LaterVersion, SpecError
from trainmaster.core.files import sync, write_whole
from trainmaster.core.schema import field
from trainmaster.train.checkpoint.remove import remove_folder
from trainmaster.train.drill.failpoints import reach

MANIFEST = "manifest.json"
_VERSION = 1
_COMMITTED = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"step-(\d{8,})(?:\.(\d+))?\.(tmp|old)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a file of the checkpoint must be."""

    size_bytes: int = field(ge=0, doc="its size")
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds. `run` names the model and the data it belongs to; `state` is train.state.State."""

    step: int = field(ge=0, doc="steps done")
    state: Mapping[str, Any]
    run: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    ranks: int = field(ge=1, doc="how many wrote it; any number may read it")
    torch: str
    saved_at: str  # ISO, with its offset
    feed: Mapping[str, Any] | None = None  # where the data source is, if it has a state of its own
    origin: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # provenance, for debugging; no code reads it
    fence: int = field(default=0, ge=0, doc="fencing number of the run that wrote it; 0: before there was a lock")
    objects: str | None = None  # in an object store: the prefix of its files; None: beside the manifest
    v: int = _VERSION

    @property
    def size_bytes(self) -> int:
        return sum(record.size_bytes for record in self.files.values())


def render(manifest: Manifest) -> str:
    """The manifest as JSON, with a digest over itself: a flipped bit in a step number must not pass either."""
    plain = schema.to_plain(manifest)
    return json.dumps({**plain, "digest": _digest(plain)}, indent=1, sort_keys=True, allow_nan=False) + "\n"


def read(checkpoint: Path) -> Manifest:
    """Read the manifest of a checkpoint; CheckpointError names the fault."""
    try:
        return parse((checkpoint / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{MANIFEST} cannot be read: {error}") from None


def parse(data: bytes) -> Manifest:
    """Parse the text of `render`; CheckpointError names the fault."""
    try:
        plain = json.loads(data)
        if plain.pop("digest") != _digest(plain):
            raise CheckpointError(f"{MANIFEST} does not match its own digest")
        if (version := plain.get("v", _VERSION)) != _VERSION:
            raise LaterVersion(
                f"{MANIFEST} has version {version!r:.20}, and this Trainmaster reads version {_VERSION}; "
                "use the Trainmaster that wrote it"
            )
        return schema.build(Manifest, plain)
    except (ValueError, KeyError, TypeError, AttributeError, SpecError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {type(error).__name__}: {error}") from None


def measure(path: Path) -> FileRecord:
    """A file's size and hash, read whole."""
    with path.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
        return FileRecord(size_bytes=file.tell(), sha256=digest)


def find_fault(checkpoint: Path, files: Mapping[str, FileRecord], *, deep: bool) -> str | None:
    """What is wrong with these files of a checkpoint, or None. `deep` reads every byte; without it only sizes."""
    for name, record in files.items():
        path = checkpoint / name
        try:
            size = path.stat().st_size
            if size != record.size_bytes:
                return f"{name} has {size} bytes instead of {record.size_bytes}"
            if deep and measure(path) != record:
                return f"{name} does not match its SHA-256"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return None


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def draft_of(folder: Path, step: int, *, fence: int = 0) -> Path:
    """The folder that a save writes into: one for each run, so that files of two runs never meet."""
    return folder / (f"step-{step:08d}.{fence}.tmp" if fence else f"step-{step:08d}.tmp")


def list_steps(folder: Path) -> list[int]:
    """Every committed checkpoint's step, newest first, good or bad. A folder that cannot be read is an error."""
    try:
        entries = os.listdir(folder)  # noqa: PTH208 (iterdir is lazy: its errors would surface elsewhere)
    except FileNotFoundError:
        return []
    return sorted((int(match[1]) for name in entries if (match := _COMMITTED.fullmatch(name))), reverse=True)


def begin(draft: Path) -> None:
    """An empty folder to save into; what a cut-off save left there is removed."""
    if draft.is_dir():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)


def commit(draft: Path, manifest: Manifest, *, guard: Callable[[], None] = lambda: None) -> Path:
    """Make the draft a checkpoint. After this returns it survives a power cut; before that it does not exist.

    `guard` is called right before the rename, and raises where this run may no longer write.
    """
    write_whole(draft / MANIFEST, render(manifest), durable=True)
    reach("save:manifest")
    guard()
    final = path_of(draft.parent, manifest.step)
    # Only one that was rejected can be in the way: a good one would have been resumed from.
    rejected = _set_aside(final) if final.exists() or final.is_symlink() else None
    draft.rename(final)
    sync(final.parent)
    if rejected is not None:
        with contextlib.suppress(OSError):  # the new one is committed all the same, and `prune` comes by again
            remove(rejected)
    return final


def _set_aside(checkpoint: Path) -> Path:
    """Rename what is to be deleted: killed in the middle of that, it must not look like a damaged checkpoint."""
    old = checkpoint.with_name(checkpoint.name + ".old")
    remove(old)
    return checkpoint.rename(old)


def remove(path: Path) -> None:
    """A folder with what is in it; of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)


def prune(
    folder: Path,
    *,
    keep: int,
    newest: int,
    keep_every: int | None = None,
    spare: Collection[int] = (),
    known_good: set[int] | None = None,
    fence: int = 0,
) -> list[int]:
    """Delete what is older than the `keep` newest good checkpoints up to `newest`; returns the deleted steps.

    Multiples of `keep_every` stay for ever, beside the `keep`, and those in `spare` for now. Those above `newest` are
    of a future that was rejected: they neither count as kept nor are deleted here. `known_good` remembers the steps
    that were looked at, from call to call: none is read twice. Drafts of runs before that with fencing number `fence`
    are deleted whatever their step: those runs have lost the lock.
    """
    past = [step for step in list_steps(folder) if step <= newest]
    seen = known_good if known_good is not None else set()
    good: list[int] = []
    for step in past:
        if len(good) == keep:
            break
        path = path_of(folder, step)
        if (step in seen and (path / MANIFEST).exists()) or _looks_good(path):
            seen.add(step)
            good.append(step)
    gone = [step for step in past if len(good) >= keep and step < good[keep - 1]]
    gone = [step for step in gone if step not in spare and (keep_every is None or step % keep_every)]
    seen.difference_update(gone)
    for step in gone:
        _set_aside(path_of(folder, step))
    for entry in folder.iterdir():
        left = _LEFTOVER.fullmatch(entry.name)
        if left and entry.is_dir() and (int(left[1]) <= newest or int(left[2] or fence) < fence):
            remove(entry)  # of a link only the link: what it leads to was put elsewhere by someone
    return gone


def _looks_good(checkpoint: Path) -> bool:
    try:
        return find_fault(checkpoint, read(checkpoint).files, deep=False) is None
    except CheckpointError:
        return False


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
