"""Numbers as people read them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from pages.samples import T0
from trainmaster.report import formats


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"), (0, "0"), (1.9475, "1.948"), (0.0003, "0.0003"), (1.5e-5, "1.5e-5"), (200, "200"), (100, "100"),
        (1234.5, "1,234"), (12_345, "12.3k"), (99_999, "100k"), (999_950, "1M"), (1_050_000, "1.05M"),
        (8.03e9, "8.03B"), (405e9, "405B"), (1.5e13, "15T"), (-3.25, "-3.25"),
        (9.9e14, "990T"), (9.9996e14, "1e+15"), (3.35e29, "3.35e+29"), (-1e300, "-1e+300"), (9.56e38, "9.56e+38"),
    ],
)  # fmt: skip
def test_short(value: float | None, text: str) -> None:
    assert formats.short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"), (0, "0 s"), (0.42, "0.4 s"), (9.96, "10 s"), (42, "42 s"), (59.7, "1 min"), (200, "3 min 20 s"),
        (3600, "1 h"), (18_120, "5 h 2 min"), (273_600, "3 d 4 h"),
    ],
)  # fmt: skip
def test_duration(seconds: float | None, text: str) -> None:
    assert formats.duration(seconds) == text


def test_a_hundred_percent_means_all_of_it() -> None:
    assert [formats.percent(share) for share in (0.9999, 1.0, 0.29, None)] == ["99%", "100%", "29%", "–"]


def test_age() -> None:
    ages = [formats.age(T0, now=T0 + timedelta(seconds=gap)) for gap in (-3, 2, 42, 125, 7300, 200_000)]
    assert ages == ["just now", "just now", "42 s ago", "2 min ago", "2 h ago", "2 d ago"]


def test_size() -> None:
    assert [formats.size(value) for value in (0, 12_800_000, 3 * 2**30, None)] == ["0 B", "12.2 MiB", "3 GiB", "–"]
