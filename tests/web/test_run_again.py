"""Resume of a job without a checkpoint is refused at submit and has no button; it can be run again."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pages import samples
from trainmaster.control import submit as submitting
from trainmaster.core.errors import SpecError
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Stage, Status
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
