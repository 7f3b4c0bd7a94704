"""The Python client against a real server: typed answers and errors, events once over a line that is cut, downloads."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from client.served import Line, serve
from control.test_notify import certificate
from trainmaster import client as c
from trainmaster.core.errors import UsageError
from trainmaster.core.events import split
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Stage, Status
from trainmaster.storage import open_store
from trainmaster.store import artifacts, attempts, events, jobs
from trainmaster.store.database import Database

SPEC = {"name": "trial", "project": "lab", "command": ["true"]}
JOB = "6f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a11"
AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
EVENTS = 200


@pytest.fixture
def url(db: Database, tmp_path: Path) -> Iterator[str]:
    with serve(db, tmp_path) as address:
        yield address


def a_running_job(db: Database, tmp_path: Path) -> Path:
    """A job with one attempt at the target `local`; returns the attempt's folder."""
    folder = tmp_path / "attempt"
    folder.mkdir()
    with db.write() as conn:
        jobs.insert_job(conn, JOB, JobSpec(name="trial", command=("true",)), at=AT)
        attempts.insert_attempt(conn, JOB, 1, handle={"attempt": f"{JOB}.1", "folder": str(folder)}, at=AT)
        assert jobs.advance(conn, JOB, seen=Stage.QUEUED, to=Stage.RUNNING, at=AT)
    return folder


def tell(db: Database, first: int, last: int, *, offset: int) -> int:
    """Events `first` to `last` come in; returns where the next one begins."""
    text = b"".join(
        json.dumps({"phase": "STEP", "event": "metrics", "data": {"step": n, "pad": "x" * 200}}).encode() + b"\n"
        for n in range(first, last + 1)
    )
    with db.write() as conn:
        lines = split(text, offset=offset, zone=UTC)
        assert events.append_events(conn, f"{JOB}.1", "events.jsonl", seen_offset=offset, lines=lines)
    return offset + len(text)


def finish(db: Database) -> None:
    with db.write() as conn:
        assert jobs.advance(conn, JOB, seen=Stage.RUNNING, to=Stage.RELEASING, at=AT)
        assert jobs.finish(conn, JOB, seen=Stage.RELEASING, status=Status.COMPLETED, reason=None, message="", at=AT)


def test_the_package_imports_no_http_library() -> None:
    code = (
        "import sys, trainmaster; assert 'httpx' not in sys.modules; trainmaster.Client; print('httpx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False", "only a client that is made needs it"


def test_a_job_is_submitted_listed_shown_and_cancelled(url: str) -> None:
    with c.Client(url) as server:
        made = server.submit(SPEC, key="mine")
        again = server.submit(SPEC, key="mine")
        assert made.new and not again.new and made.id == again.id
        listed = server.jobs(project="lab", status="pending")
        assert [line.id for line in listed.jobs] == [made.id] and listed.total == 1
        assert server.jobs(project="other").jobs == ()
        shown = server.job(made.id)
        assert shown.name == "trial" and shown.created_at is not None and shown.created_at.tzinfo is not None
        assert server.details(made.id).job.spec["project"] == "lab"
        assert server.evaluations() == () and server.checks(made.id) == () and server.artifacts(made.id) == ()
        assert server.cancel(made.id).cancel_requested
        with pytest.raises(c.Conflict, match="still writes these checkpoints"):
            server.resume(made.id)
        assert server.job_cost(made.id).total.cents is None, "local has no price until somebody states one"
        assert server.cost(project="lab") == () or server.cost()[0].project == "lab"
        assert server.set_budget("lab", "month", 500).cap_cents == 500 == server.budgets()[0].cap_cents
        assert server.health().status == "ok"


def test_each_error_has_its_type(url: str) -> None:
    with c.Client(url, retries=1) as server:
        with pytest.raises(c.NotFound) as missing:
            server.job("00000000-0000-4000-8000-000000000000")
        assert missing.value.status == 404 and missing.value.code == "not_found" and missing.value.exit_code == 2
        with pytest.raises(c.BadRequest) as bad:
            server.submit({"name": "Not A Name", "command": ["x"], "nam": 1})
        assert {fault.path for fault in bad.value.faults} == {"name", "nam"}
        server.submit(SPEC, key="k")
        with pytest.raises(c.Conflict):
            server.submit({**SPEC, "command": ["false"]}, key="k")
        with pytest.raises(c.NotFound):
            server.epochs(server.jobs().jobs[0].id, 999)
    with c.Client("http://127.0.0.1:9", retries=1) as nobody, pytest.raises(c.ServerUnreachable):
        nobody.health()


def test_a_token_is_needed_and_never_told(db: Database, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serve(db, tmp_path) as open_url, c.Client(open_url) as admin:
        token = admin.create_token("alice", role="viewer", project="lab")
    with serve(db, tmp_path, require_token=True) as url:
        with c.Client(url) as stranger, pytest.raises(c.NoAccess, match="no_token"):
            stranger.jobs()
        with c.Client(url, token) as alice:
            assert alice.jobs().total == 0
            with pytest.raises(c.NoAccess) as refused:
                alice.submit(SPEC)
            assert token not in repr(alice) + repr(refused.value) + str(refused.value)
    with pytest.raises(UsageError) as odd:
        c.Client(url, token + "\n")
    assert token not in str(odd.value)
    with pytest.raises(UsageError) as inside:
        c.Client(f"http://bob:{token}@127.0.0.1:1")
    assert token not in str(inside.value)
    printed = capfd.readouterr()
    assert token not in printed.out + printed.err


def test_events_come_once_each_over_a_line_that_is_cut(url: str, db: Database, tmp_path: Path) -> None:
    a_running_job(db, tmp_path)
    half = tell(db, 1, EVENTS // 2, offset=0)
    # Cut before the headers, inside a message, behind some: never at the same place twice.
    line = Line(url, [0, 150, 5_000, 7_777, 20_001, 1])
    with c.Client(line.url, retries=8) as server:
        got: list[int] = []
        stream = server.events(JOB)
        for event in stream:
            got.append(event.data["step"])
            if len(got) == EVENTS // 2:
                tell(db, EVENTS // 2 + 1, EVENTS, offset=half)
                finish(db)
        assert got == list(range(1, EVENTS + 1))
        assert [event.data["step"] for event in server.events(JOB, follow=False)] == got
        assert [event.data["step"] for event in server.events(JOB, after=(1, half - 1))] == got[EVENTS // 2 :]
        assert list(server.events(JOB, phase="CHECKPOINT")) == []
    assert line.opened > 4 and not line.cuts, "the line was not cut"
    line.close()


def test_a_log_is_followed_over_a_line_that_is_cut(url: str, db: Database, tmp_path: Path) -> None:
    folder = a_running_job(db, tmp_path)
    log, lines = folder / "rank-0.log", [f"line {n} {'y' * 50}\n".encode() for n in range(400)]
    log.write_bytes(b"".join(lines[:200]))
    line = Line(url, [900, 4_000])

    def write_the_rest() -> None:
        with log.open("ab") as file:
            file.writelines(lines[200:])
        finish(db)

    with c.Client(line.url, retries=8) as server:
        assert server.logs(JOB, offset=5, limit=10) == b"".join(lines)[5:15]
        got, timer = b"", None
        for piece in server.follow_logs(JOB):
            got += piece
            if timer is None and len(got) >= len(b"".join(lines[:200])):
                timer = threading.Timer(0.05, write_the_rest)
                timer.start()
    assert got == b"".join(lines)
    assert timer is not None
    timer.join()
    line.close()


def test_a_download_goes_on_where_it_was_cut_and_is_verified(url: str, db: Database, tmp_path: Path) -> None:
    a_running_job(db, tmp_path)
    data = bytes(range(256)) * 4096
    store = open_store(tmp_path / "storage")
    good, bad = "outputs/model.bin", "outputs/damaged.bin"
    for path in (good, bad):
        store.put(f"jobs/{JOB}/{path}", data)
    with db.write() as conn:
        for path, content in ((good, data), (bad, data + b"?")):
            artifacts.insert_artifact(
                conn, job_id=JOB, attempt=f"{JOB}.1", kind="output", path=path, size_bytes=len(data),
                sha256=hashlib.sha256(content).hexdigest(), at=AT,
            )  # fmt: skip
    line = Line(url, [1, 3_000_000, 400_000])
    with c.Client(line.url, retries=8) as server:
        by_path = {artifact.path: artifact for artifact in server.artifacts(JOB)}
        to = tmp_path / "got" / "model.bin"
        to.parent.mkdir()
        (to.parent / ".model.bin.part").write_bytes(data[:70_000])
        came: list[int] = []
        server.download(JOB, by_path[good], to, told=came.append)
        assert to.read_bytes() == data and sum(came) == len(data) and came[0] == 70_000
        opened = line.opened
        server.download(JOB, by_path[good], to)
        assert line.opened == opened, "a file that is there and right was fetched again"
        with pytest.raises(c.Download, match="does not match"):
            server.download(JOB, by_path[bad], tmp_path / "got" / "bad.bin")
        assert not (tmp_path / "got" / "bad.bin").exists()
    line.close()


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    for name in ("../up", "/etc/passwd", "a/../../b", "", "a//b"):
        with pytest.raises(c.Download):
            c.files.place(tmp_path, name)


def test_a_certificate_of_your_own_is_trusted_by_the_environment_and_else_refused_at_once(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem = certificate(tmp_path, "localhost")
    waits: list[float] = []
    monkeypatch.setattr("trainmaster.client.transport.time.sleep", waits.append)
    with serve(db, tmp_path, pem=pem) as address:
        with c.Client(address) as server, pytest.raises(c.ServerUnreachable, match=r"not trusted here.*SSL_CERT_FILE"):
            server.jobs()
        assert waits == [], "a retry cannot help"
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        with c.Client(address) as server:
            assert server.jobs().jobs == ()
