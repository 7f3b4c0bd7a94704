"""How an attempt stands: Slurm says whether it goes on, the records how it ended, and Slurm's word beats a guess."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from trainmaster.core.plan import ExitRecord
from trainmaster.core.states import Reason, TargetState
from trainmaster.remote.slurm.layout import NEVER
from trainmaster.remote.slurm.parse import SlurmJob
from trainmaster.targets.slurm.outcome import has_lost_first, judge

OK = ExitRecord(attempt="a", ok=True, ended_at="2026-01-01T00:00:00+00:00", message="every rank exited with 0")
STOPPED = replace(OK, ok=False, reason=Reason.PREEMPTED, message="the agent got SIGTERM", resumable=True)
BAD_DATA = replace(OK, ok=False, reason=Reason.BAD_DATA, message="no such file", ended_at="2026-01-01T00:00:05+00:00")


def row(state: str, **more: Any) -> SlurmJob:
    return SlurmJob(id="17", state=state, nodes="n[1-2]", **more)


def facts(*records: ExitRecord | None, **more: Any) -> dict[str, Any]:
    texts = [record.to_json() if record is not None else None for record in records]
    return {"job": "17", "records": texts, "stop": None, "released": False, "log": "line\nlast line\n", **more}


def test_while_slurm_runs_it_no_record_ends_it() -> None:
    poll = judge([row("COMPLETING")], facts(OK, OK), attempt="a")
    assert (poll.state, poll.exit) == (TargetState.RUNNING, None)
    assert judge([row("PENDING", reason="BeginTime")], facts(STOPPED), attempt="a").state is TargetState.WAITING


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED"])
def test_all_records_ok_is_a_success(state: str) -> None:
    assert judge([row(state)], facts(OK, OK), attempt="a").state is TargetState.SUCCEEDED


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("TIMEOUT", Reason.TIMED_OUT),
        ("DEADLINE", Reason.TIMED_OUT),
        ("OUT_OF_MEMORY", Reason.OUT_OF_MEMORY),
        ("NODE_FAIL", Reason.NODE_LOST),
        ("PREEMPTED", Reason.PREEMPTED),
        ("CANCELLED", Reason.USER_CANCELLED),
        ("FAILED", Reason.PREEMPTED),
    ],
)
def test_slurm_corrects_the_guess_of_an_agent(state: str, reason: Reason) -> None:
    poll = judge([row(state)], facts(STOPPED, None), attempt="a")
    assert poll.exit is not None and (poll.state, poll.exit.reason) == (TargetState.FAILED, reason)
    assert poll.exit.resumable
    # What an agent knows for certain stays.
    kept = judge([row(state)], facts(BAD_DATA, None), attempt="a")
    assert kept.exit is not None and kept.exit.reason is Reason.BAD_DATA


def test_a_job_that_was_preempted_says_so_and_one_that_is_stopped_meanwhile_says_that() -> None:
    at = "2026-03-01T12:00:00"
    poll = judge([row("PENDING", reason="BeginTime")], facts(STOPPED, preempted=at), attempt="a")
    assert poll.state is TargetState.WAITING and poll.note.startswith(f"preempted by Slurm at {at}, saved; waits")
    assert "(BeginTime)" in poll.note, "Slurm's own reason"
    assert "preempted" not in judge([row("RUNNING")], facts(STOPPED, preempted=at), attempt="a").note
    # Its last record is that of the run before: the cap that took it out of the queue must not read as a preemption.
    over = judge([row("CANCELLED")], facts(STOPPED, stop="over_budget: enough\n", stop_at=0.0), attempt="a")
    assert over.exit is not None and over.exit.reason is Reason.OVER_BUDGET
    assert over.exit.message == "enough; it was preempted and waited to go on"


def test_the_first_record_that_failed_counts() -> None:
    poll = judge([row("FAILED")], facts(BAD_DATA, STOPPED), attempt="a")
    assert poll.exit is not None and poll.exit.reason is Reason.PREEMPTED


@pytest.mark.parametrize(
    ("state", "reason"),
    [("NODE_FAIL", Reason.NODE_LOST), ("BOOT_FAIL", Reason.NODE_LOST), ("PREEMPTED", Reason.PREEMPTED)],
)
def test_without_a_record_a_lost_node_is_lost(state: str, reason: Reason) -> None:
    poll = judge([row(state)], facts(None, OK), attempt="a")
    assert (poll.state, poll.reason, poll.exit) == (TargetState.LOST, reason, None)
    assert "n[1-2]" in poll.note


def test_without_a_record_the_reason_of_slurm_and_the_log_are_the_evidence() -> None:
    poll = judge([row("OUT_OF_MEMORY", signal=9)], facts(None), attempt="a")
    assert poll.exit is not None and poll.exit.reason is Reason.OUT_OF_MEMORY
    assert poll.exit.evidence["last_lines"] == ["line", "last line"]
    assert poll.exit.message == "Slurm job 17: it used more memory than Slurm gave it on n[1-2] signal 9"


def test_unknown_is_not_an_end() -> None:
    assert judge(None, {}, attempt="a", note="squeue does not answer").state is TargetState.UNKNOWN
    assert judge([row("SOMETHING_NEW")], {}, attempt="a").state is TargetState.UNKNOWN
    assert judge([], facts(None), attempt="a").state is TargetState.LOST


def test_one_task_that_goes_on_keeps_the_whole_array_going() -> None:
    rows = [replace(row("FAILED"), id="17_0"), replace(row("RUNNING"), id="17_1")]
    assert judge(rows, {}, attempt="a").state is TargetState.RUNNING
    rows = [replace(row("COMPLETED"), id="17_0"), replace(row("PENDING", reason="Resources"), id="17_1")]
    poll = judge(rows, {}, attempt="a")
    assert (poll.state, poll.note.partition(":")[0]) == (TargetState.WAITING, "task 1")


def test_before_it_is_submitted() -> None:
    assert judge([], {"job": None, "intent": False}, attempt="a").state is TargetState.WAITING
    assert judge([], {"job": None, "intent": True}, attempt="a").note == "being submitted"
    assert judge([], facts(job=NEVER, released=True), attempt="a").state is TargetState.LOST
    stopped = judge([], facts(job=NEVER, stop="over_budget: enough\n", stop_at=0.0), attempt="a")
    assert stopped.exit is not None and stopped.exit.reason is Reason.OVER_BUDGET
    assert judge([], facts(job=NEVER, stop="words", stop_at=0.0), attempt="a").exit == replace(
        stopped.exit, reason=Reason.USER_CANCELLED, message="words; it was not submitted"
    )


@pytest.mark.parametrize(
    ("first_over", "age_s", "lost"), [(False, 61, True), (False, 30, False), (True, 61, False), (False, None, False)]
)
def test_node_0_is_lost_where_another_has_failed_and_it_says_nothing(
    first_over: bool, age_s: float | None, lost: bool
) -> None:
    at = age_s and (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat(timespec="microseconds")
    assert has_lost_first(facts(first_over=first_over, failed=at)) is lost
