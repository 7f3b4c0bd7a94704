"""`trainmaster jobs` on a narrow terminal: one line a job, with the columns that matter most."""

from __future__ import annotations

import itertools

import pytest
from sqlalchemy import update

from pages import samples
from trainmaster.cli import _console
from trainmaster.cli.jobs import jobs as verb
from trainmaster.core.states import Reason, Status
from trainmaster.pages import jobs
from trainmaster.store import tables
from trainmaster.store.database import Database

ALL = ["job", "name", "project", "by", "status", "stage", "step", "loss", "tokens/s", "age"]


def show(
    db: Database, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[str]]:
    """The titles of the columns, and the lines of the jobs."""
    monkeypatch.setattr(_console.out, "_width", width)
    monkeypatch.setenv("COLUMNS", str(width))
    verb._print(jobs.read(db), 0, (), undriven=False)
    first, *rest = capsys.readouterr().out.splitlines()
    return first.split(), rest


def furnish(db: Database, name: str) -> list[samples.Story]:
    failed = samples.Story(db, samples.spec(name=name)).start().tell(samples.training(1, 120, end=False))
    failed.end_attempt(Reason.CHECK_INCOMPLETE, "x").finish(Status.FAILED, Reason.CHECK_INCOMPLETE, "x")
    stories = [failed, samples.completed(db, name=name), samples.pending(db, name=name)]
    with db.write() as conn:
        conn.execute(update(tables.jobs).values(submitted_by="ana.lovelace@example.org"))
    return stories


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_a_job_is_one_line_in_the_width_of_the_terminal(
    db: Database, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stories = furnish(db, "llama-3-8b-continued-pretraining-on-code-with-a-long-name")
    titles, lines = show(db, width, capsys, monkeypatch)
    assert len(lines) == len(stories) and max(map(len, lines)) <= width
    assert titles == [word for word in ALL if word in titles] and {"job", "name", "status", "step", "age"} <= {*titles}
    for story in stories if width >= 80 else ():
        (line,) = [line for line in lines if line.startswith(story.id[:8])]
        assert "llama-3-8b-cont" in line
    if width >= 80:
        assert any("failed (check_incomplete)" in line and "120/200" in line for line in lines)


@pytest.mark.slow
def test_columns_give_way_by_importance(
    db: Database, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    furnish(db, "llama")
    shown = [show(db, width, capsys, monkeypatch)[0] for width in range(140, 70, -1)]
    order = [word for before, after in itertools.pairwise(shown) for word in before if word not in after]
    assert shown[0] == ALL and order == list(verb._SPARED)[: len(order)] and order[:2] == ["tokens/s", "stage"]


def test_a_wide_terminal_shows_names_and_columns_whole(
    db: Database, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "llama-3-8b-continued-pretraining-on-code-with-a-long-name"
    furnish(db, name)
    titles, lines = show(db, 200, capsys, monkeypatch)
    assert titles == ALL and all(name in line and "ana.lovelace@example.org" in line for line in lines)


def test_a_pipe_has_names_and_columns_whole(
    db: Database, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "llama-3-8b-continued-pretraining-on-code-with-a-long-name"
    furnish(db, name)
    monkeypatch.delenv("COLUMNS", raising=False)
    verb._print(jobs.read(db), 0, (), undriven=False)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.split() == ALL and len(lines) == 3
    assert all(name in line and "ana.lovelace@example.org" in line for line in lines)
