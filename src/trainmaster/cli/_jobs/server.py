"""Requests about jobs, answered by a server through its REST API."""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from trainmaster.api.codec import fill
from trainmaster.api.costs import CostPage, JobSpending
from trainmaster.cli import _console
from trainmaster.cli._views.sets import refuse_set
from trainmaster.core.errors import UsageError
from trainmaster.core.ids import is_uuid

if TYPE_CHECKING:
    from trainmaster.api.costs import Each
    from trainmaster.api.events import Event
    from trainmaster.api.goodput import GoodputPage
    from trainmaster.api.jobs import JobLine, JobsPage, Submitted
    from trainmaster.api.sets import SetLine, SetPage, SubmittedSet
    from trainmaster.client import Client
    from trainmaster.core.config.sweep import Sweep
    from trainmaster.core.spec import JobSpec
    from trainmaster.core.states import Status

_WORD = re.compile(r"[A-Za-z0-9.-]{1,63}")
_ID = re.compile(r"[0-9a-f-]{1,36}\Z")  # what may begin one
_MOST = 200  # jobs of one answer
_PIECE = 1 << 20  # bytes of a log in one answer


class ServerJobs:
    """Jobs of one server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # Asked for and answered as the client does.
        self.cancel_set = client.cancel_set
        self.pause_set = client.pause_set
        self.resume_set = client.resume_set
        self.show = client.job
        self.curve = client.curve
        self.transitions = client.transitions
        self.deliveries = client.deliveries
        self.receiver = client.receiver
        self.cancel = client.cancel
        self.delete = client.delete
        self.log_streams = client.log_streams
        self.log_piece = client.logs
        self.artifacts = client.artifacts
        self.pieces = client.pieces
        self.checkpoint = client.checkpoint
        self.checkpoint_pieces = client.checkpoint_pieces
        self.job_goodput = client.job_goodput
        self.queue = client.queue
        self.machines = client.machines
        self.drain_machine = client.drain_machine
        self.readmit_machine = client.readmit_machine
        self.set_share = client.set_share
        self.set_priority = client.set_priority
        self.tokens = client.tokens
        self.create_token = client.create_token
        self.revoke_token = client.revoke_token
        self.targets = client.targets
        self.add_target = client.add_target
        self.remove_target = client.remove_target
        self.grant_target = client.grant_target
        self.revoke_target = client.revoke_target

    def find(self, word: str) -> str:
        if is_uuid(word):
            return word
        if not _WORD.fullmatch(word):
            raise UsageError(f"{word!r} is neither an id nor a name of a job; `trainmaster jobs` lists them")
        if named := self._find_named(word):
            if named[1] > 1:
                _console.note_newest(word, *named)
            return named[0]
        begun = [line.id for line in self._find_lines(word) if line.id.startswith(word)] if _ID.match(word) else []
        if not begun and (page := self.find_set(word)) is not None:
            raise refuse_set(word, page)
        if not begun:
            raise UsageError(f"no job {word!r}; `trainmaster jobs` lists them")
        if len(begun) > 1:
            ids = ", ".join(job_id[:13] for job_id in begun[:5])
            raise UsageError(f"{word!r} is the beginning of {len(begun)} ids ({ids} …); write more of the id")
        return begun[0]

    def _find_named(self, word: str) -> tuple[str, int] | None:
        """The id of the newest job of this name, and how many have it; None without one."""
        from trainmaster.client import BadRequest

        try:
            page = self._client.jobs(name=word, limit=1)
        except BadRequest as refused:
            if refused.code != "unknown_parameter":  # as a server of an earlier version answers
                raise
            same = [line.id for line in self._find_lines(word) if line.name == word]
            return (same[0], len(same)) if same else None
        return (page.jobs[0].id, page.total) if page.jobs else None

    def _find_lines(self, word: str) -> Iterator[JobLine]:
        """Every job that a word finds, newest first."""
        offset, total = 0, 1
        while offset < total:
            page = self._client.jobs(find=word, limit=_MOST, offset=offset)
            yield from page.jobs
            offset, total = offset + len(page.jobs), page.total if page.jobs else 0

    def list(
        self,
        *,
        status: Status | None,
        project: str | None,
        find: str | None,
        limit: int,
        offset: int,
        folded: bool = False,
        by: str | None = None,
    ) -> JobsPage:
        if folded and (status, find, by) == (None, None, None):
            return self._client.jobs_alone(project=project, limit=limit, offset=offset)
        return self._client.jobs(status=status, project=project, find=find, by=by, limit=limit, offset=offset)

    def submit_set(self, sweep: Sweep, *, key: str | None) -> SubmittedSet:
        from trainmaster.client.transport import NoAnswer

        sent = key or str(uuid.uuid4())
        try:
            return self._client.submit_set({**sweep.document, "workdir": sweep.trials[0].spec.workdir}, key=sent)
        except NoAnswer as late:
            raise NoAnswer(
                f"{late}: `trainmaster show {sweep.name}` says whether the set is there; the same command with "
                f"`--key {sent}` makes no second one"
            ) from None

    def find_set(self, word: str) -> SetPage | None:
        if not _WORD.fullmatch(word) or not (lines := self.sets(project=None, find=word)):
            return None
        named = [line for line in lines if line.name == word]
        job = self._find_named(word)
        if named and job:
            raise UsageError(f"{word!r} is the name of set {named[0].id} and of job {job[0]}; write the id")
        if not named and job:
            return None
        if not named and len(lines) > 1:
            ids = ", ".join(line.id[:13] for line in lines[:5])
            raise UsageError(f"{word!r} is the beginning of {len(lines)} ids ({ids} …); write more of the id")
        return self._client.set((named or lines)[0].id)

    def sets(self, *, project: str | None, find: str | None = None) -> Sequence[SetLine]:
        from trainmaster.client import NotFound

        try:
            return self._client.sets(project=project, find=find)
        except NotFound:  # a server of an earlier version
            return ()

    def line(self, job_id: str) -> JobLine:
        lines = self._client.jobs(find=job_id, limit=1).jobs
        if not lines:
            raise UsageError(f"no job {job_id!r}; `trainmaster jobs` lists them")
        return lines[0]

    def submit(self, spec: JobSpec, *, key: str | None) -> Submitted:
        return self._client.submit(_to_document(spec), key=key)

    def check(self, spec: JobSpec, *, key: str | None) -> None:
        self._client.check(_to_document(replace(spec, workdir=None)), key=key)

    def resume(self, job_id: str, values: Sequence[str]) -> Submitted:
        if values:
            raise UsageError("a server does not return whole specs; submit yours again with resume_from=JOB")
        return self._client.resume(job_id)

    def rerun(self, job_id: str, values: Sequence[str]) -> Submitted:
        if values:
            raise UsageError("a server does not return whole specs; submit yours again")
        return self._client.rerun(job_id)

    def drive(self, job_id: str) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002 (a server drives)
        return contextlib.nullcontext()

    def is_driven(self) -> bool:
        return True

    def last_driven(self) -> datetime | None:
        return None

    def events(
        self,
        job_id: str,
        *,
        phase: str | None = None,
        follow: bool = False,
        after: tuple[int, int] | None = None,
        node: int = 0,
    ) -> Iterator[Event]:
        return self._client.events(job_id, follow=follow, phase=phase, after=after, node=node)

    def log(self, job_id: str, stream: str, *, attempt: int | None, follow: bool) -> Iterator[bytes]:
        empty = True
        for piece in self._read(job_id, stream, attempt, follow=follow):
            empty = False
            yield piece
        if empty:
            names = [item.stream for item in self.log_streams(job_id) if attempt in (None, item.attempt)]
            if stream not in names:
                raise UsageError(f"job {job_id} has no {stream}; it has {', '.join(sorted(set(names))) or 'no log'}")

    def _read(self, job_id: str, stream: str, attempt: int | None, *, follow: bool) -> Iterator[bytes]:
        if follow:
            yield from self._client.follow_logs(job_id, stream, attempt=attempt)
            return
        offset = 0
        while piece := self._client.logs(job_id, stream, attempt=attempt, offset=offset, limit=_PIECE):
            yield piece
            offset += len(piece)
            if len(piece) < _PIECE:
                return  # the end when it was read; a log that grows has more at every question

    def cost(self, *, job_id: str | None, project: str | None, month: datetime | None, limit: int) -> CostPage:
        if job_id is None:
            when = f"{month:%Y-%m}" if month is not None else None
            return self._client.spending(project=project, month=when, limit=limit)
        page, cost = self._client.job(job_id), self._client.job_cost(job_id)
        of_job = {name: getattr(page, name) for name in ("id", "name", "project", "status", "submitted_by")}
        line = fill(JobSpending, cost, **of_job, cents=cost.total.cents, known_cents=cost.total.known_cents)
        now = datetime.now(UTC)
        return CostPage(month=None, project=None, jobs=(line,), more=0, projects=(), budgets=(), made_at=now)

    def cost_csv(self, *, each: Each, project: str | None, month: datetime | None) -> Iterator[str]:
        when = f"{month:%Y-%m}" if month is not None else None
        return self._client.cost_csv(each=each, project=project, month=when)

    def goodput(self, *, project: str | None, month: datetime | None, limit: int) -> GoodputPage:
        when = f"{month:%Y-%m}" if month is not None else None
        return self._client.goodput(project=project, month=when, limit=limit)

    def set_budget(self, project: str, period: str, cents: int | None) -> None:
        from trainmaster.client import NotFound

        if cents is not None:
            self._client.set_budget(project, period, cents)
            return
        with contextlib.suppress(NotFound):  # there was none: nothing to remove
            self._client.remove_budget(project, period)


def _to_document(spec: JobSpec) -> dict[str, Any]:
    """The spec as it is sent. Fields without a value are left out: the server has its own defaults and may be of
    another version."""
    from trainmaster.core.schema import to_plain

    return {name: value for name, value in to_plain(spec).items() if value is not None}
