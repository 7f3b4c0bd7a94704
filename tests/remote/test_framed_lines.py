"""Bytes of files survive the way through a log: any bytes, cut anywhere, repeated and out of order."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trainmaster.remote.framed_lines import FRAME_BYTES, Frame, decode, encode
from trainmaster.targets._spool import NodeSpool

NAMES = st.sampled_from(["events.jsonl", "rank-0.log", "outputs/a b/\u00e4", "outputs/\udcff"])


def frames(name: str, data: bytes, offset: int = 0) -> list[Frame]:
    lines = list(encode(Frame(stream=name, offset=offset, data=data)))
    assert all(line.endswith(b"\n") and b"\n" not in line[:-1] for line in lines)
    assert all(len(line) < 16384 for line in lines), "a container runtime cuts longer lines"
    found = [decode(line[:-1]) for line in lines]
    assert None not in found
    return [one for one in found if one is not None]


@given(NAMES, st.binary(max_size=3 * FRAME_BYTES) | st.text().map(str.encode), st.integers(0, 10**12))
def test_every_byte_arrives_at_its_place(name: str, data: bytes, offset: int) -> None:
    found = frames(name, data, offset)
    assert b"".join(one.data for one in found) == data
    for one in found:
        assert one.stream == name
        assert one.data == data[one.offset - offset : one.end - offset]


def test_plain_lines_stay_readable() -> None:
    assert list(encode(Frame(stream="rank-0.log", offset=7, data=b"step 3 \xc3\xa4\nhalf"))) == [
        b"@tm rank-0.log 7 step 3 \xc3\xa4\n", b"@tm- rank-0.log 17 half\n",
    ]  # fmt: skip


@given(st.binary(max_size=300))
def test_other_lines_are_no_frames(line: bytes) -> None:
    found = decode(line)
    assert found is None or line.startswith(b"@tm")
    assert decode(b"@tm64 x 0 !!!") is None and decode(b"@tm x") is None


def test_a_log_that_repeats_and_reorders_is_stored_once(tmp_path: Path) -> None:
    data = b"".join(b"line %d\n" % number for number in range(500))
    made = frames("rank-0.log", data)
    draw = random.Random(7)
    spool = NodeSpool(tmp_path)
    spool.begin("pod/0")
    mixed = [*made, *draw.sample(made, 200)]
    for start in range(0, len(mixed), 20):  # locally out of order, as repeated reads give them
        part = mixed[start : start + 20]
        draw.shuffle(part)
        for one in part:
            spool.put("pod/0", one)
    assert spool.read("rank-0.log", 0, 1 << 20) == data
    assert spool.gaps() == {}


def test_a_gap_is_told_filled_or_noted(tmp_path: Path) -> None:
    data = b"".join(b"line %03d\n" % number for number in range(100))
    made = frames("rank-0.log", data)
    spool = NodeSpool(tmp_path)
    spool.begin("pod/0")
    assert spool.put("pod/0", made[0])
    assert not spool.put("pod/0", made[50])
    assert spool.gaps() == {"rank-0.log": made[1].offset}
    for one in made[1:50]:
        spool.put("pod/0", one)
    assert spool.gaps() == {}
    assert not spool.put("pod/0", made[99])
    spool.close_gaps()
    whole = spool.read("rank-0.log", 0, 1 << 20)
    assert len(whole) == len(data) and whole.endswith(b"line 099\n")
    assert whole[made[51].offset :].startswith(
        b"[%d bytes of this file were lost" % (made[99].offset - made[51].offset)
    )


def test_a_new_pod_writes_after_the_end_of_the_old_one_also_after_our_restart(tmp_path: Path) -> None:
    first, second = b"one\ntwo\n", b"three\n"
    spool = NodeSpool(tmp_path)
    spool.begin("a/0")
    for one in frames("events.jsonl", first):
        spool.put("a/0", one)
    for fresh in (False, True):
        again = NodeSpool(tmp_path) if fresh else spool  # a new one has nothing in memory
        again.begin("a/0")
        again.begin("b/0")
        for one in frames("events.jsonl", second):
            again.put("b/0", one)
        for one in frames("events.jsonl", first):  # late lines of the first are known already
            again.put("a/0", one)
        assert again.read("events.jsonl", 0, 100) == first + second


def test_outputs_that_stayed_in_the_pod_are_listed_with_the_reason(tmp_path: Path) -> None:
    spool = NodeSpool(tmp_path)
    spool.begin("a/0")
    for one in frames("uncopied.jsonl", b'["outputs/old", "named pipe"]\n'):
        spool.put("a/0", one)
    spool.begin("b/0")
    lines = [
        '["outputs/link", "symbolic link"]', '["outputs/\\udcff", "socket"]', '["outputs/copied", "17 bytes"]',
        '["outputs/../../x", "named pipe"]', '["exit.json", "gone"]', '["outputs/x", 1]', "[]", "{}", "no JSON",
        "[" * 9999,
    ]  # fmt: skip
    for name, data in (("uncopied.jsonl", "\n".join(lines).encode()), ("outputs/copied", b"17")):
        for one in frames(name, data):
            spool.put("b/0", one)
    assert sorted((file.name, file.size_bytes, file.fault) for file in spool.list_files()) == [
        ("outputs/copied", 2, ""),
        ("outputs/link", 0, "symbolic link"),
        ("outputs/\udcff", 0, "socket"),
    ]


def test_a_name_that_leads_elsewhere_is_ignored(tmp_path: Path) -> None:
    spool = NodeSpool(tmp_path / "node")
    spool.begin("a/0")
    for name in ("../x", "/etc/x", "outputs/../../x", "other/x", "starts.json"):
        spool.put("a/0", Frame(stream=name, offset=0, data=b"x"))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["starts.json"]
