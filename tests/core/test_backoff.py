"""Back-off doubles up to its limit; jitter takes at most half off."""

from __future__ import annotations

import pytest

from trainmaster.core.backoff import backoff_s


@pytest.mark.parametrize(
    ("failures", "expected_s"), [(0, 0.5), (1, 0.5), (2, 1.0), (3, 2.0), (6, 16.0), (7, 30.0), (10**9, 30.0)]
)
def test_it_doubles_up_to_the_limit(failures: int, expected_s: float) -> None:
    assert backoff_s(failures, first_s=0.5, longest_s=30.0, jitter=False) == expected_s


def test_jitter_spreads_over_the_upper_half() -> None:
    drawn = [backoff_s(3, first_s=1.0, longest_s=60.0) for _ in range(1000)]
    assert min(drawn) >= 2.0 and max(drawn) <= 4.0
    assert max(drawn) - min(drawn) > 1.5


def test_without_a_limit_it_stays_a_number() -> None:
    assert backoff_s(10**6, first_s=1.0, jitter=False) == 2.0**60
