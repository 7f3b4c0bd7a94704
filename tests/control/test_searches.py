"""Searches: proposed from what is recorded, none lost and none twice, whoever dies when; a pruned one is no failure."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from control import search_chaos
from control.search_rows import Told, end, find_deviations, list_open, list_results, report
from control.test_unreadable_jobs import spoil
from trainmaster import targets
from trainmaster.control import failpoints
from trainmaster.control.queueing import searching, sets, study
from trainmaster.core.config.sweep import parse_sweep
from trainmaster.core.errors import MissingExtra, SpecError
from trainmaster.core.states import Status
from trainmaster.pages import sets as pages
from trainmaster.store import audit, jobs, known_targets
from trainmaster.store.capacity import searches
from trainmaster.store.capacity import sets as store
from trainmaster.store.database import Database

SEARCH: dict[str, Any] = {
    "parameters": {"lr": {"float": [0.001, 1.0], "log": True}, "env.SEED": ["1", "2"]}, "trials": 12,
    "startup_trials": 3,
}  # fmt: skip
DOCUMENT: dict[str, Any] = {
    "name": "lr", "command": ["train", "{lr}"], "env": {"SEED": "0"}, "search": SEARCH, "parallel": 1,
}  # fmt: skip


class Killed(BaseException):
    """The process dies here."""


def document(parallel: int = 1, **more: Any) -> dict[str, Any]:
    return {**DOCUMENT, "parallel": parallel, "search": {**SEARCH, **more}}


def losses(trial: searches.SearchTrial) -> list[Told]:
    """Five reports of a run, from its values alone."""
    lr, seed = float(trial.values["lr"]), int(trial.values["env.SEED"])
    return [(step, abs(lr - 0.05) + seed / 10 + 1 / step) for step in range(1, 6)]


def play(db: Database, set_id: str, *, seed: int = 0, most: int = 400) -> None:
    """Runs report and end in an order by seed, and the set is advanced between, until it is over."""
    rng = random.Random(seed)
    told: dict[int, int] = {}
    for _ in range(most):
        sets.advance(db)
        if not store.list_unfinished(db):
            return
        trial = rng.choice(list_open(db, set_id))
        assert trial.job_id is not None
        left = losses(trial)[told.get(trial.number, 0) :]
        new = left[: rng.randint(1, 5)]
        if new:
            report(db, trial.job_id, *new)
        told[trial.number] = told.get(trial.number, 0) + len(new)
        job = jobs.find_job(db, trial.job_id)
        if job is not None and job.cancel_requested:
            end(db, trial.job_id, Status.CANCELLED)
        elif len(new) == len(left):
            end(db, trial.job_id)
    raise AssertionError("not over")


@pytest.mark.matrix(one_in=2)
@pytest.mark.both_databases
def test_one_after_the_other_it_is_the_same_search_every_time(db: Database) -> None:
    """Whatever the number of reports that come at once: with `parallel: 1` only values count."""
    made = []
    for seed in (0, 1):
        row = sets.submit_set(db, parse_sweep(document(pruner="median")))
        play(db, row.id, seed=seed)
        made.append(list_results(db, row.id))
        assert find_deviations(db, row.id) == []
    assert made[0] == made[1] and len(made[0]) == 12
    assert {state for _, _, state, *_ in made[0]} == {"complete", "pruned"}
    assert len({str(values) for _, values, *_ in made[0]}) == 12


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("pruner", ["none", "median", "asha"])
def test_with_several_at_once_each_proposal_follows_from_what_it_saw(db: Database, pruner: str) -> None:
    row = sets.submit_set(db, parse_sweep(document(4, pruner=pruner)))
    play(db, row.id, seed=3)
    trials = searches.list_trials(db, row.id)
    assert len(trials) == 12 == len(jobs.list_ids(db)) and find_deviations(db, row.id) == []
    seen = [sum(other.ended is not None and other.ended < trial.proposed for other in trials) for trial in trials]
    assert seen[:4] == [0, 0, 0, 0] and seen == sorted(seen) and max(seen) > 4
    ended = [trial.ended for trial in trials]
    assert None not in ended and len(set(ended)) == 12, "ends have an order"
    assert any(trial.state == "pruned" for trial in trials) == (pruner != "none")


def test_a_changed_row_is_a_deviation(db: Database) -> None:
    """The audit of the tests above can fail."""
    row = sets.submit_set(db, parse_sweep(document()))
    play(db, row.id)
    trials = searches.list_trials(db, row.id)
    with db.write() as conn:
        searches.set_trial(conn, row.id, replace(trials[0], value=-5.0), {})
    assert find_deviations(db, row.id)


PLACES = ["commit trial: before", "commit trial: after", "commit search report: before", "commit search report: after"]


@pytest.mark.matrix(one_in=5)
@pytest.mark.slow
@pytest.mark.parametrize("place", [*PLACES, "commit set over: before"])
def test_killed_anywhere_it_is_the_same_search(db: Database, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = sets.submit_set(db, parse_sweep(document(pruner="median")))
    play(db, undisturbed.id)
    row = sets.submit_set(db, parse_sweep(document(pruner="median")))
    died, advance = 0, sets.advance

    def die(reached: str, _detail: object) -> None:
        nonlocal died
        if reached == place:
            died += 1
            if died % 2:
                raise Killed

    def advance_anyhow(db: Database) -> None:
        for _ in range(100):
            try:
                advance(db)
            except Killed:
                continue
            return

    monkeypatch.setattr(failpoints, "_reach", die)
    monkeypatch.setattr(sets, "advance", advance_anyhow)
    play(db, row.id)
    assert died > (1 if "over" in place else 10)
    assert list_results(db, row.id) == list_results(db, undisturbed.id)
    assert len(jobs.list_ids(db)) == 24 and find_deviations(db, row.id) == []


@pytest.mark.parametrize("meanwhile", ["advance", "cancel", "report"])
def test_a_view_that_is_old_proposes_nothing(db: Database, meanwhile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another plane, or a cancel, comes between the look and the act."""
    row = sets.submit_set(db, parse_sweep(document(2)))
    propose, once = study.propose, [True]

    def interleave(*asked: Any) -> dict[str, Any]:
        values = propose(*asked)
        if once and once.pop():
            sets.cancel(db, row.id) if meanwhile == "cancel" else sets.advance(db)
            if meanwhile == "report":
                trial = searches.list_trials(db, row.id)[0]
                assert trial.job_id is not None
                report(db, trial.job_id, (1, 0.5))
                sets.advance(db)
        return values

    monkeypatch.setattr(study, "propose", interleave)
    sets.advance(db)
    monkeypatch.undo()
    sets.advance(db)
    trials = searches.list_trials(db, row.id)
    assert [trial.number for trial in trials] == ([] if meanwhile == "cancel" else [1, 2])
    assert sorted(jobs.list_ids(db)) == sorted(trial.job_id or "" for trial in trials)
    assert find_deviations(db, row.id) == []


def test_a_pruned_trial_is_asked_to_stop_and_is_no_failure(db: Database) -> None:
    row = sets.submit_set(db, parse_sweep(document(pruner="median", startup_trials=1, trials=2)))
    sets.advance(db)
    first = list_open(db, row.id)[0].job_id or ""
    report(db, first, (1, 0.5), (2, 0.4))
    end(db, first)
    sets.advance(db)
    second = list_open(db, row.id)[0].job_id or ""
    report(db, second, (1, 0.9), (2, 0.2))
    sets.advance(db)
    job = jobs.find_job(db, second)
    assert job is not None and job.cancel_requested and job.message == "pruned by its search at step 1"
    assert store.list_unfinished(db) != [], "it still runs"
    page = pages.read_one(db, row.id)
    assert page is not None and page.set.counts == {"completed": 1, "pruned": 1} and page.set.status == "running"
    end(db, second, Status.CANCELLED)
    sets.advance(db)
    page = pages.read_one(db, row.id)
    assert page is not None and store.list_unfinished(db) == []
    assert (page.set.status, page.set.counts) == ("completed", {"completed": 1, "pruned": 1})
    best, pruned = page.trials
    assert (best.best, best.value, best.pruned) == (True, 0.4, False)
    assert (pruned.pruned, pruned.value, pruned.message) == (True, 0.9, "pruned at step 1"), "as its verdict saw it"
    told = [entry.action for entry in audit.list_audit(db, subject=f"job:{second}")]
    assert "job.prune" in told and "job.cancel" not in told


def test_a_verdict_comes_also_for_a_run_that_was_over_before(db: Database) -> None:
    """It must not depend on how soon somebody looked."""
    row = sets.submit_set(db, parse_sweep(document(pruner="median", startup_trials=1, trials=2)))
    for values in ((0.5, 0.4), (0.9, 0.2)):
        sets.advance(db)
        job_id = list_open(db, row.id)[0].job_id or ""
        report(db, job_id, *enumerate(values, 1))
        end(db, job_id)
    sets.advance(db)
    assert [(state, value) for _, _, state, value, _ in list_results(db, row.id)] == [
        ("complete", 0.4),
        ("pruned", 0.9),
    ]


def test_results_of_all_kinds(db: Database) -> None:
    row = sets.submit_set(db, parse_sweep(document(7, trials=7, metric="eval/accuracy", goal="max")))
    sets.advance(db)
    ids = [trial.job_id or "" for trial in list_open(db, row.id)]
    told: dict[str, Any] = {"phase": "EVAL_MODEL", "name": "accuracy"}
    report(db, ids[0], (1, 0.3), (2, 0.5), **told)
    report(db, ids[1], (1, 0.7), (2, "NaN"), **told)
    report(db, ids[2], (1, 0.9))  # another metric
    report(db, ids[3], (1, 0.95), **told)
    report(db, ids[4], (1, 0.1), (2, 0.2), **told)
    report(db, ids[4], (2, 0.2), (3, 0.6), attempt=2, **told)
    report(db, ids[5], (1, 10**400), **told)
    for number, job_id in enumerate(ids):
        end(db, job_id, Status.FAILED if number == 3 else Status.COMPLETED)
    with db.write() as conn:
        jobs.delete_job(conn, ids[6])
    sets.advance(db)
    assert [(state, value) for _, _, state, value, _ in list_results(db, row.id)] == [
        ("complete", 0.5), ("failed", None), ("failed", None), ("failed", 0.95), ("complete", 0.6), ("failed", None),
        ("failed", None),
    ]  # fmt: skip
    page = pages.read_one(db, "lr")
    assert page is not None and [trial.number for trial in page.trials if trial.best] == [5]
    line = page.set
    assert (line.metric, line.goal, line.best_value, line.best_loss) == ("eval/accuracy", "max", 0.6, None)
    assert line.search == "tpe, seed 0"


def test_values_that_no_spec_has_are_one_failed_trial(db: Database) -> None:
    """Both ends are good, and some in between are not."""
    parameters = {"train.model.heads": {"int": [1, 8]}}
    made = {
        "name": "heads", "train": {"steps": 1, "model": {"width": 64, "kv_heads": 1, "layers": 1, "heads": 1}},
        "search": {"parameters": parameters, "sampler": "grid"}, "parallel": 8,
    }  # fmt: skip
    row = sets.submit_set(db, parse_sweep(made))
    sets.advance(db)
    page = pages.read_one(db, row.id)
    assert page is not None and page.set.trials == 8
    refused = [trial for trial in page.trials if trial.job is None]
    assert {trial.values["train.model.heads"] for trial in refused} >= {3, 5, 6, 7}
    assert all(trial.status == "failed" and "no spec has these values" in trial.message for trial in refused)
    assert len(jobs.list_ids(db)) == 8 - len(refused) > 0


def test_a_cancel_records_the_ends_and_proposes_no_more(db: Database) -> None:
    row = sets.submit_set(db, parse_sweep(document(3)))
    sets.advance(db)
    sets.cancel(db, row.id)
    for _ in range(3):
        sets.advance(db)
    cancels = [entry for entry in audit.list_audit(db) if entry.action == "job.cancel"]
    assert len(cancels) == 3 and store.list_unfinished(db) != [], "once each"
    for job_id in jobs.list_ids(db):
        report(db, job_id, (1, 0.5))
        end(db, job_id, Status.CANCELLED)
    sets.advance(db)
    page = pages.read_one(db, row.id)
    assert page is not None and store.list_unfinished(db) == [] and len(page.trials) == 3
    assert (page.set.status, page.set.counts) == ("cancelled", {"cancelled": 3, "skipped": 9})


def test_reports_are_bounded_and_chosen_by_their_steps_alone(db: Database) -> None:
    row = sets.submit_set(db, parse_sweep(document(2, pruner="median", trials=2)))
    sets.advance(db)
    one, other = (trial.job_id or "" for trial in list_open(db, row.id))
    steps = [(step, 1.0) for step in range(3000)]
    report(db, one, *steps)
    for first in range(0, 3000, 700):
        report(db, other, *steps[first : first + 700])
        sets.advance(db)
    kept = searches.list_reports(db, row.id, number=1) | searches.list_reports(db, row.id, number=2)
    assert kept[1].keys() == kept[2].keys() and 300 < len(kept[1]) < 700
    assert searches.list_trials(db, row.id)[0].value == 1.0


def test_what_is_missing_or_refused_is_said_and_mended(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise MissingExtra("search", "search")

    with monkeypatch.context() as patch:
        patch.setattr(study, "require", refuse)
        with pytest.raises(MissingExtra):
            sets.submit_set(db, parse_sweep(DOCUMENT))
        assert store.list_sets(db) == []
    row = sets.submit_set(db, parse_sweep(DOCUMENT))
    with monkeypatch.context() as patch:
        patch.setattr(study, "require", refuse)
        sets.advance(db)
    found = store.find_set(db, row.id)
    assert found is not None and "trial 1 cannot begin: search needs packages" in found.message
    with monkeypatch.context() as patch:  # a fault of ours, in one search: other sets go on
        patch.setattr(searching, "advance", lambda *_, **__: 1 / 0)
        sets.submit_set(db, parse_sweep({"name": "m", "command": ["x", "{a}"], "matrix": {"a": ["1"]}}))
        sets.advance(db)
    found = store.find_set(db, row.id)
    assert found is not None and "ZeroDivisionError" in found.message and len(jobs.list_ids(db)) == 1
    sets.advance(db)
    found = store.find_set(db, row.id)
    assert found is not None and found.message == "" and len(jobs.list_ids(db)) == 2


def test_a_trial_does_not_begin_on_a_target_that_was_taken_from_its_project(db: Database) -> None:
    with db.write() as conn:
        known_targets.put_grant(conn, "local", "lab", user="tm-lab", identity={}, at=datetime.now(UTC))

    def load(_: str) -> targets.Target:
        return targets.load("local")

    row = sets.submit_set(db, parse_sweep({**DOCUMENT, "project": "lab"}), load=load)
    with db.write() as conn:
        known_targets.remove_grant(conn, "local", "lab")
    sets.advance(db, load=load)
    found = store.find_set(db, row.id)
    assert jobs.list_ids(db) == [] and found is not None and "was taken from its project" in found.message
    assert searches.list_trials(db, row.id) == []


def test_a_secret_among_the_choices_makes_no_row(db: Database) -> None:
    made = document()
    made["search"]["parameters"] = {"env.SEED": ["1", "sk-proj-4f9aQ2xL8vB7nC3d"]}
    with pytest.raises(SpecError) as refused:
        sets.submit_set(db, parse_sweep(made))
    assert store.list_sets(db) == [] and "sk-proj" not in str(refused.value)
    made["search"]["parameters"] = {"env.SEED": ["1", "2"]}
    made["env"] = {"SEED": "sk-proj-4f9aQ2xL8vB7nC3d"}  # under what is varied: no trial has it
    row = searches.find_search(db, sets.submit_set(db, parse_sweep(made)).id)
    assert row is not None and row.template["env"] == {"SEED": "1"}


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
@pytest.mark.spawns
@pytest.mark.parametrize("parallel", [1, 3])
def test_a_sample_of_the_chaos(tmp_path: Path, parallel: int) -> None:
    """`make chaos-search` is the whole of it."""
    outcome = search_chaos.run(tmp_path, trials=8, kills=4, seed=parallel, parallel=parallel)
    assert outcome.faults == [] and sum(outcome.kills.values()) == 4


def test_a_search_whose_runs_log_without_end_leaves_time_for_others(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread advances all sets: a pass that always finds something new ends all the same."""
    sets.submit_set(db, parse_sweep(document()))
    other = sets.submit_set(db, parse_sweep({"name": "other", "command": ["x", "{n}"], "matrix": {"n": [1]}}))
    passes = 0

    def find_more(*_: object) -> bool:
        nonlocal passes
        passes += 1
        return passes < 2_000

    monkeypatch.setattr(searching, "_read_reports", find_more)
    sets.advance(db)
    assert 0 < passes < 20
    assert [trial.open for trial in store.list_trials(db, other.id)] == [True]


def test_a_trial_that_cannot_be_read_is_recorded_as_any_other(db: Database) -> None:
    """Its events and its end need no spec."""
    row = sets.submit_set(db, parse_sweep(document(2, trials=3)))
    sets.advance(db)
    bad, good = (trial.job_id or "" for trial in list_open(db, row.id))
    spoil(db, bad, "newer field")
    for job_id, loss in ((bad, 0.5), (good, 0.4)):
        report(db, job_id, (1, loss))
        end(db, job_id)
    sets.advance(db)
    assert [(state, value) for _, _, state, value, _ in list_results(db, row.id)][:2] == [
        ("complete", 0.5), ("complete", 0.4),
    ]  # fmt: skip
    [last] = [trial.job_id or "" for trial in store.list_trials(db, row.id) if trial.open]  # the search goes on
    sets.cancel(db, row.id)
    spoil(db, last, "newer field")
    end(db, last, Status.CANCELLED)
    sets.advance(db)
    assert store.list_unfinished(db) == []
