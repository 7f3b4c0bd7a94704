"""Every schedule stays under its peak, has no jump where its parts meet, ends where it says, and survives a resume."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.core.config.optimizer import OptimizerConfig
from trainmaster.core.config.schedule import Plateau, learning_rate
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import SpecError
from trainmaster.core.schema import build
from trainmaster.train.state import State

from .runs import RunHere, StopAfter, tiny

SHAPES = [
    *({"schedule": name} for name in ("constant", "linear", "cosine", "exponential")),
    *({"schedule": "wsd", "decay_shape": shape} for shape in ("linear", "sqrt", "cosine")),
]


@st.composite
def runs(draw: st.DrawFn) -> tuple[OptimizerConfig, int]:
    """A schedule that the checks let pass, and the steps it runs for."""
    steps = draw(st.integers(1, 400))
    shape = draw(st.sampled_from(SHAPES))
    warmup = draw(st.integers(0, steps - 1))
    decay = draw(st.none() | st.integers(1, steps - warmup)) if shape["schedule"] != "constant" else None
    ratio = draw(st.floats(0.001, 1))
    config = OptimizerConfig(
        lr=draw(st.floats(1e-6, 1)), min_lr_ratio=ratio, warmup_steps=warmup, decay_steps=decay, **shape
    )
    assert not [*config.faults(), *config.faults_over(steps, evaluates=True)]
    return config, steps


@given(runs())
def test_never_negative_never_above_the_peak_and_up_before_down(run: tuple[OptimizerConfig, int]) -> None:
    config, steps = run
    rates = [learning_rate(config, step=step, steps=steps) for step in range(steps)]
    assert all(0 < rate <= config.lr for rate in rates)
    up, down = rates[: config.warmup_steps], rates[config.warmup_steps :]
    assert up == sorted(up)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(down))


@given(runs())
def test_the_parts_meet_at_the_peak_and_the_last_step_has_the_last_rate(run: tuple[OptimizerConfig, int]) -> None:
    config, steps = run
    if config.warmup_steps:
        assert learning_rate(config, step=config.warmup_steps - 1, steps=steps) == config.lr
    if config.schedule == "constant":
        assert learning_rate(config, step=steps - 1, steps=steps) == config.lr
        return
    wsd = config.schedule == "wsd"
    tail = config.decay_steps or (min(max(1, steps // 10), steps - config.warmup_steps) if wsd else None)
    first = steps - 1 - tail if wsd and tail else config.warmup_steps
    last = steps - 1 if wsd or tail is None else config.warmup_steps + tail
    if 0 <= first < last:
        assert learning_rate(config, step=first, steps=steps) == pytest.approx(config.lr)
    if first < last:
        assert learning_rate(config, step=last, steps=steps) == pytest.approx(config.lr * config.min_lr_ratio)
        assert learning_rate(config, step=last + 7, steps=steps) == pytest.approx(config.lr * config.min_lr_ratio)


@given(runs())
def test_no_step_jumps(run: tuple[OptimizerConfig, int]) -> None:
    """One step moves by no more than the steepest part of its curve can: a border that does not meet would."""
    config, steps = run
    span = config.decay_steps or max(1, steps // 10 if config.schedule == "wsd" else steps - 1 - config.warmup_steps)
    if config.schedule == "wsd":
        span = min(span, steps - config.warmup_steps)
    fall = {
        "linear": 1 / span,
        "cosine": math.pi / 2 / span,
        "sqrt": span**-0.5,
        "constant": 0.0,
        "exponential": 1 - config.min_lr_ratio ** (1 / span),
    }[config.decay_shape if config.schedule == "wsd" else config.schedule]
    rates = [learning_rate(config, step=step, steps=steps) for step in range(config.warmup_steps, steps)]
    for earlier, later in itertools.pairwise(rates):
        assert earlier - later <= config.lr * fall * (1 + 1e-9) + 4 * math.ulp(config.lr)


def test_the_tails_of_wsd_hang_as_they_are_called() -> None:
    def at(shape: Any, step: int) -> float:
        config = OptimizerConfig(
            lr=1.0, schedule="wsd", min_lr_ratio=0.0, warmup_steps=10, decay_steps=20, decay_shape=shape
        )
        return learning_rate(config, step=step, steps=101)

    assert [at("linear", step) for step in (9, 50, 80, 85, 90, 100)] == pytest.approx([1, 1, 1, 0.75, 0.5, 0])
    assert [at("sqrt", step) for step in (80, 85, 100)] == pytest.approx([1, 0.5, 0])
    assert [at("cosine", step) for step in (80, 90, 100)] == pytest.approx([1, 0.5, 0])


@pytest.mark.slow
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40), st.integers(1, 5), st.floats(0.1, 0.9))
def test_plateau_cuts_only_after_patience_and_never_below_its_least(
    losses: list[float], patience: int, factor: float
) -> None:
    config = OptimizerConfig(
        schedule="plateau", warmup_steps=0, plateau_patience=patience, plateau_factor=factor, min_lr_ratio=0.05
    )
    seen, before = Plateau(), config.lr
    for count, loss in enumerate(losses, start=1):
        seen = seen.after(loss, config)
        rate = learning_rate(config, step=count, steps=1000, plateau=seen)
        assert config.lr * 0.05 <= rate <= before
        assert seen.cuts <= count // patience
        assert seen.best is None or math.isfinite(seen.best)
        before = rate


def test_plateau_waits_for_its_patience_and_starts_to_count_again_after_a_cut() -> None:
    config = OptimizerConfig(schedule="plateau", plateau_patience=2, plateau_threshold=0.01)
    seen, cuts = Plateau(), []
    for loss in (2.0, 1.0, 0.999, 1.5, 1.2, 1.1, 0.5, math.nan, 0.5):
        seen = seen.after(loss, config)
        cuts.append(seen.cuts)
    assert cuts == [0, 0, 0, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize(
    ("optimizer", "path", "words"),
    [
        ({"warmup_steps": 100}, "optimizer.warmup_steps", "use 10"),
        ({"schedule": "constant", "decay_steps": 5}, "optimizer.decay_steps", "means nothing with schedule constant"),
        ({"schedule": "plateau", "decay_steps": 5}, "optimizer.decay_steps", "means nothing with schedule plateau"),
        ({"schedule": "exponential", "min_lr_ratio": 0}, "optimizer.min_lr_ratio", "use 0.01"),
        ({"schedule": "wsd", "decay_steps": 95}, "optimizer.decay_steps", "more than the 90 steps after warm-up"),
        ({"schedule": "plateau", "plateau_factor": 1}, "optimizer.plateau_factor", "at most 0.99"),
        ({"schedule": "cosin"}, "optimizer.schedule", "did you mean cosine?"),
    ],
)
def test_what_cannot_be_meant_is_refused(optimizer: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        build(TrainConfig, {"steps": 100, "optimizer": optimizer})
    (fault,) = caught.value.faults
    assert (fault.path, words in fault.message) == (path, True), fault


def test_plateau_without_evaluations_is_refused() -> None:
    with pytest.raises(SpecError, match="eval_sequences"):
        build(TrainConfig, {"eval_sequences": 0, "optimizer": {"schedule": "plateau"}})


def test_a_resumed_plateau_has_the_rates_of_the_unbroken_run(run_here: RunHere, tmp_path: Path) -> None:
    # Nothing counts as an improvement at this threshold, so every second evaluation cuts.
    optimizer = {"schedule": "plateau", "plateau_patience": 2, "plateau_threshold": 0.5, "warmup_steps": 1}
    config = tiny(steps=12, epoch_steps=2, batch_sequences=2, eval_sequences=2, optimizer=optimizer)
    whole = run_here(tmp_path / "whole", config)
    # Asked at each step and each evaluation batch: ten answers lead into the seventh step.
    run_here(tmp_path / "parts", config, stop=StopAfter(10))
    resumed = run_here(tmp_path / "parts", config)

    def rates(ran: Any) -> dict[int, float]:
        return {item["data"]["step"]: item["data"]["lr"] for item in ran.named("STEP", "metrics")}

    assert rates(resumed) == rates(whole)
    assert len(set(rates(whole).values())) >= 3
    assert resumed.manifest(12)["state"]["plateau"] == whole.manifest(12)["state"]["plateau"]
    assert resumed.named("CHECKPOINT", "loaded")


def test_a_state_from_before_there_was_a_plateau_still_loads() -> None:
    assert build(State, {"step": 3, "cursor": 24}).plateau == Plateau()
