"""Schedules: each time has its run once, whoever dies when; missed times, overlaps, pause and cancel by their rules."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from trainmaster.control import failpoints, workdir
from trainmaster.control.queueing import schedules, sets
from trainmaster.core.config.cron import MOST_WAITING
from trainmaster.core.config.sweep import parse_sweep
from trainmaster.core.errors import UsageError
from trainmaster.core.roles import Role
from trainmaster.core.states import Stage, Status
from trainmaster.pages.sets import read, read_one
from trainmaster.storage import open_store
from trainmaster.store import jobs, tokens, workdirs
from trainmaster.store.capacity import schedules as store
from trainmaster.store.capacity import sets as store_sets
from trainmaster.store.capacity.sets import SetRow
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.store.workdirs import WorkdirRow

from .driving import driven, wait

pytestmark = pytest.mark.both_databases

DOCUMENT: dict[str, Any] = {
    "name": "nightly", "command": ["train"], "schedule": {"cron": "0 3 * * *", "timezone": "Europe/Berlin"},
}  # fmt: skip
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


class Killed(BaseException):
    """The process dies here."""


def submit(db: Database, **more: Any) -> tuple[SetRow, datetime]:
    """A schedule, and its first time."""
    document = {**DOCUMENT, **more, "schedule": {**DOCUMENT["schedule"], **more.get("schedule", {})}}
    row = sets.submit_set(db, parse_sweep(document))
    first = store.list_schedules(db, [row.id])[row.id].next_at
    assert first is not None and first > datetime.now(UTC)
    assert row.id not in [each.id for each in store_sets.list_unfinished(db)]
    return row, first


def tick(db: Database, now: datetime) -> None:
    schedules.put_back(db, now=now)
    schedules.begin_due(db, now=now)
    sets.advance(db)


def end_all(db: Database) -> None:
    for job_id in jobs.list_ids(db):
        with db.write() as conn:
            jobs.finish(conn, job_id, seen=Stage.QUEUED, status=Status.COMPLETED, at=datetime.now(UTC))


def begun(db: Database) -> dict[str, str]:
    """Name of each job, and the time that it stands for."""
    rows = [jobs.find_job(db, job_id) for job_id in jobs.list_ids(db)]
    return {row.name: row.spec.env[schedules.TIME_VARIABLE] for row in rows if row is not None}


def show(at: datetime) -> str:
    return at.astimezone(store_zone()).isoformat(timespec="minutes")


def store_zone() -> Any:
    return parse_sweep(DOCUMENT).schedule.zone  # type: ignore[union-attr]


def note(db: Database, row: SetRow) -> str:
    return store.list_schedules(db, [row.id])[row.id].note


def test_every_time_is_one_ordinary_job_with_a_name_of_its_own(db: Database) -> None:
    row, first = submit(db)
    tick(db, first - HOUR)
    assert jobs.list_ids(db) == []
    at, wanted = first, {}
    for number in range(1, 4):
        tick(db, at + timedelta(seconds=1))
        tick(db, at + timedelta(seconds=2))
        wanted[f"nightly-{number}"] = show(at)
        assert begun(db) == wanted
        end_all(db)
        tick(db, at + HOUR)
        following = store.list_schedules(db, [row.id])[row.id].next_at
        assert following is not None and following > at
        at = following
    page = read_one(db, "nightly")
    assert page is not None and [trial.name for trial in page.trials] == ["nightly-3", "nightly-2", "nightly-1"]
    assert page.trials[0].values == {"scheduled for": wanted["nightly-3"]}
    assert page.set.status is Status.PENDING and (page.set.next_at, page.set.paused) == (at, False)
    assert page.set.schedule == "0 3 * * * Europe/Berlin" and page.set.message == ""
    assert read(db).sets == (page.set,), "the list says the same"
    assert store_sets.list_unfinished(db) == [], "nothing is looked at until the next time"


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("place", ["commit scheduled: before", "commit scheduled: after", "commit trial: before"])
def test_killed_anywhere_a_time_has_its_run_once(db: Database, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    died = 0

    def die(reached: str, _detail: object) -> None:
        nonlocal died
        died += reached == place
        if reached == place and died % 2:
            raise Killed

    _, first = submit(db)
    monkeypatch.setattr(failpoints, "_reach", die)
    at = first
    for _ in range(3):
        for _ in range(4):
            try:
                tick(db, at)
            except Killed:
                continue
        end_all(db)
        at += DAY
    times = list(begun(db).values())
    assert died >= 3 and len(times) == len(set(times)) == 3


@pytest.mark.matrix(one_in=2)
def test_two_servers_take_a_time_once(db: Database, database_url: str) -> None:
    """Each with its own connection, at the same moment; every run begins once."""
    row, first = submit(db, schedule={"cron": "* * * * *", "overlap": "queue"})
    others = [db, open_database(database_url)]
    start = threading.Barrier(2)
    failures: list[BaseException] = []

    def serve(mine: Database) -> None:
        try:
            for number in range(20):
                start.wait(timeout=60)
                tick(mine, first + timedelta(minutes=number))
        except BaseException as error:
            failures.append(error)
            start.abort()

    threads = [threading.Thread(target=serve, args=(mine,)) for mine in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    others[1].close()
    assert not failures
    trials = store_sets.list_trials(db, row.id)
    times = [trial.values["scheduled for"] for trial in trials]
    assert times == [show(first + timedelta(minutes=number)) for number in range(20)]
    for _ in range(20):
        end_all(db)
        sets.advance(db)
    assert len(begun(db)) == 20 and set(begun(db).values()) == set(times), "parallel is 1: they waited for each other"


def test_a_trial_that_comes_while_its_set_is_found_over_is_not_lost(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server saw nothing that waits and marks the set as over; another has just added a run."""
    row, first = submit(db)
    tick(db, first)
    end_all(db)
    mark_over = store_sets.mark_over

    def late(conn: Any, set_id: str) -> None:
        monkeypatch.setattr(store_sets, "mark_over", mark_over)
        store.insert_trials(conn, row.id, [{"number": 2, "values": {}, "spec": {}, "word": None}])
        mark_over(conn, set_id)

    monkeypatch.setattr(store_sets, "mark_over", late)
    with db.write() as conn:
        store_sets.mark_over(conn, row.id)
    assert [each.id for each in store_sets.list_unfinished(db)] == [row.id]


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize(("missed", "runs"), [("once", 1), ("skip", 0), ("all", 5)])
def test_times_at_which_no_server_ran(db: Database, missed: str, runs: int) -> None:
    overlap = "queue" if missed == "all" else "skip"
    row, first = submit(db, schedule={"timezone": "UTC", "missed": missed, "overlap": overlap})
    for _ in range(6):
        tick(db, first + 4 * DAY + HOUR)
        end_all(db)
    newest = [(first + number * DAY).isoformat(timespec="minutes") for number in range(5)][5 - runs :]
    assert list(begun(db).values()) == newest
    assert ("missed: " + missed in note(db, row)) == (missed != "all")
    page = read_one(db, row.id)
    assert page is not None and page.set.message == note(db, row)
    tick(db, first + 5 * DAY)
    assert len(begun(db)) == runs + 1 and note(db, row) == "", "the next one is on time"


def test_a_run_that_is_not_over_keeps_the_next_from_beginning(db: Database) -> None:
    row, first = submit(db)
    tick(db, first)
    tick(db, first + DAY)
    assert len(begun(db)) == 1 and "overlap: skip" in note(db, row)
    end_all(db)
    tick(db, first + 2 * DAY)
    assert len(begun(db)) == 2 and note(db, row) == ""


@pytest.mark.matrix(one_in=2)
def test_the_number_of_runs_that_wait_and_of_those_that_are_listed_is_bounded(db: Database) -> None:
    row, first = submit(db, schedule={"cron": "* * * * *", "overlap": "queue", "missed": "all"})
    with db.write() as conn:
        conn.execute(store.t.schedules.update().values(next_at=first - 30 * DAY))
    tick(db, first)
    with db.read() as conn:
        assert store.count_open(conn, row.id) == (MOST_WAITING - 1, 1)
    for number in range(1, 4):
        tick(db, first + timedelta(minutes=number))
    assert len(store_sets.list_trials(db, row.id)) == MOST_WAITING + 1 and "runs wait already" in note(db, row)
    with db.write() as conn:  # runs that are over leave the table when there are more than it holds
        done = {"job_id": "gone"}
        conn.execute(store.t.set_trials.update().where(store.t.set_trials.c.job_id.is_(None)).values(done))
    end_all(db)
    for number in range(1, 130):
        schedules.begin_due(db, now=first + HOUR + timedelta(minutes=number))
        with db.write() as conn:
            conn.execute(store.t.set_trials.update().where(store.t.set_trials.c.job_id.is_(None)).values(done))
    numbers = [trial.number for trial in store_sets.list_trials(db, row.id)]
    assert len(numbers) == store.KEPT and numbers == list(range(numbers[-1] - store.KEPT + 1, numbers[-1] + 1))


def test_a_matrix_begins_as_a_whole(db: Database) -> None:
    row, first = submit(db, matrix={"env.SEED": ["1", "2", "3"]}, parallel=2)
    tick(db, first)
    assert len(begun(db)) == 2
    end_all(db)
    sets.advance(db)
    end_all(db)
    tick(db, first + DAY)
    specs = {job.name: job.spec.env["SEED"] for job in (jobs.find_job(db, each) for each in jobs.list_ids(db)) if job}
    assert specs == {f"nightly-{number}": str((number - 1) % 3 + 1) for number in range(1, 6)}
    page = read_one(db, row.id)
    assert page is not None and set(page.trials[0].values) == {"scheduled for", "env.SEED"}


def test_pause_resume_and_cancel(db: Database) -> None:
    row, first = submit(db)
    schedules.pause(db, row.id)
    tick(db, first + 3 * DAY)
    page = read_one(db, row.id)
    assert page is not None and (page.set.paused, page.set.next_at) == (True, None) and begun(db) == {}
    schedules.go_on(db, row.id, now=first + 3 * DAY)
    tick(db, first + 3 * DAY + HOUR)
    assert begun(db) == {}, "times during the pause were not missed"
    tick(db, first + 4 * DAY + HOUR)
    assert len(begun(db)) == 1
    sets.cancel(db, row.id)
    tick(db, first + 9 * DAY)
    (job,) = (jobs.find_job(db, each) for each in jobs.list_ids(db))
    assert job is not None and job.cancel_requested and store_sets.list_unfinished(db) == []
    end_all(db)
    page = read_one(db, row.id)
    assert page is not None and page.set.status is Status.CANCELLED and page.set.next_at is None
    for change in (lambda: schedules.pause(db, row.id), lambda: schedules.go_on(db, row.id, now=first)):
        with pytest.raises(UsageError, match="is cancelled"):
            change()
    assert store.list_schedules(db, [row.id])[row.id].next_at is None
    once = sets.submit_set(db, parse_sweep({"name": "b", "command": ["x"], "matrix": {"env.A": ["1"]}}))
    with pytest.raises(UsageError, match="no schedule"):
        schedules.pause(db, once.id)


def test_a_cancel_between_the_look_and_the_act_begins_nothing(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    row, first = submit(db)
    list_due = store.list_due

    def interleave(db: Database, now: datetime) -> list[store.DueRow]:
        found = list_due(db, now)
        sets.cancel(db, row.id)
        return found

    monkeypatch.setattr(store, "list_due", interleave)
    tick(db, first)
    assert store_sets.list_trials(db, row.id) == [] and begun(db) == {}


def test_one_that_cannot_be_read_holds_up_no_other(db: Database, caplog: pytest.LogCaptureFixture) -> None:
    bad, first = submit(db, name="bad")
    submit(db)
    with db.write() as conn:
        broken = {"trials": [{"values": {}}]}
        conn.execute(store.t.schedules.update().where(store.t.schedules.c.set_id == bad.id).values(broken))
    for _ in range(3):
        tick(db, first)
    assert list(begun(db)) == ["nightly-1"] and caplog.text.count("trying again") == 1
    assert note(db, bad) == "the schedule cannot go on: KeyError: 'spec'"


def test_a_zone_that_is_gone_holds_up_no_other(db: Database) -> None:
    bad, first = submit(db, name="bad")
    submit(db)
    with db.write() as conn:
        stored = {"cron": "0 3 * * *", "timezone": "US/Pacific-New", "missed": "once", "overlap": "skip"}
        conn.execute(store.t.schedules.update().where(store.t.schedules.c.set_id == bad.id).values(schedule=stored))
    tick(db, first)
    assert list(begun(db)) == ["nightly-1"] and "US/Pacific-New" in note(db, bad)
    page = read_one(db, bad.id)
    assert page is not None and page.set.schedule == "0 3 * * * US/Pacific-New"


def test_a_clock_that_was_ahead_silences_no_schedule(db: Database) -> None:
    row, first = submit(db)
    tick(db, first + 365 * DAY)
    end_all(db)
    tick(db, first + HOUR / 2)
    timed = store.list_schedules(db, [row.id])[row.id]
    following = timed.schedule.find_next(first)
    assert following is not None and timed.next_at == following
    tick(db, following)
    assert show(following) in begun(db).values()
    # One server is a little ahead of another: what it has taken is not taken again.
    for ahead in (timedelta(seconds=90), timedelta(minutes=59)):
        quick, then = submit(db, name="quick", schedule={"cron": "* * * * *", "timezone": "UTC", "overlap": "queue"})
        tick(db, then + ahead)
        taken = store.list_schedules(db, [quick.id])[quick.id].next_at
        tick(db, then)
        schedules.pause(db, quick.id)
        schedules.go_on(db, quick.id, now=then)
        assert store.list_schedules(db, [quick.id])[quick.id].next_at == taken


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("back", [HOUR / 2, 2 * HOUR, 5 * HOUR, 40 * DAY])
@pytest.mark.parametrize("again", ["put back", "paused"])
def test_a_time_that_had_its_run_has_no_second_one_after_the_clock_is_set_back(
    db: Database, back: timedelta, again: str
) -> None:
    cron = {"cron": "0 * * * *", "timezone": "UTC", "overlap": "queue"}
    row, first = submit(db, schedule=cron)
    for hours in range(4):
        tick(db, first + hours * HOUR)
        end_all(db)
    before = dict(begun(db))
    assert len(before) == 4
    now = first + 3 * HOUR + HOUR / 60 - back
    tick(db, now)
    if again == "paused":
        schedules.pause(db, row.id)
        schedules.go_on(db, row.id, now=now)
    if back < DAY:  # the clock comes to the same times again, and to new ones: also before the first that had a run
        new = 2 + sum(now < first - hours * HOUR for hours in range(1, 9))
        while now < first + 5 * HOUR:
            now += HOUR / 4
            tick(db, now)
            end_all(db)
        shown = list(begun(db).values())
        assert len(shown) == len(set(shown)) == 4 + new
        assert begun(db).items() >= before.items() and show_utc(first + 5 * HOUR) in shown
    else:  # of 40 days none had a run: the schedule is not silent until the clock is where it was
        now = (now + HOUR).replace(minute=0, second=0, microsecond=0)
        tick(db, now)
        assert len(begun(db)) == 5 and show_utc(now) in begun(db).values()


def show_utc(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="minutes")


def test_a_time_that_was_run_by_a_clock_ahead_has_no_second_run_when_it_comes(db: Database) -> None:
    row, first = submit(db, schedule={"missed": "all", "overlap": "queue"})
    tick(db, first + 2 * DAY)  # a clock was two days ahead: three times had their runs
    end_all(db)
    seen = len(begun(db))
    for hours in range(-6, 4 * 24, 6):
        tick(db, first + hours * HOUR)
        end_all(db)
    shown = list(begun(db).values())
    assert seen < len(shown) and len(shown) == len(set(shown))
    decided = store.list_schedules(db, [row.id])[row.id].decided
    assert len(decided) == 1, "times that follow each other are one span"


def test_a_server_looks_for_times_too_far_ahead(db: Database, tmp_path: Path) -> None:
    row, first = submit(db)
    with db.write() as conn:
        store.go_on(conn, row.id, first + 365 * DAY)
    with driven(db, tmp_path, open_store(tmp_path / "storage")):
        wait(lambda: store.list_schedules(db, [row.id])[row.id].next_at == first)


def test_nothing_begins_for_a_token_that_was_revoked(db: Database) -> None:
    with db.write() as conn:
        for name in ("mallory", "ann"):
            tokens.issue(conn, name=name, role=Role.ADMIN, project=None, at=datetime.now(UTC))
    document = {"name": "grid", "command": ["x"], "matrix": {"env.A": ["1", "2"]}, "parallel": 1}
    of = {name: sets.submit_set(db, parse_sweep({**document, "name": name}), by=name) for name in ("mallory", "ann")}
    timed = sets.submit_set(db, parse_sweep(DOCUMENT), by="mallory")
    first = store.list_schedules(db, [timed.id])[timed.id].next_at
    assert first is not None
    tick(db, first - HOUR)
    with db.write() as conn:
        tokens.revoke(conn, "mallory", at=datetime.now(UTC))
    end_all(db)
    tick(db, first)
    jobs_of = [row for row in (jobs.find_job(db, each) for each in jobs.list_ids(db)) if row is not None]
    assert sorted(row.name for row in jobs_of) == ["ann-1", "ann-2", "mallory-1"]
    for row in (of["mallory"], timed):
        after = store_sets.find_set(db, row.id)
        assert after is not None and "the token mallory is revoked" in after.message
        sets.cancel(db, row.id)


def test_a_set_that_cannot_go_on_holds_up_no_other(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"name": "bad", "command": ["x"], "matrix": {"env.A": ["1"]}}
    bad = sets.submit_set(db, parse_sweep(document))
    sets.submit_set(db, parse_sweep({**document, "name": "good"}))
    find_spec = store_sets.find_spec

    def find(db: Database, set_id: str, number: int) -> Any:
        if set_id == bad.id:
            raise KeyError("spec")
        return find_spec(db, set_id, number)

    monkeypatch.setattr(store_sets, "find_spec", find)
    sets.advance(db)
    (job,) = (jobs.find_job(db, each) for each in jobs.list_ids(db))
    row = store_sets.find_set(db, bad.id)
    assert job is not None and job.name == "good-1"
    assert row is not None and row.message == "the set cannot go on: KeyError: 'spec'"


def test_the_working_folder_of_what_begins_later_is_kept(db: Database, tmp_path: Any) -> None:
    """Of a schedule and of a set whose runs wait; of a cancelled one it goes."""
    old = datetime.now(UTC) - 9 * DAY
    with db.write() as conn:
        for letter in "abcd":
            row = WorkdirRow(project="default", sha256=letter * 64, manifest=(), files=0, size_bytes=0)
            workdirs.put_workdir(conn, row, at=old)
    kept, _ = submit(db, workdir=f"sha256:{'a' * 64}")
    waits = {"name": "w", "command": ["x"], "matrix": {"env.A": ["1"]}, "workdir": f"sha256:{'b' * 64}"}
    sets.submit_set(db, parse_sweep(waits))
    gone, _ = submit(db, name="gone", workdir=f"sha256:{'c' * 64}")
    sets.cancel(db, gone.id)
    workdir.sweep(db, open_store(tmp_path / "storage"))
    assert {row.sha256[0] for row in workdirs.list_workdirs(db)} == {"a", "b"} and kept.name == "nightly"
