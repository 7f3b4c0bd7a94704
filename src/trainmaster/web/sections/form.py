"""Forms of pages, and links that keep a choice."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import parse_qs, quote_plus, urlencode

from fastapi import Depends, Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from trainmaster.web.errors import Refused

_MOST = 100  # fields
_LONGEST = 4096


class Form:
    """The fields of a posted form: text without control characters at its ends, of bounded length."""

    def __init__(self, fields: Mapping[str, list[str]]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        return self._fields.get(name, [""])[0].replace("\x00", "").strip()[:_LONGEST]

    def required(self, name: str) -> str:
        """The field; Refused where it is empty."""
        if not (value := self.text(name)):
            raise Refused(422, "bad_form", f"{name}: missing")
        return value

    def every(self, name: str) -> list[str]:
        return [value for value in self._fields.get(name, []) if value]

    def number(self, name: str, *, most: int) -> int | None:
        """A whole number from 0; None where the field is empty."""
        value = self.text(name)
        if not value:
            return None
        if not value.isascii() or not value.isdecimal() or len(value) > 18 or int(value) > most:
            raise Refused(422, "bad_form", f"{name}: a whole number from 0 to {most:,}")
        return int(value)


async def _read(request: Request) -> Form:
    try:
        fields = parse_qs((await request.body()).decode(), max_num_fields=_MOST, keep_blank_values=True)
    except (ClientDisconnect, ValueError) as error:
        raise Refused(400, "bad_form", "invalid form") from error
    return Form(fields)


Posted = Annotated[Form, Depends(_read)]


def refuse_invalid(error: ValidationError) -> Refused:
    """The answer to a form that the shape of the API refuses, in the words of the API."""
    faults = [
        f"{'.'.join(map(str, item['loc']))}: {item['msg'].removeprefix('Value error, ')}" for item in error.errors()
    ]
    return Refused(422, "bad_form", "; ".join(faults))


def link(path: str, **parameters: object) -> str:
    """A path with its parameters; absent ones are left out. A sequence is a parameter for each item."""
    words = {name: value for name, value in parameters.items() if value not in (None, "", 0, (), [])}
    return f"{path}?{urlencode(words, doseq=True, quote_via=_quote)}" if words else path


@functools.lru_cache(maxsize=1024)
def _quote(text: str, *how: Any) -> str:
    """A page has the same words in hundreds of links, and the ids of 200 runs in several."""
    return quote_plus(text, *how)


def clean_word(text: str) -> str:
    """What somebody searches for: PostgreSQL has no NUL in a text."""
    return text.replace("\x00", "").strip()[:63]
