"""The arithmetic of money: it grows with time, adds up over attempts, and what is unknown stays unknown."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.core.money.cost import (
    Amount,
    Mark,
    Span,
    Window,
    add_up,
    burn,
    dollars,
    forecast,
    left_s,
    month_of,
    reached_at,
    round_cents,
)

T0 = datetime(2026, 11, 15, 12, tzinfo=UTC)
seconds = st.integers(min_value=0, max_value=10**8)
prices = st.floats(min_value=0, max_value=1e7, allow_nan=False)


@st.composite
def spans(draw: st.DrawFn, price: st.SearchStrategy[float | None] = prices) -> Span:
    start = T0 + timedelta(seconds=draw(seconds))
    end = draw(st.none() | seconds.map(lambda more: start + timedelta(seconds=more)))
    return Span(cents_per_hour=draw(price), start=start, end=end)


def close(a: float, b: float) -> bool:
    return a == pytest.approx(b, rel=1e-9, abs=1e-6)


@pytest.mark.slow
@given(st.lists(spans(), max_size=6), seconds, seconds)
def test_cost_is_monotone_in_time(paid: list[Span], first: int, more: int) -> None:
    now, later = T0 + timedelta(seconds=first), T0 + timedelta(seconds=first + more)
    assert add_up(paid, now=later).known_cents >= add_up(paid, now=now).known_cents >= 0


@pytest.mark.slow
@given(st.lists(spans(price=st.none() | prices), max_size=6), st.integers(0, 6), seconds)
def test_cost_is_additive_over_attempts(paid: list[Span], cut: int, after: int) -> None:
    now = T0 + timedelta(seconds=after)
    whole, parts = add_up(paid, now=now), add_up(paid[:cut], now=now) + add_up(paid[cut:], now=now)
    assert close(whole.known_cents, parts.known_cents) and whole.unknown == parts.unknown


@pytest.mark.slow
@given(st.lists(spans(), max_size=4), spans(price=st.none()), seconds)
def test_unknown_stays_unknown(paid: list[Span], unpriced: Span, after: int) -> None:
    now = T0 + timedelta(seconds=after)
    amount = add_up([*paid, unpriced], now=now)
    assert amount.cents is None and amount.unknown == 1
    assert forecast(amount, cents_per_hour=burn([*paid, unpriced]), left_s=1.0) is None
    assert (amount + Amount(known_cents=5.0)).cents is None


@given(spans(price=st.none() | prices), st.lists(seconds, min_size=0, max_size=5), seconds)
def test_windows_side_by_side_cost_what_the_whole_costs(span: Span, cuts: list[int], after: int) -> None:
    now = T0 + timedelta(seconds=after)
    ends = [T0, *sorted(T0 + timedelta(seconds=cut) for cut in cuts), T0 + timedelta(seconds=10**9)]
    parts = [add_up([span], now=now, window=Window(start=a, end=b)) for a, b in pairwise(ends)]
    whole = add_up([span], now=now)
    assert close(sum(part.known_cents for part in parts), whole.known_cents)
    if span.cents_per_hour is None and span.seconds(now=now) > 0:
        assert any(part.unknown for part in parts)


@given(prices, st.floats(min_value=0.01, max_value=1e9), seconds)
def test_a_cap_is_reached_when_it_is_said_to_be(price: float, cap: float, after: int) -> None:
    span, now = Span(cents_per_hour=price, start=T0), T0 + timedelta(seconds=after)
    spent = add_up([span], now=now).known_cents
    when = reached_at(cap, spent_cents=spent, cents_per_hour=burn([span]), now=now)
    if when is None:
        assert price == 0 or (cap - spent) / price >= 1_000_000
    else:
        tick = price * 1e-6 / 3600 * 2  # datetimes have microseconds
        assert when >= now and add_up([span], now=when).known_cents >= cap - tick - cap * 1e-9


def test_an_hour_costs_its_price_and_no_started_minute_is_rounded() -> None:
    paid = [Span(cents_per_hour=638, start=T0)]
    assert add_up(paid, now=T0 + timedelta(hours=1)).cents == 638
    assert add_up(paid, now=T0 + timedelta(seconds=1)).cents == pytest.approx(638 / 3600)
    assert add_up([], now=T0).cents == 0


def test_a_month_is_the_calendar_month_in_utc() -> None:
    assert month_of(datetime(2026, 12, 31, 23, 59, tzinfo=UTC)) == Window(
        start=datetime(2026, 12, 1, tzinfo=UTC), end=datetime(2027, 1, 1, tzinfo=UTC)
    )


def marks(*pairs: tuple[int, float]) -> list[Mark]:
    return [Mark(at=T0 + timedelta(seconds=at), done=done) for at, done in pairs]


def test_the_way_to_the_end_is_told_only_where_pace_and_goal_are_known() -> None:
    now = T0 + timedelta(seconds=100)
    assert left_s(marks((0, 1), (100, 11)), 101, now=now) == pytest.approx(900)
    assert left_s(marks((0, 1), (50, 6)), 101, now=now) == pytest.approx(900), "counted from now, not from the mark"
    assert left_s(marks((0, 1), (100, 11)), 5, now=now) == 0
    for pairs, total in [
        ([], 10),
        ([(0, 1)], 10),
        ([(0, 5), (9, 5)], 10),
        ([(0, 5), (0, 6)], 10),
        ([(0, 9), (9, 3)], 10),
    ]:
        assert left_s(marks(*pairs), total, now=now) is None
    assert left_s(marks((0, 1), (100, 11)), None, now=now) is None
    assert forecast(Amount(known_cents=100), cents_per_hour=3600, left_s=10) == pytest.approx(110)
    assert forecast(Amount(known_cents=100), cents_per_hour=3600, left_s=None) is None


def test_the_limits_of_a_job_bound_its_forecast_or_are_it() -> None:
    spent = Amount(known_cents=100)

    def ask(**more: float | None) -> float | None:
        return forecast(spent, **{"cents_per_hour": 3600.0, "left_s": None, **more})  # type: ignore[arg-type]

    assert ask(timeout_s=10) == ask(left_s=20, timeout_s=10) == ask(left_s=10, timeout_s=20) == pytest.approx(110)
    assert ask(cap_cents=105) == ask(left_s=10, cap_cents=105) == pytest.approx(105)
    assert ask(cap_cents=905, earlier_cents=800) == pytest.approx(105), "a cap holds for the whole run"
    assert ask(cap_cents=50) == pytest.approx(100), "what is spent is spent"
    assert ask(left_s=0.0, timeout_s=10, cap_cents=500) == pytest.approx(100), "it is over"
    assert ask(cents_per_hour=0.0, timeout_s=10, cap_cents=500) is None, "it has not begun"


def test_only_an_amount_under_a_cent_keeps_its_parts() -> None:
    assert [round_cents(x) for x in (None, 0.0, 1e-9, 0.25, 1.0, 99.6, -0.25)] == [None, 0, 1e-6, 0.25, 1, 100, 0]
    assert type(round_cents(99.6)) is int


def test_amounts_are_told_as_they_are() -> None:
    assert [dollars(x) for x in (None, 0, 0.4, 123456)] == ["unknown", "$0.00", "under $0.01", "$1,234.56"]
