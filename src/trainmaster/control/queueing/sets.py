"""Sets of runs: submit one, begin its next trials, cancel it.

A set and all its trials are rows of one transaction. A trial becomes a job when fewer than `parallel` of the set are
open; the job and the mark that the trial has begun are one transaction too. So a control plane that dies at any moment
neither loses a trial nor begins one twice, and several of them may advance the same set. Everything else about a trial
is what is known of its job. The trials of a search are proposed one by one (searching.py), those of a schedule come at
its times (schedules.py).
"""

from __future__ import annotations

import functools
import json
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from trainmaster import targets
from trainmaster.control import budget, failpoints
from trainmaster.control import submit as submitting
from trainmaster.control.queueing import searching, study
from trainmaster.core.config.cron import Schedule
from trainmaster.core.config.sweep import Sweep
from trainmaster.core.errors import JobFinal, TrainmasterError, UsageError
from trainmaster.core.schema import to_plain
from trainmaster.core.secret.shapes import recognise
from trainmaster.core.states import Status
from trainmaster.store import audit, jobs, tokens
from trainmaster.store.capacity import schedules, searches, sets
from trainmaster.store.capacity.sets import SetRow, TrialRow
from trainmaster.store.database import Connection, Database, is_unavailable
from trainmaster.store.heads import find_head
from trainmaster.targets import Target

log = logging.getLogger(__name__)


class _NotNow(TrainmasterError):
    """The trial has begun elsewhere, or its set was cancelled."""


def submit_set(
    db: Database, sweep: Sweep, *, load: Callable[[str], Target] = targets.load, by: str = submitting.LOCAL
) -> SetRow:
    """A new set. A trial that its target cannot take is refused before there is a row."""
    return submit_set_once(db, sweep, key=None, load=load, by=by)[0]


def submit_set_once(
    db: Database,
    sweep: Sweep,
    *,
    key: str | None,
    load: Callable[[str], Target] = targets.load,
    by: str = submitting.LOCAL,
) -> tuple[SetRow, bool]:
    """The set that stands for this submission, and whether it is new.

    The same key with the same document gives the same set, however often it is sent; with another one it is KeyTaken.
    The trials of a schedule have the name of the first time here, and come as rows at its times.
    """
    sent = _digest(sweep, key) if key else None
    if sent is not None:  # one that is there needs no check, which takes seconds for a thousand trials
        with db.read() as conn:
            found = sets.find_sent(conn, sweep.project, sent)
        if found is not None:
            return _known(db, found), False
    if sweep.search is not None:
        study.require()
    seen = functools.cache(recognise)  # most texts are the same in all trials, and a look at each is slow
    asked = submitting.Asked(db, load)  # what is the same for all trials is asked once
    checked = [submitting.check(db, trial.spec, asked=asked, recognise=seen) for trial in sweep.trials]
    words, paid = [word for _, word, _, _ in checked], any(costs for *_, costs in checked)
    if any(trial.spec.after.jobs for trial in sweep.trials):  # a name stands for the job that has it now
        pinned = (replace(trial, spec=submitting.pin_after(db, trial.spec)) for trial in sweep.trials)
        sweep = replace(sweep, trials=tuple(pinned))
    set_id, at = str(uuid.uuid4()), datetime.now(UTC)
    name = None if by in tokens.RESERVED else by
    with failpoints.around("commit set"), db.write() as conn:
        found = None
        if sent is not None:
            jobs.hold(conn, sweep.project, sent.key)  # one that is being written is waited for
            found = sets.find_sent(conn, sweep.project, sent)
        if found is None:
            budget.admit(conn, sweep.project, paid=paid, now=at)
            _insert(conn, set_id, sweep, words=words, by=name, at=at, sent=sent)
            detail = {"name": sweep.name, "project": sweep.project, "trials": sweep.total}
            audit.record(conn, who=by, action="set.submit", subject=f"set:{set_id}", detail=detail)
    return _known(db, found or set_id), found is None


def _insert(
    conn: Connection,
    set_id: str,
    sweep: Sweep,
    *,
    words: Sequence[str],
    by: str | None,
    at: datetime,
    sent: sets.Sent | None,
) -> None:
    if sweep.search is None and sweep.schedule is None:
        sets.insert_set(conn, set_id, sweep, by=by, at=at, words=words, sent=sent)
    else:
        sets.insert_set(conn, set_id, replace(sweep, trials=()), by=by, at=at, sent=sent)
    if sweep.search is not None:
        searches.insert_search(conn, set_id, sweep.search, sweep.template, words[0])
    if sweep.schedule is not None:
        _insert_schedule(conn, set_id, sweep, sweep.schedule, words=words, at=at)


def _digest(sweep: Sweep, key: str) -> sets.Sent:
    """A submission as its key is compared: the document, and what was changed since in every trial."""
    content = [sweep.project, sweep.document, to_plain(sweep.trials[0].spec)]
    return sets.Sent(jobs.digest(key), jobs.digest(json.dumps(content, sort_keys=True)))


def _known(db: Database, set_id: str) -> SetRow:
    row = sets.find_set(db, set_id)
    assert row is not None
    return row


def _insert_schedule(
    conn: Connection, set_id: str, sweep: Sweep, schedule: Schedule, *, words: Sequence[str], at: datetime
) -> None:
    trials = [
        {"values": dict(trial.values), "spec": trial.spec, "word": word}
        for trial, word in zip(sweep.trials, words, strict=True)
    ]
    workdir = sweep.trials[0].spec.workdir
    schedules.insert_schedule(conn, set_id, schedule, trials, workdir=workdir, next_at=schedule.find_next(at))
    sets.mark_over(conn, set_id)


def advance(db: Database, *, load: Callable[[str], Target] = targets.load) -> None:
    """Begin the trials whose turn it is, and cancel the jobs of sets that are cancelled."""
    for row in sets.list_unfinished(db):
        try:
            _advance(db, row, load)
        except Exception as error:  # what goes wrong with one holds up no other
            if is_unavailable(error):
                raise
            text = f"the set cannot go on: {type(error).__name__}: {error}"[:500]
            if text != row.message:  # once, and not at every tick
                log.exception("set %s; trying again", row.id)
            with db.write() as conn:
                sets.set_message(conn, row.id, text)


def _advance(db: Database, row: SetRow, load: Callable[[str], Target]) -> None:
    trials = sets.list_trials(db, row.id)
    if row.cancel_at is not None:
        _cancel_jobs(db, trials, by=audit.find_set_canceller(db, row.id))
    if searches.find_search(db, row.id) is not None:
        searching.advance(db, row, load=load)
        return
    if row.cancel_at is not None:
        _end(db, row)
        return
    waiting = [trial for trial in trials if trial.job_id is None]
    room = row.parallel - sum(trial.open is True for trial in trials)
    if all(_begin(db, row, trial, load) for trial in waiting[: max(room, 0)]) and len(waiting) <= room:
        _end(db, row)


def cancel(db: Database, set_id: str, *, by: str = submitting.LOCAL) -> None:
    """No further trial begins, and those that are open are asked to save and stop. JobFinal where the set is over."""
    with failpoints.around("commit set cancel"), db.write() as conn:
        schedules.lock(conn, set_id)  # before its set, as everywhere
        # With the state that is seen: of a set that ended since, the result would be rewritten.
        if accepted := sets.may_cancel(conn, set_id):
            schedules.end(conn, set_id)
            sets.request_cancel(conn, set_id, at=datetime.now(UTC))
            audit.record(conn, who=by, action="set.cancel", subject=f"set:{set_id}")
    row = sets.find_set(db, set_id)
    assert row is not None
    if not accepted:
        result = _find_result(row, sets.list_trials(db, set_id), searches.find_search(db, set_id) is not None)
        raise JobFinal(f"set {set_id} is already {result}; there is nothing to cancel")
    _cancel_jobs(db, sets.list_trials(db, set_id), by=by)
    if searches.find_search(db, set_id) is None:  # the ends of a search's trials are still to be recorded
        _end(db, row)


def _find_result(row: SetRow, trials: Sequence[TrialRow], searched: bool) -> Status:
    """How a set that is over ended, as its page says it. Pruned trials of a search are cancelled jobs."""
    ended = {trial.status for trial in trials}
    if row.cancel_at is not None:
        return Status.CANCELLED
    if Status.FAILED in ended:
        return Status.FAILED
    if Status.CANCELLED in ended and Status.COMPLETED not in ended and not searched:
        return Status.CANCELLED
    return Status.COMPLETED


def _begin(db: Database, row: SetRow, trial: TrialRow, load: Callable[[str], Target]) -> bool:
    """Make the job of a trial; False where it cannot begin now, and the set says why."""

    def mark(conn: Connection, job_id: str) -> None:
        tokens.refuse_absent(conn, row.submitted_by, row.project)
        if not sets.take_trial(conn, row.id, trial.number, job_id):
            raise _NotNow(f"trial {trial.number} of {row.name} has begun, or its set was cancelled")
        if trial.word is not None and sets.find_word(conn, job_id) != trial.word:
            # A target that was taken from its project would be used with the rights of the server.
            raise UsageError("its target is another one now, or was taken from its project; submit the set again")

    spec = sets.find_spec(db, row.id, trial.number)
    try:
        with failpoints.around("commit trial", trial.number):
            submitting.submit_once(
                db, spec, key=None, load=load, by=row.submitted_by or submitting.LOCAL, within=mark, pinned=True
            )
    except _NotNow:
        return False
    except TrainmasterError as refused:  # a budget that is spent, a target whose file is gone: mended, it goes on
        with db.write() as conn:
            sets.set_message(conn, row.id, f"trial {trial.number} cannot begin: {refused}")
        return False
    return True


def _cancel_jobs(db: Database, trials: list[TrialRow], *, by: str | None) -> None:
    for trial in trials:
        # Without its spec: a trial that cannot be read keeps no other from its stop.
        job = find_head(db, trial.job_id) if trial.job_id is not None and trial.open else None
        if job is not None and not job.cancel_requested:
            submitting.request_cancel(db, job.id, by=by or submitting.LOCAL)


def _end(db: Database, row: SetRow) -> None:
    with failpoints.around("commit set over"), db.write() as conn:
        sets.mark_over(conn, row.id)
