"""Rows of the queue: what a job asks for, and who has a device."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import event, select, text

from control.test_dispatch import Shared
from trainmaster.control import submit as submitting
from trainmaster.core import schema
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Stage
from trainmaster.queueing.state import Device
from trainmaster.store import attempts, jobs
from trainmaster.store import tables as t
from trainmaster.store.capacity import devices, queue
from trainmaster.store.columns import fetch_at_once
from trainmaster.store.database import Database


def test_a_spare_is_waited_for_once(db: Database) -> None:
    """The queue counts it as a node; after a loss the job waits for its nodes alone."""
    spec = parse_spec({"name": "a", "train": {"steps": 8}, "resources": {"nodes": 2, "spares": 1}})
    request = queue.find_request(spec)
    assert request == queue.read_request(json.dumps(schema.to_plain(spec))) and request.nodes == 3
    job = submitting.submit(db, replace(spec, target="ssh:lab"), load=Shared(2).load)
    waiting = {row.id: row.request.nodes for row in queue.list_waiting(db, driven=False)}
    with db.write() as conn:
        conn.execute(t.jobs.update().where(t.jobs.c.id == job.id).values(attempts=1))
    again = {row.id: row.request.nodes for row in queue.list_waiting(db, driven=False)}
    assert (waiting[job.id], again[job.id]) == (3, 2)


def test_a_gpu_that_a_job_uses_without_holding_it_is_not_free(db: Database) -> None:
    now = datetime.now(UTC)
    by_x: dict[str, Any] = {"used": "process 7 holds 9 MiB", "attempts": ("x.1",)}
    gpus = [Device(id="GPU-0", machine="m0"), Device(id="GPU-1", machine="m0")]
    slices = [Device(id=f"MIG-{number}", machine="m0", parent="GPU-2") for number in range(2)]
    with db.write() as conn:
        devices.record(conn, "a", "gpu", [*gpus, *slices], at=now)
        devices.book(conn, "a", "x.1", {"m0": ("GPU-0", "MIG-0")}, at=now)
        # Of a whole GPU nvidia-smi may say that a slice is used, and not which.
        devices.record(conn, "a", "gpu", [replace(device, **by_x) for device in (*gpus, *slices)], at=now)
    used = {row.device: row.used for row in devices.list_devices(db)}
    assert used == {"GPU-0": None, "GPU-1": "process 7 holds 9 MiB", "MIG-0": None, "MIG-1": None}


def test_a_job_that_reports_no_steps_is_expected_to_end_by_its_limit(db: Database) -> None:
    now, ids = datetime.now(UTC), [f"{0:08}-0000-4000-8000-{number:012}" for number in range(2)]
    with db.write() as conn:
        devices.record(conn, "a", "gpu", [Device(id=f"GPU-{n}", machine="m0") for n in range(2)], at=now)
        for number, (job_id, limits) in enumerate(zip(ids, ({"timeout_s": 600}, {}), strict=True)):
            jobs.insert_job(conn, job_id, parse_spec({"name": "a", "command": ["x"], "limits": limits}), at=now)
            attempt = attempts.insert_attempt(conn, job_id, 1, handle={}, at=now)
            jobs.advance(conn, job_id, seen=Stage.QUEUED, to=Stage.RUNNING, at=now)
            devices.book(conn, "a", attempt, {"m0": (f"GPU-{number}",)}, at=now)
    ends = {held.job: held.end_s for held in queue.list_holders(db, devices.list_devices(db), now=now)}
    assert ends == {ids[0]: now.timestamp() + 600, ids[1]: None}


def test_rows_that_come_as_one_text_are_those_that_come_one_by_one(any_db: Database) -> None:
    """Times, truth, JSON, NULL, quotes and letters beyond ASCII."""
    now = datetime.now(UTC)
    with any_db.write() as conn:
        for number, text in enumerate(("", '"quoted" \\ \n\t', "größe 模型 🚀")):
            job_id = f"{0:08}-0000-4000-8000-{number:012}"
            jobs.insert_job(conn, job_id, parse_spec({"name": "a", "command": ["x", text or "-"]}), at=now)
            jobs.set_message(conn, job_id, text)
            attempts.insert_attempt(conn, job_id, 1, handle={"nodes": [text]}, at=now)
        jobs.request_cancel(conn, job_id, at=now)
        jobs_now, tried = select(t.jobs).order_by(t.jobs.c.id), select(t.attempts).order_by(t.attempts.c.id)
        for query in (jobs_now, tried):
            single = [tuple(row) for row in conn.execute(query)]
            assert sorted(fetch_at_once(conn, query), key=lambda row: row[0]) == single and len(single) == 3
        assert fetch_at_once(conn, jobs_now.where(t.jobs.c.id == "none")) == []


def test_ids_of_the_queue_are_read_from_an_index_alone(db: Database) -> None:
    """Rows hold whole specs: those of 10,000 jobs are many megabytes."""
    asked: list[tuple[str, Any]] = []

    def note(_conn: object, _cursor: object, statement: str, values: Any, *_more: object) -> None:
        asked.append((statement, values))

    event.listen(db.engine, "before_cursor_execute", note)
    queue.list_ids(db)
    queue.list_ids(db, project="p")
    with db.read() as conn:
        for statement, values in list(asked):
            plan = conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values).all()
            assert "USING COVERING INDEX ix_jobs_stage" in plan[0][3], plan


@pytest.mark.parametrize(
    "stated",
    [{"limits": {"timeout_s": 10**400}}, {"queue": {"max_wait_s": True}}, {"limits": {"timeout_s": float("inf")}},
     {"limits": {"timeout_s": float("nan")}}, {"resources": {"processes_per_node": True}},
     {"resources": {"nodes": 1.5}}],
)  # fmt: skip
def test_a_number_that_is_none_leaves_one_job_out_and_decides_for_the_others(
    stated: dict[str, Any], db: Database
) -> None:
    bad, good = (str(uuid.uuid4()) for _ in range(2))
    with db.write() as conn:
        for job_id in (bad, good):
            jobs.insert_job(conn, job_id, parse_spec({"name": "a", "command": ["x"]}), at=datetime.now(UTC))
        plain = {**schema.to_plain(parse_spec({"name": "a", "command": ["x"]})), **stated}
        # By hand: `inf` is no JSON, and Python reads it all the same.
        conn.execute(text("UPDATE jobs SET spec = :spec WHERE id = :id"), {"spec": json.dumps(plain), "id": bad})
    assert {row.id for row in queue.list_waiting(db, driven=False)} == {good} == {*queue.list_rows(db, [bad, good])}


def test_a_time_of_earlier_versions_that_never_ends_has_no_date(db: Database) -> None:
    """The pages name when the next job is expected to start, and there is no such date."""
    now, (holder, waits) = datetime.now(UTC), [f"{0:08}-0000-4000-8000-{number:012}" for number in range(2)]
    plain = {**schema.to_plain(parse_spec({"name": "a", "command": ["x"]})), "limits": {"timeout_s": 1e300}}
    with db.write() as conn:
        devices.record(conn, "a", "gpu", [Device(id="GPU-0", machine="m0")], at=now)
        for job_id in (holder, waits):
            jobs.insert_job(conn, job_id, parse_spec({"name": "a", "command": ["x"]}), at=now)
            conn.execute(t.jobs.update().where(t.jobs.c.id == job_id).values(spec=plain))
        attempt = attempts.insert_attempt(conn, holder, 1, handle={}, at=now)
        jobs.advance(conn, holder, seen=Stage.QUEUED, to=Stage.RUNNING, at=now)
        devices.book(conn, "a", attempt, {"m0": ("GPU-0",)}, at=now)
    [held] = queue.list_holders(db, devices.list_devices(db), now=now)
    [waiting] = queue.to_waiting(queue.list_waiting(db, driven=False), ["gpu"])
    assert (held.end_s, waiting.longest_s) == (None, None)


@pytest.mark.parametrize("handle", ["[1]", "7", '{"devices": 5}', '{"devices": ["m0"]}', '{"devices": {"m0": []}}'])
def test_a_handle_that_is_none_says_nothing_of_the_machines_before(handle: str, db: Database) -> None:
    job_id, now = str(uuid.uuid4()), datetime.now(UTC)
    with db.write() as conn:
        jobs.insert_job(conn, job_id, parse_spec({"name": "a", "command": ["x"]}), at=now)
        attempts.insert_attempt(conn, job_id, 1, handle={}, at=now)
        conn.execute(text("UPDATE attempts SET handle = :handle"), {"handle": handle})
    [row] = queue.list_waiting(db, driven=False)
    assert row.machines == (("m0",) if "[]" in handle else ())
