"""Pages of jobs that were resumed, or can be: the links between the jobs of a run, and what to do next."""

from __future__ import annotations

from datetime import timedelta
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pages import samples
from trainmaster.api.jobs import JobName
from trainmaster.cli.main import build
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.pages import job
from trainmaster.report import render_html
from trainmaster.store.database import Database
from trainmaster.store.page_rows import runs

from .conftest import TestClient


def ended(
    db: Database, hour: int, *, first: str | None = None, name: str = "long", project: str = "default",
    status: Status = Status.FAILED, saved: bool | None = True,
) -> samples.Story:  # fmt: skip
    """A script that ended, submitted at an hour; `first`: the job that began its run."""
    spec = parse_spec({"name": name, "project": project, "command": ["false"], "resume_from": first})
    story = samples.Story(db, spec, at=samples.T0 + timedelta(hours=hour)).start().move(Stage.RUNNING)
    reason = Reason.USER_CANCELLED if status is Status.CANCELLED else Reason.SCRIPT_FAILED
    return story.end_attempt(reason, saved=saved).finish(status, reason)


def links(db: Database, story: samples.Story) -> tuple[str | None, str | None]:
    page = job.read(db, story.id)
    assert page is not None
    before, following = page.continues, page.continued_as
    return before.id if before is not None else None, following.id if following is not None else None


def show(home: Path, story: samples.Story) -> str:
    env = {"TRAINMASTER_HOME": str(home), "COLUMNS": "200", "TERM": "dumb"}
    printed = CliRunner(env=env).invoke(build(), ["show", story.id])
    assert printed.exit_code == 0, printed.output
    return printed.output


def test_each_job_of_a_run_names_the_one_before_and_the_one_after(any_db: Database) -> None:
    first = ended(any_db, 0)
    ended(any_db, 1)  # of the same name, and a run of its own
    second = ended(any_db, 2, first=first.id)
    ended(any_db, 3, first=first.id, project="other")  # no caller of one project learns of another's
    third = ended(any_db, 4, first=first.id)
    assert links(any_db, first) == (None, second.id)
    assert links(any_db, second) == (first.id, third.id)
    assert links(any_db, third) == (second.id, None)


def test_the_look_for_them_is_bounded(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ended(db, 0)
    for hour in (1, 2):
        ended(db, hour, name="another")
    second = ended(db, 3, first=first.id)
    monkeypatch.setattr(runs, "_NEAR", 3)
    assert links(db, first) == (None, second.id)
    monkeypatch.setattr(runs, "_NEAR", 2)
    assert links(db, first) == (None, None)
    assert links(db, second) == (first.id, None), "the first of a run is in the spec"


def test_pages_link_both_ways_also_where_the_old_one_was_read_before(
    db: Database, client: TestClient, tmp_path: Path
) -> None:
    old = ended(db, 0)
    assert "Continued as" not in client.get(f"/jobs/{old.id}").text
    new = ended(db, 1, first=old.id)
    assert (
        f'<dt>Continued as</dt><dd><a href="/jobs/{new.id}">long {new.id[:8]}</a>' in client.get(f"/jobs/{old.id}").text
    )
    assert f'<dt>Continues</dt><dd><a href="/jobs/{old.id}">long {old.id[:8]}</a>' in client.get(f"/jobs/{new.id}").text
    answer = client.get(f"/v1/training/jobs/{old.id}").json()
    assert answer["continued_as"] == {"id": new.id, "name": "long"} and answer["continues"] is None
    page = job.read(db, new.id)
    assert page is not None and page.continues == JobName(id=old.id, name="long")
    report = render_html(page)
    assert f"<dd>long {old.id[:8]}</dd>" in report and "/jobs/" not in report, "a report is read without the server"
    assert f"continued as long {new.id}" in show(tmp_path, old)
    assert f"continues   long {old.id}" in show(tmp_path, new)


@pytest.mark.parametrize("status", [Status.FAILED, Status.CANCELLED])
@pytest.mark.parametrize("saved", [True, False])
def test_what_to_do_names_the_command_where_there_is_the_button(
    db: Database, client: TestClient, tmp_path: Path, status: Status, saved: bool
) -> None:
    story = ended(db, 0, status=status, saved=saved)
    page = client.get(f"/jobs/{story.id}").text
    assert ('id="resume"' in page) is saved
    what = "`trainmaster resume long` goes on from where it saved"
    if status is Status.FAILED:  # the same program with the same files would fail again
        what = (
            "`trainmaster resume long command='[…]'` goes on from where it saved, with mended files "
            "`trainmaster submit JOB.yaml resume_from=long`"
        )
    told = unescape(page).replace("<code>", "`").replace("</code>", "`")
    assert (what in told) is saved
    assert (what in " ".join(show(tmp_path, story).split())) is saved
    if saved:
        ended(db, 1, first=story.id)
        page = client.get(f"/jobs/{story.id}").text
        assert "trainmaster resume long" not in page, "it was resumed already"


def test_a_training_that_saved_nothing_is_not_said_to_go_on(db: Database) -> None:
    spec = samples.spec()
    assert spec.train is not None
    story = samples.Story(db, spec).start().move(Stage.RUNNING)
    story.end_attempt(Reason.CRASHED).finish(Status.FAILED, Reason.CRASHED)
    page = job.read(db, story.id)
    assert page is not None and not page.may_resume and page.to_do == page.action


def test_the_tab_of_checkpoints_says_that_files_of_a_script_are_kept(db: Database, client: TestClient) -> None:
    text = client.get(f"/jobs/{ended(db, 0).id}/checkpoints").text
    assert "Checkpoints of a script of your own are not listed" in text and "Files there are kept" in text
    assert "<code>trainmaster resume long</code> goes on with them" in text
