"""Seed 004, phases 4.1 to 4.5: each of its checkboxes, from lines of a file to rows, through the real ingest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.store.page_rows import iterations

from .lines import job_of, line, records, said, utc

FULL = {
    "accuracy": 0.91, "precision": 0.9, "recall": 0.89, "f1": 0.895, "auc": 0.97, "loss": 0.3,
    "confusion_matrix": [[90, 10], [8, 92]],
}  # fmt: skip


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.spawns)])
def db(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """One database of each kind for all of them: every test has a job of its own."""
    if request.param == "sqlite":
        where = str(tmp_path_factory.mktemp("events") / "trainmaster.db")
    else:
        where = request.getfixturevalue("postgres").create()
    database = open_database(where)
    yield database
    database.close()


# 4.1 PROJECT


def test_project_start_updates_job_created_at(db: Database) -> None:
    """When the project began there; `created_at` itself stays the moment at which the job was submitted."""
    job = job_of(db, said(db, line(0, "PROJECT", "start", data={"name": "x"})))
    assert job.project_started_at == utc(0) and job.time_taken is None
    assert job.created_at > utc(0)


def test_project_end_calculates_time_taken(db: Database) -> None:
    stated = said(db, line(0, "PROJECT", "start"), line(90, "PROJECT", "end", data={"duration": 88.5}))
    assert job_of(db, stated).time_taken == 88.5
    not_stated = said(db, line(0, "PROJECT", "start"), line(90, "PROJECT", "end"))
    assert job_of(db, not_stated).time_taken == 90.0


def test_the_agents_own_project_events_do_not_replace_those_of_the_program(db: Database) -> None:
    begun = line(0, "PROJECT", "start", data={"attempt": "x.1", "host": "box", "version": "0.1"})
    ended = line(97, "PROJECT", "end", data={"ok": True, "reason": None, "message": "", "time_taken": 97.5})
    own = (line(5, "PROJECT", "start", data={"name": "x"}), line(90, "PROJECT", "end", data={"duration": 4.0}))
    for lines in ((begun, *own, ended), (*own, begun, ended), (ended, *reversed(own), begun)):
        job = job_of(db, said(db, *lines))
        assert (job.project_started_at, job.time_taken) == (utc(5), 4.0)
    silent = job_of(db, said(db, begun, ended))
    assert (silent.project_started_at, silent.time_taken) == (utc(0), 97.5), "the agent's, where the program is silent"


def test_timestamps_parsed_correctly_ist(db: Database) -> None:
    job = job_of(db, said(db, b'{"ts":"2025-11-04T15:30:00","phase":"PROJECT","event":"start"}\n'))
    assert job.project_started_at is not None
    assert job.project_started_at.isoformat() == "2025-11-04T10:00:00+00:00"
    other = job_of(db, said(db, b'{"ts":"2025-11-04T15:30:00+01:00","phase":"PROJECT","event":"start"}\n'))
    assert other.project_started_at is not None
    assert other.project_started_at.isoformat() == "2025-11-04T14:30:00+00:00"


# 4.2 GROUP_ITERATION, ITERATION


def test_group_iteration_start_updates_training_config(db: Database) -> None:
    job_id = said(db, line(0, "GROUP_ITERATION", "start", data={"config": {"lr": 0.1, "iterations": 3}}))
    assert job_of(db, job_id).training_config == {"lr": 0.1, "iterations": 3}


def test_iteration_start_creates_training_iteration_record(db: Database) -> None:
    job_id = said(db, line(5, "ITERATION", "start", iteration=2, data={"step_config": {"k": 1}}))
    (row,) = iterations.list_iterations(db, job_id)
    assert (row.number, row.started_at, row.completed_at, row.config) == (2, utc(5), None, {"k": 1})


def test_a_line_may_call_its_iteration_iteration_number(db: Database) -> None:
    raw = b'{"timestamp":"2025-11-04T10:00:05","phase":"ITERATION","event":"start","iteration_number":%s}\n'
    (row,) = iterations.list_iterations(db, said(db, raw % b"2"))
    assert row.number == 2
    for other, number in ((b"-1", 1), (b'"two"', 1), (b'2,"iteration":3', 3)):  # without one it is the first
        assert [row.number for row in iterations.list_iterations(db, said(db, raw % other))] == [number]


def test_iteration_end_updates_completed_at_and_time_taken(db: Database) -> None:
    begin = line(5, "ITERATION", "start", iteration=1)
    for end, taken in (({"duration": 24.5}, 24.5), ({}, 25.0)):
        (row,) = iterations.list_iterations(db, said(db, begin, line(30, "ITERATION", "end", iteration=1, data=end)))
        assert (row.started_at, row.completed_at, row.time_taken) == (utc(5), utc(30), taken)


def test_multiple_iterations_handled_correctly(db: Database) -> None:
    lines = [
        line(n * 10 + at, "ITERATION", event, iteration=n)
        for n in (1, 2, 3)
        for at, event in ((0, "start"), (n, "end"))
    ]
    rows = iterations.list_iterations(db, said(db, *lines))
    assert [(row.number, row.started_at, row.time_taken) for row in rows] == [(n, utc(n * 10), n) for n in (1, 2, 3)]


# 4.3 TRAJECTORY


def test_trajectory_start_creates_traj_gen_step(db: Database) -> None:
    (step,) = iterations.list_steps(db, said(db, line(1, "TRAJECTORY", "start", iteration=1, data={"episodes": 8})))
    assert (step.kind, step.config, step.started_at, step.step_time) == ("traj_gen", {"episodes": 8}, utc(1), None)


def test_trajectory_end_records_duration(db: Database) -> None:
    lines = (line(1, "TRAJECTORY", "start", iteration=1), line(9, "TRAJECTORY", "end", iteration=1))
    (step,) = iterations.list_steps(db, said(db, *lines))
    assert (step.completed_at, step.step_time) == (utc(9), 8.0)


def test_trajectory_links_to_correct_iteration(db: Database) -> None:
    job_id = said(
        db,
        line(0, "ITERATION", "start", iteration=1),
        line(1, "ITERATION", "start", iteration=2),
        line(2, "TRAJECTORY", "start", iteration=2),
        line(3, "TRAJECTORY", "start"),  # without an iteration: of the first
    )
    one, two = iterations.list_iterations(db, job_id)
    assert [(step.iteration_id, step.started_at) for step in iterations.list_steps(db, job_id)] == [
        (one.id, utc(3)),
        (two.id, utc(2)),
    ]


# 4.4 TRAINING


def test_training_start_creates_training_step(db: Database) -> None:
    (step,) = iterations.list_steps(db, said(db, line(1, "TRAINING", "start", iteration=1, data={"epochs": 5})))
    assert (step.kind, step.config, step.started_at) == ("training", {"epochs": 5}, utc(1))


def test_training_epoch_complete_creates_epoch_train_record(db: Database) -> None:
    data = {"avg_loss": 0.5, "model_path": "m/1.pt", "optimizer_path": "o/1.pt", "accuracy": 0.7, "lr": 1e-3}
    job_id = said(db, line(4, "TRAINING", "epoch_complete", iteration=1, epoch=1, data=data))
    (iteration,) = iterations.list_iterations(db, job_id)
    (epoch,) = iterations.list_epochs(db, iteration.id)
    assert (epoch.number, epoch.model_path, epoch.optimizer_path) == (1, "m/1.pt", "o/1.pt")
    assert epoch.metrics == data and epoch.at == utc(4)


def test_training_epoch_complete_records_avg_loss(db: Database) -> None:
    job_id = said(
        db,
        line(4, "TRAINING", "epoch_complete", iteration=1, epoch=1, data={"avg_loss": 0.5}),
        line(5, "TRAINING", "epoch_complete", iteration=1, epoch=2, data={"avg_loss": "NaN"}),
    )
    (iteration,) = iterations.list_iterations(db, job_id)
    assert [epoch.avg_loss for epoch in iterations.list_epochs(db, iteration.id)] == [0.5, None]


def test_training_end_records_duration(db: Database) -> None:
    lines = (line(1, "TRAINING", "start", iteration=1), line(9, "TRAINING", "end", iteration=1, data={"duration": 7.5}))
    (step,) = iterations.list_steps(db, said(db, *lines))
    assert (step.completed_at, step.step_time) == (utc(9), 7.5)


def test_multiple_epochs_handled_correctly(db: Database) -> None:
    lines = [
        line(n * 10 + e, "TRAINING", "epoch_complete", iteration=n, epoch=e, data={"avg_loss": 1 / (n * e)})
        for n in (1, 2)
        for e in range(1, 6)
    ]
    job_id = said(db, *lines)
    for iteration in iterations.list_iterations(db, job_id):
        epochs = iterations.list_epochs(db, iteration.id)
        assert [(row.number, row.avg_loss) for row in epochs] == [(e, 1 / (iteration.number * e)) for e in range(1, 6)]


# 4.5 EVAL


def test_eval_training_start_creates_evaluation_step(db: Database) -> None:
    (step,) = iterations.list_steps(db, said(db, line(1, "EVAL_TRAINING", "start", iteration=1, data={"games": 3})))
    assert (step.kind, step.config) == ("evaluation", {"games": 3})


def test_eval_model_metrics_creates_eval_record(db: Database) -> None:
    job_id = said(db, line(2, "EVAL_MODEL", "metrics", iteration=1, data={"model_id": "one", "metrics": FULL}))
    (row,) = iterations.list_evals(db, job_id=job_id)
    assert (row.model_id, row.at) == ("one", utc(2))
    assert iterations.list_evals(db, model_id="one") == [row]


def test_eval_model_metrics_stores_all_metrics(db: Database) -> None:
    job_id = said(
        db,
        line(2, "EVAL_MODEL", "metrics", iteration=1, data={"model_id": "m-1", "metrics": FULL}),
        line(3, "EVAL_MODEL", "metrics", iteration=1, data=FULL),
    )
    assert [row.metrics for row in iterations.list_evals(db, job_id=job_id)] == [FULL, FULL]


def test_eval_training_end_records_duration(db: Database) -> None:
    """Several evaluations of one iteration are one step; it took as long as all of them together."""
    job_id = said(
        db,
        line(1, "EVAL_TRAINING", "start", iteration=1),
        line(3, "EVAL_TRAINING", "end", iteration=1, data={"duration": 2.0}),
        line(7, "EVAL_TRAINING", "start", iteration=1),
        line(9, "EVAL_TRAINING", "end", iteration=1, data={"duration": 1.5}),
    )
    (step,) = iterations.list_steps(db, job_id)
    assert (step.started_at, step.completed_at, step.step_time) == (utc(1), utc(9), 3.5)


# 4.6, of single lines; the rest is in test_seed_realtime.py


def test_no_duplicate_records_created(db: Database) -> None:
    """The same things told twice, as a program does that begins again: one row each, with the newest content."""
    once = [
        line(0, "ITERATION", "start", iteration=1),
        line(1, "TRAINING", "start", iteration=1),
        line(2, "TRAINING", "epoch_complete", iteration=1, epoch=1, data={"avg_loss": 0.5}),
    ]
    again = line(3, "TRAINING", "epoch_complete", iteration=1, epoch=1, data={"avg_loss": 0.4})
    stored = records(db, said(db, *once, *once, again))
    assert [len(stored[name]) for name in ("iterations", "steps", "epochs")] == [1, 1, 1]
    assert stored["epochs"][0]["avg_loss"] == 0.4


def test_handles_out_of_order_events(db: Database) -> None:
    lines = [
        line(0, "PROJECT", "start"),
        line(1, "GROUP_ITERATION", "start", data={"config": {"a": 1}}),
        line(2, "ITERATION", "start", iteration=1),
        line(3, "TRAINING", "start", iteration=1),
        line(4, "TRAINING", "epoch_complete", iteration=1, epoch=1, data={"avg_loss": 0.5}),
        line(5, "TRAINING", "end", iteration=1),
        line(6, "EVAL_MODEL", "metrics", iteration=1, data={"model_id": "m", "metrics": {"f1": 1.0}}),
        line(7, "ITERATION", "end", iteration=1),
        line(8, "PROJECT", "end"),
    ]
    in_order = records(db, said(db, *lines))
    assert in_order["job"] == (utc(0), 8.0, {"a": 1})
    assert records(db, said(db, *reversed(lines))) == in_order
    assert records(db, said(db, *lines[::2], *lines[1::2])) == in_order
