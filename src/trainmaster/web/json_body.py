"""Body of a request: its bytes, and its JSON, checked for values that no later layer could store or print."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import ClientDisconnect, Request

from trainmaster.web.errors import Refused

_MOST_DEEP = 64  # levels; a spec has six
_LARGEST = 2**63  # integers of a database and of other languages


async def read_bytes(request: Request) -> bytes:
    """The whole body; Refused (413) where the guard or the caller has cut it."""
    try:
        return await request.body()
    except ClientDisconnect as gone:
        raise Refused(413, "too_large", "the body is too large or incomplete") from gone


async def read_spec(request: Request) -> Any:
    """The JSON of a submission; Refused (415) where the caller does not call it JSON."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "not_json", "send the spec as application/json")
    return parse(await read_bytes(request))


def parse(body: bytes) -> Any:
    """The JSON value of a body; Refused (400) where it is none, or nested, large or encoded beyond use."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        message = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Refused(400, "not_json", f"the body is not JSON: {message}") from error
    _check(value, 0)
    return value


def _check(value: Any, depth: int) -> None:
    if depth > _MOST_DEEP:
        raise Refused(400, "not_json", f"the body is nested more than {_MOST_DEEP} levels deep")
    if isinstance(value, str):
        if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise Refused(400, "not_json", "the body has half of a surrogate pair, which is no character")
    elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise Refused(400, "not_json", "the body has an integer of more than 64 bits")
    elif isinstance(value, dict):
        for name, item in value.items():
            _check(name, depth + 1)
            _check(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check(item, depth + 1)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):  # a reader before us may have judged the one that is dropped here
        raise ValueError("a key stands twice in one object")
    return value


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")
