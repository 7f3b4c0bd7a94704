"""Resume of a job without a checkpoint is refused at submit and has no button; it can be run again."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from pages import samples
from trainmaster.cli._jobs import connect
from trainmaster.control import submit as submitting
from trainmaster.core.errors import SpecError
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.pages import jobs as jobs_page
from trainmaster.store import attempts, jobs
from trainmaster.store.database import Database

from .conftest import TestClient

SPEC = {"name": "run", "preflight": {"level": 0}, "train": {"steps": 40}}


@pytest.fixture
def failed(db: Database) -> str:
    """A training job that failed before it saved anything."""
    job = submitting.submit(db, parse_spec(SPEC))
    now = datetime.now(UTC)
    with db.write() as conn:
        assert job.stage is not None
        attempts.insert_attempt(conn, job.id, 1, handle=None, at=now)
        jobs.finish(conn, job.id, seen=job.stage, status=Status.FAILED, at=now)
    return job.id


def test_resume_without_a_checkpoint_is_refused_at_submit(db: Database, client: TestClient, failed: str) -> None:
    with pytest.raises(SpecError, match=f"saved no checkpoint; run it again: trainmaster resume --again {failed}"):
        submitting.resume(db, failed)
    answer = client.post(f"/v1/training/jobs/{failed}/resume")
    assert answer.status_code == 422 and "no checkpoint" in answer.text


def test_a_command_that_left_no_files_has_no_button_to_resume(db: Database, client: TestClient) -> None:
    shown = {}
    for saved in (True, False, None):
        story = samples.Story(db, parse_spec({"name": "run", "command": ["false"]})).start()
        story.move(Stage.RUNNING).end_attempt(Reason.SCRIPT_FAILED, saved=saved).finish(Status.FAILED)
        shown[saved] = 'id="resume"' in client.get(f"/jobs/{story.id}").text
    assert shown == {True: True, False: False, None: True}


def test_the_page_offers_to_run_it_again_and_not_to_resume(db: Database, client: TestClient, failed: str) -> None:
    page = client.get(f"/jobs/{failed}").text
    assert 'id="rerun"' in page and 'id="resume"' not in page
    again = client.post(f"/v1/training/jobs/{failed}/rerun")
    assert again.status_code == 201
    row = jobs.find_job(db, again.json()["id"])
    assert row is not None and row.spec == parse_spec(SPEC) and row.spec.resume_from is None


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.FAILED, Status.CANCELLED])
def test_every_job_that_is_over_can_be_run_again(db: Database, client: TestClient, status: Status) -> None:
    job = submitting.submit(db, parse_spec(SPEC))
    assert 'id="rerun"' not in client.get(f"/jobs/{job.id}").text, "it waits"
    with db.write() as conn:
        assert job.stage is not None
        jobs.finish(conn, job.id, seen=job.stage, status=status, at=datetime.now(UTC))
    assert 'id="rerun"' in client.get(f"/jobs/{job.id}").text
    assert client.post(f"/jobs/{job.id}/rerun").status_code == 303


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"command": ["python", "train.py"], "workdir": "sha256:" + "a" * 64}, "the files and the settings of then"),
        ({"command": ["python", "/nfs/train.py"]}, "the settings of then, and the files that are there now"),
        ({"train": {"steps": 4}}, "the settings of then"),
    ],
)
def test_the_question_says_what_runs_and_how_a_mended_script_does(
    db: Database, client: TestClient, spec: dict[str, object], words: str
) -> None:
    story = samples.Story(db, parse_spec({"name": "lr-0.3", **spec})).start().move(Stage.RUNNING)
    story.end_attempt(Reason.SCRIPT_FAILED).finish(Status.FAILED, Reason.SCRIPT_FAILED)
    text = client.get(f"/jobs/{story.id}").text
    asked = text.partition(f'action="/jobs/{story.id}/rerun" data-confirm="')[2].partition('"')[0]
    assert asked.startswith(f"Run lr-0.3 again, from the beginning? It runs with {words}.")
    assert asked.endswith("trainmaster submit SPEC.yaml")


def test_a_job_that_runs_again_names_the_one_before(db: Database, client: TestClient, tmp_path: Path) -> None:
    first = submitting.submit(db, parse_spec(SPEC))
    second, _ = submitting.run_again(db, first.id, key="k")
    assert submitting.run_again(db, first.id, key="k")[0].id == second.id
    with connect(tmp_path, None) as home:
        third = home.rerun(second.id, ["train.steps=30"])
    origins = {row.id: row.again_of for row in jobs_page.read(db).jobs}
    assert origins == {first.id: None, second.id: first.id, third.id: second.id}
    text = client.get(f"/jobs/{second.id}").text
    assert f'<dt>Run again from</dt><dd><a href="/jobs/{first.id}">run {first.id[:8]}</a>' in text
    assert "Run again from" not in client.get(f"/jobs/{first.id}").text
    assert client.get(f"/v1/training/jobs/{second.id}").json()["again_of"] == {"id": first.id, "name": "run"}
    runs = client.get("/").text
    assert f'run again from <a href="/jobs/{first.id}" class="mono">{first.id[:8]}</a>' in runs
    for job_id in (first.id, second.id):
        with db.write() as conn:
            jobs.finish(conn, job_id, seen=Stage.QUEUED, status=Status.CANCELLED, at=datetime.now(UTC))
            jobs.delete_job(conn, job_id)
    assert "Run again from" not in client.get(f"/jobs/{third.id}").text, "it is gone"


def test_runs_says_which_job_goes_on_from_which(db: Database, client: TestClient, failed: str) -> None:
    story = samples.Story(db, parse_spec({"name": "run", "command": ["x"], "resume_from": failed}))
    assert [row.resume_from for row in jobs_page.read(db).jobs if row.id == story.id] == [failed]
    assert f'goes on from <a href="/jobs/{failed}" class="mono">{failed[:8]}</a>' in client.get("/").text
