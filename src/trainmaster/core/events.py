"""Events as JSON lines: rendering, and parsing of lines from any writer.

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
from datetime import datetime, timedelta, timezone, tzinfo
from typing import Any

from trainmaster.core.compat import UTC, StrEnum, parse_iso_time


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
    WATCH = "WATCH"
    START = "START"
    RECOVERY = "RECOVERY"
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
    data_json: str | None = None  # the event's data as it stood in the line, where it may be kept letter for letter


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
    return json.dumps(clean_value({**event.extra, **line}), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


_MAX_INT = 2**63 - 1  # what both databases hold
_MAX_TEXT = 200  # characters of a phase or event name
# Levels of nesting. Writing a value out again needs the stack too, and how much of it is left depends on who calls:
# a line at the edge would parse here, fail at the database, and hold up every line behind it.
_MAX_DEPTH = 100


def parse(raw: bytes, *, zone: tzinfo) -> tuple[Event | None, str | None]:
    """An event, or the fault of the line. A fault beside an event says which field was set aside."""
    return _parse(raw, zone=zone, plain=_is_plain(raw) and _is_flat(raw))


def _parse(raw: bytes, *, zone: tzinfo, plain: bool) -> tuple[Event | None, str | None]:
    try:
        line = _decode_plain(raw.decode("utf-8")) if plain else _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 at byte {error.start}"
    except RecursionError:
        return None, _TOO_DEEP
    except ValueError as error:
        return None, f"not JSON: {str(error)[:_MAX_TEXT]}"
    if not isinstance(line, dict):
        return None, f"not a JSON object but {type(line).__name__}"
    if not plain:
        try:
            line = clean_value(line)
        except _TooDeep:
            return None, _TOO_DEEP
    get = line.get
    phase, name = get("phase"), get("event")
    if type(phase) is not str or not 0 < len(phase) <= _MAX_TEXT:
        return None, "no text in `phase`"
    if type(name) is not str or not 0 < len(name) <= _MAX_TEXT:
        return None, "no text in `event`"
    extra = {}
    if get("v") != 1 or not _FIELDS.issuperset(line):
        extra = {key: value for key, value in line.items() if key not in _FIELDS or (key == "v" and value != 1)}
    stamp, seq, iteration, epoch, data = get("ts"), get("seq"), get("iteration"), get("epoch"), get("data")
    if stamp is None and extra and parse_time(extra.get("timestamp"), zone=zone) is not None:
        stamp = extra.pop("timestamp")  # another program's word for `ts`
    if iteration is None and extra and _is_count(extra.get("iteration_number")):
        iteration = extra.pop("iteration_number")  # and for `iteration`
    ts = None if stamp is None else parse_time(stamp, zone=zone)
    fault = None
    # Nearly every line is right. What is wrong with the others is found out in a second look.
    if not (
        (ts is not None or stamp is None)
        and (seq is None or _is_count(seq))
        and (iteration is None or _is_count(iteration))
        and (epoch is None or _is_count(epoch))
        and (data is None or type(data) is dict)
    ):
        good = {
            "ts": ts is not None,
            "seq": _is_count(seq),
            "iteration": _is_count(iteration),
            "epoch": _is_count(epoch),
            "data": type(data) is dict,
        }
        aside = [key for key, right in good.items() if not right and get(key) is not None]
        extra |= {key: line[key] for key in aside}
        fault = "; ".join(f"`{key}` set aside" for key in aside)
        iteration = iteration if good["iteration"] else None
        seq, epoch, data = (get(key) if good[key] else None for key in ("seq", "epoch", "data"))
    event = Event(
        phase=phase, event=name, ts=ts, seq=seq, iteration=iteration, epoch=epoch, data=data or {}, extra=extra
    )
    return event, fault


def _decode_plain(text: str) -> Any:
    """The value of a text, without the two looks for spaces around it that the library's own door takes."""
    try:
        value, end = _SCAN(text, 0)
    except StopIteration:
        return _PLAIN.decode(text)  # spaces before it, or an error that this says in words
    return value if end == len(text) else _PLAIN.decode(text)


# A line with every digit as 0: a number too large for 64 bits, or for a float, then looks like one of these.
_SHAPE = bytes.maketrans(b"123456789E", b"000000000e")
_LONG, _HUGE = b"0" * 19, b"e000"


def _is_plain(raw: bytes) -> bool:
    """Nothing in these lines needs cleaning: no escape that hides a NUL, no number JSON or 64 bits cannot hold.

    Most lines are so, and walking their values costs as much as reading them did. Many are asked about at once: where
    all of them are plain, so is each.
    """
    if b"\\u" in raw or b"\x00" in raw or b"NaN" in raw or b"Infinity" in raw:
        return False
    shape = raw.translate(_SHAPE, b"+")
    return _LONG not in shape and _HUGE not in shape


def _is_flat(raw: bytes) -> bool:
    """A line that cannot be too deep."""
    return raw.count(b"{") + raw.count(b"[") <= _MAX_DEPTH


def _verbatim(raw: bytes) -> str | None:
    """The data of a plain line as its writer wrote it; None where that would have to be looked for.

    Only where `data` is named once, is flat and ends the line, as nearly all of ours do: then the one opening brace
    behind the name and the first closing one are its own.
    """
    at = raw.find(b'"data":{')
    if at < 0 or raw.count(b'"data"') != 1 or not raw.endswith(b"}}"):
        return None
    tail = raw[at + 7 : -1]
    return tail.decode("utf-8") if tail.count(b"{") == 1 and tail.count(b"}") == 1 else None


_TOO_DEEP = f"nested deeper than {_MAX_DEPTH} levels"
_FIELDS = frozenset({"v", "ts", "seq", "phase", "event", "iteration", "epoch", "data"})


_INDIA = timezone(timedelta(hours=5, minutes=30), "IST")


def parse_time(value: object, *, zone: tzinfo) -> datetime | None:
    """ISO text or seconds since 1970, as UTC; a time without an offset is read in `zone`. None if it is neither."""
    try:
        if isinstance(value, str):
            text = value.strip()
            if text.endswith("IST"):  # of programs in India; no other zone's letters are read, several mean many
                text, zone = text[:-3].rstrip(), _INDIA
            when = parse_iso_time(text)
            if when.tzinfo is UTC:
                return when
            return (when if when.tzinfo else when.replace(tzinfo=zone)).astimezone(UTC)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, tz=UTC)
    except (ValueError, OverflowError, OSError):
        pass
    return None


def split(chunk: bytes, *, offset: int, zone: tzinfo, last: bool = False) -> list[Line]:
    """The whole lines of a chunk that starts at `offset`; half a line waits, unless the file is over (`last`)."""
    pieces = chunk.split(b"\n")
    rest = pieces.pop()  # behind the last newline
    plain = _is_plain(chunk)
    lines: list[Line] = []
    for raw in pieces:
        lines.append(_line(raw, offset=offset, length=len(raw) + 1, zone=zone, plain=plain or _is_plain(raw)))
        offset += len(raw) + 1
    if rest and last:
        lines.append(_line(rest, offset=offset, length=len(rest), zone=zone, plain=plain or _is_plain(rest)))
    return lines


def _line(raw: bytes, *, offset: int, length: int, zone: tzinfo, plain: bool) -> Line:
    if not raw or raw.isspace():
        return Line(offset=offset, length=length, fault="empty line", text="")
    plain = plain and _is_flat(raw)
    event, fault = _parse(raw, zone=zone, plain=plain)
    if fault is not None:
        text = clean_value(raw.decode("utf-8", errors="replace"))
        return Line(offset=offset, length=length, event=event, fault=fault, text=text)
    data = _verbatim(raw) if plain and event is not None and event.data else None
    return Line(offset=offset, length=length, event=event, data_json=data)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_INT


class _TooDeep(ValueError):
    """A value nested deeper than we keep."""


def clean_value(value: Any, depth: int = 0) -> Any:
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
        return {clean_value(str(key)): clean_value(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean_value(item, depth + 1) for item in value]
    for plain in (str, int, float):  # an enum or another subclass is what it derives from
        if isinstance(value, plain):
            return clean_value(plain(value))
    return clean_value(str(value))


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
_PLAIN = json.JSONDecoder()
_SCAN: Any = vars(_PLAIN)["scan_once"]  # as json/decoder.py itself calls it; typeshed does not know it
