"""Curves of a run: segments of attempts, repeated work, spikes that downsampling keeps, and a sample of a long run."""

from __future__ import annotations

import math
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from pages import samples
from trainmaster.api.curves import CurvesPage
from trainmaster.core.events import Event
from trainmaster.core.states import Stage
from trainmaster.pages import compare
from trainmaster.store.database import Database
from trainmaster.store.page_rows import figures
from trainmaster.web import curve_cache
from trainmaster.web.beside import Beside
from trainmaster.web.curve_cache import CurveCache


def points(page: CurvesPage, name: str) -> list[tuple[float, float | None]]:
    return [point for segment in page.segments for point in segment.curves.get(name, ())]


def step(number: int, loss: Any, **more: Any) -> Event:
    at = samples.T0 + timedelta(seconds=2 * number)
    return Event(phase="STEP", event="metrics", ts=at, data={"step": number, "loss": loss, **more})


def running(db: Database, *events: Event) -> samples.Story:
    return samples.Story(db, samples.spec()).start().move(Stage.RUNNING).tell(events)


def test_attempts_are_segments_and_work_done_again_is_known(any_db: Database) -> None:
    story = samples.resumed(any_db)  # lost at step 83, resumed from step 50
    page = CurveCache(any_db, Beside()).read(story.id, ["loss", "eval_loss", "no such"])
    first, second = [segment for segment in page.segments if "loss" in segment.curves]
    assert (first.attempt, first.repeated_from) == (1, 51.0)
    assert (second.attempt, second.repeated_from) == (2, None)
    assert len(first.curves["loss"]) == 83 and len(second.curves["loss"]) == 90
    assert [(mark.kind, mark.step) for mark in page.marks] == [
        ("attempt", 1), ("attempt", 51), ("checkpoint", 50), ("checkpoint", 100)
    ]  # fmt: skip
    assert [x for x, _ in points(page, "eval_loss")] == [50.0, 100.0]
    assert {"loss", "lr", "grad_norm", "tokens_per_s", "eval_perplexity"} <= set(page.metrics)
    assert (page.low, page.high, page.sampled) == (1.0, 140.0, False)


def test_any_number_that_a_script_wrote_is_a_metric_and_text_is_none(db: Database) -> None:
    odd = "<img src=x onerror=alert(1)>" * 10
    story = running(db, step(1, 2.0, accuracy=0.5, note="fine", odd=True), step(2, "NaN", **{odd: 1}), step(3, 1.0))
    cache = CurveCache(db, Beside())
    page = cache.read(story.id, ["loss", "accuracy", odd[:100]])
    assert page.metrics == ("loss", "accuracy", odd[:100])
    assert points(page, "loss") == [(1.0, 2.0), (2.0, None), (3.0, 1.0)]
    assert points(page, "accuracy") == [(1.0, 0.5)] and points(page, odd[:100]) == [(2.0, 1.0)]
    story.tell([step(4, 0.5)])
    assert points(cache.read(story.id, ["loss"]), "loss")[-1] == (4.0, 0.5), "only what is new is read"


def test_a_spike_of_one_step_survives_and_a_window_shows_every_step(db: Database) -> None:
    losses = {number: 2.0 + 0.1 * math.sin(number) for number in range(1, 3001)}
    losses[1234] = 99.0
    story = running(db, *(step(number, loss) for number, loss in losses.items()))
    cache = CurveCache(db, Beside())
    whole = points(cache.read(story.id, ["loss"], points=100), "loss")
    assert len(whole) <= 102 and max(y for _, y in whole if y is not None) == 99.0
    near = points(cache.read(story.id, ["loss"], low=1230, high=1240, points=100), "loss")
    assert [x for x, _ in near] == [float(number) for number in range(1229, 1242)], "one more on either side"
    timed = cache.read(story.id, ["loss"], axis="time", points=100)
    assert (timed.low, timed.high, timed.unit) == (0.0, 2.0 * 2999, "s")
    assert timed.origin == samples.T0 + timedelta(seconds=2)


def test_a_long_run_is_sampled_until_it_is_read(any_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    story = samples.resumed(any_db)
    monkeypatch.setattr(curve_cache, "SMALL", 0)
    sample = figures.sample_steps(any_db, story.id, count=10)
    steps = [row.data["step"] for row in sample]
    assert steps[0] == 1 and 83 in steps and steps[-1] == 140 and len(steps) <= 24
    asked: list[Any] = []
    beside = SimpleNamespace(ask=lambda key, work, rank: asked.append((key, work, rank)))
    cache = CurveCache(any_db, beside)  # type: ignore[arg-type]
    assert cache.read(story.id, ["loss"]).sampled
    ((key, work, _),) = asked
    assert key == ("curves", story.id)
    work()
    page = cache.read(story.id, ["loss"])
    assert not page.sampled and len(points(page, "loss")) == 173
    rare = {row.phase for row in figures.sample_events(any_db, story.id, count=5)}
    assert {"PROJECT", "PREFLIGHT", "TRAINING", "CHECKPOINT", "STEP"} <= rare


def test_a_sample_is_shared_out_over_the_attempts(db: Database) -> None:
    story = samples.resumed(db)
    few = figures.sample_steps(db, story.id, count=40)
    by_attempt = [sum(row.cursor[0] == number for row in few) for number in (1, 2)]
    assert all(15 <= count <= 21 for count in by_attempt), "forty in all, not of each"
    evaluations = figures.sample_steps(db, story.id, count=40, phase="EVAL_MODEL")
    assert [row.data["step"] for row in evaluations] == [50, 100]
    curve = compare.read_curve(db, story.id, metric="eval/loss")
    assert [step for step, _, _ in curve.points] == [50.0, 100.0]
