"""Text from jobs and nodes without the characters that act on its reader.

A job may print anything. A control character steers a terminal or ends an XML file, a direction mark makes text read
otherwise than it is, half a surrogate pair cannot be written as UTF-8. Each is replaced by U+FFFD: nothing is dropped
silently. The terminal (`cli/_console.py`) and the pages (`report/html.py`, `report/markdown.py`) clean here.
"""

from __future__ import annotations

import re

# C0 and C1 controls but tab and newline, DEL, direction marks and separators, surrogates, non-characters.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def clean(value: str) -> str:
    """The same text; CR is a line end, every other unsafe character is U+FFFD."""
    if value.isprintable():  # nearly all that a page shows; no unsafe character is printable
        return value
    return _UNSAFE.sub("\ufffd", value.replace("\r\n", "\n").replace("\r", "\n"))


def clean_line(value: str) -> str:
    """The same text on one line."""
    return " ".join(clean(value).split())
