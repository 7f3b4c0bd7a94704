"""Number formats for people: 12.4k, 3 min 20 s, 1.5 GiB. Absent is an en dash, never a zero."""

from __future__ import annotations

import math
from datetime import datetime

ABSENT = "–"


def count(value: float | None) -> str:
    """A whole number with thin groups: 1,024."""
    if value is None:
        return ABSENT
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}"  # a step of 2**63-1 is no float


_LARGE = 999_950_000_000_000  # rounds to 1000T


def short(value: float | None) -> str:
    """Three or four significant digits with k, M, B, T; small numbers as they are: 1.93, 0.0004, 12.4k, 3.35e+29."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= _LARGE or 0 < abs(value) < 1e-4:
        mantissa, _, power = f"{value:.2e}".partition("e")
        return f"{trim(mantissa)}e{int(power):+d}"
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        # Rounding comes first: 999,950 reads 1M, not 1000k.
        if abs(value) >= size * 0.99995:
            return trim(f"{value / (1e3 if suffix == 'k' else size):.3g}") + suffix
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return trim(f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}")


def trim(text: str) -> str:
    """The same decimal without trailing zeros."""
    if "e" in text:
        return f"{float(text):,.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float | None) -> str:
    """A share of one as a percentage, rounded down: 100% means all of it."""
    return ABSENT if share is None else f"{math.floor(share * 100 + 1e-9)}%"


def duration(seconds: float | None) -> str:
    """Two units at most: 0.4 s, 42 s, 3 min 20 s, 5 h 2 min, 3 d 4 h."""
    if seconds is None:
        return ABSENT
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{trim(f'{seconds:.1f}')} s"
    whole = round(seconds)
    for size, unit, inner, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // inner
            return f"{whole // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def age(when: datetime | None, *, now: datetime) -> str:
    """How long ago, in one unit."""
    if when is None:
        return ABSENT
    seconds = (now - when).total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now" if seconds < 5 else f"{int(seconds)} s ago"


def moment(when: datetime | None) -> str:
    """A time in UTC, to the second."""
    return ABSENT if when is None else when.strftime("%Y-%m-%d %H:%M:%S UTC")


def size(value_bytes: float | None) -> str:
    """Bytes in binary units."""
    if value_bytes is None:
        return ABSENT
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value_bytes >= factor:
            return f"{trim(f'{value_bytes / factor:.3g}')} {unit}"
    return f"{value_bytes:.0f} B"
