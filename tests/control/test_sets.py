"""Sets of runs: as many at once as they may, none lost and none twice, whoever dies when; one cancel for all."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from control.test_unreadable_jobs import KINDS, spoil
from trainmaster import targets
from trainmaster.control import failpoints
from trainmaster.control import submit as submitting
from trainmaster.control.queueing import sets
from trainmaster.core.config.sweep import parse_sweep
from trainmaster.core.errors import JobFinal, KeyTaken, SpecError, TargetError
from trainmaster.core.states import Stage, Status
from trainmaster.pages import sets as pages
from trainmaster.store import audit, jobs, known_targets
from trainmaster.store.capacity import sets as store
from trainmaster.store.database import Database
from trainmaster.store.heads import find_head
from trainmaster.store.migrate import open_database

DOCUMENT = {
    "name": "lr", "command": ["train", "{size}"], "env": {"SEED": "0"}, "parallel": 2,
    "matrix": {"size": ["s", "l"], "env.SEED": ["1", "2", "3"]},
}  # fmt: skip


class Killed(BaseException):
    """The process dies here."""


def end(db: Database, job_id: str, status: Status = Status.COMPLETED) -> None:
    with db.write() as conn:
        jobs.finish(conn, job_id, seen=Stage.QUEUED, status=status, at=datetime.now(UTC))


def open_jobs(db: Database, set_id: str) -> list[str]:
    return [trial.job_id for trial in store.list_trials(db, set_id) if trial.open and trial.job_id is not None]


def test_trials_begin_in_order_as_others_end(db: Database) -> None:
    row = sets.submit_set(db, parse_sweep(DOCUMENT))
    assert [trial.job_id for trial in store.list_trials(db, row.id)] == [None] * 6
    seen = []
    for _ in range(6):
        for _ in range(2):
            sets.advance(db)
        going = open_jobs(db, row.id)
        assert len(going) == min(2, 6 - len(seen))
        seen.append(jobs.find_job(db, going[0]).name)  # type: ignore[union-attr]
        end(db, going[0])
    assert seen == [f"lr-{number}" for number in range(1, 7)]
    sets.advance(db)
    assert store.list_unfinished(db) == [] and len(jobs.list_ids(db)) == 6


@pytest.mark.parametrize("place", ["commit set: after", "commit trial: before", "commit trial: after"])
def test_killed_anywhere_it_loses_and_doubles_nothing(
    db: Database, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every visit of the place kills once; what is started again goes on from the rows."""
    died = 0

    def die(reached: str, _detail: object) -> None:
        nonlocal died
        if reached == place and died % 2 == 0:
            died += 1
            raise Killed
        died += reached == place

    monkeypatch.setattr(failpoints, "_reach", die)
    try:
        sets.submit_set(db, parse_sweep(DOCUMENT))
    except Killed:
        assert place == "commit set: after"
    row = store.find_set(db, "lr")
    assert row is not None
    for _ in range(40):
        try:
            sets.advance(db)
        except Killed:
            continue
        if going := open_jobs(db, row.id):
            assert len(going) <= 2
            end(db, going[0])
    names = sorted(jobs.find_job(db, job_id).name for job_id in jobs.list_ids(db))  # type: ignore[union-attr]
    assert died and names == [f"lr-{number}" for number in range(1, 7)]


@pytest.mark.parametrize("meanwhile", ["advance", "cancel"])
def test_a_view_that_is_old_begins_nothing(db: Database, meanwhile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another plane begins the same trial, or somebody cancels the set, between the look and the act."""
    row = sets.submit_set(db, parse_sweep({**DOCUMENT, "parallel": 1}))
    find_spec, once = store.find_spec, [True]

    def interleave(db: Database, set_id: str, number: int) -> object:
        if once and once.pop():
            sets.advance(db) if meanwhile == "advance" else sets.cancel(db, row.id)
        return find_spec(db, set_id, number)

    monkeypatch.setattr(store, "find_spec", interleave)
    sets.advance(db)
    assert len(jobs.list_ids(db)) == (1 if meanwhile == "advance" else 0)
    assert len(open_jobs(db, row.id)) == len(jobs.list_ids(db))


@pytest.mark.matrix(one_in=3, of="any order and any cut")
@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["advance", "die", "end", "cancel"]), max_size=30), st.integers(1, 4))
def test_any_order_of_deaths_ends_and_cancels(steps: list[str], parallel: int) -> None:
    """Against the rule: never more open than may be, a trial is one job at most, after a cancel none begins."""
    with tempfile.TemporaryDirectory() as folder:
        db = open_database(Path(folder) / "trainmaster.db")
        row = sets.submit_set(db, parse_sweep({**DOCUMENT, "parallel": parallel}))
        begun_at_cancel: int | None = None
        for step in steps:
            if step == "die":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(failpoints, "after", lambda what, detail="": (_ for _ in ()).throw(Killed))
                    with contextlib.suppress(Killed):
                        sets.advance(db)
            elif step == "end" and (going := open_jobs(db, row.id)):
                end(db, going[-1])
            elif step == "cancel":
                with contextlib.suppress(JobFinal):  # it is over
                    sets.cancel(db, row.id)
                begun_at_cancel = begun_at_cancel if begun_at_cancel is not None else len(jobs.list_ids(db))
            else:
                sets.advance(db)
            assert len(open_jobs(db, row.id)) <= parallel
            marked = [trial.job_id for trial in store.list_trials(db, row.id) if trial.job_id is not None]
            assert sorted(marked) == sorted(jobs.list_ids(db)), "every job is one trial, every begun trial one job"
            assert begun_at_cancel in (None, len(marked))
        db.close()


def test_a_cancel_stops_what_is_open_and_begins_no_more(db: Database) -> None:
    row = sets.submit_set(db, parse_sweep(DOCUMENT))
    sets.advance(db)
    sets.cancel(db, row.id)
    sets.cancel(db, row.id)
    sets.advance(db)
    rows = [jobs.find_job(db, job_id) for job_id in jobs.list_ids(db)]
    assert len(rows) == 2 and all(job is not None and job.cancel_requested for job in rows)
    assert store.list_unfinished(db) == []


@pytest.mark.parametrize("ended", [Status.COMPLETED, Status.FAILED, Status.CANCELLED])
def test_the_result_of_a_set_that_is_over_is_not_rewritten(db: Database, ended: Status) -> None:
    row = sets.submit_set(db, parse_sweep({**DOCUMENT, "parallel": 6}))
    sets.advance(db)
    first, *others = open_jobs(db, row.id)
    end(db, first, ended)
    for job_id in others[:-1]:
        end(db, job_id, ended if ended is Status.CANCELLED else Status.COMPLETED)
    if ended is Status.FAILED:  # one that goes on can be cancelled
        sets.cancel(db, row.id)
        ended = Status.CANCELLED
    end(db, others[-1], ended if ended is Status.CANCELLED else Status.COMPLETED)
    for _ in range(2):
        page = pages.read_one(db, row.id)
        assert page is not None and page.set.status is ended
        with pytest.raises(JobFinal, match=f"set {row.id} is already {ended}; there is nothing to cancel"):
            sets.cancel(db, row.id)


@pytest.mark.both_databases
@pytest.mark.parametrize("beside", [False, True])
def test_a_set_that_ends_in_the_moment_of_its_cancel_keeps_its_result(
    db: Database, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last run ends when the cancel was read and is not written; `beside`: in a transaction that is still open."""
    row = sets.submit_set(db, parse_sweep({**DOCUMENT, "parallel": 6}))
    sets.advance(db)
    *others, last = open_jobs(db, row.id)
    for job_id in others:
        end(db, job_id)
    begun, told = threading.Event(), list[BaseException]()

    def reach(place: str, _detail: object) -> None:
        if place == "commit set cancel: before":
            begun.set()
            if not beside:
                end(db, last)

    def cancel() -> None:
        try:
            sets.cancel(db, row.id)
        except JobFinal as refused:
            told.append(refused)

    monkeypatch.setattr(failpoints, "_reach", reach)
    thread = threading.Thread(target=cancel)
    if beside:
        with db.write() as conn:
            jobs.finish(conn, last, seen=Stage.QUEUED, status=Status.COMPLETED, at=datetime.now(UTC))
            thread.start()
            assert begun.wait(30)
            thread.join(0.5)  # it waits for the end of this transaction, or has cancelled what is over
    else:
        thread.start()
    thread.join(30)
    page = pages.read_one(db, row.id)
    assert page is not None and page.set.status is Status.COMPLETED
    assert [str(each) for each in told] == [f"set {row.id} is already completed; there is nothing to cancel"]
    assert "set.cancel" not in [entry.action for entry in audit.list_audit(db)]


def test_a_trial_that_cannot_begin_says_why_and_begins_when_it_can(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = sets.submit_set(db, parse_sweep(DOCUMENT))

    def refuse(*_: object, **__: object) -> None:
        raise TargetError("the file is gone")

    with monkeypatch.context() as patch:
        patch.setattr(submitting, "submit_once", refuse)
        sets.advance(db)
    found = store.find_set(db, row.id)
    assert found is not None and found.message.startswith("trial 1 cannot begin")
    sets.advance(db)
    assert len(open_jobs(db, row.id)) == 2


@pytest.mark.both_databases
def test_one_key_sent_at_once_by_many_makes_one_set(db: Database) -> None:
    made: list[tuple[str, bool]] = []
    ready = threading.Barrier(4)

    def send() -> None:
        ready.wait()
        row, new = sets.submit_set_once(db, parse_sweep(DOCUMENT), key="nightly")
        made.append((row.id, new))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({set_id for set_id, _ in made}) == 1 and sorted(new for _, new in made) == [False, False, False, True]
    assert len(store.list_sets(db)) == 1 and len(store.list_trials(db, made[0][0])) == 6
    for other in ({**DOCUMENT, "parallel": 1}, {**DOCUMENT, "env": {"SEED": "9"}}):
        with pytest.raises(KeyTaken, match="stands for set"):
            sets.submit_set_once(db, parse_sweep(other), key="nightly")


def test_a_key_is_answered_without_a_check(db: Database) -> None:
    """A target that is gone since, or a budget that is spent, does not hide what was made."""

    def gone(_word: str) -> targets.Target:
        raise TargetError("its file is gone")

    row, _ = sets.submit_set_once(db, parse_sweep(DOCUMENT), key="k")
    assert sets.submit_set_once(db, parse_sweep(DOCUMENT), key="k", load=gone) == (row, False)
    with pytest.raises(TargetError):
        sets.submit_set_once(db, parse_sweep(DOCUMENT), key="other", load=gone)


def test_an_empty_key_is_none(db: Database) -> None:
    """`--key "$UNSET"`, as for a job."""
    assert [sets.submit_set_once(db, parse_sweep(DOCUMENT), key="")[1] for _ in range(2)] == [True, True]


def test_what_is_the_same_for_all_trials_is_asked_once(db: Database) -> None:
    def count(trials: int) -> int:
        asked: list[str] = []

        def note(_conn: object, _cursor: object, statement: str, *_: object) -> None:
            asked.append(statement)

        event.listen(db.engine, "before_cursor_execute", note)
        try:
            values = [str(number) for number in range(trials)]
            sets.submit_set(db, parse_sweep({**DOCUMENT, "matrix": {"size": ["s"], "env.SEED": values}}))
        finally:
            event.remove(db.engine, "before_cursor_execute", note)
        return len(asked)

    assert count(40) == count(2)


def test_a_set_with_a_trial_that_its_target_refuses_makes_no_row(db: Database) -> None:
    document = {**DOCUMENT, "matrix": {"size": ["s"], "queue.name": [None, "team"]}}
    with pytest.raises(SpecError, match="one queue, which has no name"):
        sets.submit_set(db, parse_sweep(document))
    assert store.list_sets(db) == [] and jobs.list_ids(db) == []


def test_a_trial_does_not_begin_on_a_target_that_was_taken_from_its_project(db: Database) -> None:
    """Its jobs ran as the account of the project; without the grant they would run as the server."""
    with db.write() as conn:
        known_targets.put_grant(conn, "local", "lab", user="tm-lab", identity={}, at=datetime.now(UTC))
    row = sets.submit_set(db, parse_sweep({**DOCUMENT, "project": "lab"}), load=lambda _: targets.load("local"))
    assert {trial.word for trial in store.list_trials(db, row.id)} == {"tm-lab@local"}
    with db.write() as conn:
        known_targets.remove_grant(conn, "local", "lab")
    sets.advance(db, load=lambda _: targets.load("local"))
    found = store.find_set(db, row.id)
    assert jobs.list_ids(db) == [] and found is not None and "was taken from its project" in found.message
    with db.write() as conn:
        known_targets.put_grant(conn, "local", "lab", user="tm-lab", identity={}, at=datetime.now(UTC))
    sets.advance(db, load=lambda _: targets.load("local"))
    assert len(jobs.list_ids(db)) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_that_cannot_be_read_is_shown_as_it_is_and_cancelled_with_the_others(kind: str, db: Database) -> None:
    row = sets.submit_set(db, parse_sweep({**DOCUMENT, "parallel": 6}))
    sets.advance(db)
    trials = open_jobs(db, row.id)
    for job_id in trials[:2]:
        spoil(db, job_id, kind)
    page = pages.read_one(db, row.id)
    assert page is not None and page.set == pages.read(db).sets[0]
    assert (page.set.status, page.set.counts) == (Status.PENDING, {"pending": 6})
    bad, good = page.trials[0], page.trials[2]
    assert (bad.job, good.message) == (trials[0], "") and "cannot be read" in bad.message
    sets.cancel(db, row.id)
    for _ in range(3):
        sets.advance(db)
    heads = [find_head(db, job_id) for job_id in trials]
    assert all(head is not None and head.cancel_requested for head in heads) and store.list_unfinished(db) == []
    asked = [entry.subject for entry in audit.list_audit(db) if entry.action == "job.cancel"]
    assert sorted(asked) == sorted(f"job:{job_id}" for job_id in trials), "once each"


def test_a_set_whose_trials_cannot_be_read_is_over_when_they_are(db: Database) -> None:
    row = sets.submit_set(db, parse_sweep({**DOCUMENT, "parallel": 6}))
    sets.advance(db)
    for job_id in open_jobs(db, row.id):
        spoil(db, job_id, "newer field")
        end(db, job_id)
    page = pages.read_one(db, row.id)
    assert page is not None and (page.set.status, page.set.counts) == (Status.COMPLETED, {"completed": 6})
