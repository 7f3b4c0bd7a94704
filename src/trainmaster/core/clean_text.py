"""Text from jobs and nodes without the characters that act on its reader.

A job may print anything. A control character steers a terminal or ends an XML file, a direction mark makes text read
otherwise than it is, half a surrogate pair cannot be written as UTF-8. Each is replaced by U+FFFD: nothing is dropped
silently. The terminal (`cli/_console.py`) and the pages (`report/html.py`, `report/markdown.py`) clean here. In a CSV
file a spreadsheet would also run a cell that begins as a formula does (`cell`).
"""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

# C0 and C1 controls but tab and newline, DEL, direction marks and separators, surrogates, non-characters.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)

_FORMULA = ("=", "+", "-", "@")
_UNSEEN = re.compile(r"^[\s\u00ad\u200b-\u200d\u2060\ufeff\ufffd]+")  # what programs drop before they look at a cell
_LOOKED_AT = 64  # characters of a cell
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def clean(value: str) -> str:
    """The same text; CR is a line end, every other unsafe character is U+FFFD."""
    if value.isprintable():  # nearly all that a page shows; no unsafe character is printable
        return value
    return _UNSAFE.sub("\ufffd", value.replace("\r\n", "\n").replace("\r", "\n"))


def clean_line(value: str) -> str:
    """The same text on one line."""
    return " ".join(clean(value).split())


def cell(text: str) -> str:
    """The text without characters that act on its reader, and with `'` before a formula. Numbers stay."""
    text = clean(text)
    first = _UNSEEN.sub("", unicodedata.normalize("NFKC", text[:_LOOKED_AT]))
    formula = first.startswith(_FORMULA) and not _NUMBER.fullmatch(text)
    return f"'{text}" if formula or text.startswith("\t") else text


def csv_lines(batches: Iterable[Iterable[Sequence[Any]]]) -> Iterator[str]:
    """Rows as CSV, a batch at a time. Texts of users went through `cell`."""
    text = io.StringIO()
    table = csv.writer(text)
    for batch in batches:
        table.writerows(batch)
        yield text.getvalue()
        text.seek(0)
        text.truncate()
