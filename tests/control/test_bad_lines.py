"""A line that cannot become a row is stored as a fault, and the stream goes on; another file is read from its start."""

from __future__ import annotations

import json
import random
from datetime import UTC
from typing import Any

import pytest
from sqlalchemy.event import listen

from store.rows import count_faults
from trainmaster.core.events import Event, Line, split
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.store import events, nodes
from trainmaster.store.database import Database
from trainmaster.store.page_rows import iterations

from .lines import ingest_bytes, line, new_job, records

pytestmark = pytest.mark.both_databases

LONG = "m" * 4_000
AFTER = line(9, "TRAINING", "epoch_complete", epoch=1, data={"avg_loss": 1.0})


def noise(length: int) -> str:
    """Text that no index can compress."""
    return "".join(random.Random(7).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=length))


def test_a_long_model_name_and_node_name_do_not_hold_the_stream_up(db: Database) -> None:
    job_id, attempt = new_job(db)
    ingest_bytes(
        db,
        attempt,
        line(0, "EVAL_MODEL", "metrics", data={"model_id": noise(4_000), "f1": 0.5})
        + line(1, "PREFLIGHT", "check", data={"check": "disk", "verdict": "pass", "node": noise(5_000)})
        + AFTER,
    )
    assert [row.number for i in iterations.list_iterations(db, job_id) for row in iterations.list_epochs(db, i.id)] == [
        1
    ]
    (evaluation,) = iterations.list_evals(db, job_id=job_id)
    assert (
        evaluation.model_id is not None
        and evaluation.model_id.startswith(noise(4_000)[:200])
        and len(evaluation.model_id) <= 255
    )
    assert len(nodes.list_checks(db, job_id)[0].node) <= 255


def test_two_long_names_with_one_beginning_stay_apart(db: Database) -> None:
    job_id, attempt = new_job(db)
    ingest_bytes(db, attempt, b"".join(line(0, "EVAL_MODEL", "metrics", data={"model_id": LONG + end}) for end in "ab"))
    assert len({row.model_id for row in iterations.list_evals(db, job_id=job_id)}) == 2


@pytest.mark.parametrize("bad", [2**70, "\ud800"])
def test_a_line_that_the_database_refuses_is_a_fault_and_the_next_is_stored(db: Database, bad: object) -> None:
    """No parsed line is like this; the store must stand it all the same."""
    job_id, attempt = new_job(db)
    refused = Line(offset=0, length=10, event=Event(phase="STEP", event="metrics", seq=bad))  # type: ignore[arg-type]
    if isinstance(bad, str):
        refused = Line(offset=0, length=10, event=Event(phase=bad, event="metrics"))
    good = Line(offset=10, length=10, event=Event(phase="STEP", event="metrics"))
    with db.write() as conn:
        assert events.append_events(conn, attempt, EVENTS_FILE, seen_offset=0, lines=[refused, good])
    rows = events.list_events(db, job_id)
    assert [(row.offset, row.phase) for row in rows] == [(0, None), (10, "STEP")]
    assert (rows[0].fault or "").startswith("could not be stored: ")


def test_a_record_that_cannot_be_derived_is_a_fault_of_its_line(db: Database) -> None:
    job_id, attempt = new_job(db)
    refused = Line(offset=0, length=10, event=Event(phase="ITERATION", event="start", data={"iteration": 2**70}))
    good = Line(offset=10, length=10, event=Event(phase="ITERATION", event="start", iteration=3))
    with db.write() as conn:
        assert events.append_events(conn, attempt, EVENTS_FILE, seen_offset=0, lines=[refused, good])
    rows = events.list_events(db, job_id)
    assert [row.phase for row in rows] == ["ITERATION", "ITERATION"]
    assert (rows[0].fault or "").startswith("stored as an event only: ") and rows[1].fault is None
    assert [row.number for row in iterations.list_iterations(db, job_id)] == [3]


@pytest.mark.parametrize("new", [b"", line(5, "STEP", "metrics") * 3, line(5, "STEP", "metrics") * 300])
def test_a_truncated_or_replaced_file_is_marked_and_read_from_its_start(db: Database, new: bytes) -> None:
    job_id, attempt = new_job(db)
    old = b"".join(line(at, "TRAINING", "epoch_complete", epoch=at, data={"avg_loss": 1.0}) for at in range(1, 9))
    ingest_bytes(db, attempt, old)
    ingest_bytes(db, attempt, new)
    ingest_bytes(db, attempt, new)  # once more: nothing changes
    rows = events.list_events(db, job_id, limit=10_000)
    marks = [row for row in rows if row.fault is not None]
    assert [row.offset for row in marks] == [len(old)] and "truncated, replaced or removed" in (marks[0].fault or "")
    assert len([row for row in rows if row.phase == "STEP"]) == new.count(b"\n")
    assert len([row for row in rows if row.phase == "TRAINING"]) == 8
    assert count_faults(db, job_id) == 1


def test_a_file_replaced_by_another_of_the_same_size_is_noticed(db: Database) -> None:
    job_id, attempt = new_job(db)
    ingest_bytes(db, attempt, b"".join(line(at, "STEP", "metrics", seq=at) for at in range(5)))
    ingest_bytes(db, attempt, b"".join(line(at, "STEP", "metrics", seq=at + 5) for at in range(5)))
    assert [row.seq for row in events.list_events(db, job_id) if row.phase] == list(range(10))


@pytest.mark.parametrize("where", ["field", "data"])
def test_the_work_for_a_line_does_not_grow_with_the_lines_before_it(db: Database, where: str) -> None:
    """Statements, not seconds: as many for the last lines as for the first, wherever the iteration stands."""
    _, attempt = new_job(db)
    statements, many, offset = 0, 500, 0

    def count(*_: object) -> None:
        nonlocal statements
        statements += 1

    def of(number: int) -> dict[str, Any]:
        return {"iteration": number, "data": {}} if where == "field" else {"data": {"iteration": number}}

    made = []
    for turn in range(6):
        at = range(turn * many, (turn + 1) * many)
        raw = b"".join(line(n, "ITERATION", "start" if n % 2 else "end", **of(n % 7)) for n in at)
        new = split(raw, offset=offset, zone=UTC)
        before = statements
        with db.write() as conn:
            listen(conn, "before_cursor_execute", count)
            assert events.append_events(conn, attempt, EVENTS_FILE, seen_offset=offset, lines=new)
        made.append(statements - before)
        offset += len(raw)
    assert max(made[1:]) == min(made[1:]), f"the last {many} lines cost what the first ones did: {made}"
    assert max(made) < many / 10, f"not a statement for each line: {made}"


@pytest.mark.matrix(one_in=3, of="any order and any cut")
def test_records_of_many_iterations_read_in_any_pieces_are_the_same(db: Database) -> None:
    content = b"".join(
        line(at, phase, event, data={"iteration": at % 40, **({"duration": at / 7} if event == "end" else {"lr": at})})
        for at in range(400)
        for phase, event in (("ITERATION", "start"), ("TRAINING", "start"), ("TRAINING", "end"), ("ITERATION", "end"))
    )
    outcomes = []
    for size in (len(content), 1_000, 7_777):
        job_id, attempt = new_job(db)
        for end in range(size, len(content) + size, size):
            ingest_bytes(db, attempt, content[:end])
        outcomes.append(json.dumps(records(db, job_id), default=str, sort_keys=True))
    assert outcomes[0] == outcomes[1] == outcomes[2]
