"""Maintenance of a home folder: rebuild records, back up and restore, delete jobs, sweep drafts.

A backup is consistent while a server runs: SQLite copies a snapshot, and objects are copied after it, because an object
is in storage before its row is. What lies in the home is copied too, but for job folders (checkpoints) and what a
server makes anew. A PostgreSQL database has tools of its own (pg_dump); only the files of the home are copied then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from trainmaster.control import workdir
from trainmaster.control.project_yaml import prefix
from trainmaster.core.errors import JobMissing, JobOpen, JobUnreadable, StorageError, StoreError, UsageError
from trainmaster.core.files import DRAFT_PREFIX
from trainmaster.storage import Store
from trainmaster.store import attempts, audit, jobs, projection
from trainmaster.store.database import Database
from trainmaster.store.heads import find_head
from trainmaster.store.migrate import open_database
from trainmaster.store.rows import log_once

DATABASE_FILE = "trainmaster.db"
RETAIN_VARIABLE = "TRAINMASTER_RETAIN_DAYS"  # final jobs older than this are deleted; not set: none
# What of a home folder is not backed up. Everything else is: keys, settings, the history of checks and remedies, the
# objects, and the folder's id.
_NOT_COPIED = {
    "jobs": "checkpoints and working folders of jobs: copy them by other means",
    "local.token": "made anew when a server starts",
    "server.json": "of the server that runs now",
    "server.log": "the log of a server",
    "reconcilers": "locks of processes that run now",
    "runs": "locks of processes that run now",
    "clock": "of this machine's clock",
}
_DRAFT_AGE_S = 24 * 3600.0  # no write of a whole file takes longer
_SWEEP_S = 3600.0

log = logging.getLogger(__name__)


def rebuild(db: Database, job_id: str) -> int:
    """Derive the records of a job again from its events; the number of events read."""
    with db.write() as conn:
        return projection.rebuild(conn, job_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """What a backup has, and what of the home it has not, with the reason."""

    copied: tuple[str, ...]
    left_out: Mapping[str, str]
    size_bytes: int  # of what was copied


def back_up(db: Database, home: Path, to: Path) -> Backup:
    """Copy a home folder, without what `_NOT_COPIED` names, into a new folder that is closed to other accounts.

    The database gets its name last: a folder without it is half a backup, and `restore` refuses it.
    """
    if to.exists() and any(to.iterdir()):
        raise UsageError(f"{to}: not empty; name a new folder")
    to.mkdir(parents=True, exist_ok=True)
    to.chmod(0o700)  # also where it was there
    copied, left_out, draft = [], {}, to / f"{DRAFT_PREFIX}{DATABASE_FILE}"
    if db.engine.dialect.name == "sqlite":
        source = sqlite3.connect(f"file:{db.engine.url.database}?mode=ro", uri=True)
        try:
            with contextlib.closing(source), contextlib.closing(sqlite3.connect(draft)) as target:
                source.backup(target)
        except sqlite3.Error as error:
            raise StoreError(f"{to / DATABASE_FILE}: cannot be written: {error}") from error
        copied.append(DATABASE_FILE)
    for entry in sorted(home.iterdir()):
        if entry.name.startswith((DRAFT_PREFIX, DATABASE_FILE)):
            continue
        reason = _NOT_COPIED.get(entry.name)
        if to.resolve().is_relative_to(entry.resolve()):
            reason = "this backup lies in it"
        elif not entry.is_dir() and not entry.is_file():
            reason = "no file"
        if reason is not None:
            left_out[entry.name] = reason
            continue
        _copy(entry, to / entry.name)
        copied.append(entry.name)
    if draft.exists():
        draft.chmod(0o600)
        draft.rename(to / DATABASE_FILE)
    return Backup(copied=tuple(copied), left_out=left_out, size_bytes=_measure(to))


def restore(source: Path, home: Path) -> Backup:
    """Copy a backup into a home folder that has no database yet, and open it.

    `home-id` comes along: the restored home is the one that was backed up, and what that rented is its own.
    """
    if not (source / DATABASE_FILE).is_file():
        raise UsageError(f"{source}: no {DATABASE_FILE} in it; name a folder that `trainmaster backup` wrote")
    if (home / DATABASE_FILE).exists():
        raise UsageError(f"{home}: has a database; restore into a new home folder")
    entries = [
        entry
        for entry in sorted(source.iterdir())
        if entry.name not in _NOT_COPIED and not entry.name.startswith((DRAFT_PREFIX, DATABASE_FILE))
    ]
    for entry in entries:
        there = home / entry.name
        if there.exists() and not (there.is_dir() and not any(there.iterdir())):
            raise UsageError(f"{home}: has {entry.name} already; restore into a new home folder")
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    for entry in entries:
        _copy(entry, home / entry.name)
    # The database last: a home folder that has one is whole.
    draft = home / f"{DRAFT_PREFIX}{DATABASE_FILE}"
    shutil.copy2(source / DATABASE_FILE, draft)
    open_database(draft).close()
    for left in home.glob(f"{draft.name}-*"):
        left.unlink()
    draft.rename(home / DATABASE_FILE)
    copied = (DATABASE_FILE, *(entry.name for entry in entries))
    return Backup(copied=copied, left_out={}, size_bytes=sum(_measure(home / name) for name in copied))


def _copy(entry: Path, to: Path) -> None:
    """Copy a file, or a folder without drafts and without what is no file."""
    if entry.is_file():
        shutil.copy2(entry, to)
        return

    def ignore(folder: str, names: list[str]) -> list[str]:
        places = {name: Path(folder, name) for name in names}
        plain = {name for name, place in places.items() if place.is_symlink() or place.is_file() or place.is_dir()}
        return [name for name in names if name.startswith(DRAFT_PREFIX) or name not in plain]

    shutil.copytree(entry, to, ignore=ignore, symlinks=True, dirs_exist_ok=True)


def _measure(place: Path) -> int:
    """Bytes of a file, or of the files below a folder."""
    if not place.is_dir():
        return place.stat().st_size
    return sum(Path(folder, name).lstat().st_size for folder, _, names in os.walk(place) for name in names)


def delete_job(db: Database, storage: Store, home: Path, job_id: str, *, by: str) -> None:
    """Delete a final job: its stored objects, its folder, then its rows. May be repeated after an interruption.

    Its spec is not asked for: one that cannot be read would keep the job for ever.
    """
    job = find_head(db, job_id)
    if job is None:
        raise JobMissing(f"there is no job {job_id}; `trainmaster jobs` lists them")
    if not job.final:
        raise JobOpen(f"job {job_id} is {job.status}; cancel it and wait for its end before you delete it")
    if (later := jobs.find_resumed(db, job_id)) is not None:
        raise JobOpen(f"job {later} goes on with the checkpoints of {job_id}; delete that one first")
    if held := [left.what for left in attempts.list_held(db, job=job_id)]:  # its rows are how `reap` finds it
        words = f"job {job_id} may still hold something ({held[0]})"
        raise JobOpen(f"{words}; end it first: trainmaster reap --on {job.target}")
    for stored in storage.list(f"{prefix(job_id)}/"):
        storage.delete(stored.path)
    shutil.rmtree(home / "jobs" / job_id, ignore_errors=True)
    workdir.forget(home / "jobs" / job_id)
    while jobs.delete_events(db, job_id):
        pass
    with db.write() as conn:
        jobs.delete_job(conn, job_id)
        audit.record(conn, who=by, action="job.delete", subject=f"job:{job_id}", detail={"name": job.name})


def sweep_drafts(folder: Path) -> int:
    """Remove drafts that a killed writer left behind; their number."""
    count, before = 0, time.time() - _DRAFT_AGE_S
    for place, _, names in os.walk(folder):
        for name in names:
            if name.startswith(DRAFT_PREFIX):
                with contextlib.suppress(OSError):
                    draft = Path(place) / name
                    if draft.lstat().st_mtime < before:
                        draft.unlink()
                        count += 1
    return count


async def run(db: Database, home: Path, storage: Store, *, stop: asyncio.Event) -> None:
    """Sweep drafts and hold the retention until `stop` is set. An error is logged and tried again."""
    while not stop.is_set():
        try:
            await asyncio.to_thread(_sweep, db, home, storage)
        except Exception:
            log.exception("maintenance failed; trying again in an hour")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _SWEEP_S)


def _sweep(db: Database, home: Path, storage: Store) -> None:
    try:
        db.reserve_space()
    except (sqlite3.Error, OSError) as error:  # it is wanted for a disk that will be full, and this one may be
        log.warning("no space could be reserved in the database: %s", error)
    swept = sweep_drafts(home)
    if swept:
        log.info("%d drafts of interrupted writes removed", swept)
    chunks = workdir.sweep(db, storage)
    if chunks:
        log.info("%d chunks of unused working folders removed", chunks)
    days = read_retention(os.environ.get(RETAIN_VARIABLE))
    if days is None:
        return
    for job_id in jobs.list_ended(db, before=datetime.now(UTC) - timedelta(days=days)):
        try:
            jobs.find_job(db, job_id)  # nobody asked for it: what cannot be read may be wanted where it can be
            delete_job(db, storage, home, job_id, by="control")
            log.info("job %s deleted: it ended more than %g days ago", job_id, days)
        except JobOpen:
            pass  # a later job needs its checkpoints
        except JobUnreadable as error:
            log_once(error)
        except StorageError as error:  # one object that cannot be removed does not keep the other jobs
            log.warning("job %s is kept, its stored files cannot be removed: %s", job_id, error)


def read_retention(text: str | None) -> float | None:
    """Days from the environment; None if not set. UsageError if it is no positive number."""
    if not text:
        return None
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days < 1e6:
        raise UsageError(f"{RETAIN_VARIABLE}: {text!r} is no number of days; write for example 90, or unset it")
    return days
