"""Every job is moved on until it is final, whatever its target does; nothing it held is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.control.context import TIMEOUTS_S, Context
from trainmaster.control.reconcile import run
from trainmaster.control.stage_handlers import handle_stage
from trainmaster.core.errors import NoAccess, TargetError, Unreachable, UsageError
from trainmaster.core.spec import JobSpec, parse_spec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.storage import open_store
from trainmaster.store import attempts, events, leases
from trainmaster.store.attempts import list_attempts
from trainmaster.store.database import Database
from trainmaster.store.jobs import count_jobs, find_job, list_transitions
from trainmaster.store.rows import JobRow
from trainmaster.targets import Placement, Poll, Submission

from .scripted import GOOD, RUNNING, Scripted, at_once, ended, take_over

LOST = ended(TargetState.LOST)


def spec(*, attempts: int = 1) -> JobSpec:
    return parse_spec({"name": "a", "target": "scripted", "command": ["true"], "limits": {"attempts": attempts}})


def find(db: Database, job: JobRow) -> JobRow:
    row = find_job(db, job.id)
    assert row is not None
    return row


async def until(done: Callable[[], bool]) -> None:
    while not done():  # noqa: ASYNC110 (what we wait for are rows)
        await asyncio.sleep(0.02)


def reconcile_until(
    db: Database,
    home: Path,
    target: Scripted,
    done: Callable[[], bool],
    *,
    timeouts_s: dict[str, float] = TIMEOUTS_S,
    begins: str | None = None,
) -> None:
    """Run the real loop, fast, until `done`; pytest's own timeout ends one that never is."""

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.create_task(
            run(
                db, home, stop=stop, tick_s=0.02, load=target.load, timeouts_s=timeouts_s, rest_s=at_once, begins=begins
            )
        )
        await until(lambda: done() or loop.done())
        stop.set()
        await loop

    asyncio.run(main())


def settle(db: Database, home: Path, target: Scripted, *jobs: JobRow) -> list[JobRow]:
    reconcile_until(db, home, target, lambda: all(find(db, job).status.final for job in jobs))
    return [find(db, job) for job in jobs]


def stages(db: Database, job: JobRow) -> list[Stage | None]:
    return [move.stage_to for move in list_transitions(db, job.id)]


def test_the_happy_path_goes_through_its_stages_and_keeps_every_line(db: Database, tmp_path: Path) -> None:
    target = Scripted(Poll(state=TargetState.WAITING), RUNNING, RUNNING, GOOD)
    target.events += b'{"half'
    job = submitting.submit(db, spec(), load=target.load)
    assert (job.status, job.stage, job.attempts) == (Status.PENDING, Stage.QUEUED, 0)
    (job,) = settle(db, tmp_path, target, job)
    assert (job.status, job.stage, job.reason, job.attempts) == (Status.COMPLETED, None, None, 1)
    assert job.started_at is not None and job.ended_at is not None
    assert stages(db, job) == [
        Stage.QUEUED,
        Stage.PLACING,
        Stage.STAGING,
        Stage.CHECKING,
        Stage.RUNNING,
        Stage.COLLECTING,
        Stage.RELEASING,
        None,
    ]
    assert [row.phase for row in events.list_events(db, job.id)] == ["PREFLIGHT", "STEP", None]
    (attempt,) = list_attempts(db, job.id)
    assert (attempt.report, attempt.handle) == (TargetState.SUCCEEDED, {"attempt": attempt.id, "submitted": True})
    assert target.alive == set() and target.made("submit") == 1


def test_who_follows_one_job_begins_no_other_and_goes_on_with_those_that_have_begun(
    db: Database, tmp_path: Path
) -> None:
    target = Scripted(RUNNING)
    begun = submitting.submit(db, spec(), load=target.load)
    reconcile_until(db, tmp_path, target, lambda: find(db, begun).stage is Stage.RUNNING)
    waits, mine, unwanted = (submitting.submit(db, spec(), load=target.load) for _ in range(3))
    submitting.cancel(db, unwanted.id)
    target.polls = [GOOD]
    followed = (begun, mine, unwanted)
    reconcile_until(
        db, tmp_path, target, lambda: all(find(db, job).status.final for job in followed), begins=mine.id
    )  # fmt: skip
    assert find(db, waits).stage is Stage.QUEUED and find(db, waits).attempts == 0
    (job,) = settle(db, tmp_path, target, waits)
    assert job.status is Status.COMPLETED


@pytest.mark.parametrize(
    ("poll", "reason", "attempts"),
    [
        (ended(TargetState.FAILED, Reason.SCRIPT_FAILED), Reason.SCRIPT_FAILED, 1),  # no retry helps
        (ended(TargetState.FAILED, Reason.CHECK_FAILED), Reason.CHECK_FAILED, 3),
        (LOST, Reason.NODE_LOST, 3),
        (Poll(state=TargetState.FAILED, note="NODE_FAIL"), Reason.TARGET_ERROR, 3),
    ],
)
def test_a_job_is_tried_again_only_where_its_reason_allows(
    db: Database, tmp_path: Path, poll: Poll, reason: Reason, attempts: int
) -> None:
    target = Scripted(RUNNING, poll)
    (job,) = settle(db, tmp_path, target, submitting.submit(db, spec(attempts=3), load=target.load))
    assert (job.status, job.reason, job.attempts) == (Status.FAILED, reason, attempts)
    assert [row.reason for row in list_attempts(db, job.id)] == [reason] * attempts
    assert target.alive == set()
    # Each attempt was given back before the next was begun.
    order = [call for call in target.calls if call[0] in ("submit", "release")]
    assert order == [(what, f"{job.id}.{n}") for n in range(1, attempts + 1) for what in ("submit", "release")]


def test_an_attempt_that_is_lost_is_followed_by_one_that_succeeds(db: Database, tmp_path: Path) -> None:
    target = Scripted(RUNNING, LOST)

    async def heal(attempt: str) -> None:
        if attempt.endswith(".2"):
            target.polls = [RUNNING, GOOD]

    target.before["submit"] = heal
    (job,) = settle(db, tmp_path, target, submitting.submit(db, spec(attempts=5), load=target.load))
    assert (job.status, job.reason, job.attempts) == (Status.COMPLETED, None, 2)
    assert [row.cursor[0] for row in events.list_events(db, job.id)] == [1, 1, 2, 2]


def test_unknown_is_not_failed(db: Database, tmp_path: Path) -> None:
    target = Scripted(RUNNING, *[Poll(state=TargetState.UNKNOWN, note="no route to host")] * 5, RUNNING, GOOD)
    messages: set[str] = set()
    job = submitting.submit(db, spec(), load=target.load)

    def watch() -> bool:
        row = find(db, job)
        messages.add(row.message)
        return row.status.final

    reconcile_until(db, tmp_path, target, watch)
    assert find(db, job).status is Status.COMPLETED
    assert "no route to host" in messages
    assert len(list_attempts(db, job.id)) == 1
    assert stages(db, job).count(Stage.RUNNING) == 1


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("stage", ["submit", "poll", "read", "release"])
@pytest.mark.parametrize("wrong", [Unreachable("down"), RuntimeError("a bug"), OSError(28, "disk")])
def test_a_call_that_raises_is_told_and_tried_again(db: Database, tmp_path: Path, stage: str, wrong: Exception) -> None:
    target = Scripted(RUNNING, RUNNING, GOOD)
    left = [wrong, wrong, wrong]
    messages: set[str] = set()
    job = submitting.submit(db, spec(), load=target.load)

    async def fail(_attempt: str) -> None:
        messages.add(find(db, job).message)
        if left:
            raise left.pop()

    target.before[stage] = fail
    (job,) = settle(db, tmp_path, target, job)
    assert (job.status, job.attempts, job.message) == (Status.COMPLETED, 1, "")
    assert any(str(wrong) in message for message in messages)
    assert len(events.list_events(db, job.id)) == 2


def test_a_refused_submit_ends_the_attempt_and_gives_back_what_there_is(db: Database, tmp_path: Path) -> None:
    target = Scripted()

    async def refuse(attempt: str) -> None:
        target.alive.add(attempt)  # half of it was made before the refusal
        raise TargetError("no such partition")

    target.before["submit"] = refuse
    (job,) = settle(db, tmp_path, target, submitting.submit(db, spec(attempts=2), load=target.load))
    assert (job.status, job.reason, job.message) == (Status.FAILED, Reason.TARGET_ERROR, "no such partition")
    assert (job.attempts, target.alive) == (2, set())


def test_a_fault_of_the_operator_uses_up_no_attempt_of_a_job_that_has_run(db: Database, tmp_path: Path) -> None:
    target = Scripted(LOST)

    async def lack(attempt: str) -> None:
        if attempt.endswith(".2") or attempt.endswith(".3"):
            raise NoAccess("no SSH key")
        if attempt.endswith(".4"):
            target.polls = [GOOD]

    target.before["submit"] = lack
    (job,) = settle(db, tmp_path, target, submitting.submit(db, spec(attempts=2), load=target.load))
    assert (job.status, job.attempts, target.alive) == (Status.COMPLETED, 4, set())
    reasons = [attempt.reason for attempt in list_attempts(db, job.id)]
    assert reasons == [Reason.NODE_LOST, Reason.TARGET_ERROR, Reason.TARGET_ERROR, None]


def test_a_settings_file_that_is_missing_for_a_while_ends_no_job_that_has_run(db: Database, tmp_path: Path) -> None:
    target, refused = Scripted(LOST), list[str]()
    plan = target.plan

    def lack(placement: Placement) -> Submission:
        if placement.attempt.endswith(".2") and len(refused) < 2:
            refused.append(placement.attempt)
            raise UsageError("no kubeconfig")
        target.polls = [GOOD] if placement.attempt.endswith(".2") else [LOST]
        return plan(placement)

    job = submitting.submit(db, spec(attempts=2), load=target.load)
    target.plan = lack  # type: ignore[method-assign]
    (job,) = settle(db, tmp_path, target, job)
    assert (job.status, job.attempts, len(refused)) == (Status.COMPLETED, 2, 2)


def test_a_fault_of_the_operator_ends_a_job_that_never_began_at_once(db: Database, tmp_path: Path) -> None:
    target = Scripted()

    async def lack(_attempt: str) -> None:
        raise NoAccess("no SSH key")

    target.before["submit"] = lack
    (job,) = settle(db, tmp_path, target, submitting.submit(db, spec(attempts=3), load=target.load))
    assert (job.status, job.attempts, job.message) == (Status.FAILED, 1, "no SSH key")


@pytest.mark.matrix(one_in=2)
# Provisioning and connecting belong to targets that make machines; local has none.
@pytest.mark.parametrize("stage", [stage for stage in Stage if stage not in (Stage.PROVISIONING, Stage.CONNECTING)])
def test_cancel_in_every_stage_ends_cancelled_and_holds_nothing(db: Database, tmp_path: Path, stage: Stage) -> None:
    """The job is walked to the stage one step at a time, cancelled there, and then left to the loop."""
    target = Scripted(*[RUNNING] * 2, *([LOST] if stage in (Stage.COLLECTING, Stage.RELEASING) else [RUNNING]))
    job = submitting.submit(db, spec(attempts=3), load=target.load)
    _walk(db, tmp_path, target, job, stage)
    assert submitting.cancel(db, job.id).status is Status.CANCELLING
    assert submitting.cancel(db, job.id).status is Status.CANCELLING  # asking twice is asking once
    (job,) = settle(db, tmp_path, target, job)
    assert (job.status, job.reason) == (Status.CANCELLED, Reason.USER_CANCELLED)
    assert target.alive == set()
    assert target.made("submit") == (0 if stage in (Stage.QUEUED, Stage.PLACING, Stage.STAGING) else 1)
    assert target.made("cancel") == (1 if stage in (Stage.CHECKING, Stage.RUNNING) else 0)
    with pytest.raises(UsageError, match="already cancelled"):
        submitting.cancel(db, job.id)


@pytest.mark.matrix(one_in=2)
@pytest.mark.parametrize("call", ["submit", "poll", "read", "cancel", "release"])
def test_cancel_during_a_call_is_not_lost(db: Database, tmp_path: Path, call: str) -> None:
    target = Scripted(RUNNING, RUNNING, LOST if call == "release" else RUNNING)
    job = submitting.submit(db, spec(attempts=3), load=target.load)
    if call == "cancel":
        submitting.cancel(db, job.id)
        target.polls = [RUNNING]

    async def meanwhile(_attempt: str) -> None:
        if not find(db, job).cancel_requested:
            submitting.cancel(db, job.id)

    target.before[call] = meanwhile
    (job,) = settle(db, tmp_path, target, job)
    assert (job.status, job.reason, target.alive) == (Status.CANCELLED, Reason.USER_CANCELLED, set())


@pytest.mark.parametrize("by", ["user", "cap"])
def test_a_cancel_or_a_cap_does_not_wait_for_a_start_that_hangs(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(reconcile, "_HURRY_S", 0.2)
    target = Scripted()
    job = submitting.submit(db, spec(), load=target.load)

    async def hang(attempt: str) -> None:
        target.alive.add(attempt)
        if by == "user":
            submitting.cancel(db, job.id)
        else:
            with db.write() as conn:
                at = datetime.now(UTC)
                attempts.request_stop(conn, attempt, reason=Reason.OVER_BUDGET, message="limits.max_cost", at=at)
        await asyncio.Event().wait()

    target.before["submit"] = hang
    (job,) = settle(db, tmp_path, target, job)
    assert (target.alive, target.made("submit")) == (set(), 1)
    assert job.reason is (Reason.USER_CANCELLED if by == "user" else Reason.OVER_BUDGET)


def test_a_job_that_succeeds_before_the_cancel_arrives_is_completed(db: Database, tmp_path: Path) -> None:
    target = Scripted(RUNNING, GOOD)
    job = submitting.submit(db, spec(), load=target.load)
    _walk(db, tmp_path, target, job, Stage.COLLECTING)
    submitting.cancel(db, job.id)
    (job,) = settle(db, tmp_path, target, job)
    assert job.status is Status.COMPLETED


def test_a_target_that_hangs_holds_up_only_its_own_job(db: Database, tmp_path: Path) -> None:
    target = Scripted(RUNNING, GOOD)
    hung = submitting.submit(db, spec(), load=target.load)
    others = [submitting.submit(db, spec(), load=target.load) for _ in range(3)]

    async def hang(attempt: str) -> None:
        if attempt.startswith(hung.id):
            await asyncio.Event().wait()

    target.before["poll"] = hang
    assert {job.status for job in settle(db, tmp_path, target, *others)} == {Status.COMPLETED}
    assert find(db, hung).stage is Stage.CHECKING

    # After its time is up the call is given up, told, and made again.
    quick = {**TIMEOUTS_S, "poll": 0.05}
    asked = target.made("poll")
    reconcile_until(db, tmp_path, target, lambda: target.made("poll") > asked + 2, timeouts_s=quick)
    assert find(db, hung).message == "the target did not answer `poll` within 0.05 s"
    target.before.clear()
    assert settle(db, tmp_path, target, hung)[0].status is Status.COMPLETED


def test_a_second_reconciler_stands_by_and_takes_over(db: Database, tmp_path: Path) -> None:
    first, second = Scripted(RUNNING), Scripted(GOOD)
    job = submitting.submit(db, spec(), load=first.load)

    async def main() -> None:
        stops = asyncio.Event(), asyncio.Event()
        one = asyncio.create_task(run(db, tmp_path, stop=stops[0], tick_s=0.01, load=first.load))
        await until(lambda: find(db, job).stage is Stage.RUNNING)
        two = asyncio.create_task(run(db, tmp_path, stop=stops[1], tick_s=0.01, load=second.load))
        await asyncio.sleep(0.2)
        assert second.calls == []
        stops[0].set()
        await one
        await until(lambda: find(db, job).status.final)
        stops[1].set()
        await two

    asyncio.run(main())
    assert (find(db, job).status, second.made("submit")) == (Status.COMPLETED, 0)


def test_what_cannot_be_run_is_refused_before_there_is_a_row(db: Database) -> None:
    with pytest.raises(UsageError, match="not one of"):
        submitting.submit(db, parse_spec({"name": "a", "target": "moon", "command": ["true"]}))
    with pytest.raises(TargetError, match="one node"):
        submitting.submit(db, parse_spec({"name": "a", "command": ["true"], "resources": {"nodes": 2}}))
    with pytest.raises(UsageError, match="no job nobody"):
        submitting.cancel(db, "nobody")
    assert count_jobs(db) == 0


def _walk(db: Database, home: Path, target: Scripted, job: JobRow, stage: Stage) -> None:
    """Steps one at a time until the job stands in the stage."""
    plane = Context(
        db=db, home=home, load=target.load, token=take_over(db), rest_s=at_once, storage=open_store(home / "storage")
    )

    async def walk() -> None:
        while find(db, job).stage is not stage:
            await handle_stage(plane, find(db, job))

    asyncio.run(walk())
    with db.write() as conn:
        leases.drop(conn, plane.token)  # or the loop would wait for this lease to run out
