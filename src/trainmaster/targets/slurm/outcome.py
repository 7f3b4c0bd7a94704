"""State and end of an attempt, from Slurm's rows and the agents' exit records. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from trainmaster.core.plan import ExitRecord
from trainmaster.core.states import Reason, TargetState
from trainmaster.remote.slurm.layout import NEVER
from trainmaster.remote.slurm.parse import SlurmJob
from trainmaster.remote.slurm.states import explain_pending, translate
from trainmaster.targets import Poll

# Reasons that an agent can only guess when Slurm ends it: Slurm's own state then decides.
_GUESSED = frozenset({Reason.PREEMPTED, Reason.CRASHED, Reason.SCRIPT_FAILED, Reason.NODE_LOST, Reason.TARGET_ERROR})
_BY_SLURM = frozenset({"TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "CANCELLED", "BOOT_FAIL"})
_LINES = 20
_FIRST_LOST_S = 60.0  # after the end of another node; longer than Slurm takes to end a step (KillWait, 30 s by default)


def judge(rows: Sequence[SlurmJob] | None, facts: Mapping[str, Any], *, attempt: str, note: str = "") -> Poll:
    """The poll of an attempt. `rows` None: Slurm could not be asked; empty: it knows no such job."""
    if rows is None:
        return Poll(state=TargetState.UNKNOWN, note=note)
    if not rows and facts.get("job") in (None, NEVER):
        return _not_submitted(facts, attempt)
    for state in (TargetState.UNKNOWN, TargetState.RUNNING, TargetState.WAITING):
        for row in rows:
            if translate(row.state).state is state:
                return Poll(state=state, note=_describe(row, len(rows), str(facts.get("preempted", ""))))
    return _end(rows, facts, attempt)


def has_lost_first(facts: Mapping[str, Any]) -> bool:
    """Whether node 0 of a job with spares is lost while Slurm lets the job run (`--no-kill`): another node has failed,
    and neither has node 0 left a record since, nor has its batch script ended the job."""
    before = (datetime.now(UTC) - timedelta(seconds=_FIRST_LOST_S)).isoformat(timespec="microseconds")
    return not facts["first_over"] and facts["failed"] is not None and str(facts["failed"]) < before


def _not_submitted(facts: Mapping[str, Any], attempt: str) -> Poll:
    if facts.get("job") is None:
        return Poll(state=TargetState.WAITING, note="being submitted" if facts.get("intent") else "not submitted yet")
    if facts.get("stop") is None:
        return Poll(state=TargetState.LOST, note="released before its start")
    record = _stopped(facts, attempt, "; it was not submitted")
    return Poll(state=TargetState.FAILED, exit=record, note=record.message)


def _describe(row: SlurmJob, tasks: int, preempted: str) -> str:
    meaning = translate(row.state)
    text = explain_pending(row.reason) if row.state.upper() == "PENDING" else meaning.text
    if preempted and meaning.state is TargetState.WAITING:
        text = f"preempted by Slurm at {preempted}, saved; {text}"
    which = f"task {row.task}: " if tasks > 1 and text else ""
    return f"{which}{text}"


def _end(rows: Sequence[SlurmJob], facts: Mapping[str, Any], attempt: str) -> Poll:
    """The end of an attempt whose job is over, or unknown to Slurm."""
    texts = list(facts.get("records", ()))
    records = [ExitRecord.read(text.encode(), attempt=attempt) if text is not None else None for text in texts]
    bad = next((row for row in rows if translate(row.state).state is not TargetState.SUCCEEDED), None)
    failed = [record for record in records if record is not None and not record.ok]
    if records and all(record is not None and record.ok for record in records):
        return Poll(state=TargetState.SUCCEEDED, exit=records[0], note=records[0].message if records[0] else "")
    if failed:
        record = _correct(min(failed, key=lambda record: record.ended_at), bad, facts)
        return Poll(state=TargetState.FAILED, exit=record, note=record.message)
    if facts.get("released"):
        return Poll(state=TargetState.LOST, note="it was ended by force")
    if bad is None:
        words = "Slurm does not know the job any more" if not rows else "the Slurm job is over"
        return Poll(state=TargetState.LOST, note=f"{words}, and not every node left an exit record")
    meaning = translate(bad.state)
    if bad.state == "CANCELLED" and facts.get("stop") is not None:
        record = _stopped(facts, attempt, "; it had not started")
        return Poll(state=TargetState.FAILED, exit=record, note=record.message)
    text = _sentence(bad)
    if meaning.state is TargetState.LOST:
        return Poll(state=TargetState.LOST, reason=meaning.reason, note=text)
    record = ExitRecord(
        attempt=attempt,
        ok=False,
        ended_at=bad.ended_at or datetime.now(UTC).isoformat(timespec="microseconds"),
        reason=meaning.reason or Reason.TARGET_ERROR,
        message=text,
        evidence={**_evidence(bad), "last_lines": str(facts.get("log", "")).splitlines()[-_LINES:]},
    )
    return Poll(state=TargetState.FAILED, exit=record, note=text)


def _correct(record: ExitRecord, row: SlurmJob | None, facts: Mapping[str, Any]) -> ExitRecord:
    """A record whose reason is an agent's guess, with the reason that Slurm states."""
    if row is None or row.state not in _BY_SLURM or record.reason not in _GUESSED:
        return record
    if row.state == "CANCELLED" and facts.get("stop") is not None and record.reason is Reason.PREEMPTED:
        # The record is of its last run: it was preempted, waited again, and was taken out of the queue.
        return _stopped(facts, record.attempt, "; it was preempted and waited to go on")
    if row.state == "CANCELLED" and (facts.get("stop") is not None or facts.get("released")):
        return record  # that was our own scancel
    reason = translate(row.state).reason
    evidence = {**record.evidence, **_evidence(row), "agent": record.message}
    return replace(record, reason=reason, message=_sentence(row), evidence=evidence)


def _stopped(facts: Mapping[str, Any], attempt: str, rest: str) -> ExitRecord:
    """Record of an attempt that was stopped before an agent could write one. The stop file has `reason: text`."""
    word, _, text = str(facts["stop"]).strip().partition(":")
    reason = Reason(word) if word in list(Reason) else Reason.USER_CANCELLED
    message = (text.strip() or (str(facts["stop"]).strip() if word not in list(Reason) else "asked to stop")) + rest
    at = datetime.fromtimestamp(float(facts.get("stop_at", 0.0)), UTC)
    ended_at = at.isoformat(timespec="microseconds")
    return ExitRecord(attempt=attempt, ok=False, ended_at=ended_at, reason=reason, message=message)


def _sentence(row: SlurmJob) -> str:
    parts = [f"Slurm job {row.id}: {translate(row.state).text or row.state.lower()}"]
    if row.nodes:
        parts.append(f"on {row.nodes}")
    if row.exit_code:
        parts.append(f"exit code {row.exit_code}")
    if row.signal:
        parts.append(f"signal {row.signal}")
    if row.reason and row.reason != row.state:
        parts.append(f"({row.reason})")
    return " ".join(parts)


def _evidence(row: SlurmJob) -> dict[str, Any]:
    return {
        "slurm": {
            "job": row.id, "state": row.state, "reason": row.reason, "nodes": row.nodes, "exit_code": row.exit_code,
            "signal": row.signal,
        }
    }  # fmt: skip
