"""The page of a job that somebody cancelled names that person, and nobody where it ended by itself."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from pages import samples
from trainmaster.control.queueing import sets
from trainmaster.core.config.sweep import parse_sweep
from trainmaster.core.roles import Role
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.pages import job as job_page
from trainmaster.report.markdown import render_markdown
from trainmaster.store import audit, jobs
from trainmaster.store.capacity import sets as store
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from web.conftest import BASE, LOCAL, TestClient
from web.furnished import issue


def said(client: TestClient, job_id: str) -> str:
    text = client.get(f"/jobs/{job_id}").text
    found = re.search(r'<p class="say">(.*?)</p>', text)
    assert found is not None, text
    return html.unescape(found[1])


def test_the_sentence_names_who_cancelled(db: Database, tmp_path: Path) -> None:
    app = create_app(db, tmp_path, reconcile=False, require_token=True)
    story = samples.Story(db).start().move(Stage.RUNNING)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        ann, bob, eve = (issue(db, name, Role.USER, project) for name, project in PEOPLE)
        client.headers.update(ann)
        assert "ann" not in said(client, story.id)
        assert client.post(f"/jobs/{story.id}/cancel").status_code == 303
        assert said(client, story.id) == "Asked to save and stop by ann."
        client.headers.update(bob)
        assert client.post(f"/jobs/{story.id}/cancel").status_code == 303
        assert said(client, story.id) == "Asked to save and stop by ann.", "the second one changed nothing"
        assert client.get(f"/v1/training/jobs/{story.id}").json()["cancelled_by"] == "ann"
        story.end_attempt(Reason.USER_CANCELLED).finish(Status.CANCELLED, Reason.USER_CANCELLED, "cancel requested")
        assert said(client, story.id) == "Cancelled by ann."
        client.headers.update(eve)
        assert client.get(f"/jobs/{story.id}").status_code == 404, "of another project"
    page = job_page.read(db, story.id)
    assert page is not None and "Cancelled by ann." in render_markdown(page)


PEOPLE = (("ann", "research"), ("bob", "research"), ("eve", "other"))


@pytest.mark.parametrize("status", [Status.COMPLETED, Status.CANCELLED])
def test_what_else_is_known_of_the_end_is_said(db: Database, client: TestClient, status: Status) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING)
    assert client.post(f"/jobs/{story.id}/cancel").status_code == 303
    story.end_attempt(Reason.USER_CANCELLED).finish(status, Reason.USER_CANCELLED, "saved <at> step 7")
    shown = said(client, story.id)
    assert shown.startswith("Cancelled by loopback: saved <at> step 7") == (status is Status.CANCELLED), shown


def test_nobody_is_named_where_nobody_of_ours_cancelled(db: Database, client: TestClient) -> None:
    stopped = samples.Story(db).start().move(Stage.RUNNING).end_attempt(Reason.USER_CANCELLED)
    stopped.finish(Status.CANCELLED, Reason.USER_CANCELLED, "it was cancelled in Slurm")
    assert said(client, stopped.id) == "it was cancelled in Slurm"
    pruned = samples.Story(db).start().move(Stage.RUNNING)
    with db.write() as conn:
        jobs.request_cancel(conn, pruned.id, at=samples.T0)
        audit.record(conn, who="search", action="job.prune", subject=f"job:{pruned.id}")
        jobs.set_message(conn, pruned.id, "pruned by its search at step 3")
    assert client.post(f"/jobs/{pruned.id}/cancel").status_code == 303
    assert said(client, pruned.id) == "pruned by its search at step 3"


@pytest.mark.parametrize("died", [False, True])
def test_a_job_of_a_cancelled_set_names_who_cancelled_the_set(
    db: Database, client: TestClient, monkeypatch: pytest.MonkeyPatch, died: bool
) -> None:
    made = sets.submit_set(db, parse_sweep({"name": "lr", "command": ["x"], "matrix": {"env.A": ["1", "2"]}}))
    story = samples.Story(db).start().move(Stage.RUNNING)
    with db.write() as conn:
        assert store.take_trial(conn, made.id, 1, story.id)
    with monkeypatch.context() as patch:
        if died:  # after the wish was committed and before its jobs were asked
            patch.setattr(store, "find_set", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                sets.cancel(db, made.id, by="ann")
        else:
            sets.cancel(db, made.id, by="ann")
    assert ("ann" in said(client, story.id)) == (not died)
    sets.advance(db)
    assert said(client, story.id) == "Asked to save and stop by ann."
