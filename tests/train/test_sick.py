"""Which steps are sick: never a finite one without history, always NaN and inf, and spikes of any healthy run."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from trainmaster.core.config.watch import WatchConfig
from trainmaster.train.watch.bad_steps import Decision, History, Range, decide, limits, pass_over

CONFIG = WatchConfig(max_skipped=3, spike_history=8)
LOSSES = st.floats(0.01, 100)
ANY = st.floats(allow_nan=True, allow_infinity=True)
BAD = st.sampled_from([math.nan, math.inf, -math.inf])


def after(*steps: tuple[float, float]) -> tuple[list[Decision], History]:
    history, decisions = History(), []
    for number, (loss, norm) in enumerate(steps):
        decisions.append(decide(history, loss, norm, cursor=8 * number, config=CONFIG))
        history = decisions[-1].history
    return decisions, history


@given(st.lists(st.tuples(LOSSES, LOSSES), max_size=8))
def test_without_enough_history_every_finite_step_moves(steps: list[tuple[float, float]]) -> None:
    decisions, _ = after(*steps)
    assert {decision.act for decision in decisions} <= {"move"}


@given(st.lists(st.tuples(ANY, ANY), max_size=30), BAD, st.booleans())
def test_what_is_not_finite_never_moves_and_never_enters_history(
    steps: list[tuple[float, float]], bad: float, in_loss: bool
) -> None:
    _, history = after(*steps)
    decision = decide(history, bad if in_loss else 1.0, 1.0 if in_loss else bad, cursor=0, config=CONFIG)
    assert decision.act != "move"
    assert all(map(math.isfinite, decision.history.losses + decision.history.norms))
    assert (decision.history.losses, decision.history.norms) == (history.losses, history.norms)


@given(st.floats(0.1, 10), st.lists(st.floats(0.97, 1.03), min_size=8, max_size=40))
def test_a_spike_is_sick_and_noise_is_not(level: float, noise: list[float]) -> None:
    steady = [(level * share, level) for share in noise]
    decisions, history = after(*steady)
    assert {decision.act for decision in decisions} == {"move"}
    bounds = limits(history, CONFIG)
    assert level * 1.1 < bounds.loss < level * 3
    assert decide(history, level * 3, level, cursor=0, config=CONFIG).act == "skip"
    assert decide(history, level, level * 100, cursor=0, config=CONFIG).act == "skip"
    # A falling loss is what training is for.
    assert decide(history, level / 100, level / 100, cursor=0, config=CONFIG).act == "move"
    free = WatchConfig(spike_history=8, loss_spike=None, grad_spike=None)
    assert decide(history, level * 3, level * 100, cursor=0, config=free).act == "move"


def test_a_row_of_sick_steps_rolls_back_and_knows_where_it_began() -> None:
    well, nan = (2.0, 1.0), (math.nan, 1.0)
    decisions, history = after(well, nan, nan, well, nan, nan, nan)
    assert [one.act for one in decisions] == ["move", "skip", "skip", "move", "skip", "skip", "roll back"]
    assert (history.sick_from, history.sick_steps) == (8 * 4, 3)
    assert decisions[-1].why == "loss is nan"


@given(
    st.integers(0, 60),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=5),
)
def test_no_batch_touches_a_range_and_none_goes_further_than_it_must(
    cursor: int, samples: int, spans: list[tuple[int, int]]
) -> None:
    ranges = tuple(Range(first=first, end=first + length) for first, length in spans)
    bad = {sample for one in ranges for sample in range(one.first, one.end)}
    begin = pass_over(cursor, samples, ranges)
    assert begin >= cursor
    assert not bad & set(range(begin, begin + samples))
    assert all(bad & set(range(earlier, earlier + samples)) for earlier in range(cursor, begin) if earlier == cursor)
    assert begin == cursor or begin in {one.end for one in ranges}
