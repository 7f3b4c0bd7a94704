"""The verbs against a server say what they say on the home folder; a token comes from the environment or a file."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from client.served import serve
from trainmaster.cli import _console
from trainmaster.cli.main import build
from trainmaster.core.errors import TrainmasterError, UsageError
from trainmaster.core.events import split
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Stage, Status
from trainmaster.storage import open_store
from trainmaster.store import artifacts, attempts, events, jobs
from trainmaster.store.migrate import open_database

JOB = "6f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a11"
AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
LOG = b"one\ntwo\n"
EVENT = b'{"phase":"STEP","event":"metrics","data":{"step":1,"loss":2.5}}\n'


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("home")).parent


def make_home(home: Path) -> Path:
    """A home with one finished job: an event, a log at the target, an artifact in storage. Returns its database."""
    folder = home / "jobs" / JOB / "attempts" / "1"
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_bytes(LOG)
    open_store(home / "storage").put(f"jobs/{JOB}/outputs/model.bin", b"weights")
    db = open_database(home / "trainmaster.db")
    with db.write() as conn:
        jobs.insert_job(conn, JOB, JobSpec(name="trial", project="lab", command=("true",)), at=AT)
        attempt = attempts.insert_attempt(conn, JOB, 1, handle={"attempt": f"{JOB}.1", "folder": str(folder)}, at=AT)
        events.append_events(
            conn, attempt, "events.jsonl", seen_offset=0, lines=split(EVENT, offset=0, zone=UTC)
        )  # fmt: skip
        jobs.advance(conn, JOB, seen=Stage.QUEUED, to=Stage.RELEASING, at=AT)
        jobs.finish(conn, JOB, seen=Stage.RELEASING, status=Status.COMPLETED, reason=None, message="", at=AT)
        artifacts.insert_artifact(
            conn, job_id=JOB, attempt=attempt, kind="output", path="outputs/model.bin", size_bytes=7,
            sha256=hashlib.sha256(b"weights").hexdigest(), at=AT,
        )  # fmt: skip
    db.close()
    return home / "trainmaster.db"


@pytest.fixture(scope="module")
def url(home: Path) -> Iterator[str]:
    db = open_database(home / "trainmaster.db")
    with serve(db, home) as address:
        yield address
    db.close()


def run(*words: str, **env: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", **env}).invoke(build(), list(words))


@pytest.mark.parametrize(
    "words",
    [
        ["jobs"],
        ["show", "trial"],
        ["show", JOB[:8]],
        ["logs", "trial"],
        ["logs", "trial", "-f"],
        ["logs", "trial", "--tail", "1"],
        ["logs", "trial", "--grep", "two"],
        ["logs", "trial", "--grep", "n", "--tail", "5", "-f"],
        ["events", "trial"],
        ["events", "trial", "-f"],
        ["events", "trial", "--json"],
        ["token", "list", "--json"],
    ],
    ids=" ".join,
)
def test_a_verb_says_the_same_of_a_home_and_of_its_server(words: list[str], home: Path, url: str) -> None:
    here, there = run(*words, "--home", str(home)), run(*words, "--server", url)
    assert here.exit_code == there.exit_code == 0, (here.output, there.output)
    assert here.stdout == there.stdout != ""


def test_json_of_a_home_and_of_its_server_have_one_time_format(home: Path, url: str) -> None:
    here, there = (
        json.loads(run("show", "trial", "--json", *at).stdout) for at in (["--home", str(home)], ["--server", url])
    )
    for page in (here, there):
        assert page["made_at"].endswith("Z") and page["created_at"] == "2026-03-01T12:00:00Z"
        page.pop("made_at")
    assert here == there


@pytest.mark.parametrize("where", ["home", "server"])
def test_the_log_of_an_attempt_without_folder_comes_from_storage(where: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    db = open_database(make_home(home))
    shutil.rmtree(home / "jobs" / JOB / "attempts" / "1")
    key, text = f"jobs/{JOB}/attempts/1/rank-0.log", b"kept in storage\n"
    open_store(home / "storage").put(key, text)
    with db.write() as conn:
        artifacts.insert_artifact(
            conn, job_id=JOB, attempt=f"{JOB}.1", kind="log", path="attempts/1/rank-0.log", size_bytes=len(text),
            sha256=hashlib.sha256(text).hexdigest(), at=AT,
        )  # fmt: skip
    with serve(db, home) as url:
        place = ["--home", str(home)] if where == "home" else ["--server", url]
        for more in ([], ["-f"]):
            done = run("logs", "trial", *more, *place)
            assert done.exit_code == 0 and done.stdout_bytes == text, done.output
        unknown = run("logs", "trial", "--rank", "7", *place)
        assert isinstance(unknown.exception, UsageError) and "rank-0.log" in str(unknown.exception)
    db.close()


@pytest.mark.parametrize("where", ["home", "server"])
def test_follow_waits_for_the_log_of_a_queued_job(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, other = tmp_path / "home", "7a1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a12"
    db = open_database(make_home(home))
    folder = home / "jobs" / other / "attempts" / "1"
    with db.write() as conn:
        jobs.insert_job(conn, other, JobSpec(name="next", project="lab", command=("true",)), at=AT)

    def start_and_end(_: float) -> None:
        folder.mkdir(parents=True)
        (folder / "rank-0.log").write_bytes(LOG)
        with db.write() as conn:
            attempts.insert_attempt(conn, other, 1, handle={"attempt": f"{other}.1", "folder": str(folder)}, at=AT)
            jobs.advance(conn, other, seen=Stage.QUEUED, to=Stage.RELEASING, at=AT)
            jobs.finish(conn, other, seen=Stage.RELEASING, status=Status.COMPLETED, reason=None, message="", at=AT)

    monkeypatch.setattr("trainmaster.cli.jobs.logs.time.sleep", start_and_end)
    with serve(db, home) as url:
        done = run("logs", "next", "-f", *(["--home", str(home)] if where == "home" else ["--server", url]))
    assert done.exit_code == 0 and done.stdout_bytes == LOG, done.output
    assert "next is queued, waiting for its log" in done.stderr
    db.close()


@pytest.mark.parametrize("where", ["home", "server"])
def test_a_log_that_grows_all_the_time_is_printed_to_its_present_end(where: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    db = open_database(make_home(home))
    log = home / "jobs" / JOB / "attempts" / "1" / "rank-0.log"
    with (
        serve(db, home) as url,
        subprocess.Popen(["timeout", "10", "sh", "-c", f"while :; do echo n; done >> {log}"]) as writer,
    ):
        try:
            done = run(
                "logs", "trial", "--tail", "1", *(["--home", str(home)] if where == "home" else ["--server", url])
            )
            assert writer.poll() is None, "it waited for the end of the job without --follow"
            assert done.exit_code == 0 and "n" in done.stdout, done.output
        finally:
            writer.terminate()
    db.close()


def test_json_of_a_server_has_what_programs_need(url: str) -> None:
    assert json.loads(run("jobs", "--json", "--server", url).stdout)["jobs"][0]["id"] == JOB
    assert json.loads(run("show", "trial", "--json", "--server", url).stdout)["run"]["step"] == 1
    assert json.loads(run("events", "trial", "--json", "--server", url).stdout)["data"]["loss"] == 2.5


@pytest.mark.parametrize("where", ["home", "server"])
def test_fetch_brings_outputs_and_logs(where: str, home: Path, url: str, tmp_path: Path) -> None:
    place = ["--home", str(home)] if where == "home" else ["--server", url]
    for _ in range(2):  # the second time finds all of it there
        done = run("fetch", "trial", str(tmp_path / "got"), "--json", *place)
        assert done.exit_code == 0, done.output
        files = {Path(item["path"]).relative_to(tmp_path / "got") for item in json.loads(done.stdout)["files"]}
        assert files == {Path("outputs/model.bin"), Path("attempts/1/rank-0.log")}
        assert (tmp_path / "got" / "outputs" / "model.bin").read_bytes() == b"weights"
        assert (tmp_path / "got" / "attempts" / "1" / "rank-0.log").read_bytes() == LOG


def test_a_spec_is_submitted_once_by_its_key_and_cancelled(url: str, tmp_path: Path) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text("name: sent\ncommand: [hello]\n")
    first = run("submit", str(spec), "--key", "k1", "--json", "--server", url)
    second = run("submit", str(spec), "--key", "k1", "--json", "--server", url)
    assert first.exit_code == second.exit_code == 0, first.output
    assert json.loads(first.stdout)["id"] == json.loads(second.stdout)["id"]
    cancelled = run("cancel", "sent", "--server", url)
    assert cancelled.exit_code == 0 and "sent" in cancelled.stdout, cancelled.output
    over = run("cancel", "trial", "--server", url)
    assert isinstance(over.exception, TrainmasterError) and over.exception.exit_code == 2
    assert "already" in str(over.exception)
    refused = run("delete", "sent", "--yes", "--server", url)
    assert "cancel it and wait for its end" in str(refused.exception)
    resumed = run("resume", "trial", "--json", "--server", url)
    assert resumed.exit_code == 0 and json.loads(resumed.stdout)["status"] == "pending", resumed.output
    assert "does not return whole specs" in str(run("resume", "trial", "train.steps=9", "--server", url).exception)


def test_a_set_of_runs_is_worked_with_through_a_server(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_console.out, "_width", 200)
    spec = tmp_path / "sweep.yaml"
    spec.write_text("name: sizes\ncommand: [echo, '{size}']\nworkdir: none\nmatrix: {size: [s, l]}\nparallel: 1\n")
    made = run("submit", str(spec), "--server", url)
    assert made.exit_code == 0 and "2 trials" in made.stdout, made.output
    assert "waits for its turn" in run("show", "sizes", "--server", url).stdout
    listed = run("jobs", "--server", url).stdout
    assert "sizes" in listed and "0/2" in listed
    done = run("cancel", "sizes", "--server", url)
    assert done.exit_code == 0 and "2 skipped" in done.stdout, done.output
    job = tmp_path / "job.yaml"
    job.write_text("name: both\ncommand: [hello]\nworkdir: none\n")
    for file in (spec, job):
        assert run("submit", str(file), "name=both", "--server", url).exit_code == 0
    both = run("show", "both", "--server", url).exception
    assert isinstance(both, UsageError) and "'both' is the name of set " in str(both) and " of job " in str(both)


@pytest.mark.parametrize("where", ["home", "server"])
def test_a_machine_is_drained_and_readmitted(where: str, home: Path, url: str) -> None:
    place, host = ["--home", str(home)] if where == "home" else ["--server", url], socket.gethostname()
    assert run("nodes", "drain", host, "--reason", "a fan", *place).exit_code == 0
    listed = run("nodes", *place)
    says = " ".join(listed.stderr.split())
    assert f"{host} takes no new jobs: drained since 20" in says and " UTC: a fan" in says, listed.output
    misplaced = run("nodes", *place, "readmit", host)
    assert isinstance(misplaced.exception, UsageError) and "stands behind the verb" in str(misplaced.exception)
    assert run("nodes", "readmit", host, *place).exit_code == 0
    assert "drained" not in run("nodes", *place).output
    again = run("nodes", "readmit", host, *place)
    assert isinstance(again.exception, TrainmasterError) and "is not drained" in str(again.exception)
    other = run("nodes", "drain", "x", "--on", "slurm", "--reason", "a fan", *place)
    assert "use `remedy`" in str(other.exception)


def test_tokens_are_shown_once_and_open_a_server_that_wants_one(home: Path, tmp_path: Path) -> None:
    made = run("token", "create", "alice", "--role", "viewer", "--project", "lab", "--home", str(home))
    assert made.exit_code == 0, made.output
    secret = made.stdout.strip()
    assert secret.startswith("tm_") and len(secret) == 46
    assert secret not in run("token", "list", "--home", str(home)).output
    file = tmp_path / "token"
    file.write_text(secret + "\n")
    file.chmod(0o600)
    db = open_database(home / "trainmaster.db")
    with serve(db, home, require_token=True) as closed:
        refused = run("jobs", "--server", closed)
        assert isinstance(refused.exception, TrainmasterError) and "no_token" in str(refused.exception)
        assert "set TRAINMASTER_TOKEN or TRAINMASTER_TOKEN_FILE" in str(refused.exception)
        assert "trainmaster token create NAME --role user" in str(refused.exception)
        for env in ({"TRAINMASTER_TOKEN": secret}, {"TRAINMASTER_TOKEN_FILE": str(file)}):
            assert run("jobs", "--server", closed, **env).exit_code == 0
        file.chmod(0o644)
        open_file = run("jobs", "--server", closed, TRAINMASTER_TOKEN_FILE=str(file))
        assert isinstance(open_file.exception, UsageError) and "chmod 600" in str(open_file.exception)
        assert run("token", "revoke", "alice", "--home", str(home)).exit_code == 0
        gone = run("jobs", "--server", closed, TRAINMASTER_TOKEN=secret)
        assert isinstance(gone.exception, TrainmasterError) and secret not in str(gone.exception)
    db.close()
    again = run("token", "create", "alice", "--home", str(home))
    assert isinstance(again.exception, UsageError), "a name is never given out twice"


def test_lines_of_a_log_are_chosen_and_an_unknown_rank_is_an_error(tmp_path: Path) -> None:
    db = open_database(make_home(tmp_path))
    with serve(db, tmp_path) as address:
        for where in (["--server", address], ["--home", str(tmp_path)]):
            assert run("logs", "trial", "--tail", "1", *where).stdout == "two\n"
            assert run("logs", "trial", "--grep", "one", *where).stdout == "one\n"
            assert run("logs", "trial", "--grep", "three", *where).stdout == ""
            refused = run("logs", "trial", "--rank", "7", *where)
            assert isinstance(refused.exception, TrainmasterError) and refused.exception.exit_code == 2
            assert "rank-7.log" in str(refused.exception)
    db.close()


def test_a_report_of_a_job_on_a_server_is_written_here(url: str, tmp_path: Path) -> None:
    done = run("report", "trial", "--server", url, "--out", str(tmp_path / "run.html"))
    assert done.exit_code == 0, done.output
    assert "trial" in (tmp_path / "run.html").read_text()


def test_a_job_whose_end_is_not_known_shows_its_step_alone(home: Path, url: str) -> None:
    """A program of your own reports steps and no number of steps: the last column is not `1/None`."""
    for place in (["--home", str(home)], ["--server", url]):
        (row,) = (line for line in run("jobs", *place).stdout.splitlines() if line.startswith(JOB[:8]))
        assert "1" in row.split() and "None" not in row, row
        shown = run("show", JOB, *place).stdout
        assert "None" not in shown and "/None" not in run("cost", *place).stdout
    for page in ("/", f"/jobs/{JOB}"):
        assert "None" not in httpx.get(url + page, follow_redirects=True).text


class _Away(BaseHTTPRequestHandler):
    """Answers as a server whose database is away."""

    def do_GET(self) -> None:
        body = b'{"error": {"code": "database_away", "message": "the database is away [/INST]"}}'
        self.send_response(503)
        for name, value in (("Retry-After", "2"), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_wait_for_a_server_that_is_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verb was silent for up to a minute."""
    slept: list[float] = []
    monkeypatch.setattr("trainmaster.client.transport.time.sleep", slept.append)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Away) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = run("jobs", "--server", f"http://127.0.0.1:{server.server_port}", TRAINMASTER_TOKEN="t0k")
        server.shutdown()
    assert len(slept) == 5 and min(slept) >= 2
    lines = result.stderr.splitlines()
    assert "the database is away [/INST]" in lines[0] and lines[0].endswith("trying again in 2 s (1 of 5)"), lines
    assert result.stdout == "" and "t0k" not in result.stderr
