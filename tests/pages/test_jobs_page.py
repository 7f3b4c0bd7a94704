"""The list of jobs: filters, paging, figures of the last step, and a cost that does not grow with the jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from sqlalchemy import event, update

from pages import samples
from trainmaster.core.states import Status
from trainmaster.pages import jobs, sets
from trainmaster.store import costs, tables
from trainmaster.store.database import Database


def test_a_line_shows_the_last_step_of_the_last_attempt(db: Database) -> None:
    story = samples.resumed(db)
    (line,) = jobs.read(db).jobs
    assert (line.id, line.step, line.steps, line.progress) == (story.id, 140, 200, 0.7)
    assert line.loss == samples.metrics(140)["loss"]
    assert line.attempts == 2


def test_a_job_without_steps_has_no_figures(db: Database) -> None:
    samples.pending(db)
    (line,) = jobs.read(db).jobs
    assert (line.step, line.progress, line.loss, line.tokens_per_s) == (None, None, None, None)
    assert line.steps == samples.STEPS


def test_filters_and_counts(db: Database) -> None:
    samples.completed(db)
    samples.failed_check(db)
    samples.pending(db, project="infra")
    page = jobs.read(db, status=Status.FAILED)
    assert [line.status for line in page.jobs] == [Status.FAILED]
    assert page.total == 1
    assert page.counts == {"pending": 1, "running": 0, "completed": 1, "failed": 1, "cancelling": 0, "cancelled": 0}
    infra = jobs.read(db, project="infra")
    assert [line.project for line in infra.jobs] == ["infra"]
    assert (infra.total, infra.counts["completed"]) == (1, 0)


def test_a_word_finds_by_name_and_by_id(db: Database) -> None:
    story = samples.completed(db)
    samples.pending(db, project="infra")
    for word in (story.id, story.id[:9], "llama"):
        page = jobs.read(db, find=word)
        assert story.id in [line.id for line in page.jobs] and page.total == len(page.jobs)
    assert jobs.read(db, find="%").jobs == jobs.read(db, find="a_a").jobs == ()
    assert jobs.read(db, find=story.id, status=Status.FAILED).total == 0


def test_a_word_finds_the_jobs_of_a_person(db: Database) -> None:
    story = samples.completed(db)
    samples.pending(db, project="infra")  # of nobody
    with db.write() as conn:
        conn.execute(update(tables.jobs).where(tables.jobs.c.id == story.id).values(submitted_by="ann b"))
    for word in ("ann b", "nn"):
        page = jobs.read(db, find=word)
        assert [line.id for line in page.jobs] == [story.id] and page.total == 1
    assert jobs.read(db, find="bob").total == 0


def test_a_whole_name_finds_one_person_or_one_name(db: Database) -> None:
    ann, joann = samples.completed(db), samples.completed(db, name="llama-2")
    with db.write() as conn:
        for story, person in ((ann, "ann"), (joann, "joann")):
            conn.execute(update(tables.jobs).where(tables.jobs.c.id == story.id).values(submitted_by=person))
    for page, story in (
        (jobs.read(db, by="ann"), ann),
        (jobs.read(db, by="joann"), joann),
        (jobs.read(db, name="llama-2"), joann),
    ):
        assert [line.id for line in page.jobs] == [story.id] and page.total == 1
    assert jobs.read(db, by="ann", name="llama-2").total == 0
    assert jobs.read(db, find="llama", by="ann").total == 1


def test_pages_hold_every_job_once(db: Database) -> None:
    stories = {samples.pending(db).id for _ in range(7)}
    ids = [line.id for offset in (0, 3, 6) for line in jobs.read(db, limit=3, offset=offset).jobs]
    assert len(ids) == 7
    assert set(ids) == stories
    assert jobs.read(db, limit=3).total == 7


@pytest.mark.slow
@pytest.mark.parametrize("many", [2, 9])
def test_the_cost_does_not_grow_with_the_jobs(db: Database, many: int) -> None:
    for _ in range(many):
        samples.resumed(db)
    with counted(db) as statements:
        jobs.read(db)
    # Rows, last steps, what they paid for (2), prices, machines, origins, how many of each status.
    assert len([text for text in statements if text.startswith("SELECT")]) == 8


@contextmanager
def counted(db: Database) -> Iterator[list[str]]:
    statements: list[str] = []

    def note(_conn: object, _cursor: object, text: str, *_: object) -> None:
        statements.append(text)

    event.listen(db.engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(db.engine, "before_cursor_execute", note)


def test_the_list_without_trials_has_the_same_lines(db: Database) -> None:
    """Costs and machines too: it is what `trainmaster jobs` prints."""
    stories = [make(db) for make in (samples.resumed, samples.completed, samples.pending)]
    with db.write() as conn:
        costs.set_price(conn, stories[1].attempt, 100)
    now = datetime.now(UTC)
    folded = sets.read_folded(db, project=None, limit=50, offset=0, now=now)
    assert folded.jobs == jobs.read(db, now=now).jobs and any(line.cost_cents for line in folded.jobs)
