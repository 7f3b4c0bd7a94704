"""Sets of runs: the table of results of one, with the best marked, and the list."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from trainmaster.api.codec import fill
from trainmaster.api.jobs import JobsPage
from trainmaster.api.sets import SetLine, SetPage, SetsPage, Trial
from trainmaster.core.config.search import Search
from trainmaster.core.errors import UsageError
from trainmaster.core.money.cost import round_cents
from trainmaster.core.states import Status
from trainmaster.pages import jobs as job_list
from trainmaster.pages.cost import list_exact
from trainmaster.pages.parts.downsample import number, sick_text, whole
from trainmaster.store import events, jobs
from trainmaster.store.capacity import schedules, searches, sets
from trainmaster.store.capacity.schedules import ScheduleRow
from trainmaster.store.capacity.searches import SearchTrial
from trainmaster.store.capacity.sets import SetRow, TrialRow
from trainmaster.store.database import Database
from trainmaster.store.page_rows.runs import find_jobs

_GONE, _SKIPPED = "its job was deleted", "will not run"
_UNREADABLE = "its stored spec cannot be read by this version of Trainmaster"
_COUNTED = {"": "waiting", _GONE: "deleted", _SKIPPED: "skipped"}  # trials without a job, by their message


def read_one(db: Database, word: str, *, now: datetime | None = None) -> SetPage | None:
    """The set with this id, the newest of this name, or the one whose id begins so; UsageError where several do.

    A job of this name comes before the beginning of an id.
    """
    row = sets.find_set(db, word)
    if row is not None and row.name == word and row.id != word:
        named = next((job for job in jobs.search_jobs(db, word) if job.name == word), None)
        if named is not None:
            raise UsageError(f"{word!r} is the name of set {row.id} and of job {named.id}; write the id")
    if row is None and word and (ids := sets.search_ids(db, word)):
        same = jobs.search_jobs(db, word)
        if any(job.name == word for job in same):
            return None
        ids += [job.id for job in same]
        if len(ids) > 1:
            listed = ", ".join(each[:13] for each in ids[:5])
            raise UsageError(f"{word!r} is the beginning of {len(ids)} ids ({listed} …); write more of the id")
        row = sets.find_set(db, ids[0])
    return _read(db, row, now=now or datetime.now(UTC)) if row is not None else None


def read_folded(db: Database, *, project: str | None, limit: int, offset: int, now: datetime | None = None) -> JobsPage:
    """The list of jobs without the trials of sets."""
    at = now or datetime.now(UTC)
    with db.read():
        ids, total = sets.list_alone(db, project=project, limit=limit, offset=offset)
        lines = job_list.lines(db, find_jobs(db, ids), now=at)
        counts = {word.value: count for word, count in jobs.count_by_status(db, project=project).items()}
    return JobsPage(
        jobs=lines, total=total, counts=counts, status=None, project=project, find=None, limit=limit, offset=offset,
        made_at=at, next=None,
    )  # fmt: skip


def read(
    db: Database,
    *,
    project: str | None = None,
    find: str | None = None,
    limit: int = 200,
    offset: int = 0,
    now: datetime | None = None,
) -> SetsPage:
    """Sets, newest first: of a project, of a name, or whose id begins so."""
    at = now or datetime.now(UTC)
    with db.read():
        rows = sets.list_sets(db, project=project, find=find, limit=limit, offset=offset)
        return SetsPage(sets=tuple(_summarize(db, rows, now=at)))


def _summarize(db: Database, rows: Sequence[SetRow], *, now: datetime) -> Iterator[SetLine]:
    """A line for each set, those of a matrix from five queries: a list of sets has hundreds of trials."""
    searched = searches.list_ids(db, [row.id for row in rows])
    timed = schedules.list_schedules(db, [row.id for row in rows])
    outcomes = sets.list_outcomes(db, [row.id for row in rows if row.id not in searched])
    known = {each.job_id: each.status for listed in outcomes.values() for each in listed if each.job_id and each.status}
    completed = [job for job, status in known.items() if status == Status.COMPLETED.value]
    last = events.last_data(db, completed, phase="STEP")
    spent = list_exact(db, list(known), now=now)
    for row in rows:
        if row.id in searched:
            yield _read(db, row, now=now).set
            continue
        trials = []
        for number_, job, status in outcomes[row.id]:
            loss = number(last[job], "loss") if job in last else None
            message = "" if status else _GONE if job else _SKIPPED if row.cancel_at is not None else ""
            trials.append(
                Trial(
                    number=number_, values={}, job=job if status else None, name="", message=message,
                    status=Status(status) if status else None, cost_cents=round_cents(spent.get(job or "")),
                    loss=loss, value=loss,
                )
            )  # fmt: skip
        best = find_best(trials)
        marked = [replace(trial, best=True) if trial.number == best else trial for trial in trials]
        yield _line(row, marked, None, timed.get(row.id), spent)


def _read(db: Database, row: SetRow, *, now: datetime) -> SetPage:
    found = searches.find_search(db, row.id)
    search = found.search if found is not None else None
    told = {trial.number: trial for trial in searches.list_trials(db, row.id)} if search is not None else {}
    rows = sets.list_trials(db, row.id)
    begun = [trial.job_id for trial in rows if trial.job_id and trial.status]
    known = {job.id: job for job in find_jobs(db, begun)}
    steps, spent = events.last_data(db, begun, phase="STEP"), list_exact(db, begun, now=now)
    trials = []
    for trial in rows:
        name, data = f"{row.name}-{trial.number}", steps.get(trial.job_id or "", {})
        if trial.job_id is None or trial.status is None:
            shown = _show_without_job(row, trial, name)
        else:
            job = known.get(trial.job_id)
            shown = Trial(
                number=trial.number, values=trial.values, job=trial.job_id, name=name,
                status=Status(trial.status) if job is None else job.status, step=whole(data, "step"),
                loss=number(data, "loss"), cost_cents=round_cents(spent[trial.job_id]),
                message=_UNREADABLE if job is None else job.message,
                value=number(data, "loss") if search is None else None, loss_text=sick_text(data, "loss"),
            )  # fmt: skip
        trials.append(_add_result(shown, told[trial.number]) if trial.number in told else shown)
    best = find_best(trials, goal="min" if search is None else search.goal)
    trials = [replace(trial, best=True) if trial.number == best else trial for trial in trials]
    if (timed := schedules.list_schedules(db, [row.id]).get(row.id)) is not None:
        trials.reverse()  # newest first
    return SetPage(set=_line(row, trials, search, timed, spent), trials=tuple(trials))


def _show_without_job(row: SetRow, trial: TrialRow, name: str) -> Trial:
    message = _GONE if trial.job_id else _SKIPPED if row.cancel_at is not None else ""
    return Trial(number=trial.number, values=trial.values, job=None, name=name, status=None, message=message)


def _add_result(trial: Trial, told: SearchTrial) -> Trial:
    """A trial of a search, with what the sampler was told of it."""
    pruned = told.state == "pruned"
    if told.job_id is None:  # no spec has these values
        return replace(trial, status=Status.FAILED, message=told.message)
    message = f"pruned at step {told.step}" if pruned else trial.message or told.message
    return replace(trial, value=told.value, pruned=pruned, message=message if trial.job else trial.message)


def find_best(trials: Sequence[Trial], *, goal: str = "min") -> int | None:
    """The completed trial with the lowest or highest last value; the first of equal ones."""
    sign = -1.0 if goal == "max" else 1.0
    known = [
        (sign * trial.value, trial.number)
        for trial in trials
        if trial.status is Status.COMPLETED and not trial.pruned and trial.value is not None
        if trial.value == trial.value  # NaN is equal to nothing
    ]
    return min(known)[1] if known else None


def judge_status(statuses: Sequence[Status | None], *, waiting: int, cancelled: bool) -> Status:
    """One status for all trials. `waiting`: trials that have not begun."""
    known = [status for status in statuses if status is not None]
    if any(not status.final for status in known):
        if cancelled:
            return Status.CANCELLING
        begun = Status.RUNNING in known or any(status.final for status in known)
        return Status.RUNNING if begun else Status.PENDING
    if cancelled:
        return Status.CANCELLED
    if waiting:
        return Status.RUNNING if known else Status.PENDING
    if Status.FAILED in known:
        return Status.FAILED
    # Nobody asked to cancel the set: what was cancelled of it one by one is told by its counts.
    return Status.CANCELLED if known and set(known) == {Status.CANCELLED} else Status.COMPLETED


def _line(
    row: SetRow, trials: Sequence[Trial], search: Search | None, timed: ScheduleRow | None,
    spent: Mapping[str, float | None],
) -> SetLine:  # fmt: skip
    """`spent`: by job, not rounded."""
    total = len(trials) if search is None else search.total
    unproposed, cancelled = total - len(trials), row.cancel_at is not None
    waiting = sum(trial.status is None and not trial.message for trial in trials) + unproposed
    counts = Counter(_count_as(trial) for trial in trials)
    if unproposed:
        counts["skipped" if cancelled else "waiting"] += unproposed
    cents = [spent.get(trial.job) for trial in trials if trial.job is not None]
    paid = [cent for cent in cents if cent is not None]
    best = next((trial for trial in trials if trial.best), None)
    metric = "loss" if search is None else search.metric
    status = judge_status([_judge_as(trial) for trial in trials], waiting=waiting, cancelled=cancelled)
    if timed is not None and status.final and not cancelled:
        status = Status.PENDING  # its next time comes
    return fill(
        SetLine,
        row,
        status=status,
        trials=total,
        counts=dict(counts),
        message=row.message or (timed.note if timed is not None else ""),
        cost_cents=round_cents(math.fsum(paid)) if len(paid) == len(cents) else None,
        best_loss=best.value if best is not None and metric == "loss" else None,
        metric=metric,
        goal="min" if search is None else search.goal,
        best_value=best.value if best is not None else None,
        search=None if search is None else _describe(search),
        schedule=timed.schedule.text if timed is not None else None,
        next_at=timed.next_at if timed is not None and not timed.paused else None,
        paused=timed is not None and timed.paused,
    )


def _count_as(trial: Trial) -> str:
    if trial.pruned:
        return "pruned"
    return trial.status.value if trial.status else _COUNTED[trial.message]


def _judge_as(trial: Trial) -> Status | None:
    """A trial that was pruned has done what it was for."""
    return Status.COMPLETED if trial.pruned and (trial.status is None or trial.status.final) else trial.status


def _describe(search: Search) -> str:
    pruned = "" if search.pruner == "none" else f", pruned by {search.pruner}"
    return f"{search.sampler}, seed {search.seed}{pruned}"
