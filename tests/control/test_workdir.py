"""Uploaded working folders: kept by project, laid out whole, bounded, swept."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from client.test_workdir import Memory
from control.test_global_file import run_all
from trainmaster.client.workdir import scan, upload
from trainmaster.control import maintain, workdir
from trainmaster.control import submit as submitting
from trainmaster.core.errors import OverQuota, SpecError
from trainmaster.core.spec import JobSpec, parse_spec
from trainmaster.core.workdir import CHUNK_BYTES, digest_of
from trainmaster.storage import Store, open_store
from trainmaster.store import jobs
from trainmaster.store.database import Database


class Project(Memory):
    """A receiver over the functions of the control plane."""

    def __init__(self, db: Database, storage: Store, name: str = "default") -> None:
        super().__init__()
        self._at = (db, storage, name)

    def find_missing(self, digests):  # type: ignore[no-untyped-def]
        db, _, name = self._at
        return workdir.find_missing(db, name, digests)

    def put_chunk(self, sha256: str, data: bytes) -> None:
        assert workdir.put_chunk(*self._at, sha256, data)
        self.sent.append(sha256)

    def put_workdir(self, sha256, chunks):  # type: ignore[no-untyped-def]
        return workdir.put_workdir(*self._at, sha256, chunks)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    (place / "pkg").mkdir(parents=True)
    (place / "pkg" / "words.py").write_text("WORD = 'hello'\n")
    (place / "train.py").write_text("import pkg.words; open('written', 'w').write(pkg.words.WORD)\n")
    (place / "run.sh").write_text('#!/bin/sh\nexec "$PYTHON" train.py\n')
    (place / "run.sh").chmod(0o755)
    (place / "latest").symlink_to("pkg/words.py")
    return place


@pytest.fixture
def storage(tmp_path: Path) -> Store:
    return open_store(tmp_path / "home" / "storage")


def test_a_name_of_another_project_gives_nothing(db: Database, storage: Store, folder: Path) -> None:
    name = upload(scan(folder), Project(db, storage, "ours"))
    other = Project(db, storage, "theirs")
    upload(scan(folder), other)
    assert other.sent, "chunks of another project are not known here"
    spec = {"name": "x", "command": ["true"], "workdir": name, "project": "third"}
    with pytest.raises(SpecError, match="no such snapshot"):
        submitting.submit(db, parse_spec(spec))


def test_wrong_bytes_sizes_and_names_are_refused(db: Database, storage: Store) -> None:
    digest = digest_of(b"x")
    for sha256, data in ((digest, b"y"), (digest, b""), ("zz", b"x"), (digest_of(b"0"), bytes(CHUNK_BYTES + 1))):
        with pytest.raises(SpecError):
            workdir.put_chunk(db, storage, "p", sha256, data)
    assert workdir.put_chunk(db, storage, "p", digest, b"x") is True
    assert workdir.put_chunk(db, storage, "p", digest, b"x") is False
    with pytest.raises(SpecError):
        workdir.put_workdir(db, storage, "p", digest, [digest])  # not a manifest


def test_a_manifest_with_missing_or_other_chunks_is_not_recorded(db: Database, storage: Store, folder: Path) -> None:
    raw = scan(folder).manifest.to_bytes()
    digest = digest_of(raw)
    workdir.put_chunk(db, storage, "p", digest, raw)
    assert len(workdir.put_workdir(db, storage, "p", digest, [digest])) == 3
    liar = raw.replace(b'"size_bytes":15', b'"size_bytes":16')
    assert liar != raw
    upload(scan(folder), Project(db, storage, "p"))
    workdir.put_chunk(db, storage, "p", digest_of(liar), liar)
    with pytest.raises(SpecError, match="other sizes"):
        workdir.put_workdir(db, storage, "p", digest_of(liar), [digest_of(liar)])


def test_a_project_has_a_quota(db: Database, storage: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(workdir.QUOTA_VARIABLE, str(3 / 2**30))  # three bytes
    workdir.put_chunk(db, storage, "p", digest_of(b"ab"), b"ab")
    with pytest.raises(OverQuota, match="2 of 3 bytes"):
        workdir.put_chunk(db, storage, "p", digest_of(b"cd"), b"cd")
    workdir.put_chunk(db, storage, "q", digest_of(b"cd"), b"cd")


@pytest.mark.spawns
def test_a_job_finds_its_files_and_changes_only_its_own(db: Database, storage: Store, folder: Path) -> None:
    name = upload(scan(folder), Project(db, storage))
    (folder / "pkg" / "words.py").write_text("WORD = 'changed after the submit'\n")
    spec = {"name": "x", "command": ["./run.sh"], "env": {"PYTHON": sys.executable}, "workdir": name,
            "preflight": {"level": 0}}  # fmt: skip
    ids = [submitting.submit(db, parse_spec(spec)).id for _ in range(2)]
    home = folder.parent / "home"
    run_all(db, home, ids)
    for job_id in ids:
        work = home / "jobs" / job_id / "work"
        assert (work / "written").read_text() == "hello"
        assert (work / "latest").read_text() == "WORD = 'hello'\n" and (work / "latest").is_symlink()
    assert not (folder / "written").exists()


@pytest.mark.spawns
def test_a_second_attempt_keeps_what_the_first_wrote(db: Database, storage: Store, folder: Path) -> None:
    name = upload(scan(folder), Project(db, storage))
    script = "test -f state && exit 0; echo x > state; rm train.py; exit 3"
    spec = {"name": "x", "command": ["sh", "-c", script], "workdir": name, "preflight": {"level": 0},
            "limits": {"attempts": 2, "retry": {"script_failed": True}}}  # fmt: skip
    job_id = submitting.submit(db, parse_spec(spec)).id
    run_all(db, folder.parent / "home", [job_id])
    assert not (folder.parent / "home" / "jobs" / job_id / "work" / "train.py").exists()


def test_an_interrupted_layout_is_made_again(db: Database, storage: Store, folder: Path, tmp_path: Path) -> None:
    name = upload(scan(folder), Project(db, storage))
    job = submitting.submit(db, JobSpec(name="x", command=("true",), workdir=name))
    place = tmp_path / "home" / "jobs" / job.id
    (place / "work" / "half").mkdir(parents=True)
    workdir.unpack(db, storage, job, place)
    assert not (place / "work" / "half").exists() and (place / "work" / "train.py").is_file()
    (place / "work" / "train.py").unlink()
    workdir.unpack(db, storage, job, place)
    assert not (place / "work" / "train.py").exists(), "once laid out, the files are the job's own"


def test_unused_snapshots_are_swept_and_those_of_jobs_stay(db: Database, storage: Store, folder: Path) -> None:
    used = upload(scan(folder), Project(db, storage))
    job = submitting.submit(db, JobSpec(name="x", command=("true",), workdir=used))
    (folder / "train.py").write_text("another one\n")
    upload(scan(folder), Project(db, storage))
    assert workdir.sweep(db, storage) == 0, "an upload of today stays"
    later = datetime.now(UTC) + timedelta(days=2)
    assert workdir.sweep(db, storage, now=later) == 2, "the changed file and its manifest"
    workdir.check_known(db, "default", used)
    with db.write() as conn:
        jobs.request_cancel(conn, job.id, at=later)
    run_cancelled(db, folder.parent / "home", job.id)
    maintain.delete_job(db, storage, folder.parent / "home", job.id, by="test")
    assert workdir.sweep(db, storage, now=later) == 4
    assert storage.list("workdirs/") == []


def run_cancelled(db: Database, home: Path, job_id: str) -> None:
    with pytest.raises(AssertionError):  # it ends, but not as completed
        run_all(db, home, [job_id])
    row = jobs.find_job(db, job_id)
    assert row is not None and row.status.final
