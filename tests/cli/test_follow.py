"""`submit --follow` drives a job to its end and ends as the job did: its exit code is the job's, not its own."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Run
from trainmaster.api.events import Event
from trainmaster.api.jobs import JobLine
from trainmaster.api.run import EpochLoss, EvaluationResult, IterationPhase, IterationSummary
from trainmaster.cli._views.follow import View
from trainmaster.cli.jobs.show import _print_iteration
from trainmaster.core.states import Stage, Status


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize(("script", "code", "status"), [("print('Loss: 0.1')", 0, "completed"), ("1/0", 1, "failed")])
def test_a_failed_run_is_never_a_success(run: Run, tmp_path: Path, script: str, code: int, status: str) -> None:
    spec, home = tmp_path / "job.yaml", tmp_path / "home"
    spec.write_text(json.dumps({"name": "a", "command": [sys.executable, "-c", script], "preflight": {"level": 0}}))
    done = run("submit", str(spec), "--follow", home=home)
    assert done.returncode == code, done.stdout + done.stderr
    assert status in done.stdout
    assert not [line for line in done.stdout.splitlines() if line != line.rstrip()]
    assert ("log: trainmaster logs a --tail 50" if code else "log: trainmaster logs a") in done.stdout.splitlines()
    (job,) = json.loads(run("jobs", "--json", home=home).stdout)["jobs"]
    assert job["status"] == status
    shown = run("show", "a", home=home).stdout
    assert status in shown
    if code:
        assert "ZeroDivisionError" in shown, "why it failed is shown with its last lines"
        assert "to do: see the last lines of the failing rank's log" in done.stdout
        assert "ZeroDivisionError" in run("logs", "a", home=home).stdout
    assert run("cancel", "a", home=home).returncode == 2, "a finished job cannot be cancelled"
    events = [json.loads(line) for line in run("events", "a", "--json", home=home).stdout.splitlines()]
    assert [event["event"] for event in events if event["phase"] == "PROJECT"] == ["start", "end"]


@pytest.mark.proof
def test_a_job_that_runs_again_is_followed_to_its_end(run: Run, tmp_path: Path) -> None:
    spec, home, there = tmp_path / "job.yaml", tmp_path / "home", tmp_path / "there"
    command = ["sh", "-c", f"echo looks; test -e {there}"]
    spec.write_text(json.dumps({"name": "a", "command": command, "preflight": {"level": 0}}))
    assert run("submit", str(spec), "--follow", home=home).returncode == 1
    there.touch()
    done = run("resume", "--again", "a", "--follow", home=home)
    assert (done.returncode, "completed after " in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.proof
def test_the_last_lines_name_the_outputs_and_the_signal(run: Run, tmp_path: Path) -> None:
    spec, home = tmp_path / "job.yaml", tmp_path / "home"
    write = 'echo 1; echo x > "$TRAINMASTER_OUTPUTS/x"'
    spec.write_text(json.dumps({"name": "a", "command": ["sh", "-c", write], "preflight": {"level": 0}}))
    done = run("submit", str(spec), "--follow", home=home).stdout.splitlines()
    assert done[-3].startswith("completed after ")
    assert done[-2:] == ["log: trainmaster logs a", "1 output: trainmaster fetch a"]
    killed = {"name": "b", "command": ["sh", "-c", "echo 1; kill -9 $$"], "preflight": {"level": 0}}
    spec.write_text(json.dumps({**killed, "limits": {"attempts": 1}}))
    ended = run("submit", str(spec), "--follow", home=home).stdout
    reason = 'rank 0 of 1 was killed by SIGKILL; its last line: "1"'
    assert reason in ended
    shown = run("show", "b", home=home).stdout
    assert shown.count(reason) == 1 and "\n    1\n" not in shown, "the same line once"


def event(phase: str, name: str, data: dict[str, Any], *, epoch: int | None = None) -> Event:
    return Event(
        attempt="x.1", stream="events.jsonl", offset=0, length=1, ts=None, seq=None, phase=phase, event=name,
        iteration=2, epoch=epoch, data=data, extra={}, fault=None, text=None,
    )  # fmt: skip


def test_events_of_a_program_of_another_kind_are_shown_without_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    view = View()
    for row in (
        event("ITERATION", "start", {"config": {}}),
        event("TRAJECTORY", "start", {}),
        event("TRAJECTORY", "end", {"duration": 8}),
        event("TRAINING", "start", {"config": {"lr": 0.1}}),
        event("STEP", "metrics", {"step": 1}),
        event("TRAINING", "epoch_complete", {"avg_loss": 0.5}, epoch=3),
        event("TRAINING", "end", {}),
        event("EVAL_MODEL", "metrics", {"model_id": "m7", "metrics": {"f1": 0.895}}),
        event("CHECKPOINT", "saved", {}),
        event("CHECKPOINT", "failed", {}),
        event("ITERATION", "end", {"time_taken": 9}),
    ):
        view.show_event(row)
    assert capsys.readouterr().out.splitlines() == [
        "iteration 2 begins", "trajectories of iteration 2 begins", "trajectories of iteration 2 ends after 8.0 s",
        "training of iteration 2 begins", "step 1", "epoch 3 of iteration 2: avg_loss 0.5",
        "training of iteration 2 ends", "eval of m7: f1 0.895", "checkpoint saved",
        "checkpoint failed: no reason stated", "iteration 2 ends after 9.0 s",
    ]  # fmt: skip


def test_starts_and_recoveries_are_shown_with_their_parts(capsys: pytest.CaptureFixture[str]) -> None:
    view = View()
    parts = {"imports": 3.1, "device": 0.01, "load": 7.6, "note": "x"}
    for row in (
        event("START", "part", {"part": "imports", "seconds": 3.1, "restart": 0}),
        event("START", "done", {"step": 1, "seconds": 12.34, "parts": parts, "restart": 0}),
        event("RECOVERY", "start", {"message": "rank 1 of 2 was killed by SIGKILL"}),
        event("RECOVERY", "done", {"step": 21, "seconds": 1.0, "parts": "none"}),
        event("RECOVERY", "start", {"how": "group", "message": "rank 1 of 4 was killed by SIGKILL"}),
        event("RECOVERY", "survived", {"groups": 1, "of": 2, "step": 22, "seconds": 0.21, "parts": {"step": 0.2}}),
    ):
        view.show_event(row)
    assert capsys.readouterr().out.splitlines() == [
        "first step after 12.3 s (load 7.6, imports 3.1)",
        "recovering in place: rank 1 of 2 was killed by SIGKILL",
        "recovered in 1.0 s, at step 21",
        "recovering one group: rank 1 of 4 was killed by SIGKILL",
        "1 of 2 groups go on after 0.2 s, at step 22 (step 0.2)",
    ]


def test_show_lists_iterations_epochs_and_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    whole = IterationSummary(
        number=2, completed=True, seconds=25.0, epochs=12,
        phases=(IterationPhase(kind="traj_gen", seconds=8.0), IterationPhase(kind="training", seconds=None)),
        newest_epochs=(EpochLoss(number=12, avg_loss=0.5),),
        evaluations=(EvaluationResult(model_id="m7", metrics={"f1": 0.123456789012, "n": 12345678}),
                     EvaluationResult(model_id=None, metrics={"step": 150, "f1": 0.9})),
    )  # fmt: skip
    _print_iteration(whole, final=True)
    last = replace(whole, number=3, completed=False, seconds=None, phases=(), newest_epochs=(), evaluations=())
    _print_iteration(last, final=False)
    _print_iteration(last, final=True)
    assert capsys.readouterr().out.splitlines() == [
        "iteration 2: completed 25.0 s (traj_gen 8.0 s, training)", "    epoch 12 of 12 loss 0.5000",
        "    evaluation m7 f1 0.123, n 12345678", "    evaluation step 150, f1 0.9",
        "iteration 3: running", "iteration 3: its end was not reported",
    ]  # fmt: skip


def test_a_job_that_waits_says_for_what_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = JobLine(
        id="x", name="a", project="p", target="lambda", status=Status.PENDING, stage=Stage.PROVISIONING, reason=None,
        message="renting [gpu_8x] in us-east-1: booting", attempts=1, step=None, steps=None, progress=None, loss=None,
        tokens_per_s=None, created_at=datetime.now(UTC), started_at=None, ended_at=None,
    )  # fmt: skip
    view = View()
    for job in (line, line, replace(line, stage=Stage.RUNNING, status=Status.RUNNING, message="not shown")):
        view.show_job(job)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["stage provisioning", "  renting [gpu_8x] in us-east-1: booting", "stage running"]
