"""One job's page: the figures are those of the events, and nothing a node writes can make it look better than it is."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from pages import samples
from trainmaster.core.events import Event
from trainmaster.core.results import Overall, Verdict
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.pages import job
from trainmaster.pages.parts.run_summary import RunSummary
from trainmaster.report import phrases
from trainmaster.store import attempts, jobs
from trainmaster.store.capacity import machines
from trainmaster.store.database import Database
from trainmaster.targets import find_place


def read(db: Database, story: samples.Story) -> job.JobPage:
    page = job.read(db, story.id, now=story.at)
    assert page is not None
    return page


def test_there_is_no_page_of_no_job(db: Database) -> None:
    assert job.read(db, "nobody") is None


def test_a_completed_job(db: Database) -> None:
    page = read(db, samples.completed(db))
    run = page.run
    assert (page.status, page.reason, page.action, page.duration_s) == (Status.COMPLETED, None, None, 73.0)
    assert (run.step, run.steps, run.progress) == (200, 200, 1.0)
    assert (run.loss_first, run.loss_last) == (samples.loss_at(1), samples.loss_at(200))
    assert run.loss_ratio == samples.loss_at(200) / samples.loss_at(1)
    assert (run.tokens_per_s, run.ranks, run.device, run.torch) == (18_432.0, 2, "cpu", "2.11.0")
    assert [checkpoint.step for checkpoint in run.checkpoints] == [50, 100, 150, 200]
    assert run.checkpoint_events == {"saved": 4}
    assert [x for x, _ in run.curves.eval_loss] == [50, 100, 150, 200]
    assert len(run.curves.loss) == 200
    assert run.left_s is None
    assert [attempt.ok for attempt in page.attempts] == [True]


def test_a_running_job_says_what_is_left(db: Database) -> None:
    run = read(db, samples.resumed(db)).run
    assert (run.step, run.resumed_from) == (140, 50)
    assert run.left_s == pytest.approx(60 * 16 * 128 / 18_400, rel=0.05)


def test_a_second_attempt_steps_back_and_both_stay(db: Database) -> None:
    steps = [x for x, _ in read(db, samples.resumed(db)).run.curves.loss]
    assert steps == [*range(1, 84), *range(51, 141)]


def test_a_failed_check_names_itself_and_what_to_do(db: Database) -> None:
    page = read(db, samples.failed_check(db))
    assert (page.status, page.reason) == (Status.FAILED, Reason.CHECK_FAILED)
    assert page.action == Reason.CHECK_FAILED.rule.action
    assert page.run.preflight is not None
    assert page.run.preflight.overall is Overall.FAIL
    first = page.run.preflight.checks[0]
    assert (first.check, first.device, first.verdict) == ("ecc", "gpu3", Verdict.FAIL)


def test_a_planned_check_that_never_spoke_is_shown_as_not_measured(db: Database) -> None:
    story = samples.Story(db).start()
    story.tell([*samples.preflight([samples.CHECKS[0]], silent=("nccl",))])
    assert read(db, story).run.preflight.overall is None  # still going on
    story.tell([Event(phase="PREFLIGHT", event="end", data={"overall": "PASS"})])
    preflight = read(db, story).run.preflight
    assert preflight.overall is Overall.INCOMPLETE  # what the node says of itself is not believed
    assert [(row.check, row.verdict) for row in preflight.checks] == [("nccl", Verdict.ERROR), ("cpu", Verdict.PASS)]


@pytest.mark.parametrize("findings", [None, [], "fine", [3], [{"verdict": "great"}], [{"verdict": ["pass"]}], [{}]])
def test_findings_that_cannot_be_read_are_never_a_pass(db: Database, findings: object) -> None:
    story = samples.Story(db).start()
    data = {"check": "ecc", "verdict": "pass", "findings": findings}
    story.tell([Event(phase="PREFLIGHT", event="start", data={"planned": ["ecc"]})])
    story.tell([Event(phase="PREFLIGHT", event="check", data=data), Event(phase="PREFLIGHT", event="end")])
    preflight = read(db, story).run.preflight
    assert preflight.overall is Overall.INCOMPLETE
    assert [row.verdict for row in preflight.checks] == [Verdict.ERROR]


def test_a_new_attempt_begins_its_own_checks(db: Database) -> None:
    preflight = read(db, samples.resumed(db)).run.preflight
    assert (preflight.attempt, len(preflight.checks)) == (2, len(samples.CHECKS))


def test_a_loss_that_is_no_number_is_a_gap_and_is_counted(db: Database) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING)
    losses = [5.0, float("nan"), 4.0]
    story.tell(Event(phase="STEP", event="metrics", data={"step": n, "loss": y}) for n, y in enumerate(losses, 1))
    run = read(db, story).run
    assert run.curves.loss == ((1, 5.0), (2, None), (3, 4.0))
    assert (run.sick_steps, run.loss_first, run.loss_last) == (1, 5.0, 4.0)


def test_what_a_run_watched_itself_for_is_counted_and_told(db: Database) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING)
    told = [
        ("STEP", "metrics", {"step": 1, "mfu": 0.4, "mfu_measured": 0.5, "data_share": 0.1, "compute_share": "x"}),
        ("WATCH", "skipped", {"step": 7, "why": "loss is nan"}),
        ("WATCH", "skipped", {"step": 8, "why": "loss is nan"}),
        ("WATCH", "rollback", {"step": 8, "to_step": 4, "why": "2 sick steps in a row"}),
        ("WATCH", "straggler", {"step": 9, "rank": 3, "node": 1, "score": 0.25, "what": "data"}),
        ("WATCH", "straggler", {"step": 9, "rank": None, "node": 1, "score": None, "what": 7}),
        ("WATCH", "hang", {"why": "hang: rank 2 is stopped"}),
        ("WATCH", "hang", {"why": "hang: rank 2 is stopped"}),
        ("WATCH", "hang", {"why": ["?"]}),
    ]
    story.tell(Event(phase=phase, event=event, data=data) for phase, event, data in told)
    run = read(db, story).run
    assert (run.mfu_measured, run.data_share, run.compute_share) == (0.5, 0.1, None)
    assert (run.skipped_steps, run.rollbacks) == (2, 1)
    assert run.warnings == (
        "went back from step 8 to 4: 2 sick steps in a row",
        "rank 3 is slow by 25% of a step (data), since step 9",
        "node 1 is slow (7), since step 9",
        "hang: rank 2 is stopped",
    )


def test_starts_and_recoveries_are_figures_of_the_page(db: Database) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING)
    told = [
        ("START", "done", {"step": 1, "seconds": 29.5, "parts": {"load": 7.6, "imports": 11.7, "x": "y"}}),
        ("RECOVERY", "start", {"reason": "crashed"}),
        ("START", "done", {"step": 21, "seconds": 6.5, "parts": {"load": 4.0, "build": 0.01}}),
        ("RECOVERY", "done", {"step": 21, "seconds": 7.5}),
    ]
    story.tell(Event(phase=phase, event=event, data=data) for phase, event, data in told)
    page = read(db, story)
    assert (page.run.start_s, page.run.start_parts) == (6.5, {"load": 4.0, "build": 0.01})
    assert (page.run.recoveries, page.run.recovery_s) == (1, 7.5)
    shown = {figure.name: (figure.value, figure.note) for figure in phrases.figures(page)}
    assert shown["Start to first step"] == ("6.5 s", "load 4 s")
    assert shown["Recoveries in place"] == ("1", "the last took 7.5 s")


def test_garbage_lines_are_counted_and_shown(db: Database) -> None:
    run = read(db, samples.failed_run(db)).run
    assert run.garbage_lines == 2
    assert [line.text for line in run.garbage] == ["%%% half a li", '{"phase": 7}']


def test_a_fold_that_goes_on_sees_what_a_fresh_one_sees(db: Database) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING)
    kept = RunSummary()
    events = [*samples.preflight(), *samples.training(end=False), b"garbage\n"]
    for start in range(0, len(events), 37):
        story.tell(events[start : start + 37])
        assert job.read(db, story.id, summary=kept, now=story.at) == job.read(db, story.id, now=story.at)


def test_what_sounds_like_a_secret_is_not_shown(db: Database) -> None:
    story = samples.pending(db, env={"WANDB_API_KEY": "abc123", "HF_TOKEN": "hf_x", "NCCL_DEBUG": "INFO"})
    page = read(db, story)
    assert page.spec is not None
    assert page.spec["env"] == {"WANDB_API_KEY": "(hidden)", "HF_TOKEN": "(hidden)", "NCCL_DEBUG": "INFO"}


def test_a_failed_job_that_could_be_retried_names_the_field(db: Database) -> None:
    row = jobs.find_job(db, samples.completed(db).id)
    assert row is not None
    failed = replace(row, status=Status.FAILED, reason=Reason.NODE_LOST)
    build = partial(job.build, attempts=(), summary=RunSummary(), now=row.created_at, made_by="")
    once = replace(failed, spec=replace(row.spec, limits=replace(row.spec.limits, attempts=1)))
    assert "limits: { attempts: 3 }" in (build(job=once).action or "")
    thrice = replace(failed, spec=replace(row.spec, limits=replace(row.spec.limits, attempts=3)))
    assert build(job=thrice).action == Reason.NODE_LOST.rule.action


def test_a_job_that_its_pre_flight_failed_says_how_to_drain_the_machine_and_to_try_another(
    db: Database, tmp_path: Path
) -> None:
    (hosts := tmp_path / "hosts.yaml").write_text("hosts: [gpu-01, gpu-02]\n")
    story = samples.Story(db, samples.spec(target=f"ssh:{hosts}", limits={"attempts": 1})).start()
    story.tell([Event(phase="PROJECT", event="start", data={"attempt": story.attempt, "host": "gpu-01"})])
    story.tell([Event(phase="PREFLIGHT", event="check", data={"check": "xid", "verdict": "fail", "findings": []})])
    with db.write() as conn:
        attempts.set_handle(conn, story.attempt, {"nodes": ["gpu-01"]})
    story.end_attempt(Reason.CHECK_FAILED).finish(Status.FAILED, Reason.CHECK_FAILED)
    drain = "`trainmaster nodes drain gpu-01 --reason TEXT`"
    action = read(db, story).action or ""
    assert drain in action and action.endswith(
        "with `limits: { attempts: 2 }` a job is tried on another machine by itself"
    )
    with db.write() as conn:
        machines.drain(conn, find_place(f"ssh:{hosts}"), "gpu-02", reason="a fan", by="eve", at=samples.T0)
    action = read(db, story).action or ""
    assert drain in action and "no other machine of its target takes jobs" in action
    hosts.unlink()
    assert read(db, story).action == Reason.CHECK_FAILED.rule.action


def test_a_run_that_names_no_iteration_is_one_as_long_as_its_phases(db: Database) -> None:
    """Our own trainer: training and evaluations, which are over with the job. More phases may come before that."""

    def at(phase: str, name: str, second: int) -> Event:
        return Event(phase=phase, event=name, ts=samples.T0 + timedelta(seconds=second), data={})

    story = samples.Story(db).start()
    story.tell([at("TRAINING", "start", 0), at("EVAL_TRAINING", "start", 20), at("EVAL_TRAINING", "end", 23)])
    story.tell([replace(at("TRAINING", "end", 40), data={"duration": 40.25})])
    (running,) = read(db, story).run.iterations
    assert (running.completed, running.seconds, len(running.phases)) == (False, None, 2)
    story.end_attempt().finish(Status.COMPLETED)
    (over,) = read(db, story).run.iterations
    assert (over.completed, over.seconds) == (True, 40.25), "no less than a phase of it"


@pytest.mark.parametrize(("ends", "expected"), [((7,), (True, 7.0)), ((), (False, None))], ids=["stated", "not stated"])
def test_an_iteration_without_a_duration_lasts_from_its_start_to_its_end(
    db: Database, ends: tuple[int, ...], expected: tuple[bool, float | None]
) -> None:
    """A program that opens an iteration closes it too: where it did not, its phases do not say so."""
    events = [("ITERATION", "start", 0), ("TRAINING", "start", 1), ("TRAINING", "end", 5)]
    events += [("ITERATION", "end", second) for second in ends]
    story = samples.Story(db).start()
    story.tell(
        Event(phase=phase, event=name, ts=samples.T0 + timedelta(seconds=second), iteration=1, data={})
        for phase, name, second in events
    )
    story.end_attempt().finish(Status.COMPLETED)
    (found,) = read(db, story).run.iterations
    assert (found.completed, found.seconds) == expected
