"""Newest checkpoint of a job on the local target: its files, and their bytes, for those who fetch the model.

The manifest is written last and names every file with its checksum. Only files that it names are read, never through a
link, and only files of the job's own user where that is another than ours: the job owns the folder, and may put
something else in its place between two reads; and the folder may be one that its spec names.

A script of one's own writes no manifest: its checkpoint is what lies in the folder, without checksums, and without the
older ones of a numbered series of folders (checkpoint-100, checkpoint-200; iter_0000100).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainmaster import targets
from trainmaster.core.errors import UsageError
from trainmaster.core.plan import CHECKPOINTS_FOLDER, WORK_FOLDER
from trainmaster.store.rows import JobRow
from trainmaster.targets.local import find_job_uid

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_MAX_MANIFEST_BYTES = 64 << 20
_NUMBERED = re.compile(r"(.*?)(\d+)")  # a folder of a series
_PARTS = re.compile(r".*(rank|shard|part|node|gpu)[-_]?\d+")  # numbered too, but parts of one checkpoint
_MAX_FILES = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointListing:
    """One checkpoint: its folder, and size and SHA-256 of each file."""

    folder: Path
    step: int
    files: Mapping[str, tuple[int, str | None]]
    owner: int | None = None  # user whose files they must be; None: our own


def find_newest(home: Path, job: JobRow) -> CheckpointListing:
    """The newest checkpoint of the job, or UsageError where it has none."""
    folder = _folder(home, job)
    if job.spec.train is None:
        return _list_own(folder, job)
    try:
        saved = sorted((int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name)))
    except OSError:
        saved = []
    for step, path in reversed(saved):
        try:
            return _read_manifest(path, step, find_job_uid(job.target))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # being written, being removed, or damaged: the one before it
    raise UsageError(f"job {job.id} has saved no checkpoint")


def find_step(home: Path, job: JobRow, step: int) -> CheckpointListing:
    """The checkpoint of one step, or UsageError where it is not there any more."""
    if job.spec.train is None:
        return _list_own(_folder(home, job), job)
    try:
        return _read_manifest(_folder(home, job) / f"step-{step:08d}", step, find_job_uid(job.target))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"job {job.id} has no checkpoint of step {step}; fetch the newest one") from None


def read(listing: CheckpointListing, name: str, *, offset: int, limit: int) -> bytes:
    """At most `limit` bytes of a file that the listing names; UsageError for any other name."""
    if name not in listing.files:
        raise UsageError(f"the checkpoint of step {listing.step} has no file {name!r:.100}")
    try:
        return _read(listing.folder, name, offset, limit, listing.owner)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}; the checkpoint may have been replaced, fetch the newest") from None


def _folder(home: Path, job: JobRow) -> Path:
    if (traits := targets.find_traits(job.target)) is None or not traits.here:
        raise UsageError(f"checkpoints of target {job.spec.target} are not read through the server")
    stated = job.spec.train.checkpoint.folder if job.spec.train is not None else None
    if stated:
        return (
            home / "jobs" / job.id / WORK_FOLDER / stated
        )  # a relative one begins where the ranks do, not where we do
    return home / "jobs" / (job.spec.resume_from or job.id) / CHECKPOINTS_FOLDER


def _read_manifest(folder: Path, step: int, owner: int | None) -> CheckpointListing:
    raw = _read(folder, MANIFEST, 0, _MAX_MANIFEST_BYTES, owner)
    stated = json.loads(raw)["files"]
    files: dict[str, tuple[int, str | None]] = {
        str(name): (int(file["size_bytes"]), str(file["sha256"])) for name, file in stated.items()
    }
    if not all(_NAME.fullmatch(name) and name not in (".", "..", MANIFEST) for name in files):
        raise ValueError("a manifest that names files elsewhere")
    files[MANIFEST] = (len(raw), hashlib.sha256(raw).hexdigest())  # last, as it was written
    return CheckpointListing(folder=folder, step=step, files=files, owner=owner)


def _list_own(folder: Path, job: JobRow) -> CheckpointListing:
    """What a script of one's own has saved. The step is the number of the newest folder of a series, else 0."""
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.is_symlink() and not entry.name.startswith(".")]
        older, step = _older_of_series(entries)
        files: dict[str, tuple[int, str | None]] = {}
        ahead = [(entry, entry.name) for entry in entries if entry.name not in older]
        while ahead:
            entry, name = ahead.pop()
            if entry.is_dir(follow_symlinks=False):
                ahead += [(inner, f"{name}/{inner.name}") for inner in os.scandir(entry.path)]
            elif entry.is_file(follow_symlinks=False):
                files[name] = (entry.stat(follow_symlinks=False).st_size, None)
            if len(files) > _MAX_FILES:
                raise UsageError(f"{folder} has more than {_MAX_FILES:,} files; copy them from there")
    except OSError:
        files, step = {}, 0  # not there, or being replaced
    if not files:
        raise UsageError(
            f"job {job.id} has saved no checkpoint: nothing is in the folder that its script finds in "
            "TRAINMASTER_CHECKPOINTS"
        )
    owner = find_job_uid(job.target)
    return CheckpointListing(folder=folder, step=step, files=dict(sorted(files.items())), owner=owner)


def _older_of_series(entries: Sequence[os.DirEntry[str]]) -> tuple[set[str], int]:
    """Folders that have a newer one whose name differs only in its number; and the number of the newest of all."""
    series: dict[str, list[tuple[int, int, str]]] = {}
    for entry in entries:
        match = _NUMBERED.fullmatch(entry.name)
        if match and not _PARTS.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            written = entry.stat(follow_symlinks=False).st_mtime_ns
            series.setdefault(match[1], []).append((written, int(match[2]), entry.name))
    newest = max((max(rows) for rows in series.values()), default=(0, 0, ""))
    return {name for rows in series.values() for *_, name in sorted(rows)[:-1]}, newest[1]


def _read(root: Path, name: str, offset: int, limit: int, owner: int | None) -> bytes:
    """Bytes of a file below a folder of the job. No part of the path may be a link."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    *above, last = name.split("/")
    folder = os.open(root, flags | os.O_DIRECTORY)
    try:
        for part in above:
            inner = os.open(part, flags | os.O_DIRECTORY, dir_fd=folder)
            os.close(folder)
            folder = inner
        fd = os.open(last, flags | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or owner not in (None, facts.st_uid):
            raise OSError(0, "not a plain file of the job")
        return os.pread(fd, limit, offset)
    finally:
        os.close(fd)
