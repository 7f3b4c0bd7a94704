"""A plain mapping becomes a frozen dataclass, or every fault in it is named at once.

The dataclass is the schema: its annotations are the types, `field` adds bounds and a sentence for the docs, and an
optional method `faults()` says what is wrong between fields. A class method `expand(mapping)`, where there is one, may
first put something under what is written (a preset). A class attribute OTHER_NAMES maps names of other programs to
ours, for the message; HINTS maps unknown names to the advice for them. Nothing here knows YAML or JSON.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import re
import types
import typing
from collections.abc import Hashable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from trainmaster.core.errors import Fault, SpecError
from trainmaster.core.secret.shapes import HIDDEN, hide, recognise

T = TypeVar("T")
Parts = dict[tuple[type[Any], str], object]  # by class and what is written: parts of documents that were built before
_SHOWN = 60  # characters of a wrong value repeated in its message
_MOST_INT = (1 << 63) - 1  # of a database, of JSON readers in other languages, of torch
_MOST_PARTS, _LARGE_PART = 1024, 16_384  # kept parts, and the characters above which none is kept: 16 MB at most
YEAR_S = 31_536_000.0  # bound of a duration: what runs timers takes no more than some 10^9 seconds


def field(
    *,
    doc: str,
    default: Any = dataclasses.MISSING,
    factory: Any = dataclasses.MISSING,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    most: float | None = None,
    pattern: str | None = None,
    allowed: str | None = None,
    example: object = None,
    default_text: str | None = None,
) -> Any:
    """A field of a spec: one sentence for the docs, bounds, and what a right value looks like.

    `le` holds for every document, also for one that was stored long ago; `most` only for a new one (`build_new`).
    """
    metadata = {"doc": doc, "ge": ge, "gt": gt, "le": le, "most": most, "pattern": pattern, "example": example}
    metadata["allowed"] = allowed  # the pattern in words, for its fault
    metadata["default_text"] = default_text  # for the docs, where other fields decide the default
    if factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def build(cls: type[T], mapping: object, *, path: str = "", parts: Parts | None = None) -> T:
    """The dataclass `cls` from a mapping; SpecError with every fault if it does not fit.

    `parts` keeps what is built for the next document: those of one program differ in a name and a few numbers.
    """
    faults: list[Fault] = []
    value = _dataclass(cls, mapping, path, faults, parts)
    if faults:
        raise SpecError(faults)
    return typing.cast(T, value)


def build_new(cls: type[T], mapping: object, *, path: str = "") -> T:
    """As `build`, for a document that somebody just wrote: bounds that were added later hold too."""
    value = build(cls, mapping, path=path)
    if faults := list(_above_most(value, path)):
        raise SpecError(faults)
    return value


def _above_most(value: object, path: str) -> Iterator[Fault]:
    for item in dataclasses.fields(typing.cast(Any, value)):
        where, inner = _join(path, item.name), getattr(value, item.name)
        parts = inner if isinstance(inner, tuple) else (inner,)
        for part in parts:
            if dataclasses.is_dataclass(part):
                yield from _above_most(part, where)
        most = item.metadata.get("most")
        if most is not None and inner is not None and inner > most:
            yield Fault(path=where, message=f"{inner} is out of range; it must be at most {most:g}")


_SCALARS = frozenset({str, int, float, bool, type(None)})


@functools.cache
def _fields(kind: type[Any]) -> tuple[dataclasses.Field[Any], ...] | None:
    """Fields of a dataclass; None for another type. A set of runs asks for those of 60 classes a thousand times."""
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else None


def to_plain(value: object) -> Any:
    """The same data as dicts, lists and scalars, ready for JSON; `build` reads it back."""
    kind: Any = type(value)
    if kind in _SCALARS:  # nearly every value
        return value
    if (items := _fields(kind)) is not None:
        return {item.name: to_plain(getattr(value, item.name)) for item in items}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(item) for item in value]
    return value


def to_stated(value: object) -> Any:
    """As `to_plain`, without what is null or empty by default: `build` reads the same data back, and people read less.

    A null that was stated where the default is a value stays.
    """
    kind: Any = type(value)
    if kind in _SCALARS:
        return value
    if (items := _fields(kind)) is not None:
        stated: dict[str, Any] = {}
        for item in items:
            plain = to_stated(getattr(value, item.name))
            if plain not in (None, [], {}) or not _is_default(item, getattr(value, item.name)):
                stated[item.name] = plain
        return stated
    if isinstance(value, Mapping):
        return {str(key): to_stated(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_stated(item) for item in value]
    return to_plain(value)


def _is_default(item: dataclasses.Field[Any], value: object) -> bool:
    if item.default_factory is not dataclasses.MISSING:
        return bool(item.default_factory() == value)
    return item.default is not dataclasses.MISSING and bool(item.default == value)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FieldDoc:
    """One row of the generated reference: where, what type, what default, what for."""

    path: str
    type: str
    default: str
    doc: str


def describe(cls: type[Any], *, path: str = "") -> Iterator[FieldDoc]:
    """Every field a document of this kind may hold, depth first, in reading order."""
    for item in dataclasses.fields(cls):
        hint = _hints(cls)[item.name]  # type: ignore[arg-type]  # mypy: a class is not Hashable
        where = _join(path, item.name)
        inner = next((arg for arg in (hint, *get_args(hint)) if dataclasses.is_dataclass(arg)), None)
        if inner is not None:
            yield from describe(typing.cast(type[Any], inner), path=where)
            continue
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        yield FieldDoc(
            path=where,
            type=_name(hint),
            default="required" if required else item.metadata.get("default_text") or _default_text(default),
            doc=str(item.metadata.get("doc", "")),
        )


@functools.cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _part(cls: type[Any], mapping: object, path: str, faults: list[Fault], parts: Parts | None) -> object:
    """As `_dataclass`, taken from `parts` where the same was built without a fault before."""
    if parts is None:
        return _dataclass(cls, mapping, path, faults, parts)
    key, before = (cls, repr(mapping)), len(faults)  # repr, because 1, 1.0 and true are equal and not the same
    if (known := parts.get(key)) is not None:
        return known
    built = _dataclass(cls, mapping, path, faults, parts)
    if len(faults) == before and len(key[1]) <= _LARGE_PART:
        if len(parts) >= _MOST_PARTS:
            parts.clear()
        parts[key] = built
    return built


def _dataclass(cls: type[Any], mapping: object, path: str, faults: list[Fault], parts: Parts | None) -> object:
    if not isinstance(mapping, Mapping):
        faults.append(Fault(path=path, message=f"expected a mapping of fields, got {_show(mapping)}"))
        return None
    known = {item.name: item for item in dataclasses.fields(cls)}
    hints = _hints(cls)  # type: ignore[arg-type]
    before = len(faults)
    mapping = _expand(cls, mapping, path, faults)
    values: dict[str, object] = {}
    for key, raw in mapping.items():
        if key not in known:
            other = getattr(cls, "OTHER_NAMES", {}).get(key)
            hint = f"here it is `{other}`" if other else _suggest(str(key), known)
            hint = getattr(cls, "HINTS", {}).get(key, hint)
            name = _plain_name(str(key))
            faults.append(Fault(path=_join(path, name), message=f"unknown field; {hint}"))
            continue
        values[key] = _value(hints[key], raw, _join(path, key), faults, known[key].metadata, parts=parts)
    for name, item in known.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and name not in mapping:
            example = item.metadata.get("example")
            wanted = f"write for example `{name}: {_plain_text(example)}`" if example is not None else "write it"
            faults.append(Fault(path=_join(path, name), message=f"missing; {wanted} ({item.metadata.get('doc', '')})"))
    if len(faults) > before:
        return None
    built = cls(**values)
    if hasattr(built, "faults"):
        between: Iterable[Fault] = built.faults()
        faults.extend(Fault(path=_join(path, hide(fault.path)), message=hide(fault.message)) for fault in between)
    return typing.cast(object, built)


def _expand(cls: type[Any], mapping: Mapping[Any, object], path: str, faults: list[Fault]) -> Mapping[Any, object]:
    if not hasattr(cls, "expand"):
        return mapping
    try:
        return typing.cast(Mapping[Any, object], cls.expand(mapping))
    except SpecError as error:
        faults.extend(Fault(path=_join(path, fault.path), message=fault.message) for fault in error.faults)
        return mapping  # the rest of it may be wrong too, and every fault is named at once


def _value(
    hint: Any, raw: object, path: str, faults: list[Fault], meta: Mapping[str, Any], *, parts: Parts | None
) -> object:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if raw is None and type(None) in args:
            return None
        (only,) = [arg for arg in args if arg is not type(None)]
        return _value(only, raw, path, faults, meta, parts=parts)
    if dataclasses.is_dataclass(hint):
        return _part(typing.cast(type[Any], hint), raw, path, faults, parts)
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, Enum)):
        return _choice(hint, raw, path, faults)
    if origin is tuple:
        if isinstance(raw, (str, bytes)) or not isinstance(raw, (list, tuple)):
            faults.append(Fault(path=path, message=f"expected a list, got {_show(raw)}; write [a, b]"))
            return ()
        return tuple(_value(args[0], item, f"{path}[{i}]", faults, meta, parts=parts) for i, item in enumerate(raw))
    if origin in (dict, Mapping, typing.get_origin(Mapping[str, str])):
        if not isinstance(raw, Mapping):
            faults.append(Fault(path=path, message=f"expected a mapping, got {_show(raw)}; write {{name: value}}"))
            return {}
        return {
            str(key): _value(args[1], item, _join(path, str(key)), faults, meta, parts=parts)
            for key, item in raw.items()
        }
    if hint is Any or hint is object:
        return raw
    return _scalar(hint, raw, path, faults, meta)


def _choice(hint: Any, raw: object, path: str, faults: list[Fault]) -> object:
    words = list(get_args(hint)) if get_origin(hint) is Literal else [member.value for member in hint]
    if isinstance(raw, bool) and raw not in words:  # YAML reads `on` and `off` as these
        raw = {True: "on", False: "off"}[raw] if {"on", "off"} <= set(words) else raw
    if raw not in words or (isinstance(raw, bool) and raw not in [w for w in words if isinstance(w, bool)]):
        message = f"{_show(raw)} is not one of {', '.join(map(str, words))}"
        close = difflib.get_close_matches(str(raw), [str(word) for word in words], n=1)
        faults.append(Fault(path=path, message=message + (f"; did you mean {close[0]}?" if close else "")))
        return raw
    return raw if get_origin(hint) is Literal else hint(raw)


def _scalar(hint: Any, raw: object, path: str, faults: list[Fault], meta: Mapping[str, Any]) -> object:
    def fault(message: str) -> object:
        faults.append(Fault(path=path, message=message))
        return raw

    if hint is bool:
        return raw if isinstance(raw, bool) else fault(f"expected true or false, got {_show(raw)}")
    if hint is str:
        if raw is None:
            return fault("expected text, and nothing is there: write some, or leave the field out")
        if not isinstance(raw, str):
            return fault(f'expected text, got {_show(raw)}; put it in quotes: "{_plain_text(raw)}"')
        if "\x00" in raw:
            return fault("text may not hold a NUL character")
        if meta.get("pattern") and not re.fullmatch(meta["pattern"], raw):
            allowed = f": {meta['allowed']}" if meta.get("allowed") else ""
            return fault(f"{_show(raw)} does not fit{allowed}; write for example {_plain_text(meta.get('example'))}")
        return raw
    if hint in (int, float):
        # YAML 1.1 reads 3e-4 as text; the user meant a number.
        number = _number(raw) if hint is float else raw
        if isinstance(number, bool) or not isinstance(number, (int, float) if hint is float else int):
            kind = "a whole number" if hint is int else "a number"
            return fault(f"expected {kind}, got {_show(raw)}")
        if isinstance(number, int) and abs(number) > _MOST_INT:
            return fault(f"{_show(number)} is out of range; it must be at most {_MOST_INT}")
        if not math.isfinite(number):
            return fault(f"expected a finite number, got {_show(raw)}")
        return hint(number) if _in_bounds(number, path, faults, meta) else raw
    raise TypeError(f"{path}: a spec field of type {hint!r} has no reader")


def _number(raw: object) -> object:
    if isinstance(raw, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", raw):
        return float(raw)
    return raw


def _in_bounds(number: float, path: str, faults: list[Fault], meta: Mapping[str, Any]) -> bool:
    limits = (("ge", "at least", operator.ge), ("gt", "more than", operator.gt), ("le", "at most", operator.le))
    for key, words, holds in limits:
        bound = meta.get(key)
        if bound is not None and not holds(number, bound):
            faults.append(Fault(path=path, message=f"{number} is out of range; it must be {words} {bound}"))
            return False
    return True


def _suggest(word: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean `{close[0]}`?" if close else f"known here: {', '.join(names)}"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _show(value: object) -> str:
    text = repr(value)
    if recognise(text) is not None:
        return HIDDEN  # before it is cut: half a secret has no shape
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _plain_name(key: str) -> str:
    """A key for a message: no secret, no control characters, not endless."""
    if recognise(key) is not None:
        return HIDDEN
    return key if key.isprintable() and len(key) <= _SHOWN else _show(key)


def _plain_text(value: object) -> str:
    return str(to_plain(value))


def _default_text(value: object) -> str:
    if value is None:
        return "not stated"
    if isinstance(value, bool):
        return str(value).lower()
    return "empty" if value in ((), {}, "") else _plain_text(value)


def _name(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_name(arg) for arg in args if arg is not type(None))
    if origin is Literal:
        return " | ".join(map(str, args))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " | ".join(str(member.value) for member in hint)
    if origin is tuple:
        return f"list of {_name(args[0])}"
    if origin is not None and args:
        return f"mapping to {_name(args[-1])}"
    names = {"str": "text", "int": "whole number", "float": "number", "bool": "true | false"}
    return names.get(getattr(hint, "__name__", ""), "any")
