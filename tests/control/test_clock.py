"""A step of the wall clock is no duration: neither a deadline nor a cap sees it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import update

from trainmaster.control import budget, reconcile
from trainmaster.control import submit as submitting
from trainmaster.control.clock import FOLDER, Clock
from trainmaster.control.deadlines import Deadlines
from trainmaster.core.money.cost import Span, add_up
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Stage, TargetState
from trainmaster.store import attempts, costs, jobs, leases, tables
from trainmaster.store.database import Database

from .scripted import Scripted


class Machine:
    """Two clocks: the wall clock can be set, the steady one only runs."""

    def __init__(self) -> None:
        self.steady_s, self.set_s = 1_000.0, 1_700_000_000.0

    def wall(self) -> float:
        return self.set_s + self.steady_s

    def steady(self) -> float:
        return self.steady_s

    def clock(
        self, home: Path | None = None, *, boot: str = "one", host: str = "here", pid: int | None = None
    ) -> Clock:
        return Clock(home, wall=self.wall, steady=self.steady, boot=boot, host=host, pid=pid)


@pytest.mark.parametrize("step_s", [7_200.0, -7_200.0])
def test_a_step_inside_a_duration_does_not_count(step_s: float, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    clock = machine.clock()
    since = clock.now() - timedelta(seconds=30)
    machine.steady_s += 30
    machine.set_s += step_s
    now = clock.now()
    assert clock.elapsed_s(since, now) == pytest.approx(60)
    assert f"the clock was set by {step_s:+.0f} s; durations leave the step out" in caplog.text
    later = clock.now()
    machine.steady_s += 10
    assert clock.elapsed_s(later, clock.now()) == pytest.approx(10), "what begins behind the step is not touched"


@pytest.mark.parametrize("steps", [(86_400.0, -86_400.0), (-86_400.0, 86_400.0), (86_400.0, -172_800.0)])
def test_steps_that_follow_each_other_do_not_count(steps: tuple[float, ...]) -> None:
    """A clock that is set wrong for a moment and set right again: the job of an hour is one of an hour."""
    machine = Machine()
    clock = machine.clock()
    begins = []
    for step_s in (*steps, 0.0):
        begins.append((machine.steady_s, clock.now()))
        machine.steady_s += 1800
        machine.set_s += step_s
        now = clock.now()
    for steady_s, began in begins:
        assert clock.elapsed_s(began, now) == pytest.approx(machine.steady_s - steady_s)


def test_a_job_that_was_just_heard_of_is_not_stalled_by_a_clock_set_back(db: Database) -> None:
    machine, target = Machine(), Scripted()
    clock = machine.clock()
    job = submitting.submit(db, parse_spec({"name": "a", "target": "scripted", "command": ["true"]}), load=target.load)
    began = clock.now()
    machine.steady_s += 7200
    machine.set_s -= 86_400
    heard = clock.now()
    machine.steady_s += 60
    job = replace(job, stage=Stage.RUNNING, stage_since=began, heard_at=heard)
    deadlines = Deadlines(elapsed_s=clock.elapsed_s)
    assert deadlines.quiet_s(job, clock.now()) == pytest.approx(60)
    assert not deadlines.is_stalled(job, clock.now())


def test_a_time_that_the_clock_never_showed_is_taken_as_it_is() -> None:
    machine = Machine()
    clock = machine.clock()
    machine.set_s += 86_400
    now = clock.now()
    assert clock.elapsed_s(now + timedelta(seconds=60), now) == pytest.approx(-60), "of another machine's clock"


def test_a_rest_ends_though_the_clock_was_set_back(db: Database, tmp_path: Path) -> None:
    target = Scripted()
    job = submitting.submit(db, parse_spec({"name": "a", "target": "scripted", "command": ["true"]}), load=target.load)
    with db.write() as conn:
        leases.take(conn, "one", owner="here")
        jobs.set_backoff(conn, job.id, until=datetime.now(UTC) + timedelta(seconds=600), tries=1, message="away")
    assert leases.list_due(db, "one") == []
    with db.write() as conn:  # as the row looks once the clock is set back by a day
        jobs.set_backoff(conn, job.id, until=datetime.now(UTC) + timedelta(days=1), tries=1, message="away")
    assert leases.list_due(db, "one") == [job.id]


def test_a_lease_expires_though_the_clock_was_set_back(db: Database, tmp_path: Path) -> None:
    target = Scripted()
    job = submitting.submit(db, parse_spec({"name": "a", "target": "scripted", "command": ["true"]}), load=target.load)
    with db.write() as conn:
        leases.take(conn, "gone", owner="elsewhere")
    assert not leases.wanted(db, "one")
    with db.write() as conn:
        far = datetime.now(UTC) + timedelta(days=1)
        conn.execute(update(tables.jobs).where(tables.jobs.c.id == job.id).values(lease_until=far))
    assert leases.wanted(db, "one")
    with db.write() as conn:
        leases.take(conn, "one", owner="here")
        assert leases.holds(conn, job.id, "one")


def test_a_small_difference_is_no_step() -> None:
    machine = Machine()
    clock = machine.clock()
    since = clock.now()
    machine.set_s += 2
    assert clock.elapsed_s(since, clock.now()) == pytest.approx(2)


def test_a_step_while_no_server_ran_is_found_at_the_next_start(tmp_path: Path) -> None:
    machine = Machine()
    since = machine.clock(tmp_path).now()
    machine.steady_s += 100
    machine.set_s += 3_600
    again = machine.clock(tmp_path)
    assert again.elapsed_s(since, again.now()) == pytest.approx(100)
    third = machine.clock(tmp_path)
    assert third.elapsed_s(since, third.now()) == pytest.approx(100)


def test_after_a_reboot_the_old_offset_means_nothing(tmp_path: Path) -> None:
    machine = Machine()
    since = machine.clock(tmp_path).now()
    machine.set_s += machine.steady_s + 500
    machine.steady_s = 5.0
    clock = machine.clock(tmp_path, boot="two")
    assert clock.elapsed_s(since, clock.now()) == pytest.approx(505)


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / FOLDER / f"here.{os.getpid()}.json"
    path.parent.mkdir()
    path.write_text("{")
    Machine().clock(tmp_path)
    assert '"steps": []' in path.read_text()


def test_each_process_has_a_file_of_its_own_and_goes_on_with_those_before_it(tmp_path: Path) -> None:
    machine, other = Machine(), Machine()
    gone, lives = 2**22 + 1, os.getppid()  # no process has a number over 2**22
    first, second = machine.clock(tmp_path, pid=gone), machine.clock(tmp_path, pid=lives)
    far = other.clock(tmp_path, boot="far", host="far", pid=7)
    since = first.now()
    machine.set_s += 7_200
    second.observe()  # the first one is dead by now
    other.set_s -= 600
    far.observe()
    third = machine.clock(tmp_path)
    assert third.elapsed_s(since, third.now()) == pytest.approx(0), "the step of its own machine, and no other"
    names = {path.name for path in (tmp_path / FOLDER).iterdir()}
    assert names == {f"here.{lives}.json", f"here.{os.getpid()}.json", "far.7.json"}


def test_money_is_counted_for_the_time_that_passed() -> None:
    machine = Machine()
    clock = machine.clock()
    span = Span(cents_per_hour=100.0, start=clock.now())
    machine.steady_s += 3_600
    machine.set_s += 100 * 3_600
    now = clock.now()
    assert add_up([clock.correct(span, now=now)], now=now).known_cents == pytest.approx(100)
    assert add_up([span], now=now).known_cents == pytest.approx(10_100)


STEP_S = 7_200.0


@pytest.mark.parametrize("stepped", [True, False])
def test_a_step_of_the_clock_times_no_job_out(db: Database, tmp_path: Path, stepped: bool) -> None:
    """The rows say that the job began two hours ago. Where the clock was set forward by that, it began just now."""
    target = Scripted()
    mapping = {
        "name": "a", "target": "scripted", "command": ["true"], "limits": {"timeout_s": 600, "stall_minutes": 30}
    }  # fmt: skip
    job = submitting.submit(db, parse_spec(mapping), load=target.load)
    began = datetime.now(UTC) - timedelta(seconds=STEP_S + 1)
    with db.write() as conn:
        attempt = attempts.insert_attempt(conn, job.id, 1, handle={"attempt": f"{job.id}.1"}, at=began)
        attempts.record_poll(conn, attempt, TargetState.RUNNING, at=began)
        jobs.advance(conn, job.id, seen=Stage.QUEUED, to=Stage.RUNNING, at=began)
    target.started.append(attempt)
    if stepped:  # the offset of the clocks as a server kept it before the step
        kept = Clock(tmp_path)
        (path,) = (tmp_path / FOLDER).iterdir()
        found = json.loads(path.read_text())
        path.write_text(json.dumps({**found, "offset_s": kept._offset_s - STEP_S}))

    async def go() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(reconcile.run(db, tmp_path, stop=stop, tick_s=0.02, load=target.load))
        end = time.monotonic() + 60
        while target.made("poll") < 5 and not target.made("cancel") and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        stop.set()
        await running

    asyncio.run(go())
    assert (target.made("cancel") == 0) is stepped


@pytest.mark.parametrize("stepped", [True, False])
def test_a_step_of_the_clock_spends_no_money(db: Database, stepped: bool) -> None:
    machine = Machine()
    clock = machine.clock()
    spec = {"name": "a", "command": ["true"], "resources": {"price_per_hour": 6}, "limits": {"max_cost": 3}}
    job = submitting.submit(db, parse_spec(spec))
    with db.write() as conn:
        jobs.advance(conn, job.id, seen=Stage.QUEUED, to=Stage.RUNNING, at=clock.now())
        attempt = attempts.insert_attempt(conn, job.id, 1, handle={}, at=clock.now())
        costs.set_price(conn, attempt, 600)
    if stepped:
        machine.set_s += 10 * 3_600
    else:
        machine.steady_s += 10 * 3_600
    budget.enforce(db, clock=clock)
    (row,) = attempts.list_attempts(db, job.id)
    assert (row.stop_reason is None) is stepped
