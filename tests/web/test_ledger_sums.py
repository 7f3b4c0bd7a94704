"""The sums that /metrics and the page Cost show: events of a final job are read once, by whichever server."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import event, text

from pages import samples
from pages.test_goodput import T0, a_run
from trainmaster.control.maintain import rebuild
from trainmaster.core.money.goodput.bins import Bin
from trainmaster.pages import goodput
from trainmaster.store import jobs
from trainmaster.store.database import Database
from trainmaster.store.page_rows import ledger_tallies
from trainmaster.web.beside import Beside
from trainmaster.web.ledgers import Ledgers, Sums


def sums(db: Database) -> tuple[Sums, list[str]]:
    """Those of a server that has just started, and the statements that read events."""
    statements: list[str] = []

    def note(_conn: object, _cursor: object, statement: str, *_: object) -> None:
        if "FROM events" in statement:
            statements.append(statement)

    event.listen(db.engine, "before_cursor_execute", note)
    try:
        ledgers = Ledgers(db, Beside())
        ledgers.refresh()
        made = ledgers.sums()
    finally:
        event.remove(db.engine, "before_cursor_execute", note)
    assert made is not None
    return made, statements


def projects(made: Sums) -> dict[str, tuple[int, float, int, int]]:
    return {
        name: (tally.total_us, sum(tally.cents.values()), tally.jobs, tally.unpriced_jobs)
        for name, tally in made.projects.items()
    }


@pytest.mark.both_databases
def test_a_server_that_starts_reads_events_of_open_jobs_alone(any_db: Database) -> None:
    db = any_db
    over = [a_run(db, project=f"p{number}", at=T0 + timedelta(seconds=number)) for number in range(3)]
    samples.Story(db, samples.spec(project="p0")).start()
    first, read = sums(db)
    assert len(read) == 2  # those of the final jobs, and those of the open one
    again, read = sums(db)
    assert len(read) == 1 and "jobs.stage IS NOT NULL" in read[0]
    before = projects(first)
    assert {name: row[2] for name, row in before.items()} == {"p0": 2, "p1": 1, "p2": 1}
    after = projects(again)
    assert after["p1"] == before["p1"] and after["p2"] == before["p2"] and after["p0"][2:] == before["p0"][2:]
    assert first.targets.keys() == again.targets.keys()

    # Other rules, other tallies: all are made again.
    with db.write() as conn:
        conn.execute(text("UPDATE ledger_tallies SET rules = 'of before', tally = '{}'"))
    made, read = sums(db)
    assert len(read) == 2 and projects(made)["p1"] == before["p1"]

    # What is derived again from events is tallied again, and a deleted job leaves no tally.
    rebuild(db, over[1].id)
    with db.read() as conn:
        assert ledger_tallies.list_missing(conn) == [over[1].id]
    while jobs.delete_events(db, over[2].id):
        pass
    with db.write() as conn:
        jobs.delete_job(conn, over[2].id)
    made, _ = sums(db)
    assert projects(made)["p1"] == before["p1"] and "p2" not in made.projects


def test_a_tally_of_a_job_that_was_deleted_meanwhile_is_not_stored(db: Database) -> None:
    story = a_run(db)
    with db.read() as conn:
        assert ledger_tallies.list_missing(conn) == [story.id]
    ledgers = Ledgers(db, Beside())
    ledgers.refresh()
    with db.read() as conn:
        (kept,) = ledger_tallies.read(conn, [story.id])
    with db.write() as conn:
        ledger_tallies.keep(conn, [("a job that is gone", kept.steps, kept.tally), (story.id, kept.steps, kept.tally)])
    with db.read() as conn:
        assert ledger_tallies.list_kept(conn) == {story.id}


def test_steps_of_an_earlier_job_count_as_repeated_also_where_only_its_tally_is_read(db: Database) -> None:
    first = a_run(db, last=20)
    sums(db)
    a_run(db, last=20, resume_from=first.id, at=T0 + timedelta(days=2))
    made, _ = sums(db)
    page = goodput.read(db)
    tally = made.projects["research"]
    assert tally.gpu_us[Bin.REPEATED] > 0
    assert {bin_.value: us for bin_, us in tally.gpu_us.items() if us} == {
        line.bin: line.gpu_us for line in page.total.goodput.bins if line.gpu_us
    }


@pytest.mark.parametrize(
    "spec", ['{"resources": {"nodes": 1e999}}', '{"limits": {"stall_minutes": "30 minutes"}}', "[]"]
)
def test_sizes_that_are_no_numbers_leave_out_that_job_alone(spec: str, db: Database) -> None:
    a_run(db, project="good")
    bad = a_run(db, project="bad")
    with db.write() as conn:
        conn.execute(text("UPDATE jobs SET spec = :spec WHERE id = :id"), {"spec": spec, "id": bad.id})
    made, _ = sums(db)
    assert list(made.projects) == ["good"]
