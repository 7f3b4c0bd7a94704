"""What a job keeps is listed and given out, by this server or by the object store itself; and pages of final jobs."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from urllib.request import urlopen

import pytest
from starlette.testclient import TestClient

from pages import samples
from s3_server import S3
from trainmaster.core.states import Status
from trainmaster.storage import open_store
from trainmaster.store import events
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from trainmaster.web.beside import Beside
from trainmaster.web.page_cache import PageCache
from web.conftest import BASE, LOCAL
from web.furnished import JOBS, keep


def test_artifacts_are_listed_and_downloaded(client: TestClient, db: Database, tmp_path: Path) -> None:
    story = samples.completed(db)
    model = b"0123456789" * 300_000  # more than one piece
    keep(db, tmp_path, story.id, {"outputs/a b/model.bin": model, "empty.txt": b""})
    rows = client.get(f"{JOBS}/{story.id}/artifacts").json()["artifacts"]
    assert [(row["path"], row["size_bytes"]) for row in rows] == [
        ("empty.txt", 0),
        ("outputs/a b/model.bin", 3_000_000),
    ]
    got = client.get(rows[1]["url"])
    assert hashlib.sha256(got.content).digest() == hashlib.sha256(model).digest()
    assert got.headers["content-type"] == "application/octet-stream"
    assert got.headers["content-disposition"] == "attachment; filename*=UTF-8''model.bin"
    assert client.get(f"{rows[1]['url']}?offset=2999998").content == b"89"
    assert client.get(f"{rows[1]['url']}?signed=true").content == model  # a folder has no URLs of its own
    assert client.get(rows[0]["url"]).content == b""


@pytest.mark.parametrize("path", ["nothing", "..%2f..%2ftrainmaster.db", "%00", "outputs/", "/etc/passwd"])
def test_only_what_is_listed_is_given_out(client: TestClient, db: Database, path: str) -> None:
    story = samples.completed(db)
    assert client.get(f"{JOBS}/{story.id}/artifacts/{path}").status_code == 404


def test_storage_that_is_away_is_said(client: TestClient, db: Database, tmp_path: Path) -> None:
    story = samples.completed(db)
    keep(db, tmp_path, story.id, {"model.bin": b"x"})
    (tmp_path / "storage" / "jobs" / story.id / "model.bin").unlink()
    answer = client.get(f"{JOBS}/{story.id}/artifacts/model.bin")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_away")


def test_an_object_store_gives_it_out_itself(
    db: Database, tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.use(monkeypatch)
    story = samples.completed(db)
    keep(db, tmp_path, story.id, {"model.bin": b"weights"})  # for its row; the bytes are in S3
    store = open_store(f"s3://{s3.bucket}/{tmp_path.name}")
    store.put(f"jobs/{story.id}/model.bin", b"weights")
    app = create_app(db, tmp_path, reconcile=False, storage=store)
    client = TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False)
    answer = client.get(f"{JOBS}/{story.id}/artifacts/model.bin?signed=true")
    assert answer.status_code == 307
    with urlopen(answer.headers["location"]) as given:
        assert given.read() == b"weights"
    assert client.get(f"{JOBS}/{story.id}/artifacts/model.bin").content == b"weights"


@pytest.mark.matrix(one_in=2)
def test_walking_gives_the_events_that_listing_gives(any_db: Database) -> None:
    story = samples.resumed(any_db)  # two attempts
    story.tell([b"garbage\n"])
    scanned: list[events.ScannedEvent] = []
    while rows := events.scan_events(any_db, story.id, after=scanned[-1].cursor if scanned else None, limit=37):
        scanned += rows
    listed = events.list_events(any_db, story.id, limit=10_000)
    assert [(row.cursor, row.phase, row.event, row.data, row.fault, row.text) for row in listed] == scanned


def test_the_page_of_a_final_job_is_read_once(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    live, story = PageCache(db, Beside()), samples.resumed(db)
    assert live.read(story.id).status is Status.RUNNING  # type: ignore[union-attr]
    story.tell(samples.training(141, 200)).end_attempt().finish(Status.COMPLETED)
    first = live.read(story.id)
    assert first is not None
    assert (first.status, first.run.step) == (Status.COMPLETED, 200)
    monkeypatch.setattr("trainmaster.pages.job.read", None)  # it must not be asked again
    again = live.read(story.id)
    assert again is not None
    assert (again.run, again.made_at >= first.made_at) == (first.run, True)


def test_what_a_page_does_not_wait_for_is_read_later_once_and_the_curves_first() -> None:
    done: list[str] = []
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        assert go_on.wait(30)
        raise OSError("the database is away")

    beside = Beside(wait_s=0.0)
    beside.ask("first", first, rank=5)
    assert begun.wait(30)
    for _ in range(3):
        beside.ask("first", lambda: done.append("again"), rank=0)  # it is being read
        beside.ask("ledger", lambda: (done.append("ledger"), over.set()), rank=2)
        beside.ask("curves", lambda: done.append("curves"), rank=0)
    assert beside.is_asked("first") and beside.is_asked("ledger") and not beside.is_asked("page")
    go_on.set()
    assert over.wait(30)
    assert done == ["curves", "ledger"], "one by one, by rank, and a failure ends nothing"
    patient = Beside(wait_s=3600)
    patient.ask("page", lambda: done.append("at once"), rank=0)
    assert patient.is_asked("page") and done == ["curves", "ledger"]
