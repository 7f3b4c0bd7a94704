"""How long each stage may take, and what "too long" means. Pure: rows and a clock in, a judgement out.

A deadline bounds what we try, not how long we were away: a stage is given up only after it failed several times in a
row and its time is over. A control plane that was dead for a day, or whose database was, tries again first.

    queued                 none: waiting costs nothing
    placing, provisioning, connecting, staging
                           the attempt ends, and may be followed by another
    checking               counted from when the node began; the attempt is asked to stop
    running                limits.timeout_s of the spec; the agent keeps it, we keep the agent to it
    collecting             what could be kept is kept, the rest is named, and the attempt is released; after a cancel
                           or a cap on money this also ends a copy that goes on. On rented machines
                           `rent.collect_minutes` of failures
    releasing              after a while a notification says that something may be left running; a target that refuses
                           (no credentials, no kubeconfig) is given up soon, one that cannot be reached after a day:
                           the job ends with what may be left, and `reap` finds it
    asked to stop          limits.grace_s and a margin, then it is released by force, in whatever stage it is
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from trainmaster.core.spec import MAX_GRACE_S
from trainmaster.core.states import CANCEL_REQUESTED, Reason, Stage
from trainmaster.store.rows import AttemptRow, JobRow

# Seconds by preflight.level: what the checks of that level take on a large node, several times over.
_CHECKING_S = {0: 900.0, 1: 900.0, 2: 3600.0, 3: 6 * 3600.0}


def _elapsed_s(since: datetime, until: datetime) -> float:
    return (until - since).total_seconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds. A server may be given others."""

    placing_s: float = 300.0
    renting_s: float = 3 * 3600.0  # the provider's API does not answer; boot and capacity have limits in `rent:`
    staging_s: float = 3600.0
    checking_s: Mapping[int, float] = field(default_factory=lambda: _CHECKING_S)
    collecting_s: float = 6 * 3600.0
    cancelled_collecting_s: float = 600.0  # outputs of a cancelled job are stored if this is enough
    cancelled_late_s: float = 30.0  # the same where the cancel came when the attempt had ended: nothing is to be saved
    stop_margin_s: float = 60.0  # over limits.grace_s: for the agent to see the wish, sweep and write its record
    leak_s: float = 900.0  # a release that fails for so long may leave something running
    leak_again_s: float = 6 * 3600.0
    refused_release_s: float = 60.0  # the target answers, or cannot be asked at all, and will say the same tomorrow
    releasing_s: float = 24 * 3600.0
    longest_rest_s: float = 30.0  # between two tries of a job whose step keeps failing
    tries: int = 3  # a stage that failed less often in a row is not given up, however late it is
    # A running attempt that cannot be asked is given up after this many tries in a row, about a day: time in which
    # this control plane was away does not count.
    unreachable_tries: int = 4_000
    elapsed_s: Callable[[datetime, datetime], float] = _elapsed_s  # control/clock.py leaves steps of the clock out

    def is_late(self, job: JobRow, now: datetime, *, rented: bool = False) -> bool:
        """Whether the stage of a job whose step has just failed is to be given up. `rented`: its machines cost."""
        if job.stage is Stage.RUNNING:
            return job.tries + 1 >= self.unreachable_tries
        if rented and job.stage is Stage.COLLECTING and self.failed_s(job, now) > job.spec.rent.collect_minutes * 60:
            return True
        limit = self._limit_s(job)
        if limit is None or job.stage_since is None or job.tries + 1 < self.tries:
            return False
        return self.elapsed_s(job.stage_since, now) > limit

    def failed_s(self, job: JobRow, now: datetime) -> float:
        """Seconds for which a stage has failed in a row, at most: between two tries are `longest_rest_s` or less. A
        copy of hours that then fails three times has not failed for hours."""
        if job.stage_since is None or job.tries + 1 < self.tries:
            return 0.0
        return min(self.elapsed_s(job.stage_since, now), (job.tries + 1) * self.longest_rest_s)

    def _limit_s(self, job: JobRow) -> float | None:
        if job.stage is Stage.PLACING:
            return self.placing_s
        if job.stage in (Stage.PROVISIONING, Stage.CONNECTING):
            return self.renting_s
        if job.stage is Stage.STAGING:
            return self.staging_s
        if job.stage is Stage.CHECKING:
            return self.checking_s[job.spec.preflight.level]
        if job.stage in (Stage.COLLECTING, Stage.RELEASING):
            return self.cancelled_collecting_s if job.cancel_requested else self.collecting_s
        return None

    def must_stop_storing(self, job: JobRow, attempt: AttemptRow, now: datetime) -> bool:
        """Whether a job that was cancelled, or has reached a cap, had all its time to have its outputs stored."""
        capped_at = attempt.stop_at if attempt.stop_reason is Reason.OVER_BUDGET else None
        times = [time for time in (job.cancel_at if job.cancel_requested else None, capped_at) if time is not None]
        if not times:
            return False
        since = min(times)
        late = attempt.ended_at is not None and since >= attempt.ended_at
        return self.elapsed_s(since, now) > (self.cancelled_late_s if late else self.cancelled_collecting_s)

    def leaks(self, job: JobRow, now: datetime) -> int:
        """Number of notifications due by now about a release that fails."""
        if job.stage is not Stage.RELEASING or job.stage_since is None:
            return 0
        late_s = self.elapsed_s(job.stage_since, now) - self.leak_s
        return 0 if late_s < 0 else 1 + int(late_s // self.leak_again_s)

    def must_leave(self, job: JobRow, now: datetime, *, refused: bool) -> bool:
        """Whether a release that fails is to be given up."""
        if job.stage_since is None or job.tries + 1 < self.tries:
            return False
        return self.elapsed_s(job.stage_since, now) > (self.refused_release_s if refused else self.releasing_s)

    def overdue(self, job: JobRow, attempt: AttemptRow, now: datetime) -> StopRequest | None:
        """Why an attempt that was asked just now and goes on should not."""
        if attempt.started_at is None:
            return self._waits_too_long(job, attempt, now)
        lasted_s = self.elapsed_s(attempt.started_at, now)
        timeout_s, checking_s = job.spec.limits.timeout_s, self.checking_s[job.spec.preflight.level]
        if timeout_s is not None and lasted_s > timeout_s + self.stop_margin_s:
            return StopRequest(reason=Reason.TIMED_OUT, since=now, text=f"limits.timeout_s of {timeout_s:g} s is over")
        if job.stage is Stage.CHECKING and lasted_s > checking_s:
            text = f"the checks did not come to an end within {checking_s:g} s"
            return StopRequest(reason=Reason.CHECK_INCOMPLETE, since=now, text=text)
        return None

    def _waits_too_long(self, job: JobRow, attempt: AttemptRow, now: datetime) -> StopRequest | None:
        """Waiting for a node costs nothing here: it ends only where the spec says so."""
        longest_s = job.spec.queue.max_wait_s
        if longest_s is None or self.elapsed_s(attempt.created_at, now) <= longest_s:
            return None
        text = f"it waited longer than queue.max_wait_s of {longest_s:g} s"
        return StopRequest(reason=Reason.TIMED_OUT, since=now, text=text)

    def must_force(self, job: JobRow, request: StopRequest, now: datetime) -> bool:
        """Whether an attempt that was asked to stop had all its time."""
        return self.elapsed_s(request.since, now) > self.grace_s(job)

    def quiet_s(self, job: JobRow, now: datetime, *, heard_at: datetime | None = None) -> float:
        """Seconds since the last event of a running job, or since it began. `heard_at`: newer than its row."""
        heard = [time for time in (heard_at or job.heard_at, job.stage_since) if time is not None]
        # Not since the later one: a clock that was set back shows the newer of the two as the earlier.
        return min((self.elapsed_s(time, now) for time in heard), default=0.0)

    def is_stalled(self, job: JobRow, now: datetime, *, heard_at: datetime | None = None) -> bool:
        limit = job.spec.limits.stall_minutes
        return (
            job.stage is Stage.RUNNING and limit is not None and self.quiet_s(job, now, heard_at=heard_at) > limit * 60
        )

    def grace_s(self, job: JobRow) -> float:
        return min(job.spec.limits.grace_s, MAX_GRACE_S) + self.stop_margin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """A request to stop an attempt: reason, time, message."""

    reason: Reason
    since: datetime
    text: str


def find_stop_request(job: JobRow, attempt: AttemptRow) -> StopRequest | None:
    """The stop request of an attempt, if any. A user's goes first; time counts from the earliest."""
    times = [time for time in (job.cancel_at, attempt.stop_at) if time is not None]
    if job.cancel_requested:
        assert times, "a cancel has its time"
        return StopRequest(reason=Reason.USER_CANCELLED, since=min(times), text=CANCEL_REQUESTED)
    if attempt.stop_reason is not None:
        assert attempt.stop_at is not None
        return StopRequest(reason=attempt.stop_reason, since=attempt.stop_at, text=attempt.message)
    return None
