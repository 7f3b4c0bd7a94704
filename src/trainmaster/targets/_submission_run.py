"""A submission run to its end by the process that made it: submitted, polled, read, and removed."""

from __future__ import annotations

import asyncio
import time

from trainmaster.core.plan import EXIT_FILE, ExitRecord, rank_log
from trainmaster.core.states import TargetState
from trainmaster.targets import Handle, Poll, Submission, Target
from trainmaster.targets._cluster_job import ClusterJobEnd

_BLOCK = 1 << 20


async def run_submission(
    target: Target, submission: Submission, *, limit_s: float, action: str, poll_s: float = 1.0
) -> ClusterJobEnd:
    """Run a submission to its end. What was created is ended and deleted, also where this is cancelled."""
    handle = submission.handle
    # A request that is under way cannot be taken back: it is waited for, so that nothing is left behind.
    creating = asyncio.ensure_future(target.submit(submission))
    try:
        handle = await asyncio.shield(creating)
        poll = await _wait(target, handle, limit_s, poll_s)
        log = await _read(target, handle, rank_log(0))
        raw = await _read(target, handle, EXIT_FILE)
    finally:
        await asyncio.gather(creating, return_exceptions=True)
        await target.release(handle)
    record = ExitRecord.read(raw, attempt=str(handle["attempt"])) if raw else None
    code = record.exit_codes.get("0") if record is not None else None
    return judge_end(poll, limit_s, out=log.decode(errors="replace"), code=code, action=action)


def judge_end(poll: Poll, limit_s: float, *, out: str, code: int | None, action: str) -> ClusterJobEnd:
    """The end of a job from its last state. A rank that failed is named; machines that never ran say nothing."""
    rank = None
    if poll.state is TargetState.FAILED and poll.exit is not None and poll.exit.exit_codes:
        note, codes = poll.exit.message[:600], poll.exit.exit_codes
        rank = f"rank{next((rank for rank, code in codes.items() if code != 0), '0')}"
    elif poll.state.over:
        note = f"it ended as {poll.state} without a result: {poll.note}"
    else:
        note = f"no result in {limit_s:.0f} s; it is {poll.state}: {poll.note}"
    return ClusterJobEnd(out=out, code=code, note=note, action=action, failed_rank=rank)


async def _wait(target: Target, handle: Handle, limit_s: float, poll_s: float) -> Poll:
    end = time.monotonic() + limit_s
    while True:
        poll = await target.poll(handle)
        if poll.state.over or time.monotonic() > end:
            return poll
        await asyncio.sleep(poll_s)


async def _read(target: Target, handle: Handle, stream: str) -> bytes:
    data = b""
    while block := await target.read(handle, stream, offset=len(data), limit=_BLOCK):
        data += block
    return data
