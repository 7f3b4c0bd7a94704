"""Jobs: the list, one job as its row, one job as its page, its attempts and its transitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainmaster.api.costs import Bound
from trainmaster.api.run import Run
from trainmaster.core.money.cost import Cents
from trainmaster.core.states import Reason, Stage, Status, TargetState

_BY_THE_SCRIPT = (Reason.OUT_OF_MEMORY, Reason.SCRIPT_FAILED)  # the same program would fail again
_RESUME_JOB = "trainmaster resume JOB"  # in actions of reasons (core/states.py)
_FINAL = frozenset(word.value for word in Status if word.final)  # text too: a word may come from a newer server


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnyJob:
    """What a line, a row and a page say of a job."""

    id: str
    name: str
    project: str
    target: str
    status: Status
    stage: Stage | None
    reason: Reason | None
    message: str

    @property
    def final(self) -> bool:
        return self.status in _FINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine(_AnyJob):
    """One job in the list. Figures are those of its last STEP event; null before the first."""

    attempts: int
    step: int | None
    steps: int | None
    progress: float | None
    loss: float | None
    tokens_per_s: float | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    cost_cents: Cents | None = None  # so far; None: unknown
    forecast_cents: Cents | None = None  # at its end
    forecast_bound: Bound | None = None  # the forecast is at most so much; None: it is from the pace of the job
    submitted_by: str | None = None  # name of the token; None: the command line on the home folder
    price_cents_per_hour: float | None = None  # for all its machines; None: unknown
    machines: tuple[str, ...] = ()  # of its newest attempt, where the target names them
    uuid: str | None = None  # as in Job
    project_id: str | None = None
    completed_at: datetime | None = None
    resume_from: str | None = None  # the job that began its run, where it goes on with checkpoints
    again_of: str | None = None  # the job that it runs again, from the beginning
    loss_text: str | None = None  # NaN, Infinity or -Infinity, where its last loss is no number

    @property
    def spent_cents(self) -> Cents | None:
        """So far, as a list shows and sorts it: a job without a price that has spent nothing has an unknown cost."""
        return self.cost_cents if self.cost_cents or self.price_cents_per_hour is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsPage:
    """One page of the list of jobs, with its filter."""

    jobs: tuple[JobLine, ...]
    total: int  # jobs that match the filter, on all pages
    counts: Mapping[str, int]  # by status, in the project of the filter
    status: Status | None
    project: str | None
    find: str | None
    limit: int
    offset: int
    made_at: datetime
    next: str | None = None  # cursor of the following page; None on an empty page
    by: str | None = None  # the filter: only this submitter


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(_AnyJob):
    """The row of a job. Its page, `GET /v1/training/jobs/{uuid}`, adds the results."""

    attempts: int
    cancel_requested: bool
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    project_started_at: datetime | None
    time_taken: float | None
    training_config: Mapping[str, Any] | None
    heard_at: datetime | None
    stalled_at: datetime | None
    submitted_by: str | None
    spec: Mapping[str, Any]
    uuid: str | None = None  # id, project and ended_at under the names that earlier programs read
    project_id: str | None = None
    completed_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Created(Job):
    """The row of a job that was submitted or resumed, and what its owner should know of it."""

    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted(Created):
    """The row of a job that was submitted or resumed. `new`: False where the same key had created it before.

    The API sends `new` as its status code: 201 or 200.
    """

    new: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt on the job page: how it ended, with the evidence it left."""

    number: int
    report: TargetState | None
    ok: bool | None  # None: no exit record yet
    reason: Reason | None
    action: str | None
    message: str
    resumable: bool
    saved: bool | None = None  # whether files lay in the checkpoint folder at its end; None: not known
    exit_codes: Mapping[str, int]
    evidence: Mapping[str, Any]
    started_at: datetime | None
    ended_at: datetime | None
    recovered_s: float | None = None  # from the last event of the attempt before to its own first training step
    machines: tuple[str, ...] = ()  # names, where the target chooses them
    price_cents_per_hour: float | None = None  # of all its machines


@dataclass(frozen=True, slots=True, kw_only=True)
class JobName:
    """Id and name of another job."""

    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMachine:
    """A machine of the newest attempt, by its name in Nodes."""

    name: str
    has_page: bool  # it was checked, or is in use now: Nodes has a page of it


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage(_AnyJob):
    """Everything the page of one job shows."""

    action: str | None  # what to do next, where the job did not end well
    cancel_requested: bool
    created_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    duration_s: float | None
    attempts: tuple[Attempt, ...]
    run: Run
    spec: Mapping[str, Any] | None
    made_at: datetime
    made_by: str  # the command that makes this report again
    cost_cents: Cents | None = None  # so far; None: unknown
    forecast_cents: Cents | None = None  # at its end
    forecast_bound: Bound | None = None  # the forecast is at most so much; None: it is from the pace of the job
    submitted_by: str | None = None  # name of the token; None: the command line on the home folder
    price_cents_per_hour: float | None = None  # for all its machines; None: unknown
    continues: JobName | None = None  # the job before it in its run (`trainmaster resume`)
    continued_as: JobName | None = None  # the job after it
    again_of: JobName | None = None  # the job that it runs again, from the beginning
    machines: tuple[JobMachine, ...] = ()  # of its newest attempt, where they are known
    cancelled_by: str | None = None  # who asked it to stop, named as in the audit log; None: nobody did
    uuid: str | None = None  # as in Job
    project_id: str | None = None
    completed_at: datetime | None = None
    version: str  # of the program that made it

    @property
    def careful(self) -> str | None:
        """What is wrong with its losses, in words."""
        run = self.run
        if not run.sick_steps:
            return None
        words = f"{run.sick_steps:,} step{'s' if run.sick_steps > 1 else ''} reported a loss that is not a number"
        return f"{words}, every one since step {run.sick_since:,}" if run.sick_since is not None else words

    @property
    def may_resume(self) -> bool:
        """Whether it ended early and has a checkpoint, or may have one: a script need not report what it saves."""
        if self.status not in (Status.FAILED, Status.CANCELLED) or not self.attempts or self.spec is None:
            return False
        if self.run.checkpoint_events.get("saved") or self.spec.get("resume_from"):
            return True
        return not self.spec.get("train") and self.attempts[-1].saved is not False

    @property
    def to_do(self) -> str | None:
        """`action`, with the command that resumes this job where it may be resumed and was not."""
        if not self.may_resume or self.continued_as is not None:
            return self.action
        command = f"trainmaster resume {self.name}"
        if self.action and _RESUME_JOB in self.action:
            return self.action.replace(_RESUME_JOB, command)
        if self.reason in _BY_THE_SCRIPT and not (self.spec or {}).get("train"):
            mended = f"with mended files `trainmaster submit JOB.yaml resume_from={self.name}`"
            return f"{self.action}; `{command} command='[…]'` goes on from where it saved, {mended}"
        return f"{self.action}; `{command}` goes on from where it saved" if self.action else f"`{command}`"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptShape:
    """One attempt of a job. The target's own handle is not included."""

    id: str
    number: int
    report: str | None
    reason: Reason | None
    message: str
    exit_codes: Mapping[str, int] | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    released_at: datetime | None
    price_cents_per_hour: float | None
    stop_reason: Reason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    attempts: tuple[AttemptShape, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One change of a job's stage. `stage_from` is null at its creation, `stage_to` at its end."""

    at: datetime
    stage_from: Stage | None
    stage_to: Stage | None
    status: Status
    reason: Reason | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    transitions: tuple[Transition, ...]
