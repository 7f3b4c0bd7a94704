"""Newest checkpoint of a job on the local target: its files, and their bytes, for those who fetch the model.

The manifest is written last and names every file with its checksum. Only files that it names are read, never through a
link, and only files of the job's own user where that is another than ours: the job owns the folder, and may put
something else in its place between two reads; and the folder may be one that its spec names.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainmaster import targets
from trainmaster.core.errors import UsageError
from trainmaster.core.plan import CHECKPOINTS_FOLDER
from trainmaster.store.rows import JobRow
from trainmaster.targets.local import find_job_uid

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{8,})")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointListing:
    """One checkpoint: its folder, and size and SHA-256 of each file."""

    folder: Path
    step: int
    files: Mapping[str, tuple[int, str]]
    owner: int | None = None  # user whose files they must be; None: our own


def find_newest(home: Path, job: JobRow) -> CheckpointListing:
    """The newest checkpoint of the job, or UsageError where it has none."""
    folder = _folder(home, job)
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
    try:
        return _read_manifest(_folder(home, job) / f"step-{step:08d}", step, find_job_uid(job.target))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"job {job.id} has no checkpoint of step {step}; fetch the newest one") from None


def read(listing: CheckpointListing, name: str, *, offset: int, limit: int) -> bytes:
    """At most `limit` bytes of a file that the listing names; UsageError for any other name."""
    if name not in listing.files:
        raise UsageError(f"the checkpoint of step {listing.step} has no file {name!r:.100}")
    try:
        return _read(listing.folder / name, offset, limit, listing.owner)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}; the checkpoint may have been replaced, fetch the newest") from None


def _folder(home: Path, job: JobRow) -> Path:
    if (traits := targets.find_traits(job.target)) is None or not traits.here:
        raise UsageError(f"checkpoints of target {job.spec.target} are not read through the server")
    stated = job.spec.train.checkpoint.folder if job.spec.train is not None else None
    return Path(stated) if stated else home / "jobs" / (job.spec.resume_from or job.id) / CHECKPOINTS_FOLDER


def _read_manifest(folder: Path, step: int, owner: int | None) -> CheckpointListing:
    raw = _read(folder / MANIFEST, 0, _MAX_MANIFEST_BYTES, owner)
    stated = json.loads(raw)["files"]
    files = {str(name): (int(file["size_bytes"]), str(file["sha256"])) for name, file in stated.items()}
    if not all(_NAME.fullmatch(name) and name not in (".", "..", MANIFEST) for name in files):
        raise ValueError("a manifest that names files elsewhere")
    files[MANIFEST] = (len(raw), hashlib.sha256(raw).hexdigest())  # last, as it was written
    return CheckpointListing(folder=folder, step=step, files=files, owner=owner)


def _read(path: Path, offset: int, limit: int, owner: int | None) -> bytes:
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY)
    try:
        fd = os.open(path.name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or owner not in (None, facts.st_uid):
            raise OSError(0, "not a plain file of the job")
        return os.pread(fd, limit, offset)
    finally:
        os.close(fd)
