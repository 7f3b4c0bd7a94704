"""What a user asks of the control plane: run this, stop that. Both only write rows; the reconciler does the rest."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from trainmaster import targets
from trainmaster.control import budget, inputs, known_targets, workdir
from trainmaster.control.queueing import dispatch
from trainmaster.core.config.queue import After
from trainmaster.core.errors import Fault, JobFinal, JobMissing, JobOpen, JobUnreadable, SpecError
from trainmaster.core.ids import is_uuid
from trainmaster.core.secret.in_spec import find_in_spec
from trainmaster.core.secret.shapes import recognise
from trainmaster.core.spec import JobSpec
from trainmaster.store import attempts, audit, jobs, tokens
from trainmaster.store.capacity import after, sets
from trainmaster.store.database import Connection, Database
from trainmaster.store.heads import JobHead, find_head
from trainmaster.store.rows import JobRow
from trainmaster.targets import Placement, Rents, Target

LOCAL = "local"  # caller name of the command line working on the database itself


class Asked:
    """What the rows and the targets answer to a submission; to the trials of a set, each question once."""

    def __init__(self, db: Database, load: Callable[[str], Target]) -> None:
        self._db, self.load = db, functools.cache(load)
        self._words: dict[tuple[str, str], str] = {}
        self.check_workdir = functools.cache(functools.partial(workdir.check_known, db))
        self.places = dispatch.Places(db)

    def find_word(self, spec: JobSpec) -> str:
        """What its target stands for."""
        asked = (spec.project, spec.target)
        if asked not in self._words:
            with self._db.read() as conn:
                self._words[asked] = known_targets.find_word(conn, spec)
        return self._words[asked]


def submit(db: Database, spec: JobSpec, *, load: Callable[[str], Target] = targets.load, by: str = LOCAL) -> JobRow:
    """A new job, queued. A target that does not exist or cannot take such a job is refused before there is a row."""
    return submit_once(db, spec, key=None, load=load, by=by)[0]


def submit_once(
    db: Database,
    spec: JobSpec,
    *,
    key: str | None,
    load: Callable[[str], Target] = targets.load,
    by: str = LOCAL,
    within: Callable[[Connection, str], None] | None = None,
    pinned: bool = False,
    again_of: str | None = None,
) -> tuple[JobRow, bool]:
    """The job that stands for this submission, and whether it is new.

    The same key with the same spec gives the same job, however often it is sent; with another spec it is KeyTaken.
    OverBudget where the project has spent what it may; SpecError where a secret stands in the spec, or where it would
    go on from a job whose checkpoints a later one has written over; JobOpen where another job still writes them.
    `within` writes what belongs to the new job, in the same transaction; where it raises, there is no job. `pinned`:
    of a trial, whose `after` has the ids of jobs that there were when its set was submitted. `again_of`: the job that
    it runs again; the audit trail keeps it.
    """
    named = spec.resume_from
    spec, word, job_id, paid = check(db, spec, load=load, pinned=pinned)
    later = _find_later(db, named, spec.resume_from)
    before = pin_after(db, spec, pinned=pinned).after.jobs
    at = datetime.now(UTC)
    name = None if by in tokens.RESERVED else by
    with db.write() as conn:
        job_id, new = jobs.insert_once(conn, job_id, spec, key=key, by=name, at=at, word=word)
        if new:
            first = spec.resume_from
            if first is not None and (writer := jobs.find_writer(conn, first, besides=job_id)) is not None:
                raise JobOpen(f"job {writer} still writes these checkpoints; wait for its end, or cancel it first")
            if later is not None:
                message = f"job {later} went on from {named} and may have saved since, into the same folder; "
                message += f"to go on from the newest checkpoint, name that job: {later}"
                raise SpecError([Fault(path="resume_from", message=message)])
            budget.admit(conn, spec.project, paid=paid, now=at)
            detail: dict[str, object] = {"name": spec.name, "project": spec.project, "target": spec.target}
            if spec.allow:
                detail["allow"] = spec.allow
            if again_of is not None:
                detail["again_of"] = again_of
            after.insert_after(conn, job_id, before)
            audit.record(conn, who=by, action="job.submit", subject=f"job:{job_id}", detail=detail)
            if within is not None:
                within(conn, job_id)
    return known(db, job_id), new


def check_only(db: Database, spec: JobSpec, *, key: str | None = None) -> None:
    """Refuse what `submit_once` would refuse of the spec itself, its target and the budget. Nothing is written.

    Whether `resume_from` names a job that still writes is asked at the submission. With a key the budget is not asked:
    the job of that key may be there already, and is then returned in any case.
    """
    spec, _, _, paid = check(db, spec)
    if key is None:
        with db.read() as conn:
            budget.admit(conn, spec.project, paid=paid, now=datetime.now(UTC))


def check(
    db: Database,
    spec: JobSpec,
    *,
    load: Callable[[str], Target] = targets.load,
    pinned: bool = False,
    recognise: Callable[[str], str | None] = recognise,
    asked: Asked | None = None,
) -> tuple[JobSpec, str, str, bool]:
    """The spec as it would be stored, what its target stands for, an id and whether it may cost something.

    Errors as of `submit_once`.

    `asked`: of the set that the spec is a trial of.
    """
    asked = asked or Asked(db, load)
    word = asked.find_word(spec)
    spec = _find_first(db, spec, word)
    pin_after(db, spec, pinned=pinned)
    # Here and not in the spec itself: rows of earlier days must stay readable.
    if faults := [*find_in_spec(spec, recognise=recognise), *_find_tilde(spec), *asked.places.find_faults(word, spec)]:
        raise SpecError(faults)
    asked.check_workdir(spec.project, spec.workdir)
    job_id = str(uuid.uuid4())
    # Planning touches nothing, so a trial of it costs nothing; the folder it names is thrown away.
    target = asked.load(word)
    targets.refuse_queue(word, spec)
    inputs.refuse_unserved(spec, target)
    planned = target.plan(Placement(attempt=f"{job_id}.1", spec=spec, job_folder=Path("/") / job_id))
    price = budget.price_of(spec, planned.handle)
    if spec.limits.max_cost is not None and price is None and not isinstance(target, Rents):
        message = f"the price of {spec.target} is not known, so this cap cannot be held; state resources.price_per_hour"
        raise SpecError([Fault(path="limits.max_cost", message=message)])
    return spec, word, job_id, budget.may_cost(spec, word, price=price)


def resume(
    db: Database, job_id: str, *, key: str | None = None, load: Callable[[str], Target] = targets.load, by: str = LOCAL
) -> tuple[JobRow, bool]:
    """A new job with the spec of one that is over, which goes on with what that one saved; and whether it is new."""
    # What it waited for is over: neither of the two waits for that again.
    spec = replace(known(db, job_id).spec, resume_from=job_id, after=After())
    return submit_once(db, spec, key=key, load=load, by=by)


def run_again(
    db: Database, job_id: str, *, key: str | None = None, load: Callable[[str], Target] = targets.load, by: str = LOCAL
) -> tuple[JobRow, bool]:
    """A new job with the spec of another one, from the beginning; and whether it is new."""
    spec = replace(known(db, job_id).spec, resume_from=None, after=After())
    return submit_once(db, spec, key=key, load=load, by=by, again_of=job_id)


def _find_tilde(spec: JobSpec) -> Iterator[Fault]:
    """A checkpoint folder with `~` or `~user`: the trainer would make a folder of that name, beside the checkpoints."""
    if spec.train is None:
        return
    stated = spec.train.checkpoint
    for name, folder in (("folder", stated.folder), ("memory.folder", stated.memory.folder)):
        if folder is not None and folder.startswith("~"):
            yield Fault(path=f"train.checkpoint.{name}", message="`~` is not expanded here; write the whole path")


def _find_first(db: Database, spec: JobSpec, word: str) -> JobSpec:
    """The spec with the job that began the run in `resume_from`: its checkpoints are there."""
    if spec.resume_from is None:
        return spec
    try:
        earlier = jobs.find_job(db, spec.resume_from)
    except JobUnreadable as error:
        if error.project == spec.project:
            raise SpecError([Fault(path="resume_from", message=str(error))]) from None
        earlier = None
    if earlier is None or earlier.project != spec.project:
        message = f"the project {spec.project} has no job {spec.resume_from}"
        raise SpecError([Fault(path="resume_from", message=message)])
    if earlier.target != word:
        place = f"at {earlier.spec.target}" if earlier.spec.target != spec.target else "of another account"
        message = f"the checkpoints of {earlier.id} are {place}; a job elsewhere cannot go on with them"
        raise SpecError([Fault(path="target", message=message)])
    first = earlier.spec.resume_from or earlier.id
    if not _may_have_saved(db, earlier, first):
        message = f"job {earlier.id} has saved no checkpoint; run it again: trainmaster resume --again {earlier.id}"
        raise SpecError([Fault(path="resume_from", message=message)])
    return replace(spec, resume_from=first)


def pin_after(db: Database, spec: JobSpec, *, pinned: bool = False) -> JobSpec:
    """The spec with the ids of the jobs that it waits for; a job of another project is as unknown as none.

    Where they are `pinned` already, one that is gone was deleted since: its id stays, and the job fails for it.
    """
    ids, faults = [], []
    for number, word in enumerate(spec.after.jobs):
        found = after.find_named(db, spec.project, word)
        if len(found) == 1:
            ids.append(found[0].id)
            continue
        if pinned and not found and is_uuid(word):
            ids.append(word)
            continue
        message = f"the project {spec.project} has no job {word!r}; submit that one first"
        message = f"{word!r} is the beginning of several ids; write more of the id" if found else message
        if not found and (named := sets.list_sets(db, project=spec.project, find=word, limit=1)):
            name = named[0].name
            message = (
                f"{word!r} is a set of runs, and a job waits for jobs: name those of its runs that have begun, as "
                f"{name}-1; `trainmaster show {name}` lists them"
            )
        faults.append(Fault(path=f"after.jobs[{number}]", message=message))
    if faults:
        raise SpecError(faults)
    return replace(spec, after=replace(spec.after, jobs=tuple(ids)))


def _may_have_saved(db: Database, earlier: JobRow, first: str) -> bool:
    """False where it is certain that the run has no checkpoint. An open job is refused for that, by the caller."""
    if not earlier.status.final or jobs.has_checkpoint(db, first):
        return True
    if earlier.spec.train is not None:  # our trainer reports each save
        return False
    # Another program need not report anything; the agent looked into its checkpoint folder when the attempt ended.
    made = attempts.list_attempts(db, earlier.id)
    if not made:
        return earlier.id != first
    record = made[-1].exit
    return record is None or record.saved is not False


def _find_later(db: Database, named: str | None, first: str | None) -> str | None:
    """The newest job of the run, where it was made after the named one and may have saved: the jobs of a run share one
    folder, so what the named one saved last is not what a job would go on from."""
    if named is None or first is None:
        return None
    for job_id in jobs.list_later(db, named, first):
        made = [attempt.exit for attempt in attempts.list_attempts(db, job_id)]
        # Where an attempt left no record, or ran on several nodes, nobody has looked into its folder.
        unknown = any(record is None or record.saved is None for record in made)
        if (
            unknown
            or any(record.saved_since for record in made if record)
            or jobs.has_checkpoint(db, job_id, alone=True)
        ):
            return job_id
    return None


def cancel(db: Database, job_id: str, *, by: str = LOCAL) -> JobRow | JobHead:
    """Ask a job to save and stop. It is cancelled once the reconciler has seen it end.

    Its spec need not be readable.
    """
    accepted = request_cancel(db, job_id, by=by)
    try:
        job: JobRow | JobHead = known(db, job_id)
    except JobUnreadable:
        if (head := find_head(db, job_id)) is None:
            raise
        job = head
    if not accepted:
        raise JobFinal(f"job {job_id} is already {job.status}; there is nothing to cancel")
    return job


def request_cancel(db: Database, job_id: str, *, by: str = LOCAL) -> bool:
    """The same without reading the job; False if it is final or unknown."""
    with db.write() as conn:
        accepted = jobs.request_cancel(conn, job_id, at=datetime.now(UTC))
        if accepted:
            audit.record(conn, who=by, action="job.cancel", subject=f"job:{job_id}")
    return accepted


def known(db: Database, job_id: str) -> JobRow:
    job = jobs.find_job(db, job_id)
    if job is None:
        raise JobMissing(f"there is no job {job_id}; `trainmaster jobs` lists them")
    return job
