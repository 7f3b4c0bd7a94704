"""Text of users in CSV files. A spreadsheet would run a cell that begins as a formula does."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from trainmaster.core.clean_text import clean

_FORMULA = ("=", "+", "-", "@")
_UNSEEN = re.compile(r"^[\s\u00ad\u200b-\u200d\u2060\ufeff\ufffd]+")  # what programs drop before they look at a cell
_LOOKED_AT = 64  # characters of a cell
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def cell(text: str) -> str:
    """The text without characters that act on its reader, and with `'` before a formula. Numbers stay."""
    text = clean(text)
    first = _UNSEEN.sub("", unicodedata.normalize("NFKC", text[:_LOOKED_AT]))
    formula = first.startswith(_FORMULA) and not _NUMBER.fullmatch(text)
    return f"'{text}" if formula or text.startswith("\t") else text


def lines(batches: Iterable[Iterable[Sequence[Any]]]) -> Iterator[str]:
    """Rows as CSV, a batch at a time. Texts of users went through `cell`."""
    text = io.StringIO()
    table = csv.writer(text)
    for batch in batches:
        table.writerows(batch)
        yield text.getvalue()
        text.seek(0)
        text.truncate()
