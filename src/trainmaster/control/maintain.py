"""Maintenance of a home folder: rebuild records, back up and restore, delete jobs, sweep drafts.

A backup is consistent while a server runs: SQLite copies a snapshot, and objects are copied after it, because an object
is in storage before its row is. Job folders (checkpoints) are not part of it. A PostgreSQL database has tools of its
own (pg_dump); only the files of the home are copied then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sqlite3
import time
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
_FILES = ("secret.key", "notify.yaml")
_STORAGE = "storage"
_DRAFT_AGE_S = 24 * 3600.0  # no write of a whole file takes longer
_SWEEP_S = 3600.0

log = logging.getLogger(__name__)


def rebuild(db: Database, job_id: str) -> int:
    """Derive the records of a job again from its events; the number of events read."""
    with db.write() as conn:
        return projection.rebuild(conn, job_id)


def back_up(db: Database, home: Path, to: Path) -> list[str]:
    """Copy database, keys and stored objects into a new folder, closed to other accounts; what was copied.

    The database gets its name last: a folder without it is half a backup, and `restore` refuses it.
    """
    if to.exists() and any(to.iterdir()):
        raise UsageError(f"{to}: not empty; name a new folder")
    to.mkdir(parents=True, exist_ok=True)
    to.chmod(0o700)  # also where it was there
    copied, draft = [], to / f"{DRAFT_PREFIX}{DATABASE_FILE}"
    if db.engine.dialect.name == "sqlite":
        source = sqlite3.connect(f"file:{db.engine.url.database}?mode=ro", uri=True)
        try:
            with contextlib.closing(source), contextlib.closing(sqlite3.connect(draft)) as target:
                source.backup(target)
        except sqlite3.Error as error:
            raise StoreError(f"{to / DATABASE_FILE}: cannot be written: {error}") from error
        copied.append(DATABASE_FILE)
    for name in _FILES:
        if (home / name).is_file():
            shutil.copy2(home / name, to / name)
            copied.append(name)
    if (home / _STORAGE).is_dir():
        ignored = shutil.ignore_patterns(f"{DRAFT_PREFIX}*")
        shutil.copytree(home / _STORAGE, to / _STORAGE, ignore=ignored, symlinks=True)
        copied.append(_STORAGE)
    if draft.exists():
        draft.chmod(0o600)
        draft.rename(to / DATABASE_FILE)
    return copied


def restore(source: Path, home: Path) -> list[str]:
    """Copy a backup into a home folder that has no database yet, and open it; what was copied."""
    if not (source / DATABASE_FILE).is_file():
        raise UsageError(f"{source}: no {DATABASE_FILE} in it; name a folder that `trainmaster backup` wrote")
    if (home / DATABASE_FILE).exists():
        raise UsageError(f"{home}: has a database; restore into a new home folder")
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    copied = []
    for entry in sorted(source.iterdir()):
        if entry.name in (*_FILES, _STORAGE):
            (shutil.copytree if entry.is_dir() else shutil.copy2)(entry, home / entry.name)
            copied.append(entry.name)
    # The database last: a home folder that has one is whole.
    draft = home / f"{DRAFT_PREFIX}{DATABASE_FILE}"
    shutil.copy2(source / DATABASE_FILE, draft)
    open_database(draft).close()
    for left in home.glob(f"{draft.name}-*"):
        left.unlink()
    draft.rename(home / DATABASE_FILE)
    return [*copied, DATABASE_FILE]


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
