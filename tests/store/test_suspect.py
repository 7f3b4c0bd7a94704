"""A machine whose newest check failed is given out last for a day."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import insert

from trainmaster.core.results import Verdict
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Stage
from trainmaster.queueing.free import choose
from trainmaster.queueing.state import Device, Need
from trainmaster.store import attempts, jobs
from trainmaster.store import tables as t
from trainmaster.store.capacity import devices, order, queue
from trainmaster.store.capacity.order import LASTS, find_suspects
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


def suspects(db: Database, now: datetime = NOW, **checks: tuple[datetime, Verdict]) -> list[str]:
    with db.read() as conn:
        return sorted(find_suspects(conn, {row.machine for row in devices.list_devices(db)}, now=now, checks=checks))


def test_it_is_suspect_until_a_pre_flight_passes(place: Database) -> None:
    check(place, 1, timedelta(minutes=3), m0="pass", m1="fail", m2="warn")
    assert suspects(place) == ["m1"]
    check(place, 2, timedelta(minutes=2), m1="error")  # it was not measured: neither good nor bad
    assert suspects(place) == []
    check(place, 3, timedelta(minutes=1), m1="fail")
    assert suspects(place) == ["m1"]
    check(place, 4, timedelta(), m1="pass")
    assert suspects(place) == []


def test_the_operators_own_check_counts_where_it_is_newer(place: Database) -> None:
    check(place, 1, timedelta(hours=3), m0="fail", m1="pass")
    later, before = NOW - timedelta(hours=2), NOW - timedelta(hours=4)
    assert suspects(place) == ["m0"], "for a day: a fault does not go away in minutes"
    assert suspects(place, m0=(later, Verdict.PASS), m1=(later, Verdict.FAIL), m9=(later, Verdict.FAIL)) == ["m1"]
    assert suspects(place, m0=(before, Verdict.PASS), m1=(before, Verdict.FAIL)) == ["m0"]
    assert suspects(place, m2=(NOW + timedelta(days=400), Verdict.FAIL)) == ["m0"], "of a clock that is ahead"


@pytest.mark.parametrize("ahead", [timedelta(), timedelta(days=400)])
def test_it_is_one_as_any_other_after_a_while(place: Database, ahead: timedelta) -> None:
    """Also where the clock of the node is ahead: or one line of a job would count for ever."""
    check(place, 1, timedelta(), m1="fail")
    with place.write() as conn:
        conn.execute(t.check_results.update().values(at=NOW + ahead))
    assert suspects(place, NOW + LASTS - timedelta(seconds=1)) == ["m1"]
    assert suspects(place, NOW + LASTS) == []


def test_jobs_get_it_last(place: Database) -> None:
    check(place, 1, timedelta(), m0="fail")
    check(place, 2, timedelta(), m1="fail")
    assert start(place, 7, nodes=1) == [["m2"]]
    assert start(place, 8, nodes=2) == [["m2"], ["m0", "m1"]]  # every job starts that fits


def test_a_job_that_needs_more_machines_gets_the_others_first(place: Database) -> None:
    check(place, 1, timedelta(), m0="fail", m1="fail")
    ((one, other),) = start(place, 7, nodes=2)
    assert "m2" in (one, other)


def test_a_job_that_waits_for_the_only_machine_that_is_left_reads_that_its_check_failed(place: Database) -> None:
    check(place, 1, timedelta(), m0="fail", m1="fail", m2="fail")
    start(place, 7, nodes=3)
    (wait,) = waits(place, 8)
    assert wait.endswith("; the newest check of m0 failed, and no machine without a failed check is left")
    check(place, 2, timedelta(), m2="pass")
    assert "failed" not in waits(place, 9)[-1]


def waits(db: Database, number: int) -> list[str]:
    """One job more waits behind the one that starts on every machine; what those are told that wait."""
    start(db, number, nodes=1)
    decided = order.decide(db, "a", queue.list_waiting(db, driven=False), now=NOW).decisions
    return [wait.text for wait in decided.waits if wait.why == "first"]


def start(db: Database, number: int, *, nodes: int) -> list[list[str]]:
    """One job more waits; the machines of all that start."""
    resources = {"nodes": nodes, "processes_per_node": 1}
    spec = {"name": "a", "command": ["x"], "resources": resources, "target": "ssh:lab"}
    with db.write() as conn:
        jobs.insert_job(conn, f"{number:08}-0000-4000-8000-000000000000", parse_spec(spec), at=NOW)
    decided = order.decide(db, "a", queue.list_waiting(db, driven=False), now=NOW).decisions
    return [sorted(one.devices) for one in decided.starts]


def test_a_machine_that_a_job_ran_on_before_is_not_preferred_while_it_is_suspect() -> None:
    counts = {"m0": 1, "m1": 8, "m2": 8}
    one, two = (Need(nodes=nodes, each=1, kind="gpu") for nodes in (1, 2))
    assert choose(one, counts, ["m1"]) == ["m1"] and choose(one, counts, ["m1"], {"m1"}) == ["m0"]
    assert choose(one, counts, ["m1"], counts.keys()) == ["m0"]  # all are: as if none were
    assert choose(two, counts, ["m2"], {"m0"}) == ["m2", "m1"]
    assert choose(two, counts, ["m0"], {"m0", "m1"}) == ["m2", "m0"]
