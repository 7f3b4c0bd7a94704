"""`submit` uploads the working folder, on this machine and to a server; unchanged, it sends nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from client.served import serve
from trainmaster.cli.main import build
from trainmaster.client import Client
from trainmaster.client.errors import NoAccess
from trainmaster.control import workdir
from trainmaster.core.errors import UsageError
from trainmaster.core.roles import Role
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Stage, Status
from trainmaster.storage import open_store
from trainmaster.store import attempts, costs, jobs
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from web.furnished import issue

pytestmark = pytest.mark.spawns


def run(*words: str, **env: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", **env}).invoke(build(), list(words))


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A project whose program prints a file of its own."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "train.py").write_text("print(open('words.txt').read())\n")
    (place / "words.txt").write_text("from the folder of the spec")
    (place / "job.yaml").write_text(
        f"name: trial\ncommand: [{sys.executable}, train.py]\npreflight: {{level: 0}}\n"
    )  # fmt: skip
    return place / "job.yaml"


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    (tmp_path / "server").mkdir()
    database = open_database(tmp_path / "server" / "trainmaster.db")
    yield database
    database.close()


def stored(home: Path) -> int:
    """The number of chunks in storage."""
    return len(open_store(home / "storage").list("workdirs/"))


def newest(db: Database) -> Any:
    return jobs.list_jobs(db, limit=1)[0]


@pytest.mark.parametrize("word", ["trial", "6f1c1f0e"], ids=["a name", "the beginning of an id"])
@pytest.mark.parametrize("over", ["home", "server"])
def test_a_mended_folder_goes_on_from_the_checkpoints_of_an_earlier_job(
    tmp_path: Path, db: Database, spec: Path, word: str, over: str
) -> None:
    """`resume` takes the files of the first time."""
    earlier, at = "6f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a11", datetime(2026, 11, 17, tzinfo=UTC)
    with db.write() as conn:
        jobs.insert_job(conn, earlier, parse_spec({"name": "trial", "command": ["true"]}), at=at)
        attempts.insert_attempt(conn, earlier, 1, handle=None, at=at)
        assert jobs.finish(conn, earlier, seen=Stage.QUEUED, status=Status.CANCELLED, at=at)
    with serve(db, tmp_path / "server") as url:
        place = ["--home", str(tmp_path / "server")] if over == "home" else ["--server", url]
        done = run("submit", str(spec), f"resume_from={word}", *place)
    assert done.exit_code == 0, done.output
    assert newest(db).spec.resume_from == earlier and newest(db).id != earlier


def test_a_job_to_go_on_from_that_is_not_there_is_named(tmp_path: Path, spec: Path) -> None:
    done = run("submit", str(spec), "resume_from=nobody", "--dry-run", "--home", str(tmp_path / "none"))
    assert "no job 'nobody'" in str(done.exception) and not (tmp_path / "none").exists()


def test_on_this_machine_the_job_runs_in_its_own_copy(tmp_path: Path, spec: Path) -> None:
    home = ["--home", str(tmp_path / "home")]
    done = run("submit", str(spec), "--follow", *home)
    assert done.exit_code == 0, done.output
    assert "from the folder of the spec" in run("logs", "trial", *home).stdout
    assert "bytes sent" in done.stderr and stored(tmp_path / "home") == 4, "three files and the manifest"
    again = run("submit", str(spec), *home)
    assert again.exit_code == 0 and "bytes sent" not in again.stderr
    assert stored(tmp_path / "home") == 4


def test_a_spec_that_names_files_sent_before_says_that_this_folder_is_not_used(tmp_path: Path, spec: Path) -> None:
    """Copied from the page of a job that failed, into a folder where its script was mended."""
    home = ["--home", str(tmp_path / "home")]
    assert run("submit", str(spec), *home).exit_code == 0
    sent = json.loads(run("show", "trial", "--json", *home).stdout)["spec"]["workdir"]
    copied = spec.with_name("copied.yaml")
    copied.write_text(f"{spec.read_text()}\nworkdir: {sent}\n")
    done = run("submit", str(copied), *home)
    said = f"workdir: the files that were sent as {sent.removeprefix('sha256:')[:12]}; none of this folder"
    assert done.exit_code == 0 and said in done.stderr.replace("\n", " "), done.output


@pytest.mark.proof
def test_over_a_server_the_job_gets_the_files_and_nothing_is_sent_twice(
    tmp_path: Path, db: Database, spec: Path
) -> None:
    home = tmp_path / "server"
    with serve(db, tmp_path / "server", reconcile=True) as url:
        done = run("submit", str(spec), "--follow", "--server", url)
        assert done.exit_code == 0, done.output
        assert "from the folder of the spec" in run("logs", "trial", "--server", url).stdout
        assert "bytes sent" in done.stderr and stored(home) == 4
        again = run("submit", str(spec), "--follow", "--server", url)
        assert again.exit_code == 0 and "bytes sent" not in again.stderr and stored(home) == 4
        (spec.parent / "words.txt").write_text("changed")
        assert run("submit", str(spec), "--follow", "--server", url).exit_code == 0
        assert stored(home) == 6, "one file and the manifest"
    assert newest(db).spec.workdir.startswith("sha256:")


@pytest.mark.proof
def test_a_relative_workdir_lies_beside_the_spec_and_an_absolute_one_on_the_node(
    tmp_path: Path, db: Database, spec: Path
) -> None:
    (spec.parent / "inner").mkdir()
    (spec.parent / "inner" / "train.py").write_text("print('inner')\n")
    with serve(db, tmp_path / "server", reconcile=True) as url:
        assert run("submit", str(spec), "workdir=inner", "--follow", "--server", url).exit_code == 0
        assert "inner" in run("logs", "trial", "--server", url).stdout
    with serve(db, tmp_path / "server") as url:
        assert run("submit", str(spec), "workdir=/opt/project", "--server", url).exit_code == 0
        assert newest(db).spec.workdir == "/opt/project"
        assert run("submit", str(spec), "--workdir", "none", "--server", url).exit_code == 0
        assert newest(db).spec.workdir is None
        assert run("submit", str(spec), "--workdir", str(spec.parent / "inner"), "--server", url).exit_code == 0
        assert newest(db).spec.workdir.startswith("sha256:")
        missing = run("submit", str(spec), "workdir=nowhere", "--server", url)
        assert isinstance(missing.exception, UsageError) and "is not a folder" in str(missing.exception)


def test_an_unfit_folder_is_linked_here_and_refused_for_a_server(tmp_path: Path, db: Database, spec: Path) -> None:
    (spec.parent / "data").symlink_to("/usr/share")
    home = ["--home", str(tmp_path / "home")]
    done = run("submit", str(spec), "--follow", *home)
    assert done.exit_code == 0 and "linked instead" in done.stderr, done.output
    with serve(db, tmp_path / "server") as url:
        refused = run("submit", str(spec), "--server", url)
    assert isinstance(refused.exception, UsageError) and "--workdir none" in str(refused.exception)
    assert jobs.list_jobs(db, limit=1) == []


def test_only_users_of_the_project_upload(tmp_path: Path, db: Database, spec: Path) -> None:
    callers = {
        "viewer": (Role.VIEWER, None, 403),
        "ours": (Role.USER, "lab", 200),
        "theirs": (Role.USER, "other", 403),
    }
    with serve(db, tmp_path / "server", require_token=True, trust_jobs=True) as url:
        for name, (role, project, status) in callers.items():
            token = issue(db, name, role, project=project)["Authorization"].removeprefix("Bearer ")
            with Client(url, token) as client:
                if status == 200:
                    digest = client.upload(spec.parent, project="lab")
                    assert client.submit({"name": "x", "project": "lab", "command": ["true"], "workdir": digest}).new
                    continue
                with pytest.raises(Exception, match=r"limited|need|role|project") as refused:
                    client.upload(spec.parent, project="lab")
                assert getattr(refused.value, "status", None) == status


def test_the_quota_of_a_project_is_one_sentence(
    tmp_path: Path, db: Database, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(workdir.QUOTA_VARIABLE, "0.00000001")
    with serve(db, tmp_path / "server") as url:
        refused = run("submit", str(spec), "--server", url)
    assert refused.exception is not None and "working folders" in str(refused.exception)


def test_what_a_server_refuses_is_refused_before_the_upload(tmp_path: Path, db: Database, spec: Path) -> None:
    two_nodes = ("resources.nodes=2", "local runs one node")
    unknown = ("resume_from=00000000-0000-4000-8000-000000000000", "has no job 00000000")
    spent = ("resources.price_per_hour=1", "is spent")
    home = tmp_path / "server"
    with db.write() as conn:
        costs.set_budget(conn, "lab", "total", 0, at=datetime.now(UTC))
    with serve(db, home) as url:
        for word, says in (two_nodes, unknown, spent):
            refused = run("submit", str(spec), "project=lab", word, "--server", url)
            assert refused.exception is not None and says in str(refused.exception), word
        file = spec.parent / "set.yaml"
        file.write_text("name: two\ncommand: ['true', '{a}']\nmatrix: {a: [x, y]}\n")
        for word, says in (two_nodes, unknown, spent):
            refused = run("submit", str(file), "project=lab", word, "--server", url)
            assert refused.exception is not None and says in str(refused.exception), word
        file.unlink()
        assert not (home / "storage").exists() or stored(home) == 0
        assert jobs.list_jobs(db, limit=1) == [], "and there is no job"
        assert run("submit", str(spec), "--server", url).exit_code == 0
    assert stored(home) == 4 and newest(db).spec.workdir.startswith("sha256:")


def test_a_server_without_the_question_refuses_at_the_submission(
    tmp_path: Path, db: Database, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmaster.client.JOBS_CHECK", "/v1/training/jobs/absent")
    with serve(db, tmp_path / "server") as url:
        refused = run("submit", str(spec), "resources.nodes=2", "--server", url)
        assert refused.exception is not None and "local runs one node" in str(refused.exception)
        assert run("submit", str(spec), "--server", url).exit_code == 0


def test_the_question_is_for_those_who_may_submit(tmp_path: Path, db: Database) -> None:
    body = {"name": "x", "project": "lab", "command": ["true"]}
    with serve(db, tmp_path / "server", require_token=True, trust_jobs=True) as url:
        for name, role, project in (("viewer", Role.VIEWER, None), ("theirs", Role.USER, "other")):
            token = issue(db, name, role, project=project)["Authorization"].removeprefix("Bearer ")
            with Client(url, token) as client, pytest.raises(NoAccess):
                client.check(body)
    assert jobs.list_jobs(db, limit=1) == []


@pytest.mark.proof
def test_a_spec_that_the_target_refuses_is_refused_before_its_upload(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: a\ncommand: ['true']\nresources: { nodes: 2 }\n")
    for words in (("--dry-run",), ()):
        done = subprocess.run(
            [sys.executable, "-m", "trainmaster", "submit", "job.yaml", "--home", "home", *words],
            cwd=tmp_path, check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 2 and "local runs one node" in done.stderr, done.stderr
        assert not (tmp_path / "home" / "storage").exists()
