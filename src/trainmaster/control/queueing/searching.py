"""Advance a search: read what its trials report, prune, record their ends, propose and begin the next.

All that matters is in rows. A proposal is written in one transaction with its job, a verdict with the report that led
to it and with the request to stop. Each such change takes its turn (store/capacity/searches.py), so a control plane
that dies at any moment, or another one beside it, neither runs a trial twice nor proposes another one for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from trainmaster.api.events import Event
from trainmaster.control import failpoints
from trainmaster.control import submit as submitting
from trainmaster.control.queueing import study
from trainmaster.control.queueing.study import Seen
from trainmaster.core.config.search import Search
from trainmaster.core.config.sweep import fill
from trainmaster.core.errors import SpecError, TrainmasterError, UsageError
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Status
from trainmaster.store import audit, events, jobs, tokens
from trainmaster.store.capacity import searches, sets
from trainmaster.store.capacity.searches import SearchRow, SearchTrial
from trainmaster.store.capacity.sets import SetRow
from trainmaster.store.database import Connection, Database
from trainmaster.store.heads import find_head
from trainmaster.targets import Target

_AT_ONCE = 1000  # events that are read in one go
_PASSES = 5  # over a search at a tick: one thread advances all sets, and some runs log without end
_MOST_STEPS = 2**53  # a float holds every whole number up to here
_PRUNED_BY = "search"  # in the audit trail


class _NotNow(TrainmasterError):
    """Something else was recorded since the rows were read, or the set was cancelled."""


def advance(db: Database, row: SetRow, *, load: Callable[[str], Target]) -> None:
    """Take steps until there is nothing to do now, as much as one tick may take of the thread that advances all sets.

    What keeps the next trial from its begin is the set's message.
    """
    for _ in range(_PASSES):
        if not _read_reports(db, row):
            break
    while _begin_next(db, row, load):  # each is one of the trials that are left
        pass
    found = searches.find_search(db, row.id)
    trials, begun = searches.list_trials(db, row.id), sets.list_trials(db, row.id)
    assert found is not None
    ended = all(trial.ended is not None for trial in trials) and not any(trial.open for trial in begun)
    if ended and (len(trials) == found.search.total or row.cancel_at is not None):
        with failpoints.around("commit set over"), db.write() as conn:
            sets.mark_over(conn, row.id)


def _read_reports(db: Database, row: SetRow) -> bool:
    """Record what trials have reported since, and their ends; False where there is nothing new."""
    found = searches.find_search(db, row.id)
    assert found is not None
    trials = searches.list_trials(db, row.id)
    any_new = False
    for place, trial in enumerate(trials):
        if trial.state != "running" or (read := _read(db, found, trials, trial)) is None:
            continue
        changed, reports = read
        turn = _record(db, found, changed, reports)
        if turn is None:
            break
        any_new = True
        found, trials[place] = replace(found, turn=turn), changed
    return any_new


def _read(
    db: Database, found: SearchRow, trials: Sequence[SearchTrial], trial: SearchTrial
) -> tuple[SearchTrial, dict[int, float]] | None:
    """The trial as its new events and the state of its job leave it, and its new reports; None: nothing is new."""
    assert trial.job_id is not None
    # The job before its events: those of a job that is over are all there. Its spec may be one that cannot be read.
    job = find_head(db, trial.job_id)
    status, over = (Status.FAILED.value, True) if job is None else (job.status, job.final)
    phase, name = found.search.place
    new = [] if job is None else events.list_events(db, job.id, phase=phase, after=trial.read, limit=_AT_ONCE)
    if not new and not over:
        return None
    changed, reports = _follow(trial, new, name)
    if found.search.pruner == "none":
        reports = []
    elif reports:
        changed = _judge(db, found, trials, changed, reports)
    if changed.state == "running" and over and len(new) < _AT_ONCE:
        changed = _end(changed, status, found.search, "its job was deleted" if job is None else "")
    last = changed.step
    return changed, {step: value for step, value in reports if last is not None and step <= last}


def _follow(trial: SearchTrial, new: Sequence[Event], name: str) -> tuple[SearchTrial, list[tuple[int, float]]]:
    """The trial with its newest value, and the reports for a pruner: steps that go up, fewer as they grow.

    What an attempt repeats after a restart is no report. One in a hundred steps is kept behind the hundredth, so that
    a run of a million steps has a thousand reports; which, depends on the steps alone.
    """
    reports: list[tuple[int, float]] = []
    value, last = trial.value, trial.step
    for event in new:
        if event.event != "metrics" or name not in event.data:
            continue
        value, at = _number(event.data[name]), _number(event.data.get("step"))
        if value is None or at is None or not 0 <= at <= _MOST_STEPS:
            continue
        step = int(at)
        if last is None or step >= last + max(1, last // 100):
            reports.append((step, value))
            last = step
    read = trial.read if not new else (int(new[-1].attempt.rpartition(".")[2]), new[-1].offset)
    return replace(trial, value=value, step=last, read=read), reports


def _number(value: object) -> float | None:
    """A finite number, or None for anything else a node may have written (NaN arrives as text)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _judge(
    db: Database, found: SearchRow, trials: Sequence[SearchTrial], trial: SearchTrial, reports: list[tuple[int, float]]
) -> SearchTrial:
    """The trial as its pruner leaves it."""
    known = searches.list_reports(db, found.set_id, steps=[step for step, _ in reports], number=trial.number)
    seen = [
        Seen(
            values=other.values, state=other.state, value=other.value, attributes=other.attributes,
            reports=known.get(other.number, {}),
        )
        for other in trials
    ]  # fmt: skip
    step, attributes = study.find_stop(found.search, seen, trial.number, reports)
    trial = replace(trial, attributes=attributes)
    return trial if step is None else replace(trial, state="pruned", step=step, value=dict(reports)[step])


def _end(trial: SearchTrial, status: str, search: Search, message: str) -> SearchTrial:
    if status != Status.COMPLETED:
        return replace(trial, state="failed", message=message)
    if trial.value is None:
        return replace(trial, state="failed", message=f"its last {search.metric} is no number, or it reported none")
    return replace(trial, state="complete")


def _record(db: Database, found: SearchRow, trial: SearchTrial, reports: Mapping[int, float]) -> int | None:
    """The turn in which it was written; None where something was recorded since the rows were read.

    With a verdict, the job is asked to save and stop.
    """
    assert trial.job_id is not None
    at = datetime.now(UTC)
    with failpoints.around("commit search report", trial.number), db.write() as conn:
        turn = searches.take_turn(conn, found.set_id, seen=found.turn)
        if turn is None:
            return None
        ended = turn if trial.state != "running" else None
        searches.set_trial(conn, found.set_id, replace(trial, ended=ended), reports)
        if trial.state == "pruned" and jobs.request_cancel(conn, trial.job_id, at=at):
            jobs.set_message(conn, trial.job_id, f"pruned by its search at step {trial.step}")
            detail = {"set": found.set_id, "step": trial.step}
            audit.record(conn, who=_PRUNED_BY, action="job.prune", subject=f"job:{trial.job_id}", detail=detail)
    return turn


def _begin_next(db: Database, row: SetRow, load: Callable[[str], Target]) -> bool:
    """Propose the next trial and make its job; False where it is not its turn, or another control plane was first."""
    found = searches.find_search(db, row.id)
    assert found is not None
    trials = searches.list_trials(db, row.id)
    going = {trial.number for trial in sets.list_trials(db, row.id) if trial.open}
    going |= {trial.number for trial in trials if trial.state == "running"}
    if row.cancel_at is not None or len(trials) == found.search.total or len(going) >= row.parallel:
        return False
    number = len(trials) + 1
    try:
        values = study.propose(found.search, [see_for_proposal(trial) for trial in trials])
        _begin(db, row, found, values, number=number, load=load)
        return True
    except _NotNow:
        return False
    except TrainmasterError as refused:  # a budget that is spent, a package that is missing: mended, it goes on
        with db.write() as conn:
            sets.set_message(conn, row.id, f"trial {number} cannot begin: {refused}")
        return False


def see_for_proposal(trial: SearchTrial) -> Seen:
    """Its values and, once it has ended, its result. A sampler uses no report but that at which a trial was pruned."""
    if trial.state == "running":
        return Seen(values=trial.values)
    pruned_at = {trial.step: trial.value} if trial.step is not None and trial.value is not None else {}
    reports = pruned_at if trial.state == "pruned" else {}
    return Seen(values=trial.values, state=trial.state, value=trial.value, reports=reports)


def _begin(
    db: Database, row: SetRow, found: SearchRow, values: dict[str, Any], *, number: int, load: Callable[[str], Target]
) -> None:
    try:
        spec = parse_spec(fill(found.template, values, number))
    except SpecError as refused:  # values that do not go together: one trial less, and the search goes on
        with failpoints.around("commit trial", number), db.write() as conn:
            turn = _take(conn, row, found)
            text = f"no spec has these values: {refused}"
            searches.insert_trial(
                conn, row.id, number, values, turn=turn, job_id=None, spec=None, word=None, refused=text
            )
        return

    def mark(conn: Connection, job_id: str) -> None:
        tokens.refuse_absent(conn, row.submitted_by, row.project)
        turn = _take(conn, row, found)
        searches.insert_trial(conn, row.id, number, values, turn=turn, job_id=job_id, spec=spec, word=found.word)
        if sets.find_word(conn, job_id) != found.word:
            # A target that was taken from its project would be used with the rights of the server.
            raise UsageError("its target is another one now, or was taken from its project; submit the set again")
        sets.set_message(conn, row.id, "")

    with failpoints.around("commit trial", number):
        submitting.submit_once(
            db, spec, key=None, load=load, by=row.submitted_by or submitting.LOCAL, within=mark, pinned=True
        )


def _take(conn: Connection, row: SetRow, found: SearchRow) -> int:
    turn = None if sets.is_cancelled(conn, row.id) else searches.take_turn(conn, row.id, seen=found.turn)
    if turn is None:
        raise _NotNow("something else was recorded for this search, or it was cancelled")
    return turn
