"""What every target promises, held over each one in the folder."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from trainmaster import targets
from trainmaster.core.errors import TargetError, UsageError
from trainmaster.core.plan import EVENTS_FILE, rank_log
from trainmaster.core.states import Reason, TargetState

pytestmark = pytest.mark.spawns


def test_plan_is_pure_and_its_text_is_stable(name: str, place: Any, tmp_path: Any) -> None:
    placement = place()
    first, second = (targets.load(name).plan(placement) for _ in range(2))
    assert first == second
    assert first.render() == second.render()
    assert all(path in first.render() and text in first.render() for path, text in first.files.items())
    assert not placement.job_folder.exists()


@pytest.mark.matrix(one_in=3)
def test_a_handle_survives_json(name: str, place: Any, run: Any, end: Any, reserve: Any) -> None:
    target = targets.load(name)
    submission = target.plan(place())

    async def go() -> None:
        placed = await reserve(target, submission)
        handle = await target.submit(placed)
        assert handle.items() >= placed.handle.items(), "what was planned finds it too: a crash may lose the rest"
        again = json.loads(json.dumps(handle))
        assert (await end(targets.load(name), again)).state is TargetState.SUCCEEDED

    run(go())


@pytest.mark.matrix(one_in=3)
def test_submitted_often_it_starts_once(name: str, place: Any, run: Any, end: Any, reserve: Any) -> None:
    target = targets.load(name)
    submission = target.plan(place("echo started"))

    async def go() -> None:
        placed = await reserve(target, submission)
        handles = await asyncio.gather(*(target.submit(placed) for _ in range(3)))
        assert handles == [await target.submit(placed)] * 3
        poll = await end(target, placed.handle)
        assert (poll.state, poll.exit is not None and poll.exit.ok) == (TargetState.SUCCEEDED, True)
        await target.submit(placed)
        assert (await target.poll(placed.handle)).state is TargetState.SUCCEEDED
        assert await target.read(placed.handle, rank_log(0), offset=0, limit=1000) == b"started\n"

    run(go())


@pytest.mark.matrix(one_in=3)
def test_streams_read_the_same_in_any_pieces(name: str, place: Any, run: Any, end: Any, reserve: Any) -> None:
    target = targets.load(name)
    submission = target.plan(place("seq 1 200"))

    async def go() -> None:
        placed = await reserve(target, submission)
        handle = await target.submit(placed)
        await end(target, handle)
        whole = await target.read(handle, rank_log(0), offset=0, limit=1 << 20)
        assert whole == "".join(f"{n}\n" for n in range(1, 201)).encode()
        for size in (1, 7, 100):
            pieces, offset = b"", 0
            while piece := await target.read(handle, rank_log(0), offset=offset, limit=size):
                assert len(piece) <= size
                pieces, offset = pieces + piece, offset + len(piece)
            assert pieces == whole
        assert await target.read(handle, rank_log(0), offset=len(whole) + 99, limit=10) == b""
        assert await target.read(handle, rank_log(0), offset=0, limit=0) == b""
        assert await target.read(handle, rank_log(7), offset=0, limit=10) == b""
        assert (await target.read(handle, EVENTS_FILE, offset=0, limit=1 << 20)).endswith(b"\n")

    run(go())


def test_what_it_leaves_is_listed_and_read(name: str, place: Any, run: Any, end: Any, reserve: Any, free: Any) -> None:
    target = targets.load(name)
    script = 'cd "$TRAINMASTER_OUTPUTS"; mkdir a; printf 12345 > a/b; ln -s /etc/passwd link; ln -s /etc far; '
    script += "mkfifo a/pipe; echo up"
    submission = target.plan(place(script))

    async def go() -> None:
        placed = await reserve(target, submission)
        assert await target.list_files(placed.handle) == []
        handle = await target.submit(placed)
        await end(target, handle)
        await free(target, handle)
        found = await target.list_files(handle)
        listed = {file.name: file.size_bytes for file in found if not file.fault}
        assert listed["outputs/a/b"] == 5 and listed[rank_log(0)] == 3
        assert {EVENTS_FILE, "exit.json"} < listed.keys() and not any(
            "link" in file or "far" in file for file in listed
        )
        assert {file.name: file.fault for file in found if file.fault} == {
            "outputs/a/pipe": "named pipe, not a plain file",
            "outputs/far": "symbolic link, not a plain file",
            "outputs/link": "symbolic link, not a plain file",
        }
        assert await target.read(handle, "outputs/a/b", offset=1, limit=3) == b"234"
        for linked in ("outputs/link", "outputs/far/passwd", "outputs/a/pipe"):
            with pytest.raises(TargetError):
                await target.read(handle, linked, offset=0, limit=10)

    run(go())


@pytest.mark.parametrize(
    "stream", ["outputs", "outputs/", "outputs/../plan.json", "outputs//x",
               "", ".", "..", "../1/plan.json", "/etc/passwd", "rank-0.log/../plan.json", "rank-0.log\n", "rank-.log",
               "rank-١.log", "agent.lock", "events.jsonl\0", "exit.json.tmp"]
)  # fmt: skip
def test_a_stream_is_one_of_the_known_names(name: str, stream: str, place: Any, run: Any) -> None:
    target = targets.load(name)
    with pytest.raises(TargetError, match="not a stream"):
        run(target.read(target.plan(place()).handle, stream, offset=0, limit=10))


@pytest.mark.matrix(one_in=3)
def test_cancel_stops_it_with_the_reason(name: str, place: Any, run: Any, end: Any, printed: Any, reserve: Any) -> None:
    target = targets.load(name)
    submission = target.plan(place("trap 'exit 75' TERM; echo up; while :; do sleep 0.02; done"))

    async def go() -> None:
        placed = await reserve(target, submission)
        handle = await target.submit(placed)
        await printed(target, handle)
        assert (await target.poll(handle)).state is TargetState.RUNNING
        await target.cancel(handle, reason="over_budget: enough")
        await target.cancel(handle, reason="user_cancelled")  # the first counts
        poll = await end(target, handle)
        assert poll.state is TargetState.FAILED
        assert poll.exit is not None
        assert (poll.exit.reason, poll.exit.resumable) == (Reason.OVER_BUDGET, True)
        await target.cancel(handle, reason="user_cancelled")

    run(go())


@pytest.mark.matrix(one_in=3)
def test_release_ends_it_by_force_and_may_be_repeated(
    name: str, place: Any, run: Any, printed: Any, reserve: Any, free: Any
) -> None:
    target = targets.load(name)
    submission = target.plan(place("trap '' TERM; echo up; while :; do sleep 0.02; done"))

    async def go() -> None:
        placed = await reserve(target, submission)
        handle = await target.submit(placed)
        await printed(target, handle)
        await free(target, handle)
        assert (await target.poll(handle)).state is TargetState.LOST
        await free(target, handle)
        # Slurm kills one process after the other: the shell may still write `Killed` about its child.
        kept = {b"up\n", b"up\nKilled\n"} if name.startswith("slurm") else {b"up\n"}
        assert await target.read(handle, rank_log(0), offset=0, limit=20) in kept
        await target.submit(placed)  # released is over: it does not start again
        assert (await target.poll(handle)).state is TargetState.LOST

    run(go())


@pytest.mark.matrix(one_in=3)
def test_a_released_attempt_keeps_how_it_ended(
    name: str, place: Any, run: Any, end: Any, reserve: Any, free: Any
) -> None:
    target = targets.load(name)
    submission = target.plan(place("exit 3"))

    async def go() -> None:
        placed = await reserve(target, submission)
        handle = await target.submit(placed)
        before = await end(target, handle)
        await free(target, handle)
        assert await target.poll(handle) == before
        assert before.state is TargetState.FAILED

    run(go())


def test_what_was_never_submitted(name: str, place: Any, run: Any, free: Any) -> None:
    target = targets.load(name)
    handle = target.plan(place()).handle
    assert run(target.poll(handle)).state is TargetState.WAITING
    assert run(target.read(handle, EVENTS_FILE, offset=0, limit=10)) == b""
    run(free(target, handle))
    assert run(target.poll(handle)).state is TargetState.WAITING


@pytest.mark.matrix(one_in=3)
def test_an_attempt_cancelled_before_its_start_does_not_run(
    name: str, place: Any, run: Any, end: Any, reserve: Any
) -> None:
    target = targets.load(name)
    submission = target.plan(place("echo up"))

    async def go() -> None:
        placed = await reserve(target, submission)
        await target.cancel(placed.handle, reason="user_cancelled")
        handle = await target.submit(placed)
        poll = await end(target, handle)
        assert poll.exit is not None
        assert poll.exit.reason is Reason.USER_CANCELLED
        assert await target.read(handle, rank_log(0), offset=0, limit=10) == b""

    run(go())


def test_a_name_that_is_no_target() -> None:
    with pytest.raises(UsageError, match=", ".join(targets.names())):
        targets.load("nowhere")
