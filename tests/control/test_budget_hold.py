"""A job waits while the budget of its project is spent: it says so, keeps nothing from others, and starts later."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from control import test_dispatch as base
from control.driving import driven, wait
from control.scripted import GOOD, Scripted, at_once, take_over
from trainmaster import targets
from trainmaster.control import budget
from trainmaster.control import submit as submitting
from trainmaster.control.context import Context
from trainmaster.control.queueing import dispatch, sets
from trainmaster.control.stage_handlers import handle_stage
from trainmaster.core.config.sweep import parse_sweep
from trainmaster.core.errors import OverBudget, UsageError
from trainmaster.core.spec import JobSpec, parse_spec
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.pages import queue as queue_page
from trainmaster.queueing.state import Device
from trainmaster.storage import open_store
from trainmaster.store import attempts, costs, leases
from trainmaster.store import jobs as rows
from trainmaster.store.capacity import budget_hold, devices, queue
from trainmaster.store.database import Database
from trainmaster.targets import Placement, find_place


def cap(db: Database, project: str, period: str, cents: int) -> None:
    with db.write() as conn:
        costs.set_budget(conn, project, period, cents, at=datetime.now(UTC))


@pytest.mark.both_databases
@pytest.mark.parametrize("period", ["total", "month"])
def test_a_job_of_a_spent_project_waits_with_the_reason_and_has_nothing_kept_for_it(
    db: Database, tmp_path: Path, period: str
) -> None:
    target = base.Shared(2)
    price = {"price_per_hour": 6}
    runs = base._submit(db, target, "runs", limits={"timeout_s": 3600})
    with base._driven(db, tmp_path, target):
        wait(lambda: base._runs(db, runs))
        paid = base._submit(db, target, "paid", project="lab", resources={"processes_per_node": 2, **price})
        free = base._submit(db, target, "free", project="lab", gpus=2)
        wait(lambda: "kept for it" in base._find(db, paid).message)
        (line,) = (each for each in queue_page.read(db).jobs if each.job_id == paid.id)
        assert line.position == 1 and line.expected_at is not None
        cap(db, "lab", period, 0)
        label = f"{datetime.now(UTC):%Y-%m}" if period == "month" else "total"
        until = "the budget is raised or the month ends" if period == "month" else "the budget is raised"
        why = f"the budget of project lab ({label}) is spent: $0.00 of $0.00; it waits until {until}"
        wait(lambda: base._find(db, paid).message == why)
        wait(lambda: "kept for it" in base._find(db, free).message)
        lines = {each.job_id: each for each in queue_page.read(db).jobs}
        held = lines[paid.id]
        assert (held.reason, held.position, held.expected_at, held.before) == (why, None, None, ())
        assert lines[free.id].position == 1 and lines[free.id].before == ()
        after = base._submit(db, target, "after", limits={"timeout_s": 60})
        wait(lambda: base._runs(db, after))
        target.ends |= {runs.id, after.id}
        wait(lambda: base._runs(db, free))
        target.ends.add(free.id)
        wait(lambda: base._find(db, free).status is Status.COMPLETED)
        assert base._find(db, paid).stage is Stage.QUEUED and base._find(db, paid).attempts == 0
        cap(db, "lab", period, 100_000)
        wait(lambda: base._runs(db, paid))
        target.ends.add(paid.id)
        wait(lambda: base._find(db, paid).status is Status.COMPLETED)


def test_a_job_far_behind_is_told_that_its_budget_is_spent(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message was that of the head of the queue still, and of the end by `queue.max_wait_s` then."""
    monkeypatch.setattr(dispatch, "_TOLD", 1)
    target = base.Shared(1)
    runs = base._submit(db, target, "runs")
    with base._driven(db, tmp_path, target):
        wait(lambda: base._runs(db, runs))
        paid = base._submit(db, target, "paid", project="lab", resources={"price_per_hour": 6})
        wait(lambda: "kept for it" in base._find(db, paid).message)
        base._submit(db, target, "next")
        cap(db, "lab", "total", 0)
        wait(lambda: "is spent: $0.00 of $0.00" in base._find(db, paid).message)


def test_pages_say_so_where_no_order_was_kept(db: Database) -> None:
    """As after the server that drove the jobs was killed."""
    ids = []
    for name, more in (("runs", {}), ("paid", {"resources": {"price_per_hour": 6}}), ("free", {})):
        spec = parse_spec({"name": name, "project": "lab", "command": ["x"], **more})
        ids.append(submitting.submit(db, spec).id)
    place, now = find_place("local"), datetime.now(UTC)
    with db.write() as conn:
        devices.record(conn, place, "gpu", [Device(id="GPU-0", machine="m0", model="H200")], at=now)
        attempt = attempts.insert_attempt(conn, ids[0], 1, handle={}, at=now)
        rows.advance(conn, ids[0], seen=Stage.QUEUED, to=Stage.RUNNING, at=now)
        devices.book(conn, place, attempt, {"m0": ("GPU-0",)}, at=now)
        leases.take(conn, "t", owner="a test")
    assert [line.position for line in queue_page.read(db).jobs] == [1, 2]
    cap(db, "lab", "total", 0)
    lines = {line.job_id: line for line in queue_page.read(db).jobs}
    assert "is spent: $0.00 of $0.00" in lines[ids[1]].reason and lines[ids[1]].position is None
    assert lines[ids[2]].position == 1 and "kept for it" in lines[ids[2]].reason


def test_a_target_with_a_queue_of_its_own_is_given_nothing(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "LOOK_S", 0.1)
    target = Scripted(GOOD)
    spec = {"name": "x", "project": "lab", "command": ["x"], "target": "scripted", "preflight": {"level": 0}}
    jobs = [
        submitting.submit(db, parse_spec({**spec, **more}), load=target.load)
        for more in ({}, {"queue": {"max_wait_s": 0.5}})
    ]
    cap(db, "lab", "total", 0)
    with driven(db, tmp_path, open_store(tmp_path / "storage"), load=target.load, rest_s=at_once):
        wait(lambda: base._find(db, jobs[1]).status.final)
        assert target.started == []
        late, held = (base._find(db, job) for job in reversed(jobs))
        why = "the budget of project lab (total) is spent: $0.00 of $0.00; it waits until the budget is raised"
        assert (held.stage, held.attempts, held.message) == (Stage.QUEUED, 0, why)
        assert late.reason is Reason.TIMED_OUT and late.message.endswith(why)
        cap(db, "lab", "total", 100)
        wait(lambda: base._find(db, jobs[0]).status is Status.COMPLETED)


def test_the_price_of_a_spec_is_read_by_the_queue(db: Database) -> None:
    spec = parse_spec({"name": "x", "command": ["x"], "resources": {"price_per_hour": 2.5}})
    submitting.submit(db, spec)
    (row,) = queue.list_waiting(db, driven=False)
    assert row.request == queue.find_request(spec) and row.request.price_per_hour == 2.5


@pytest.mark.parametrize("kind", ["lambda", "ssh", "pool"])
def test_a_stated_price_of_nothing_is_no_way_past_a_spent_budget(db: Database, tmp_path: Path, kind: str) -> None:
    """Where the machines have a price of their own, which is not known before they are chosen."""
    (tmp_path / "free.yaml").write_text("hosts: [{host: a}]\n")
    (tmp_path / "paid.yaml").write_text("hosts: [{host: a}, {host: b, price_per_hour: 2}]\n")

    def ask(price: float, file: str = "paid.yaml") -> dict[str, object]:
        word = kind if kind == "lambda" else f"{kind}:{tmp_path / file}"
        spec = {"name": "x", "project": "lab", "command": ["x"], "target": word}
        return {**spec, "resources": {"price_per_hour": price}}

    before = submitting.submit(db, parse_spec(ask(0)))
    cap(db, "lab", "total", 0)
    for price in (0, 1):
        with pytest.raises(OverBudget):
            submitting.submit(db, parse_spec(ask(price)))
        with pytest.raises(OverBudget):
            submitting.check_only(db, parse_spec(ask(price)))
        with pytest.raises(OverBudget):
            sets.submit_set(db, parse_sweep({**ask(price), "matrix": {"limits.timeout_s": [60, 90]}}))
    if kind != "lambda":
        submitting.submit(db, parse_spec(ask(0, "free.yaml")))  # nothing there has a price
    with db.write() as conn:
        leases.take(conn, "t", owner="a test")
    rows_now = queue.list_waiting(db)
    with db.read() as conn:
        held = budget_hold.list_held(conn, rows_now, may_cost=targets.may_cost, now=datetime.now(UTC))
    assert list(held) == [before.id] and "is spent: $0.00 of $0.00" in held[before.id]


def test_a_job_with_a_stated_price_of_nothing_is_not_placed_on_a_paid_machine(db: Database, tmp_path: Path) -> None:
    job = submitting.submit(
        db,
        parse_spec({
            "name": "x", "project": "lab", "command": ["x"], "target": "lambda", "resources": {"price_per_hour": 0},
        }),
    )  # fmt: skip
    cap(db, "lab", "total", 0)
    plane = Context(
        db=db, home=tmp_path, load=targets.load, token=take_over(db), storage=open_store(tmp_path / "storage")
    )  # fmt: skip
    assert not asyncio.run(handle_stage(plane, base._find(db, job)))
    after = base._find(db, job)
    assert (after.stage, after.attempts) == (Stage.QUEUED, 0) and "is spent: $0.00 of $0.00" in after.message


def test_the_operator_prices_this_machine(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that state no price count with it, and none states less."""
    monkeypatch.setenv("TRAINMASTER_GPU_HOUR_PRICE", "2.50")

    def ask(**resources: float) -> JobSpec:
        return parse_spec({"name": "x", "project": "lab", "command": ["x"], "resources": resources})

    priced = [({}, 250), ({"processes_per_node": 4}, 1000), ({"price_per_hour": 0}, 250), ({"price_per_hour": 9}, 900)]
    for stated, cents in priced:
        planned = targets.load("local").plan(Placement(attempt="a.1", spec=ask(**stated), job_folder=tmp_path / "a"))
        assert budget.price_of(ask(**stated), planned.handle) == cents
    job = submitting.submit(db, ask(price_per_hour=0))
    plane = Context(
        db=db, home=tmp_path, load=targets.load, token=take_over(db), storage=open_store(tmp_path / "storage")
    )  # fmt: skip
    cap(db, "lab", "total", 0)
    with pytest.raises(OverBudget, match="ask an administrator of the server"):
        submitting.submit(db, ask())
    assert budget.note_uncounted(db, job) is None, "it counts"
    assert not asyncio.run(handle_stage(plane, base._find(db, job)))
    assert "is spent: $0.00 of $0.00" in base._find(db, job).message
    for wrong in ("-1", "nan", "two"):
        monkeypatch.setenv("TRAINMASTER_GPU_HOUR_PRICE", wrong)
        with pytest.raises(UsageError, match="is no price"):
            targets.load("local").plan(Placement(attempt="a.1", spec=ask(), job_folder=tmp_path / "a"))
