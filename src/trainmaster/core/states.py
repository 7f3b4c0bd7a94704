"""Where a job is, and why: statuses for users, stages for the control plane, typed reasons with their retry rule.

A user sees a `Status`. The control plane works in `Stage`s. A `Reason` says why a job or an attempt ended, whether
trying again can help, and what to do. Every change of stage goes through one door (store.writes.advance), which asks
`may_move` here.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.core.compat import StrEnum

CANCEL_REQUESTED = "cancel requested"  # the message of a job that somebody cancelled


class Status(StrEnum):
    """Job status, as users see it and the API filters by it."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Nothing more will happen to the job."""
        return self in (Status.COMPLETED, Status.FAILED, Status.CANCELLED)


class Stage(StrEnum):
    """Work of the control plane for a job that is not final."""

    QUEUED = "queued"
    PLACING = "placing"
    PROVISIONING = "provisioning"
    CONNECTING = "connecting"
    STAGING = "staging"
    CHECKING = "checking"
    RUNNING = "running"
    COLLECTING = "collecting"
    RELEASING = "releasing"


_ORDER = list(Stage)
_STARTED = (Stage.CHECKING, Stage.RUNNING, Stage.COLLECTING, Stage.RELEASING)


def may_move(seen: Stage, to: Stage) -> bool:
    """Forward by any number of stages (a target without machines to provision skips some); back only to try again.

    A new attempt starts at QUEUED, and only after RELEASING: what the last attempt held is given back first.
    """
    if seen is Stage.RELEASING:
        return to is Stage.QUEUED
    return _ORDER.index(to) > _ORDER.index(seen)


def status_in(stage: Stage) -> Status:
    """The status of a job in this stage, without a cancel request."""
    return Status.RUNNING if stage in _STARTED else Status.PENDING


class TargetState(StrEnum):
    """State of an attempt as its target reports it. A target that cannot be reached is UNKNOWN, never FAILED."""

    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"
    UNKNOWN = "unknown"

    @property
    def over(self) -> bool:
        """The attempt will not go on by itself, on positive evidence."""
        return self in (TargetState.SUCCEEDED, TargetState.FAILED, TargetState.LOST)


class Reason(StrEnum):
    """Typed cause of the end of an attempt or a job."""

    CHECK_FAILED = "check_failed"
    CHECK_INCOMPLETE = "check_incomplete"
    NO_CAPACITY = "no_capacity"
    NODE_LOST = "node_lost"
    PREEMPTED = "preempted"
    BAD_MACHINE = "bad_machine"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    COLLECTIVE_TIMEOUT = "collective_timeout"
    BAD_DATA = "bad_data"
    BAD_CHECKPOINT = "bad_checkpoint"
    DIVERGED = "diverged"
    SCRIPT_FAILED = "script_failed"
    TIMED_OUT = "timed_out"
    OVER_BUDGET = "over_budget"
    USER_CANCELLED = "user_cancelled"
    TARGET_ERROR = "target_error"
    STALLED = "stalled"
    STORAGE_ERROR = "storage_error"
    CRASHED = "crashed"
    GPU_ERROR = "gpu_error"
    FABRIC_ERROR = "fabric_error"
    FILE_SYSTEM_ERROR = "file_system_error"
    IMAGE_ERROR = "image_error"
    CHECKPOINT_IN_USE = "checkpoint_in_use"
    DEPENDENCY_FAILED = "dependency_failed"

    @property
    def rule(self) -> ReasonRule:
        return _RULES[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonRule:
    """Whether the same job may be tried again as it is, and the one thing a person should do otherwise."""

    retry: bool
    action: str
    by_progress: bool = False  # tried again all the same while the job keeps saving: a text may mislead
    rest_s: float = 5.0  # before the next attempt; doubled with each


_RULES = {
    Reason.CHECK_FAILED: ReasonRule(retry=True, action="see the failed check; replace the node or fix what it names"),
    Reason.CHECK_INCOMPLETE: ReasonRule(retry=True, action="see which check could not be measured and make it so"),
    Reason.NO_CAPACITY: ReasonRule(retry=True, action="wait, or choose another instance type or region", rest_s=60.0),
    Reason.NODE_LOST: ReasonRule(
        retry=True, action="read the message; where it names no cause, look at the node's kernel log"
    ),
    Reason.PREEMPTED: ReasonRule(retry=True, action="nothing; the next attempt resumes from the last checkpoint"),
    Reason.BAD_MACHINE: ReasonRule(
        retry=True, action="nothing; the machine was returned, another one is tried and this one is not trusted again"
    ),
    Reason.OUT_OF_MEMORY: ReasonRule(
        retry=False, by_progress=True, action="lower the batch or the sequence, or shard over more ranks"
    ),
    Reason.DISK_FULL: ReasonRule(
        retry=False, by_progress=True, action="free space, or keep fewer checkpoints (train.checkpoint.keep)"
    ),
    Reason.COLLECTIVE_TIMEOUT: ReasonRule(retry=True, action="see which rank was missing; check its node and fabric"),
    Reason.BAD_DATA: ReasonRule(retry=False, by_progress=True, action="fix the data source named in the last lines"),
    Reason.BAD_CHECKPOINT: ReasonRule(
        retry=False, by_progress=True, action="restore or remove the checkpoint named in the last lines"
    ),
    Reason.DIVERGED: ReasonRule(
        retry=False,
        action="lower train.optimizer.lr or grad_clip, raise warmup_steps, or look at the samples in the last line; "
        "then `trainmaster resume JOB KEY=VALUE` goes on from the last good checkpoint",
    ),
    Reason.SCRIPT_FAILED: ReasonRule(
        retry=False, by_progress=True, action="see the last lines of the failing rank's log"
    ),
    Reason.TIMED_OUT: ReasonRule(
        retry=False, action="`trainmaster resume JOB limits.timeout_s=…` goes on from where it saved"
    ),
    Reason.OVER_BUDGET: ReasonRule(retry=False, action="raise the budget; then `trainmaster resume JOB` goes on"),
    Reason.USER_CANCELLED: ReasonRule(
        retry=False, action="nothing; `trainmaster resume JOB` goes on from where it saved"
    ),
    Reason.TARGET_ERROR: ReasonRule(retry=True, action="see what the target answered"),
    Reason.STALLED: ReasonRule(retry=True, action="see the last lines; raise limits.stall_minutes if it was working"),
    Reason.STORAGE_ERROR: ReasonRule(retry=True, action="see what the storage answered; check its place and access"),
    Reason.CRASHED: ReasonRule(retry=True, action="see the signal and the last lines; if it recurs, the kernel log"),
    Reason.GPU_ERROR: ReasonRule(
        retry=True, action="if it recurs on one node, run `trainmaster check --level 2` there; else look at the kernel"
    ),
    Reason.FABRIC_ERROR: ReasonRule(
        retry=True, action="run `trainmaster bandwidth` or `trainmaster isolate` over these nodes", rest_s=15.0
    ),
    Reason.FILE_SYSTEM_ERROR: ReasonRule(
        retry=True, action="check the mount named in the last lines and its server", rest_s=30.0
    ),
    Reason.DEPENDENCY_FAILED: ReasonRule(
        retry=False, action="see why the job that it waited for did not complete; then submit both again"
    ),
    Reason.CHECKPOINT_IN_USE: ReasonRule(
        retry=True,
        action="end the run that the last lines name, or choose another checkpoint folder; its checkpoints are good",
        rest_s=60.0,  # longer than a lease (train.checkpoint.lease_s): a holder that died has lost it by then
    ),
    Reason.IMAGE_ERROR: ReasonRule(
        retry=False, action="check container.image, container.login and the container engine of the node"
    ),
}
