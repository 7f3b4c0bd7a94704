"""The simulated place keeps the contract of a target, and goes wrong exactly as its seed says."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest

from sims.timed_target import LINE_BYTES, Place, parse
from trainmaster.core.errors import UsageError
from trainmaster.core.events import split
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, TargetState
from trainmaster.targets import Handle, Placement

SPEC = parse_spec({"name": "load", "target": "sim", "command": ["true"]})


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def begin(place: Place, name: str = "a.1") -> Handle:
    submission = place.plan(Placement(attempt=name, spec=SPEC, job_folder=Path("/nowhere")))
    handle: Handle = run(place.submit(submission))
    return handle


def run(answer: Any) -> Any:
    return asyncio.run(answer)


def test_a_stream_grows_with_time_and_reads_the_same_in_any_pieces() -> None:
    clock = Clock()
    place = Place(parse("run_s=400,event_s=4,epoch_lines=10,eval_lines=20"), now=clock)
    handle = begin(place)
    clock.now += 204
    early = run(place.read(handle, EVENTS_FILE, offset=0, limit=1 << 20))
    clock.now += 1000
    whole = run(place.read(handle, EVENTS_FILE, offset=0, limit=1 << 20))
    assert whole.startswith(early) and len(early) in (50 * LINE_BYTES, 51 * LINE_BYTES)
    pieces = b""
    while piece := run(place.read(handle, EVENTS_FILE, offset=len(pieces), limit=777)):
        pieces += piece
    assert pieces == whole
    lines = split(whole, offset=0, zone=UTC)
    assert [line.fault for line in lines] == [None] * 101
    said = Counter(line.event.phase for line in lines if line.event is not None)
    assert said["STEP"] > 80 and said["EVAL_MODEL"] == 5 and said["TRAINING"] == 10
    assert run(place.poll(handle)).state is TargetState.SUCCEEDED


def test_submitted_again_it_is_found_and_stopped_it_says_why() -> None:
    clock = Clock()
    place = Place(parse("run_s=400"), now=clock)
    assert begin(place) == begin(place)
    handle = begin(place)
    clock.now += 50
    run(place.cancel(handle, reason="over_budget: enough"))
    clock.now += 50
    run(place.cancel(handle, reason="user_cancelled"))
    poll = run(place.poll(handle))
    assert poll.state is TargetState.FAILED and poll.exit.reason is Reason.OVER_BUDGET
    assert len(run(place.read(handle, EVENTS_FILE, offset=0, limit=1 << 20))) <= 13 * LINE_BYTES
    run(place.release(handle))
    assert run(place.poll(handle)).exit.reason is Reason.OVER_BUDGET


def test_what_goes_wrong_follows_from_the_seed() -> None:
    def fates(seed: int) -> list[tuple[TargetState, int]]:
        clock = Clock()
        place = Place(parse(f"run_s=400,fail=0.2,vanish=0.2,hang=0.2,seed={seed}"), now=clock)
        handles = [begin(place, f"job-{number}.1") for number in range(200)]
        clock.now += 1000
        return [(run(place.poll(each)).state, run(place.list_files(each))[0].size_bytes) for each in handles]

    first = fates(1)
    assert first == fates(1) != fates(2)
    reports = Counter(report for report, _ in first)
    assert {TargetState.SUCCEEDED, TargetState.FAILED, TargetState.LOST, TargetState.RUNNING} == reports.keys()
    assert min(reports.values()) > 20


@pytest.mark.parametrize("words", ["run_s=0", "fail=2", "fail=0.6,hang=0.6", "speed=3", "event_s=often"])
def test_what_cannot_be_is_refused(words: str) -> None:
    with pytest.raises(UsageError):
        parse(words)
