"""A log line as HTML: colours of the terminal as classes, every other escape removed, the rest escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable

from markupsafe import Markup, escape

from trainmaster.core.clean_text import clean

LONGEST = 4000  # characters of a line that are shown
_COLOUR = re.compile(r"\x1b\[([0-9;:]{0,40})m")
_OTHER = re.compile(r"\x1b(?:\[[0-?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,400}(?:\x07|\x1b\\)|[@-Z\\-_]|[()][A-Z0-9])")
_NAMES = {1: "bold", 2: "dim", 3: "slant", 4: "under"}


def render(text: str) -> Markup:
    """One line. What a progress bar has overwritten is left out: the text behind the last carriage return stands."""
    text = text.rstrip("\r\n")
    text = text.rpartition("\r")[2] if "\r" in text else text
    cut = len(text) > LONGEST
    parts: list[Markup] = []
    classes: dict[str, str] = {}
    last = 0
    text = text[:LONGEST]
    for match in _COLOUR.finditer(text):
        parts.append(_span(text[last : match.start()], classes.values()))
        _apply(classes, match[1])
        last = match.end()
    parts.append(_span(text[last:], classes.values()))
    if cut:
        parts.append(Markup('<span class="quiet"> … the line goes on</span>'))
    return Markup("").join(parts)


def _span(text: str, classes: Iterable[str]) -> Markup:
    plain = escape(clean(_OTHER.sub("", text)))
    names = " ".join(classes)
    return Markup('<span class="{}">{}</span>').format(names, plain) if names and plain else plain


def _apply(classes: dict[str, str], codes: str) -> None:
    """The state after an escape. Of 256 and of true colours only the first sixteen are known; others are the text's."""
    numbers = [int(code) if code.isdecimal() else 0 for code in re.split("[;:]", codes)]
    skip = 0
    for place, number in enumerate(numbers):
        if skip:
            skip -= 1
        elif number == 0:
            classes.clear()
        elif number in _NAMES:
            classes[_NAMES[number]] = f"a-{_NAMES[number]}"
        elif number == 22:
            classes.pop("bold", None)
            classes.pop("dim", None)
        elif number in (23, 24):
            classes.pop("slant" if number == 23 else "under", None)
        elif 30 <= number <= 37 or 90 <= number <= 97:
            classes["ink"] = f"a-{number % 10}"
        elif number in (38, 48):
            kind = numbers[place + 1] if place + 1 < len(numbers) else 0
            skip = 2 if kind == 5 else 4
            colour = numbers[place + 2] if kind == 5 and place + 2 < len(numbers) else 16
            if number == 38:
                classes.pop("ink", None)
                if colour < 16:
                    classes["ink"] = f"a-{colour % 8}"
        elif number == 39:
            classes.pop("ink", None)
