"""A machine whose newest pre-flight failed gets no jobs for a while, as long as there is another."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import insert

from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Stage
from trainmaster.queueing.state import Device
from trainmaster.store import attempts, jobs
from trainmaster.store import tables as t
from trainmaster.store.capacity import devices, machines, order, queue
from trainmaster.store.capacity.held import HOLD, find_held
from trainmaster.store.database import Database

NOW = datetime(2026, 11, 19, 5, 0, tzinfo=UTC)


@pytest.fixture
def place(any_db: Database) -> Database:
    with any_db.write() as conn:
        devices.record(conn, "a", "gpu", [Device(id=f"GPU-{n}", machine=f"m{n}") for n in range(3)], at=NOW)
    return any_db


def check(db: Database, number: int, ago: timedelta, **verdicts: str) -> None:
    """The pre-flight of a job on several machines."""
    job_id, at = f"{number:08}-0000-4000-8000-000000000000", NOW - ago
    with db.write() as conn:
        jobs.insert_job(conn, job_id, parse_spec({"name": "a", "command": ["x"]}), at=at)
        attempt = attempts.insert_attempt(conn, job_id, 1, handle={}, at=at)
        jobs.advance(conn, job_id, seen=Stage.QUEUED, to=Stage.RUNNING, at=at)
        for node, verdict in verdicts.items():
            for name, said in (("gpu_count", "pass"), ("gpu_ecc", verdict)):
                row = {"attempt": attempt, "node": node, "check": name, "verdict": said, "findings": [], "at": at}
                conn.execute(insert(t.check_results).values(row))


def held(db: Database, now: datetime = NOW) -> dict[str, str]:
    with db.read() as conn:
        return dict(find_held(conn, devices.list_devices(db), machines.list_machines(db), now=now))


def test_it_is_held_back_until_a_pre_flight_passes(place: Database) -> None:
    check(place, 1, timedelta(minutes=3), m0="pass", m1="fail", m2="warn")
    assert held(place) == {"m1": "held back until 05:12 UTC: its newest pre-flight failed (gpu_ecc)"}
    check(place, 2, timedelta(minutes=2), m1="error")  # it was not measured: neither good nor bad
    assert held(place) == {}
    check(place, 3, timedelta(minutes=1), m1="fail")
    assert list(held(place)) == ["m1"]
    check(place, 4, timedelta(), m1="pass")
    assert held(place) == {}


def test_it_is_tried_again_after_a_while(place: Database) -> None:
    check(place, 1, timedelta(), m1="fail")
    assert list(held(place, NOW + HOLD - timedelta(seconds=1))) == ["m1"]
    assert held(place, NOW + HOLD) == {}


def test_a_clock_of_a_node_that_is_ahead_does_not_hold_it_for_ever(place: Database) -> None:
    check(place, 1, timedelta(days=-400), m1="fail")
    assert "05:15" in held(place)["m1"]


def test_where_every_machine_failed_none_is_held_back(place: Database) -> None:
    check(place, 1, timedelta(), m0="fail", m1="fail", m2="fail")
    assert held(place) == {}
    check(place, 2, timedelta(), m2="pass")
    assert list(held(place)) == ["m0", "m1"]
    with place.write() as conn:
        machines.drain(conn, "a", "m2", reason="fans", by="x", at=NOW)
    assert held(place) == {}


def test_jobs_go_to_the_others_and_are_told_why_they_wait(place: Database) -> None:
    check(place, 1, timedelta(), m1="fail")
    for number, nodes in ((7, 2), (8, 1)):
        resources = {"nodes": nodes, "processes_per_node": 1}
        spec = {"name": "a", "command": ["x"], "resources": resources, "target": "ssh:lab"}
        with place.write() as conn:
            jobs.insert_job(conn, f"{number:08}-0000-4000-8000-000000000000", parse_spec(spec), at=NOW)
    rows = queue.list_waiting(place, driven=False)
    decided = order.decide(place, "a", rows, now=NOW).decisions
    (start,) = decided.starts
    assert start.job.startswith("00000007") and sorted(start.devices) == ["m0", "m2"]
    (wait,) = decided.waits
    assert "held back until 05:15 UTC" in wait.text and "m1" in wait.text
