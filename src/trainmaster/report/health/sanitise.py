"""Sanitising of values from nodes, for every format at once.

A node may write anything. Control characters break XML or steer a terminal, a lone surrogate cannot be written as
UTF-8, and NaN is no JSON. Replaced characters show as U+FFFD; nothing is dropped silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainmaster.core.clean_text import clean as text
from trainmaster.core.clean_text import clean_line as line

__all__ = ["line", "number", "plain", "text"]

MAX_DEPTH = 12
MAX_BITS = 256  # of a whole number; longer ones are no measurement, and cannot be turned into a float


def plain(value: object, *, depth: int = 0) -> Any:
    """Data for JSON: finite numbers, safe text, bounded depth."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() <= MAX_BITS else f"a number of {value.bit_length()} bits"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth >= MAX_DEPTH:
        return "…"
    if isinstance(value, Mapping):
        return {text(str(key)): plain(item, depth=depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth=depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, depth=depth + 1) for item in value), key=repr)
    return text(str(value))


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None
