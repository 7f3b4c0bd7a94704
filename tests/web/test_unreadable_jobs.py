"""A job whose stored spec cannot be read: lists go on without it, and another project learns nothing of it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from control.test_unreadable_jobs import KINDS, SECRET, spoil
from pages import samples
from trainmaster.cli._jobs.home import HomeJobs
from trainmaster.core import schema
from trainmaster.core.roles import Role
from trainmaster.core.states import Status
from trainmaster.pages import compare, search
from trainmaster.store import tables
from trainmaster.store.database import Database
from trainmaster.store.heads import find_head
from web.conftest import TestClient
from web.furnished import JOBS, issue

LISTS = (
    "/", JOBS, "/queue", "/v1/queue", "/search?q=trial", "/cost", "/v1/cost/jobs", "/v1/goodput",
    "/v1/machines", "/v1/search?q=trial",
)  # fmt: skip


@pytest.mark.matrix(one_in=5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("running", [False, True])
def test_lists_go_on_without_it(kind: str, running: bool, client: TestClient, db: Database) -> None:
    admin = issue(db, "root", Role.ADMIN)
    good, bad = (samples.Story(db, samples.spec(project=project)) for project in ("lab", "other"))
    for story in (good, bad) if running else ():
        story.start()
    before = {path: client.get(path, headers=admin).status_code for path in LISTS}
    spoil(db, bad.id, kind)
    after = {path: client.get(path, headers=admin).status_code for path in LISTS}
    assert after == before and {*after.values()} == {200}
    listed = [row["id"] for row in client.get(JOBS, headers=admin).json()["jobs"]]
    assert good.id in listed and bad.id not in listed


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
def test_another_project_is_told_of_no_job(kind: str, client: TestClient, db: Database) -> None:
    own, other = issue(db, "own", Role.USER, "lab"), issue(db, "other", Role.USER, "other")
    job = samples.Story(db, samples.spec(project="lab"))
    spoil(db, job.id, kind)
    for path in (f"{JOBS}/{job.id}", f"/jobs/{job.id}", f"{JOBS}/{job.id}/cost", f"{JOBS}/{job.id}/cancel"):
        ask = client.post if path.endswith("cancel") else client.get
        refused, told = ask(path, headers=other), ask(path, headers=own)
        assert refused.status_code == 404 and SECRET not in refused.text
        assert SECRET not in told.text
    told = client.get(f"{JOBS}/{job.id}", headers=own)
    assert told.status_code == 409 and job.id in told.text and "cannot be read" in told.text
    spec = {"name": "b", "project": "other", "command": ["x"], "resume_from": job.id}
    again = client.post(JOBS, headers=other, json=spec)
    assert "cannot be read" not in again.text and SECRET not in again.text


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_search_says_that_there_is_more_than_it_shows(kind: str, db: Database) -> None:
    times = [samples.T0 + timedelta(seconds=number) for number in range(search.MOST + 1)]
    stories = [samples.Story(db, samples.spec(), at=at) for at in times]
    assert search.read(db, "trial").more
    spoil(db, stories[-1].id, kind)
    page = search.read(db, "trial")
    assert page.more and len(page.hits) == search.MOST - 1


@pytest.mark.parametrize("env", [[SECRET], SECRET, 5])
def test_runs_are_compared_beside_one_whose_env_is_no_mapping(env: object, db: Database) -> None:
    good, bad = (samples.Story(db, samples.spec(env={"A": "1"})).id for _ in range(2))
    with db.write() as conn:
        spec = {**schema.to_plain(samples.spec()), "env": env}
        conn.execute(tables.jobs.update().where(tables.jobs.c.id == bad).values(spec=spec))
    page = compare.read(db, ids=[good, bad])
    assert [run.id for run in page.runs] == [good, bad] and SECRET not in repr(page)
    assert ("env.A", {"1", compare.ABSENT}) in [(each.field, {*dict(each.values)}) for each in page.differences]


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
def test_its_own_project_cancels_it(kind: str, client: TestClient, db: Database) -> None:
    own, other, viewer = (
        issue(db, name, role, project)
        for name, role, project in (
            ("own", Role.USER, "lab"), ("other", Role.USER, "other"), ("viewer", Role.VIEWER, "lab")
        )
    )  # fmt: skip
    job = samples.Story(db, samples.spec(project="lab"))
    spoil(db, job.id, kind)
    path = f"{JOBS}/{job.id}/cancel"
    assert [client.post(path, headers=who).status_code for who in (other, viewer)] == [404, 403]
    assert (head := find_head(db, job.id)) is not None and not head.cancel_requested
    for _ in range(2):
        asked = client.post(path, headers=own)
        assert asked.status_code == 200 and SECRET not in asked.text
        shown = asked.json()
        assert (shown["id"], shown["status"], shown["cancel_requested"]) == (job.id, "cancelling", True)
    job.finish(Status.CANCELLED)
    over = client.post(path, headers=own)
    assert over.status_code == 400 and "already cancelled" in over.text


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
def test_its_own_project_deletes_it_once_it_is_over(kind: str, client: TestClient, db: Database) -> None:
    own, other = issue(db, "own", Role.USER, "lab"), issue(db, "other", Role.USER, "other")
    job = samples.Story(db, samples.spec(project="lab"))
    spoil(db, job.id, kind)
    path = f"{JOBS}/{job.id}"
    assert [client.delete(path, headers=who).status_code for who in (other, own)] == [404, 409]
    job.finish(Status.CANCELLED)
    assert [client.delete(path, headers=who).status_code for who in (other, own, own)] == [404, 204, 404]
    assert find_head(db, job.id) is None


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_command_on_its_home_folder_cancels_it(kind: str, db: Database, tmp_path: Path) -> None:
    job = samples.Story(db, samples.spec(project="lab"))
    spoil(db, job.id, kind)
    home = HomeJobs(tmp_path, db)
    assert home.find(job.id[:8]) == home.find(samples.spec().name) == job.id
    asked = home.cancel(job.id)
    assert (asked.id, asked.status, asked.spec) == (job.id, "cancelling", {})
    assert home.line(job.id).final is False
    job.finish(Status.CANCELLED)
    assert home.line(job.id).final
