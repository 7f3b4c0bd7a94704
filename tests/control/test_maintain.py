"""Rebuild, backup, restore, deletion, retention and the sweep of drafts."""

from __future__ import annotations

import errno
import os
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from trainmaster.control import maintain
from trainmaster.core.errors import JobMissing, JobOpen, StorageError, UsageError
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Stage, Status
from trainmaster.storage import open_store
from trainmaster.store import artifacts, attempts, audit, events, jobs, tables
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database

from .lines import ingest_bytes, line, new_job, records

pytestmark = pytest.mark.both_databases

LINES = b"".join(
    line(at, phase, event, iteration=at % 3, data={"duration": at})
    for at in range(20)
    for phase, event in (("ITERATION", "start"), ("TRAINING", "end"), ("ITERATION", "end"), ("STEP", "metrics"))
)


def final_job(db: Database, home: Path, *, ended: datetime | None = None, resume_from: str | None = None) -> str:
    """A completed job with events, a stored object and a folder."""
    job_id, attempt = new_job(db)
    at = ended or datetime.now(UTC)
    ingest_bytes(db, attempt, LINES)
    store = open_store(home / "storage")
    store.put(f"jobs/{job_id}/outputs/model.bin", b"weights")
    (home / "jobs" / job_id / "checkpoints").mkdir(parents=True)
    with db.write() as conn:
        artifacts.insert_artifact(
            conn, job_id=job_id, attempt=attempt, kind="output", path="outputs/model.bin", size_bytes=7,
            sha256="0" * 64, at=at,
        )  # fmt: skip
        if resume_from is not None:
            spec = {"name": "a", "command": ["true"], "resume_from": resume_from}
            conn.execute(tables.jobs.update().where(tables.jobs.c.id == job_id).values(spec=spec))
        jobs.finish(conn, job_id, seen=Stage.QUEUED, status=Status.COMPLETED, at=at)
        attempts.mark_released(conn, attempt, at=at)
    return job_id


def test_records_are_rebuilt_from_events(db: Database) -> None:
    job_id, attempt = new_job(db)
    ingest_bytes(db, attempt, LINES)
    before = records(db, job_id)
    with db.write() as conn:  # as after an upgrade from a database that had no records
        for table in (tables.steps, tables.epochs, tables.iterations):
            conn.execute(table.delete())
    assert records(db, job_id) != before
    assert maintain.rebuild(db, job_id) == 60
    assert records(db, job_id) == before
    assert maintain.rebuild(db, job_id) == 60
    assert records(db, job_id) == before


def test_a_backup_while_it_is_written_to_is_restored_whole(tmp_path: Path) -> None:
    home, copy, new = tmp_path / "home", tmp_path / "copy", tmp_path / "new"
    home.mkdir()
    db = open_database(home / "trainmaster.db")
    job_id = final_job(db, home)
    (home / "secret.key").write_bytes(b"k" * 32)
    with db.write() as conn:  # a writer holds the lock meanwhile
        jobs.insert_job(conn, "half", JobSpec(name="a", command=("true",)), at=datetime.now(UTC))
        made = maintain.back_up(db, home, copy)
    assert made.copied == ("trainmaster.db", "secret.key", "storage") and set(made.left_out) == {"jobs"}
    with pytest.raises(UsageError, match="not empty"):
        maintain.back_up(db, home, copy)
    db.close()
    maintain.restore(copy, new)
    again = open_database(new / "trainmaster.db")
    assert jobs.find_job(again, job_id) is not None and jobs.find_job(again, "half") is None
    assert len(events.list_events(again, job_id)) == 80
    assert open_store(new / "storage").get(f"jobs/{job_id}/outputs/model.bin") == b"weights"
    again.close()
    with pytest.raises(UsageError, match="has a database"):
        maintain.restore(copy, new)


def test_a_backup_has_all_of_a_home_but_checkpoints_and_what_a_server_makes_anew(tmp_path: Path) -> None:
    home, new = tmp_path / "home", tmp_path / "new"
    kept = ("history.jsonl", "remedies.jsonl", "home-id", "baselines.toml", "notify.yaml", "hosts/lab.yaml")
    gone = ("local.token", "server.json", "reconcilers/seen", "jobs/a/checkpoints/1", "clock/vm.1.json", "runs/1")
    for name in (*kept, *gone, "storage/.part-half"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    os.mkfifo(home / "hosts" / "pipe")
    db = open_database(home / "trainmaster.db")
    made = maintain.back_up(db, home, home / "backups" / "monday")
    db.close()
    assert set(made.left_out) == {name.partition("/")[0] for name in gone} | {"backups"}
    copy = home / "backups" / "monday"
    assert made.size_bytes == sum(path.stat().st_size for path in copy.rglob("*") if path.is_file())
    restored = maintain.restore(copy, new)
    assert restored.copied == made.copied and restored.size_bytes == made.size_bytes
    files = {str(path.relative_to(new)) for path in new.rglob("*") if path.is_file()}
    assert files == {*kept, "trainmaster.db"}
    (new / "trainmaster.db").unlink()
    with pytest.raises(UsageError, match=r"has baselines\.toml already"):  # a check wrote here: its history stays
        maintain.restore(copy, new)


def test_a_final_job_is_deleted_with_everything_it_left(db: Database, tmp_path: Path) -> None:
    gone, stays = final_job(db, tmp_path), final_job(db, tmp_path)
    store = open_store(tmp_path / "storage")
    maintain.delete_job(db, store, tmp_path, gone, by="local")
    assert jobs.find_job(db, gone) is None and not (tmp_path / "jobs" / gone).exists()
    assert [item.path for item in store.list("jobs/")] == [f"jobs/{stays}/outputs/model.bin"]
    assert len(events.list_events(db, stays)) == 80 and len(attempts.list_attempts(db, stays)) == 1
    assert audit.list_audit(db, subject=f"job:{gone}")[0].action == "job.delete"
    with pytest.raises(JobMissing):
        maintain.delete_job(db, store, tmp_path, gone, by="local")


def test_open_jobs_and_those_another_one_needs_are_not_deleted(db: Database, tmp_path: Path) -> None:
    store = open_store(tmp_path / "storage")
    running, _ = new_job(db)
    first = final_job(db, tmp_path)
    final_job(db, tmp_path, resume_from=first)
    held = final_job(db, tmp_path)
    with db.write() as conn:
        conn.execute(tables.attempts.update().where(tables.attempts.c.job_id == held).values(released_at=None))
    for job_id, words in ((running, "cancel it and wait"), (first, "delete that one first"), (held, "reap --on local")):
        with pytest.raises(JobOpen, match=words):
            maintain.delete_job(db, store, tmp_path, job_id, by="local")
        assert jobs.find_job(db, job_id) is not None


def test_the_retention_deletes_old_jobs_and_drafts(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = final_job(db, tmp_path, ended=datetime.now(UTC) - timedelta(days=40))
    young = final_job(db, tmp_path)
    for name, age_s in ((".part-old", 90_000), (".part-new", 10), ("kept", 90_000)):
        (tmp_path / "storage" / name).write_bytes(b"x")
        os.utime(tmp_path / "storage" / name, (time.time() - age_s,) * 2)
    monkeypatch.setenv(maintain.RETAIN_VARIABLE, "30")
    maintain._sweep(db, tmp_path, open_store(tmp_path / "storage"))
    assert jobs.find_job(db, old) is None and jobs.find_job(db, young) is not None
    assert sorted(p.name for p in (tmp_path / "storage").iterdir() if p.is_file()) == [".part-new", "kept"]
    with pytest.raises(UsageError, match="no number of days"):
        maintain.read_retention("soon")


def test_pages_by_cursor_give_each_job_once_while_others_come(db: Database) -> None:
    first = [new_job(db)[0] for _ in range(5)]
    page = jobs.list_jobs(db, limit=2)
    seen = [row.id for row in page]
    while page:
        new_job(db)
        page = jobs.list_jobs(db, limit=2, after=(page[-1].created_at, page[-1].id))
        seen += [row.id for row in page]
    assert sorted(seen) == sorted(first)


def test_half_a_backup_is_not_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, half = tmp_path / "home", tmp_path / "half"
    home.mkdir()
    db = open_database(home / "trainmaster.db")
    final_job(db, home)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copytree", full)
        with pytest.raises(OSError, match="No space"):
            maintain.back_up(db, home, half)
    db.close()
    with pytest.raises(UsageError, match=r"no trainmaster\.db"):
        maintain.restore(half, tmp_path / "new")


def test_a_backup_is_closed_to_other_accounts_in_a_folder_that_was_there(tmp_path: Path) -> None:
    home, to = tmp_path / "home", tmp_path / "to"
    home.mkdir()
    db = open_database(home / "trainmaster.db")
    to.mkdir(mode=0o755)
    maintain.back_up(db, home, to)
    db.close()
    assert to.stat().st_mode & 0o777 == 0o700 and (to / "trainmaster.db").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in to.iterdir() if path.name.startswith(".part-")] == []


def test_a_job_whose_files_cannot_be_removed_does_not_keep_the_others(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(maintain.RETAIN_VARIABLE, "1")
    old = datetime.now(UTC) - timedelta(days=3)
    both = [final_job(db, tmp_path, ended=old - timedelta(hours=hours)) for hours in (1, 0)]
    store = open_store(tmp_path / "storage")
    delete = store.delete

    def refuse(path: str) -> None:
        if not refused:
            refused.append(path)
            raise StorageError("locked")
        delete(path)

    refused: list[str] = []
    monkeypatch.setattr(store, "delete", refuse)
    maintain._sweep(db, tmp_path, store)
    left = [job for job in both if jobs.find_job(db, job) is not None]
    assert refused and len(left) == 1 and left[0] in refused[0]
