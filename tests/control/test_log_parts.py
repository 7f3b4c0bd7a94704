"""A log that several programs search, each a part of it, against a search of the whole."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import pytest

from trainmaster.control.log_view import grep, logs, search


def write(path: Path, *, seed: int) -> bytes:
    """Lines of 0 to 300 bytes, some longer than a program takes at once, with or without an end."""
    dice = random.Random(seed)
    sizes = [dice.choice((0, 1, 7, 60, 300, 2000)) for _ in range(120)]
    lines = [b"".join(dice.choices((b"needle ", b"hay ", b"x"), k=size // 4)) for size in sizes]
    path.write_bytes(b"\n".join(lines) + dice.choice((b"", b"\n")))
    return path.read_bytes()


def run(path: Path, *, until: float = 1e18, **request: Any) -> list[dict[str, Any]]:
    """What the program answers."""
    asked = {"offset": 0, "limit": 10**6, **request}
    with path.open("rb", buffering=0) as log:
        log.seek(asked["offset"])
        if asked.get("within"):
            asked["offset"] = grep._seek_line(log, asked["offset"])
        return list(grep.search(log, grep.compile_sought("needle", re.MULTILINE), asked, until=until))


@pytest.mark.parametrize("seed", range(40))
def test_parts_have_together_what_the_whole_has(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grep, "_BLOCK", 64)
    monkeypatch.setattr(grep, "_LONGEST", 500)
    path, dice = tmp_path / "log", random.Random(seed)
    size = len(write(path, seed=seed))
    ends = sorted(dice.sample(range(1, size), 3))
    parts = [(0, ends[0]), (ends[0], ends[1]), (ends[1], ends[2]), (ends[2], None)]
    found = [run(path, offset=begin, end=end, within=begin > 0) for begin, end in parts]
    assert all(answers[-1]["done"] for answers in found)
    where = [answer["at"] for answers in found for answer in answers if "at" in answer]
    whole = [answer["at"] for answer in run(path) if "at" in answer]
    log = path.read_bytes()

    def furthest(offsets: list[int]) -> dict[int, int]:
        """By the beginning of a line, where the last piece of it that matches begins."""
        return {log.rfind(b"\n", 0, at) + 1: at for at in offsets}

    ours, theirs = furthest(where), furthest(whole)
    assert where == sorted(set(where)) and list(ours) == list(theirs) and theirs
    # A line that is taken as several, of up to 564 bytes, has its cuts where the program began to read.
    assert all(abs(ours[start] - theirs[start]) < 2 * 564 for start in ours)


@pytest.mark.parametrize("blocks", range(1, 30))
def test_no_line_is_lost_where_the_time_of_a_part_is_over(
    blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the block that goes over the end of a part: the next part has found what stands behind it."""
    monkeypatch.setattr(grep, "_BLOCK", 64)
    path = tmp_path / "log"
    path.write_text("".join(f"step {n} needle\n" for n in range(200)))
    at: int | None = 0
    texts: list[str] = []
    while at is not None:
        size = path.stat().st_size - at
        ends = [at + size * part // 3 for part in (1, 2)]
        tried = []
        for begin, end in zip([at, *ends], [*ends, None], strict=True):
            clock = iter(range(10**6))
            monkeypatch.setattr(grep.time, "monotonic", lambda clock=clock: next(clock))
            *found, last = run(path, offset=begin, end=end, within=begin > at, until=blocks - 1.5)
            lines = tuple(search.LogLine(stream="", offset=one["at"], text=one["text"]) for one in found)
            tried.append(search.Found(lines=lines, next=None if last["done"] else last["next"]))
        joined = search._join(tried, 10**6)
        texts += [line.text for line in joined.lines]
        assert joined.next is None or joined.next > at
        at = joined.next
    assert texts == path.read_text().splitlines()


@pytest.mark.parametrize("limit", [1, 3, 25, 10_000])
def test_a_search_in_parts_goes_on_where_it_stopped(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the programs themselves, until the log is searched to its end: every line once, in order."""
    monkeypatch.setattr(search, "PART", 4000)
    monkeypatch.setattr(search.os, "cpu_count", lambda: 3)
    path = tmp_path / "log"
    lines = [f"step {n} needle" if n % 3 == 0 else f"step {n}" for n in range(1500 if limit > 3 else 900)]
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(logs, "is_over", lambda job, attempt: True)
    monkeypatch.setattr(search, "_path", lambda *_: str(path))

    async def go() -> list[str]:
        texts: list[str] = []
        at: int | None = 0
        rounds = 0
        while at is not None and rounds < 8:
            nothing: Any = None
            found = await search.search(
                nothing, nothing, nothing, nothing, "rank-0.log", slots=search.Slots(), caller="ann",
                pattern="needle", offset=at, limit=limit,
            )  # fmt: skip
            assert found.fault is None and len(found.lines) <= limit
            assert found.next is None or found.next > at
            texts += [line.text for line in found.lines]
            at, rounds = found.next, rounds + 1
        return texts

    found, want = asyncio.run(go()), [line for line in lines if "needle" in line]
    assert found == want[: len(found)] and len(found) >= min(len(want), limit)


def test_what_is_behind_a_place_that_was_not_searched_is_found_later() -> None:
    def line(at: int) -> search.LogLine:
        return search.LogLine(stream="rank-0.log", offset=at, text="x")

    def found(*at: int, after: int | None = None, fault: str | None = None) -> search.Found:
        return search.Found(lines=tuple(map(line, at)), next=after, fault=fault)

    cut = search._join([found(1), found(20, after=30), found(40)], 9)
    assert ([one.offset for one in cut.lines], cut.next) == ([1, 20], 30)
    full = search._join([found(1), found(20, 22), found(40)], 2)
    assert ([one.offset for one in full.lines], full.next) == ([1, 20], 22)
    assert search._join([found(1), found(20)], 9).next is None
    assert search._join([found(1), found(fault="too long")], 9).fault == "too long"
