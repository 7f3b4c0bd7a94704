"""The drill's judgements: each promise, broken once, is seen; and what was not shown is no pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.results import Verdict
from trainmaster.train.drill import judge, record
from trainmaster.train.drill.judge import Damaged
from trainmaster.train.drill.record import Attempt

STEPS, EVERY = 10, 2


def loss(step: int) -> float:
    return 5.0 - step / 8


def attempt(
    first: int, last: int, *, codes: tuple[int, ...] = (-9, 1), saves: tuple[int, ...] = (), resumed: int | None = None,
    ranks: int = 2, **changed: float,
) -> Attempt:  # fmt: skip
    """An attempt over these steps, two samples each; `changed` puts another loss at a step: s7=1.5."""
    events: list[dict[str, Any]] = [{"phase": "TRAINING", "event": "start", "data": {"resumed_from": resumed}}]
    for step in range(first, last + 1):
        data = {"step": step, "loss": changed.get(f"s{step}", loss(step))}
        events.append({"phase": "STEP", "event": "metrics", "data": data})
        if step in saves:
            events.append({"phase": "CHECKPOINT", "event": "saved", "data": {"step": step}})
    if set(codes) == {0}:
        events.append({"phase": "TRAINING", "event": "end", "data": {}})
    samples = {step: {2 * step - 2: f"a{step}", 2 * step - 1: f"b{step}"} for step in range(first, last + 1)}
    return Attempt(ranks=ranks, codes=codes, events=tuple(events), samples=samples)


REFERENCE = attempt(1, STEPS, codes=(0, 0), saves=(2, 4, 6, 8, 10))
KILLED = attempt(1, 5, saves=(2, 4))
RESUMED = attempt(5, STEPS, codes=(0, 0), saves=(6, 8, 10), resumed=4)
OVER = attempt(1, STEPS, codes=(0, 0), saves=(2, 4, 6, 8, 10))  # started at step 0 again


def resumes(*attempts: Attempt, damaged: dict[int, Damaged] | None = None) -> list[judge.Resume]:
    return judge.list_resumes(attempts, stated=EVERY, damaged=damaged or {})


def test_a_run_that_went_on_passes_everything() -> None:
    both = (KILLED, RESUMED)
    (one,) = resumes(*both)
    assert (one.died_at, one.resumed_from, one.acknowledged, one.lost) == (5, 4, 4, 1)
    findings = [
        judge.no_silent_start([one]),
        judge.nothing_acknowledged_is_lost([one]),
        judge.bounded([one], every_steps=EVERY),
        judge.same_losses(REFERENCE, both),
        judge.same_samples(REFERENCE, both, steps=STEPS),
        judge.ended(both, steps=STEPS),
    ]
    assert [finding.verdict for finding in findings] == [Verdict.PASS] * 6


def test_a_start_at_step_0_with_a_checkpoint_there_fails() -> None:
    found = judge.no_silent_start(resumes(KILLED, OVER))
    assert (found.verdict, found.reason) == (Verdict.FAIL, "started at step 0 although step 4 was saved")
    nothing_saved = attempt(1, 1)
    assert judge.no_silent_start(resumes(nothing_saved, OVER)).verdict is Verdict.PASS  # there was nothing to lose


def test_a_saved_step_that_was_passed_over_fails() -> None:
    older = attempt(3, STEPS, codes=(0, 0), resumed=2)
    assert judge.nothing_acknowledged_is_lost(resumes(KILLED, older)).verdict is Verdict.FAIL
    hurt = {1: Damaged(step=4, path="x")}
    assert judge.nothing_acknowledged_is_lost(resumes(KILLED, older, damaged=hurt)).verdict is Verdict.PASS


def test_more_lost_than_stated_fails() -> None:
    late = attempt(1, 7, saves=(2, 4))  # a save of step 6 that never ended
    found = judge.bounded(resumes(late, RESUMED), every_steps=EVERY)
    assert (found.verdict, found.reason) == (Verdict.FAIL, "3 steps lost at step 7, stated were at most 2")
    stated = {"phase": "CHECKPOINT", "event": "bound", "data": {"lost_steps": 3}}
    told = replace(late, events=(*late.events, stated))
    assert judge.bounded(resumes(told, RESUMED), every_steps=EVERY).verdict is Verdict.PASS
    silent = judge.list_resumes((late, RESUMED), stated=None, damaged={})
    assert judge.bounded(silent, every_steps=EVERY).verdict is Verdict.ERROR  # what nobody stated nobody has held


def test_an_attempt_that_died_while_loading_leaves_the_loss_to_the_next() -> None:
    loading = Attempt(ranks=2, codes=(-9, -9), events=(), samples={})
    first, second = resumes(KILLED, loading, RESUMED)
    assert not first.began
    assert (second.died_at, second.lost) == (5, 1)
    assert judge.bounded([first, second], every_steps=EVERY).verdict is Verdict.PASS


@pytest.mark.parametrize("other", [5.0 - 7 / 8 + 1e-12, float("nan")])
def test_one_other_bit_fails(other: float) -> None:
    resumed = attempt(5, STEPS, codes=(0, 0), resumed=4, s7=other)
    assert judge.same_losses(REFERENCE, (KILLED, resumed)).verdict is Verdict.FAIL


def test_another_number_of_ranks_may_round_but_not_drift() -> None:
    near = attempt(5, STEPS, codes=(0,), resumed=4, ranks=1, s7=loss(7) + 9e-4)
    far = attempt(5, STEPS, codes=(0,), resumed=4, ranks=1, s7=loss(7) + 2e-3)
    lost = attempt(5, STEPS, codes=(0,), resumed=4, ranks=1, s7=float("nan"))
    verdicts = [judge.close_losses(REFERENCE, (KILLED, one)).verdict for one in (near, far, lost)]
    assert verdicts == [Verdict.PASS, Verdict.FAIL, Verdict.FAIL]
    # None of them resumed on as many ranks: that promise was not looked at, which is no pass.
    assert judge.same_losses(REFERENCE, (KILLED, near)).verdict is Verdict.ERROR
    assert judge.close_losses(REFERENCE, (KILLED, RESUMED)).verdict is Verdict.ERROR


def swapped(whole: Attempt, step: int, samples: dict[int, str]) -> Attempt:
    return replace(whole, samples={**whole.samples, step: samples})


@pytest.mark.parametrize(
    "resumed",
    [
        swapped(RESUMED, 7, {12: "b7", 13: "a7"}),  # the order
        swapped(RESUMED, 7, {12: "a7"}),  # one left out
        swapped(RESUMED, 7, {12: "a7", 13: "a7"}),  # one twice
        swapped(RESUMED, 7, {12: "a7+a7", 13: "b7"}),  # two ranks took it
        attempt(6, STEPS, codes=(0, 0), resumed=4),  # a whole step left out
    ],
)  # fmt: skip
def test_samples_must_be_the_same_once_and_in_order(resumed: Attempt) -> None:
    assert judge.same_samples(REFERENCE, (KILLED, resumed), steps=STEPS).verdict is Verdict.FAIL


def test_a_run_that_went_back_twice_counts_each_sample_once() -> None:
    far, end = attempt(5, 9, resumed=4), attempt(3, STEPS, codes=(0, 0), resumed=2)  # 2 is before its own start
    assert judge.same_samples(REFERENCE, (KILLED, far, end), steps=STEPS).verdict is Verdict.PASS


def test_a_damaged_checkpoint_must_be_refused_by_name() -> None:
    def told(event: str, path: str) -> Attempt:
        data = {"phase": "CHECKPOINT", "event": event, "data": {"path": path, "why": "a bit", "step": 4}}
        return replace(RESUMED, events=(*RESUMED.events, data))

    hurt = {1: Damaged(step=4, path="x")}
    assert judge.rejected((KILLED, told("rejected", "x")), hurt).verdict is Verdict.PASS
    assert judge.rejected((KILLED, told("loaded", "x")), hurt).verdict is Verdict.FAIL
    assert judge.rejected((KILLED, RESUMED), hurt).verdict is Verdict.FAIL


def test_an_attempt_is_read_with_the_lines_a_kill_cut_off(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"phase":"STEP","event":"metrics","data":{"step":1,"loss":2.0}}\n{"pha')
    (tmp_path / "rank-0.jsonl").write_text('{"step":1,"first":0,"rows":["a"]}\n{"step":2,"first":2,"rows":["c"]}\n{"st')
    (tmp_path / "rank-1.jsonl").write_text('{"step":1,"first":1,"rows":["b"]}\n')
    found = record.read(tmp_path / "events.jsonl", tmp_path, ranks=2, codes=(-9, 1))
    assert found.losses == {1: 2.0}
    assert found.samples == {1: {0: "a", 1: "b"}, 2: {2: "c"}}
    assert found.last_step == 1
    assert record.read(tmp_path / "none", tmp_path / "none", ranks=1, codes=()).last_step is None


def in_place(first: int, last: int, *, seconds: float | None, **more: Any) -> Attempt:
    """A start that followed a kill in the same attempt; `seconds` None: it was killed before its first step."""
    start = attempt(first, last, **more)
    events: list[dict[str, Any]] = [{"phase": "RECOVERY", "event": "start", "data": {"reason": "crashed"}}]
    if seconds is not None:
        events.append({"phase": "RECOVERY", "event": "done", "data": {"seconds": seconds}})
    return replace(start, events=(*events, *start.events))


STARTS = (
    attempt(1, 5, codes=(-9, -9), saves=(2, 4)),
    in_place(5, 4, seconds=None, codes=(-9, -9), resumed=4),
    in_place(5, 7, seconds=1.5, codes=(-9, -9), saves=(6,), resumed=4),
    attempt(7, STEPS, codes=(0, 0), saves=(8, 10), resumed=6),
)


def test_kills_in_place_are_judged_like_attempts_and_their_slowest_is_told() -> None:
    finding = judge.recovered(REFERENCE, STARTS, kills=2, steps=STEPS)
    assert finding.verdict is Verdict.PASS, finding
    assert "2 kills recovered in one attempt, the slowest within 1.5 s" in finding.reason


@pytest.mark.parametrize(
    ("starts", "verdict"),
    [
        (STARTS[:2] + STARTS[3:], Verdict.ERROR),  # the last kill in place did not come
        (STARTS[:3], Verdict.ERROR),  # nothing followed the death of the agent
        ((*STARTS[:3], attempt(7, STEPS, codes=(0, 0), resumed=6, s8=1.0)), Verdict.FAIL),
        ((*STARTS[:3], attempt(5, STEPS, codes=(0, 0), resumed=4)), Verdict.FAIL),  # step 6 was saved
        ((*STARTS[:3], attempt(7, STEPS - 1, codes=(1, 0), resumed=6)), Verdict.FAIL),
    ],
)
def test_a_recovery_in_place_that_differs_is_no_pass(starts: tuple[Attempt, ...], verdict: Verdict) -> None:
    assert judge.recovered(REFERENCE, starts, kills=2, steps=STEPS).verdict is verdict


def test_an_attempt_is_cut_at_its_recoveries(tmp_path: Path) -> None:
    lines = [
        {"phase": "TRAINING", "event": "start", "data": {"resumed_from": None}},
        {"phase": "RECOVERY", "event": "start", "data": {}},
        {"phase": "TRAINING", "event": "start", "data": {"resumed_from": 2}},
    ]
    (tmp_path / "events.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for folder, step in (("samples", 1), ("samples/restart-1", 3)):
        (tmp_path / folder).mkdir()
        row = {"step": step, "first": 0, "rows": ["x"], "draws": 1}
        (tmp_path / folder / "rank-0.jsonl").write_text(json.dumps(row) + "\n")
    first, second = record.read_starts(tmp_path / "events.jsonl", tmp_path / "samples", ranks=1, codes=(0,))
    assert (first.codes, first.resumed_from, list(first.samples)) == ((-9,), None, [1])
    assert (second.codes, second.resumed_from, list(second.samples)) == ((0,), 2, [3])
