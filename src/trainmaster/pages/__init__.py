"""Pages: one file each, a query and a dataclass. The folder is the registry.

Every module has `Page`, a frozen dataclass of plain data, and `read(db, …) -> Page`. It knows nothing of HTML: the
web and the reports render the same dataclass, and JSON is `to_json` of it. What several pages
share is in `parts/`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import pkgutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Any


def names() -> list[str]:
    """Every page there is: the modules of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg)


def to_json(value: object, *, indent: int | None = None) -> str:
    """A page as JSON: times as ISO text in UTC, enums as their words. ValueError where a number is none of JSON's."""
    separators = (",", ":") if indent is None else None
    return json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False, indent=indent, separators=separators)


def to_plain(value: object) -> Any:
    """A page as dicts, lists and scalars: what a reader of its JSON gets."""
    return json.loads(json.dumps(value, default=_plain))


def _plain(value: object) -> object:
    """What the encoder does not know by itself, one layer of it."""
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names, take = _fields(type(value))
        return dict(zip(names, take(value), strict=True))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a page holds a {type(value).__name__}")


@functools.cache
def _fields(kind: type[Any]) -> tuple[tuple[str, ...], Callable[[object], tuple[Any, ...]]]:
    names = tuple(field.name for field in dataclasses.fields(kind))
    if len(names) == 1:  # one name gives its value, and not a tuple of it
        return names, lambda value: (getattr(value, names[0]),)
    return names, operator.attrgetter(*names)
