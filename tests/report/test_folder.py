"""A folder alone gives the same page as the database, and never a better one than its proof."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pages import samples
from trainmaster.api.jobs import JobPage
from trainmaster.core.errors import UsageError
from trainmaster.core.events import Event
from trainmaster.core.plan import ExitRecord, Plan
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.pages import job
from trainmaster.report.folder import read_folder
from trainmaster.report.markdown import render_markdown
from trainmaster.store.database import Database


def attempt(
    folder: Path, events: list[Event | bytes], record: ExitRecord | None = None, *, name: str = "job.1"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_bytes(samples.encode(events))
    plan = Plan(attempt=name, spec=samples.spec(), folder=str(folder), checkpoints="/x")
    (folder / "plan.json").write_text(plan.to_json())
    if record is not None:
        (folder / "exit.json").write_text(record.to_json())
    return folder


def exited(reason: Reason | None = None, message: str = "") -> ExitRecord:
    return ExitRecord(
        attempt="job.1", ok=reason is None, ended_at="2026-03-01T12:02:00+00:00", reason=reason, message=message
    )


EVENTS: list[Event | bytes] = [samples.project("job.1"), *samples.preflight(), *samples.training(), b"garbage\n"]


def test_the_same_events_give_the_same_page(db: Database, tmp_path: Path) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING).tell(EVENTS).end_attempt().finish(Status.COMPLETED)
    from_rows = job.read(db, story.id)
    from_files = read_folder(attempt(tmp_path / "a", EVENTS, exited()))
    assert from_rows is not None
    assert from_files.run == from_rows.run
    assert from_files.spec == from_rows.spec
    assert (from_files.status, from_files.id) == (Status.COMPLETED, "job")


def test_without_an_exit_record_nothing_is_completed(tmp_path: Path) -> None:
    page = read_folder(attempt(tmp_path / "a", EVENTS))
    assert page.status is Status.RUNNING
    assert "no exit.json" in page.message


@pytest.mark.parametrize("text", ["", "{", '{"ok": true}', "[]", "\x00"])
def test_an_exit_record_that_cannot_be_read_proves_nothing(tmp_path: Path, text: str) -> None:
    folder = attempt(tmp_path / "a", EVENTS)
    (folder / "exit.json").write_text(text)
    assert read_folder(folder).status is Status.RUNNING


def test_a_failure_keeps_its_reason(tmp_path: Path) -> None:
    page = read_folder(attempt(tmp_path / "a", EVENTS[:20], exited(Reason.OUT_OF_MEMORY, "rank 1")))
    assert (page.status, page.reason, page.message) == (Status.FAILED, Reason.OUT_OF_MEMORY, "rank 1")


def test_half_a_line_waits_while_it_runs_and_is_garbage_when_it_is_over(tmp_path: Path) -> None:
    events = [*EVENTS[:10], b'{"phase":"ST']
    assert read_folder(attempt(tmp_path / "a", events)).run.garbage_lines == 0
    assert read_folder(attempt(tmp_path / "b", events, exited())).run.garbage_lines == 1


def test_a_job_folder_holds_its_attempts_in_order(tmp_path: Path) -> None:
    for number in (10, 9):
        first = 51 if number == 10 else 1
        attempt(tmp_path / "attempts" / str(number), list(samples.training(first, 60)), exited(), name=f"job.{number}")
    page = read_folder(tmp_path)
    assert [x for x, _ in page.run.curves.loss] == [*range(1, 61), *range(51, 61)]
    assert [row.number for row in page.attempts] == [1, 2]


def test_only_events_are_needed(tmp_path: Path) -> None:
    (tmp_path / "global.json").write_bytes(samples.encode(EVENTS))
    page = read_folder(tmp_path)
    assert page.spec is None
    assert page.run.step == 200


def test_a_time_without_an_offset_is_read_in_the_zone_of_the_spec(tmp_path: Path) -> None:
    folder = attempt(tmp_path / "a", [b'{"ts":"2026-03-01T12:00:00","phase":"PROJECT","event":"start"}\n'])
    spec = samples.spec(zone="Asia/Kolkata")
    (folder / "plan.json").write_text(Plan(attempt="job.1", spec=spec, folder="/x", checkpoints="/x").to_json())
    assert read_folder(folder).started_at == datetime(2026, 3, 1, 6, 30, tzinfo=UTC)


@pytest.mark.parametrize(("name", "hour"), [("events.jsonl", 12), ("global.json", 6)])
def test_a_time_without_an_offset_and_a_zone_is_utc_except_in_global_json(tmp_path: Path, name: str, hour: int) -> None:
    (tmp_path / name).write_bytes(b'{"ts":"2026-03-01T12:00:00","phase":"PROJECT","event":"start"}\n')
    page = read_folder(tmp_path)
    assert page.started_at is not None and page.started_at.hour == hour


def test_a_folder_without_events_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no events\.jsonl"):
        read_folder(tmp_path)


def test_a_page_from_a_folder_is_a_page(tmp_path: Path) -> None:
    page = read_folder(attempt(tmp_path / "a", EVENTS, exited()))
    assert {field.name for field in dataclasses.fields(page)} == {field.name for field in dataclasses.fields(JobPage)}


def test_a_lost_first_attempt_leaves_the_last_one_to_say_that_the_job_is_over(tmp_path: Path) -> None:
    """A node that is lost writes no exit.json."""
    begun = datetime(2026, 3, 1, 12, tzinfo=UTC)
    for number, record in ((1, None), (2, exited())):
        start, end = begun + timedelta(hours=number), begun + timedelta(hours=number, minutes=2)
        events: list[Event | bytes] = [
            Event(ts=start, phase="TRAINING", event="start", data={"steps": 2, "batch_sequences": 1}),
            Event(ts=end, phase="TRAINING", event="end", data={"step": 2}),
        ]
        attempt(tmp_path / "attempts" / str(number), events, record, name=f"job.{number}")
    page = read_folder(tmp_path)
    assert page.status is Status.COMPLETED
    (one,) = page.run.iterations
    assert (one.completed, one.seconds) == (True, 3720.0)


def test_iterations_epochs_and_evaluations_of_a_bare_folder(tmp_path: Path) -> None:
    lines = [
        {"phase": "ITERATION", "event": "start", "iteration": 1, "data": {"iteration": 1}},
        {"phase": "TRAINING", "event": "start", "iteration": 1},
        {"phase": "TRAINING", "event": "epoch_complete", "iteration": 1, "data": {"epoch": 1, "avg_loss": 0.5}},
        {"phase": "TRAINING", "event": "end", "iteration": 1, "data": {"time_taken": 3.0}},
        {"phase": "ITERATION", "event": "end", "iteration": 1, "data": {"iteration": 1}},
    ]
    stamp = "2026-11-15T12:00:00+00:00"
    (tmp_path / "events.jsonl").write_text("".join(json.dumps({"ts": stamp, **line}) + "\n" for line in lines))
    page = read_folder(tmp_path)
    (one,) = page.run.iterations
    assert (one.number, one.epochs, one.completed) == (1, 1, True)
    assert "| 1 |" in render_markdown(page)
