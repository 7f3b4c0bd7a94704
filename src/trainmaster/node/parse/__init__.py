"""Foreign text becomes our data: one file per format that a tool of somebody else prints.

Every parser here keeps three promises, and `make fuzz` tries to break them:

1. it raises ParseError or nothing, whatever it is given;
2. what it could not read is absent from the data, never guessed, and `faults` says in words that it is missing;
3. what the text says is broken stays visible in the data, whatever else in the text is damaged.

So a judge may say "healthy" only of something that is there, and only where `faults` is empty.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

_SHOWN = 80  # characters of foreign text that a sentence repeats
_LONGEST = 8192  # characters of a line
_PLAIN = re.compile(r"[+-]?\d{1,18}")
_DECIMAL = re.compile(r"[+-]?\d{1,18}(\.\d{1,18})?([eE][+-]?\d{1,3})?")


class ParseError(ValueError):
    """The text is not what its parser reads; the sentence says what was expected."""


def as_text(raw: str | bytes) -> str:
    """The text of a tool's output. Bytes that are no UTF-8 become marks that match nothing."""
    return raw.decode("utf-8", errors="replace") if isinstance(raw, bytes) else raw


def split_lines(raw: str | bytes) -> list[str]:
    """The lines of a tool's output. No tool prints longer ones; what is cut off cannot be read, and shows as that."""
    return [line[:_LONGEST] for line in as_text(raw).splitlines()]


def load_json(text: str) -> Any:
    """One JSON document. A key given twice is damage, not a choice between two values."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ParseError("the JSON is nested too deeply to be a report") from None
    except ParseError:
        raise
    except ValueError as error:
        raise ParseError(f"not valid JSON: {shorten(str(error))}") from None


def read_int(value: object) -> int | None:
    """A whole number, written as one; anything else is None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if abs(value) < 10**18 else None
    if isinstance(value, str) and value.isascii() and _PLAIN.fullmatch(value.strip()):
        return int(value)
    return None


def read_float(value: object) -> float | None:
    """A finite number; `N/A`, `nan`, `inf` and everything else is None."""
    if isinstance(value, str):
        text = value.strip()
        value = float(text) if text.isascii() and _DECIMAL.fullmatch(text) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def shorten(text: str) -> str:
    """Foreign text, fit for a sentence of ours: one line, printable, not long."""
    line = " ".join("".join(char if char.isprintable() else "?" for char in text[: 4 * _SHOWN]).split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ParseError("the JSON gives the same key twice in one object")
    return mapping


def _no_constant(word: str) -> Any:
    raise ParseError(f"the JSON holds {word}, which is no number")
