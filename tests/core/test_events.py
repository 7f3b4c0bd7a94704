"""Lines that anyone may have written: none is lost, none stops the reader, and chunking changes nothing."""

from __future__ import annotations

import json
import math
import sys
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainmaster.core.events import Event, Line, parse, parse_time, render, split

INDIA = ZoneInfo("Asia/Kolkata")
at_ease = settings(deadline=None)  # a busy machine is not a wrong answer
START = b'{"phase":"TRAINING","event":"start"'

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
documents = st.dictionaries(
    st.sampled_from(["v", "ts", "seq", "phase", "event", "iteration", "epoch", "data", "x"]) | st.text(), anything
)
lines_of_a_file = st.one_of(
    documents.map(lambda value: json.dumps(value).encode()),
    documents.map(lambda value: json.dumps(value | {"phase": "STEP", "event": "metrics"}).encode()),
    st.binary(max_size=40),
    st.sampled_from([b"", b" ", b"\r", b"[]", b"null", b"NaN", b'{"phase":"A","event":"b"}']),
)
files = st.lists(lines_of_a_file, max_size=12).map(b"\n".join)


def grow(content: bytes, cuts: list[int]) -> list[Line]:
    """Read a growing file: it has `cuts[i]` bytes at the i-th look, and each look begins where whole lines ended."""
    found: list[Line] = []
    offset = 0
    for size in [*sorted(cuts), len(content)]:
        found += split(content[offset:size], offset=offset, zone=UTC)
        offset = found[-1].offset + found[-1].length if found else 0
    return found + split(content[offset:], offset=offset, zone=UTC, last=True)


@pytest.mark.slow
@at_ease
@given(content=files, cuts=st.lists(st.integers(min_value=0, max_value=600), max_size=8))
@example(content=b'{"phase":"A","event":"b"}\n{"pha', cuts=[1, 26, 27])
@example(content="é\n".encode(), cuts=[1])
def test_any_chunking_gives_the_same_lines_and_every_byte_once(content: bytes, cuts: list[int]) -> None:
    whole = split(content, offset=0, zone=UTC, last=True)
    assert grow(content, cuts) == whole
    ends = [0, *(line.offset + line.length for line in whole)]
    assert [line.offset for line in whole] == ends[:-1]
    assert ends[-1] == len(content)


@pytest.mark.slow
@at_ease
@given(files)
def test_a_line_is_an_event_or_a_fault_that_any_database_and_json_reader_takes(content: bytes) -> None:
    for line in split(content, offset=0, zone=UTC, last=True):
        assert line.event is not None or (line.fault and line.text is not None)
        if line.event is not None:
            json.dumps([line.event.data, line.event.extra], allow_nan=False).encode()
            assert "\\u0000" not in json.dumps([line.event.data, line.event.extra])
        if line.text is not None:
            assert "\x00" not in line.text
            line.text.encode()


@at_ease
@given(st.binary(max_size=200))
def test_parse_takes_any_bytes(raw: bytes) -> None:
    event, fault = parse(raw, zone=UTC)
    assert event is not None or fault


@pytest.mark.slow
@at_ease
@given(
    phase=st.text(min_size=1, max_size=20),
    seq=st.integers(0, 2**63 - 1) | st.none(),
    ts=st.datetimes(min_value=datetime(1970, 1, 1), timezones=st.just(UTC)) | st.none(),  # noqa: DTZ001
    data=st.dictionaries(st.text(), anything),
)
def test_what_we_render_reads_back_as_it_was_written(
    phase: str, seq: int | None, ts: datetime | None, data: dict[str, object]
) -> None:
    line = render(Event(phase=phase, event="metrics", ts=ts, seq=seq, data=data))
    assert "\n" not in line
    event, fault = parse(line.encode(), zone=INDIA)
    assert fault is None and event is not None
    assert (event.seq, event.ts) == (seq, ts)
    # Cleaning once is cleaning for ever: what was read renders to the same line.
    assert render(event) == line


@pytest.mark.slow
@at_ease
@given(documents)
@example({"phase": "A", "event": "b", "x": 1e308})
def test_the_short_way_for_plain_lines_gives_what_the_long_way_gives(document: dict[str, object]) -> None:
    named = {"phase": "A", "event": "b"} | {
        key: value for key, value in document.items() if key not in ("phase", "event")
    }
    plain = json.dumps(named, ensure_ascii=False).encode(errors="surrogatepass")
    # An escape in one text sends the same line the long way round.
    assert plain.startswith(b'{"phase": "A"')
    assert parse(plain, zone=UTC) == parse(plain.replace(b"A", rb"\u0041", 1), zone=UTC)


@given(
    st.dictionaries(st.text(max_size=5), st.none() | st.text(max_size=5) | st.integers() | st.floats(), max_size=4),
    st.sampled_from(["{}", '{{"phase":"A","event":"b","data":{}}}', '{{"data":{},"phase":"A","event":"b"}}']),
)
@example({"x": "}"}, '{{"phase":"A","event":"b","data":{}}}')
@example({"a": 1}, '{{"phase":"A","event":"data","data":{}}}')
@example({"a": 1}, '{{"phase":"A","event":"b","data":{},"a":{{}}}}')
@example({"a": 1}, '{{"phase":"A","event":"b","extra":{{"data":{}}}}}')
def test_data_kept_letter_for_letter_is_the_data_that_was_read(data: dict[str, object], shape: str) -> None:
    for ascii_only in (True, False):
        raw = shape.format(json.dumps(data, ensure_ascii=ascii_only)).encode(errors="surrogatepass")
        (line,) = split(raw, offset=0, zone=UTC, last=True)
        if line.data_json is not None:
            assert line.event is not None and json.loads(line.data_json) == line.event.data


def test_half_a_line_waits_for_its_rest() -> None:
    assert split(START, offset=7, zone=UTC) == []
    (line,) = split(START + b"}\n", offset=7, zone=UTC)
    assert (line.offset, line.length, line.fault) == (7, len(START) + 2, None)
    (half,) = split(START, offset=7, zone=UTC, last=True)
    assert half.event is None and half.text == START.decode()


@pytest.mark.parametrize(
    ("text", "utc"),
    [
        ("2025-03-01T12:00:00", "2025-03-01T06:30:00+00:00"),  # no offset: the configured zone
        ("2025-03-01 12:00:00.25", "2025-03-01T06:30:00.250000+00:00"),
        ("2025-03-01T12:00:00Z", "2025-03-01T12:00:00+00:00"),
        ("2025-03-01T12:00:00+05:30", "2025-03-01T06:30:00+00:00"),
        (1740830400, "2025-03-01T12:00:00+00:00"),
    ],
)
def test_times_are_read_in_their_zone_or_in_the_configured_one(text: object, utc: str) -> None:
    found = parse_time(text, zone=INDIA)
    assert found is not None and found.isoformat() == utc


@pytest.mark.parametrize("value", ["", "soon", "12:00", "0001-01-01T00:00:00+14:00", 1e300, -1e300, True, [], {}])
def test_a_time_that_is_none_is_set_aside(value: object) -> None:
    event, fault = parse(json.dumps({"phase": "A", "event": "b", "ts": value}).encode(), zone=INDIA)
    assert event is not None and event.ts is None
    assert (event.extra["ts"], fault) == (value, "`ts` set aside")


def test_fields_of_a_wrong_type_are_set_aside_and_none_is_lost() -> None:
    raw = {"v": 2, "phase": "A", "event": "b", "seq": "1", "iteration": -1, "epoch": True, "data": [1], "who": "me"}
    event, fault = parse(json.dumps(raw).encode(), zone=UTC)
    assert event == Event(
        phase="A",
        event="b",
        extra={"v": 2, "seq": "1", "iteration": -1, "epoch": True, "data": [1], "who": "me"},
    )
    assert fault == "`seq` set aside; `iteration` set aside; `epoch` set aside; `data` set aside"


def test_an_unknown_phase_is_kept_as_it_is() -> None:
    event, fault = parse(b'{"phase":"SIDE_QUEST","event":"begun"}', zone=UTC)
    assert event is not None and (event.phase, event.event, fault) == ("SIDE_QUEST", "begun", None)


def test_numbers_json_has_no_word_for_become_text() -> None:
    raw = START + b',"data":{"a":NaN,"b":-Infinity,"c":1e999,"d":9223372036854775808,"e":-1}}'
    event, fault = parse(raw, zone=UTC)
    assert event is not None and fault is None
    assert event.data == {"a": "NaN", "b": "-Infinity", "c": "Infinity", "d": "9223372036854775808", "e": -1}
    assert json.loads(render(Event(phase="A", event="b", data={"x": math.nan})))["data"] == {"x": "NaN"}


def test_an_integer_too_long_to_read_is_a_fault_not_a_crash() -> None:
    event, fault = parse(START + b',"seq":' + b"9" * 5000 + b"}", zone=UTC)
    assert event is None and fault is not None and fault.startswith("not JSON")


def test_nul_and_lone_surrogates_are_replaced_in_keys_and_values() -> None:
    event, _ = parse(START + rb',"data":{"a\u0000":"b\ud800c"}}', zone=UTC)
    assert event is not None and event.data == {"a\ufffd": "b?c"}


@pytest.mark.parametrize("depth", [98, 99, 100, 1_000, 100_000])
def test_depth_is_bounded_by_a_number_not_by_what_stack_is_left(depth: int) -> None:
    raw = START + b',"data":{"x":' + b"[" * depth + b"]" * depth + b"}}"
    event, fault = parse(raw, zone=UTC)

    def from_deep_down(frames: int) -> tuple[Event | None, str | None]:
        return parse(raw, zone=UTC) if not frames else from_deep_down(frames - 1)

    assert from_deep_down(sys.getrecursionlimit() // 3) == (event, fault)
    if depth <= 98:
        assert event is not None and json.dumps(event.data)
    else:
        assert (event, fault) == (None, "nested deeper than 100 levels")


@pytest.mark.parametrize("raw", [b"\xff\xfe\n", b"{\n", b"[1]\n", b"3\n", b"{}\n", b'{"phase":"","event":"x"}\n'])
def test_garbage_is_kept_with_its_text(raw: bytes) -> None:
    (line,) = split(raw, offset=0, zone=UTC)
    assert line.event is None and line.fault
    assert line.text == raw.decode(errors="replace").rstrip("\n")
