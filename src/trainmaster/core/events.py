"""One event is one JSON line. Rendering it, and reading lines that anyone may have written.

    {"v":1,"ts":"…","seq":n,"phase":"TRAINING","event":"epoch_complete","iteration":1,"epoch":3,"data":{…}}

`parse` never raises and never drops: a line that is not an event comes back with its text and the fault, an unknown
phase is kept as it is, a field of the wrong type moves to `extra`. `split` cuts a growing file into whole lines, so
that any chunking of the file gives the same lines at the same offsets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """The phases we know. A line may name others; they are kept."""

    PROJECT = "PROJECT"
    GROUP_ITERATION = "GROUP_ITERATION"
    ITERATION = "ITERATION"
    TRAJECTORY = "TRAJECTORY"
    TRAINING = "TRAINING"
    EVAL_TRAINING = "EVAL_TRAINING"
    EVAL_MODEL = "EVAL_MODEL"
    PREFLIGHT = "PREFLIGHT"
    CHECKPOINT = "CHECKPOINT"
    STEP = "STEP"
    HEARTBEAT = "HEARTBEAT"
    ACCEPT = "ACCEPT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened on a node."""

    phase: str
    event: str
    ts: datetime | None = None
    seq: int | None = None
    iteration: int | None = None
    epoch: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields of a line that are not ours, kept as they came


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of an event file at its byte offset: an event, or its text and what is wrong with it."""

    offset: int
    length: int  # with its newline
    event: Event | None = None
    fault: str | None = None
    text: str | None = None  # only where there is a fault


def render(event: Event) -> str:
    """The event as one line of JSON, without its newline."""
    line: dict[str, Any] = {"v": 1}
    if event.ts is not None:
        line["ts"] = event.ts.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    for name in ("seq", "phase", "event", "iteration", "epoch"):
        value = getattr(event, name)
        if value is not None:
            line[name] = str(value) if isinstance(value, StrEnum) else value
    if event.data:
        line["data"] = event.data
    # A key of `extra` never covers one of ours.
    return json.dumps(_clean({**event.extra, **line}), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


_MAX_INT = 2**63 - 1  # what both databases hold
_MAX_TEXT = 200  # characters of a phase or event name
# Levels of nesting. Writing a value out again needs the stack too, and how much of it is left depends on who calls:
# a line at the edge would parse here, fail at the database, and hold up every line behind it.
_MAX_DEPTH = 100


def parse(raw: bytes, *, zone: tzinfo) -> tuple[Event | None, str | None]:
    """An event, or the fault of the line. A fault beside an event says which field was set aside."""
    try:
        line = _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as wrong:
        return None, f"not UTF-8 at byte {wrong.start}"
    except RecursionError:
        return None, _TOO_DEEP
    except ValueError as wrong:
        return None, f"not JSON: {str(wrong)[:_MAX_TEXT]}"
    if not isinstance(line, dict):
        return None, f"not a JSON object but {type(line).__name__}"
    if not _is_plain(raw):
        try:
            line = _clean(line)
        except _TooDeep:
            return None, _TOO_DEEP
    for name in ("phase", "event"):
        if not isinstance(line.get(name), str) or not 0 < len(line[name]) <= _MAX_TEXT:
            return None, f"no text in `{name}`"
    faults: list[str] = []
    extra = {key: value for key, value in line.items() if key not in _FIELDS or (key == "v" and value != 1)}

    def take(name: str, good: Any) -> Any:
        value = line.get(name)
        if value is None or good(value):
            return value
        faults.append(f"`{name}` set aside")
        extra[name] = value
        return None

    ts = parse_time(line.get("ts"), zone=zone)
    if ts is None and line.get("ts") is not None:
        faults.append("`ts` set aside")
        extra["ts"] = line["ts"]
    event = Event(
        phase=line["phase"],
        event=line["event"],
        ts=ts,
        seq=take("seq", _is_count),
        iteration=take("iteration", _is_count),
        epoch=take("epoch", _is_count),
        data=take("data", lambda value: isinstance(value, dict)) or {},
        extra=extra,
    )
    return event, "; ".join(faults) or None


def _is_plain(raw: bytes) -> bool:
    """No text of this line can need cleaning, and no depth: without a \\u there is no NUL and no lone surrogate.

    Most lines are so, and walking their values costs as much as reading them did.
    """
    return b"\\u" not in raw and raw.count(b"{") + raw.count(b"[") <= _MAX_DEPTH


_TOO_DEEP = f"nested deeper than {_MAX_DEPTH} levels"
_FIELDS = frozenset({"v", "ts", "seq", "phase", "event", "iteration", "epoch", "data"})


def parse_time(value: object, *, zone: tzinfo) -> datetime | None:
    """ISO text or seconds since 1970, as UTC; a time without an offset is read in `zone`. None if it is neither."""
    try:
        if isinstance(value, str):
            when = datetime.fromisoformat(value.strip())
            return (when if when.tzinfo else when.replace(tzinfo=zone)).astimezone(UTC)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, tz=UTC)
    except (ValueError, OverflowError, OSError):
        pass
    return None


def split(chunk: bytes, *, offset: int, zone: tzinfo, last: bool = False) -> list[Line]:
    """The whole lines of a chunk that starts at `offset`; half a line waits, unless the file is over (`last`)."""
    lines: list[Line] = []
    start = 0
    while start < len(chunk):
        end = chunk.find(b"\n", start)
        if end < 0 and not last:
            break
        stop = len(chunk) if end < 0 else end + 1
        raw = chunk[start:stop]
        lines.append(_line(raw, offset=offset + start, zone=zone))
        start = stop
    return lines


def _line(raw: bytes, *, offset: int, zone: tzinfo) -> Line:
    if not raw.strip():
        return Line(offset=offset, length=len(raw), fault="empty line", text="")
    event, fault = parse(raw, zone=zone)
    text = None
    if fault is not None:
        text = _clean(raw.decode("utf-8", errors="replace").rstrip("\n"))
    return Line(offset=offset, length=len(raw), event=event, fault=fault, text=text)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT


class _TooDeep(ValueError):
    """A value nested deeper than we keep."""


def _clean(value: Any, depth: int = 0) -> Any:
    """The same value in a form every JSON reader and both databases accept.

    Not-a-number becomes text (JSON has no word for it), NUL and lone surrogates are replaced (PostgreSQL refuses
    them), and integers beyond 64 bits become text.
    """
    kind = type(value)
    if kind is str:
        # Nearly every text is plain; asking costs a third of encoding it.
        if value.isascii() and "\x00" not in value:
            return value
        return value.replace("\x00", "\ufffd").encode("utf-8", errors="replace").decode("utf-8")
    if kind is bool or value is None:
        return value
    if kind is int:
        return _whole(value)
    if kind is float:
        return _finite(value)
    if depth >= _MAX_DEPTH and isinstance(value, (Mapping, list, tuple)):
        raise _TooDeep(_TOO_DEEP)
    if isinstance(value, Mapping):
        return {_clean(str(key)): _clean(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item, depth + 1) for item in value]
    for plain in (str, int, float):  # an enum or another subclass is what it derives from
        if isinstance(value, plain):
            return _clean(plain(value))
    return _clean(str(value))


def _whole(value: str | int) -> int | str:
    number = int(value)
    return number if -_MAX_INT <= number <= _MAX_INT else str(number)


def _finite(value: str | float) -> float | str:
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


# Numbers are made clean as they are read. Kept, because json.loads with options would make one for every line.
_DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_finite, parse_constant=str)
