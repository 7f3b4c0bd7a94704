"""JSON of an answer shape, and the shape of a JSON answer."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import types
import typing
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")


def to_json(value: object, *, indent: int | None = None) -> str:
    """JSON text: times as ISO 8601 in UTC with `Z`, enums as their words. ValueError for NaN and infinity."""
    separators = (",", ":") if indent is None else None
    return json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False, indent=indent, separators=separators)


def to_plain(value: object) -> Any:
    """Dicts, lists and scalars, as a reader of the JSON gets them."""
    return json.loads(json.dumps(value, default=_plain))


def decode(kind: type[T], value: Any) -> T:
    """A shape from parsed JSON. Unknown fields are ignored; an unknown word of an enum stays text.

    A missing field takes its default, or None where the type allows it. TypeError where it allows neither.
    """
    decoded: T = _decode(kind, value)
    return decoded


def fill(kind: Callable[..., T], source: object, **more: Any) -> T:
    """A shape from the attributes of the same names of another object; `more` gives the other fields."""
    assert isinstance(kind, type)
    names, take = _fields(kind, frozenset(more))
    made: T = kind(**dict(zip(names, take(source), strict=True)), **more)
    return made


def _plain(value: object) -> object:
    """One layer of a value that the encoder does not know by itself."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names, take = _fields(type(value), frozenset())
        return dict(zip(names, take(value), strict=True))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"an answer holds a {type(value).__name__}")


@functools.cache
def _fields(kind: type[Any], without: frozenset[str]) -> tuple[tuple[str, ...], Callable[[object], tuple[Any, ...]]]:
    names = tuple(field.name for field in dataclasses.fields(kind) if field.name not in without)
    if len(names) == 1:  # attrgetter of one name returns the bare value
        return names, lambda value: (getattr(value, names[0]),)
    return names, operator.attrgetter(*names)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@functools.cache
def _absent(kind: Any) -> tuple[str, ...]:
    """Fields without a default whose type allows None: an older server may not send them."""
    hints = _hints(kind)
    bare = (field.name for field in dataclasses.fields(kind) if _has_no_default(field))
    return tuple(name for name in bare if types.NoneType in typing.get_args(hints[name]))


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _decode(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if value is None or kind is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        return _decode(next(part for part in typing.get_args(kind) if part is not types.NoneType), value)
    if origin is tuple:
        parts = typing.get_args(kind)
        each = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(_decode(part, item) for part, item in zip(each, value, strict=False))
    if isinstance(kind, type):
        return _decode_class(kind, value)
    return value


def _decode_class(kind: type[Any], value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        known = {name: _decode(hints[name], item) for name, item in value.items() if name in hints}
        return kind(**dict.fromkeys(_absent(kind)) | known)
    if issubclass(kind, Enum):
        return kind(value) if value in {word.value for word in kind} else value
    if kind is datetime:
        return datetime.fromisoformat(value)
    if kind is float and isinstance(value, int):
        return float(value)
    return value
