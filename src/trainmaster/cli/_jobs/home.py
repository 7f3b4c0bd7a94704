"""Requests about jobs, answered from a home folder: its database, its storage, and the targets."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.cli import _console
from trainmaster.cli._jobs.home_queue import HomeQueue
from trainmaster.cli._views.sets import refuse_set
from trainmaster.core.errors import JobUnreadable, UsageError
from trainmaster.core.secret.shapes import recognise

if TYPE_CHECKING:
    from trainmaster.api.access import Token
    from trainmaster.api.compare import RunCurve
    from trainmaster.api.costs import CostPage, Each
    from trainmaster.api.events import Event
    from trainmaster.api.files import Artifact, CheckpointFiles, LogStream
    from trainmaster.api.goodput import GoodputPage, JobGoodput
    from trainmaster.api.jobs import Job, JobLine, JobPage, JobsPage, Submitted, Transition
    from trainmaster.api.targets import KnownTarget
    from trainmaster.api.webhooks import Delivery
    from trainmaster.client.workdir import Receiver
    from trainmaster.core.spec import JobSpec
    from trainmaster.core.states import Status
    from trainmaster.storage import Store
    from trainmaster.store.database import Database
    from trainmaster.store.rows import AttemptRow, JobRow

_BY = "local"  # the name of the command line in the audit trail
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"  # as in the API (web/dependencies.py)
_PIECE = 1 << 20
_EVERY_S = 0.5


class HomeJobs(HomeQueue):
    """Jobs of one home folder."""

    def __init__(self, home: Path, db: Database, *, storage: str | None = None) -> None:
        self.home, self.db, self._storage = home, db, storage

    def find(self, word: str) -> str:
        """The id of the job with this id, a unique beginning of it, or the newest with this name; else UsageError."""
        from trainmaster.store import heads

        rows = heads.search_heads(self.db, word) if word else []  # every id begins with nothing: cancel "$UNSET"
        if not rows and word and (page := self.find_set(word)) is not None:
            raise refuse_set(word, page)
        if not rows:
            raise UsageError(f"no job {word!r}; `trainmaster jobs` lists them")
        if len(rows) > 1 and rows[0][1] != word:
            ids = ", ".join(job_id[:13] for job_id, _ in rows[:5])
            raise UsageError(f"{word!r} is the beginning of {len(rows)} ids ({ids} …); write more of the id")
        if (many := sum(name == word for _, name in rows)) > 1:
            _console.note_newest(word, rows[0][0], many)
        return rows[0][0]

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
        """A page of jobs, of this submitter where one is named; `folded`: without the trials of sets."""
        from trainmaster.pages import jobs, sets

        if folded and (status, find, by) == (None, None, None):
            return sets.read_folded(self.db, project=project, limit=limit, offset=offset)
        return jobs.read(self.db, status=status, project=project, find=find, by=by, limit=limit, offset=offset)

    def show(self, job_id: str) -> JobPage:
        from trainmaster.pages import job

        page = job.read(self.db, job_id)
        if page is None:
            raise _missing(job_id)
        return page

    def line(self, job_id: str) -> JobLine:
        """The job as a line of the list: cheap enough to poll."""
        from trainmaster.pages import jobs
        from trainmaster.pages.parts import shapes
        from trainmaster.store.heads import find_head

        try:
            return jobs.line(self.db, self._row(job_id))
        except JobUnreadable:
            if (head := find_head(self.db, job_id)) is None:
                raise
            return shapes.line_without_spec(head)

    def curve(self, job_id: str, *, points: int) -> RunCurve:
        """About so many points of its loss."""
        from trainmaster.pages import compare

        return compare.read_curve(self.db, job_id, metric="loss", points=points)

    def transitions(self, job_id: str) -> tuple[Transition, ...]:
        from trainmaster.store import jobs

        return tuple(jobs.list_transitions(self.db, job_id))

    def deliveries(self, job_id: str) -> tuple[Delivery, ...]:
        from trainmaster.pages import deliveries

        return deliveries.read(self.db, job=job_id).deliveries

    def submit(self, spec: JobSpec, *, key: str | None, again_of: str | None = None) -> Submitted:
        from trainmaster.control import budget, known_targets
        from trainmaster.control import submit as submitting
        from trainmaster.pages.parts import shapes

        known_targets.refuse_job_file(spec.target, self.home)
        row, new = submitting.submit_once(self.db, spec, key=key, again_of=again_of)
        return shapes.submitted(row, new=new, note=budget.note_uncounted(self.db, row))

    def check(self, spec: JobSpec, *, key: str | None) -> None:
        """Refuse what `submit` would refuse, before the working folder is uploaded."""
        from trainmaster.control import submit as submitting

        submitting.check_only(self.db, replace(spec, workdir=None), key=key)

    def receiver(self, project: str) -> Receiver:
        """Where snapshots of working folders of a project go."""

        return _Receiver(self.db, self._open_storage(), project)

    def resume(self, job_id: str, values: Sequence[str]) -> Submitted:
        """Continue an ended job as a new one; `values` are `key.path=value` changes of its spec."""

        return self._submit_changed(job_id, [*values, f"resume_from={job_id}"])

    def rerun(self, job_id: str, values: Sequence[str]) -> Submitted:
        """Run a job again from the beginning, as a new one."""

        return self._submit_changed(job_id, [*values, "resume_from=null"], again_of=job_id)

    def _submit_changed(self, job_id: str, values: Sequence[str], again_of: str | None = None) -> Submitted:
        from trainmaster.core.schema import to_plain
        from trainmaster.core.spec import parse_spec
        from trainmaster.documents import yaml_file

        spec = parse_spec(yaml_file.override(to_plain(self._row(job_id).spec), values))
        return self.submit(spec, key=None, again_of=again_of)

    def cancel(self, job_id: str) -> Job:
        from trainmaster.control import submit as submitting
        from trainmaster.pages.parts import shapes

        return shapes.job(submitting.cancel(self.db, job_id))

    def delete(self, job_id: str) -> None:
        """Delete a final job with everything it left."""
        from trainmaster.control import maintain

        maintain.delete_job(self.db, self._open_storage(), self.home, job_id, by=_BY)

    def drive(self, job_id: str) -> contextlib.AbstractContextManager[None]:
        """Keep this job progressing while the block runs, and those that have begun, where no server does."""
        from trainmaster.cli._jobs.inline_reconciler import driving

        return driving(self.db, self.home, job_id)

    def is_driven(self) -> bool:
        """Whether a server or a worker drives the jobs now."""
        from trainmaster.control import liveness
        from trainmaster.store import leases

        return liveness.is_alive(self.home) or leases.is_held_elsewhere(self.db, socket.gethostname())

    def last_driven(self) -> datetime | None:
        """When the jobs were last driven; None: never, or not known."""
        from trainmaster.control import liveness

        return liveness.last_seen(self.home)

    def events(
        self,
        job_id: str,
        *,
        phase: str | None = None,
        follow: bool = False,
        after: tuple[int, int] | None = None,
        node: int = 0,
    ) -> Iterator[Event]:
        from trainmaster.pages import events

        while True:
            # The state is read first: once it is final, all its events are recorded and none is missed.
            over = not follow or self._row(job_id).status.final
            while page := events.read(self.db, job_id, phase=phase, after=after, node=node).events:
                yield from page
                after = page[-1].cursor
            if over:
                return
            time.sleep(_EVERY_S)

    def log(self, job_id: str, stream: str, *, attempt: int | None, follow: bool) -> Iterator[bytes]:
        from trainmaster.control.log_view import logs

        number, offset = self._attempt(job_id, attempt).number, 0
        while True:
            over = not follow or logs.is_over(self._row(job_id), self._attempt(job_id, number))
            while piece := self.log_piece(job_id, stream, attempt=number, offset=offset):
                yield piece
                offset += len(piece)
                if not follow and len(piece) < _PIECE:
                    return  # the end when it was read; a log that grows has more at every question
            if over:
                break
            time.sleep(_EVERY_S)
        if not offset:
            _refuse_unknown(job_id, stream, number, self.log_streams(job_id))

    def log_streams(self, job_id: str) -> tuple[LogStream, ...]:
        import asyncio

        from trainmaster.control.log_view import logs
        from trainmaster.store.attempts import list_attempts

        streams = asyncio.run(logs.list_streams(self.db, self._row(job_id), list_attempts(self.db, job_id)))
        return tuple(streams)

    def log_piece(self, job_id: str, stream: str, *, attempt: int, offset: int) -> bytes:
        """Bytes of a stream from an offset; empty at its end."""

        import asyncio

        from trainmaster.control.log_view import logs

        row, attempt_row = self._row(job_id), self._attempt(job_id, attempt)
        return asyncio.run(
            logs.read(self.db, self._open_storage(), row, attempt_row, stream, offset=offset, limit=_PIECE)
        )

    def artifacts(self, job_id: str) -> tuple[Artifact, ...]:
        from trainmaster.pages import artifacts

        return artifacts.read(self.db, job_id).artifacts

    def pieces(self, job_id: str, path: str, offset: int) -> Iterator[bytes]:
        from trainmaster.control.log_view import logs
        from trainmaster.store import artifacts

        row = artifacts.find_artifact(self.db, job_id, path)
        if row is None:
            raise UsageError(f"job {job_id} has no stored file {path!r}")
        storage = self._open_storage()
        while piece := logs.read_kept(storage, row, offset=offset, limit=_PIECE):
            yield piece
            offset += len(piece)

    def checkpoint(self, job_id: str) -> CheckpointFiles:
        """The newest checkpoint of a job; an error where it has saved none."""
        from trainmaster.api.files import CheckpointFile, CheckpointFiles
        from trainmaster.control import checkpoints

        newest = checkpoints.find_newest(self.home, self._row(job_id))
        files = (CheckpointFile(path=name, size_bytes=size, sha256=sha) for name, (size, sha) in newest.files.items())
        return CheckpointFiles(step=newest.step, name=newest.folder.name, files=tuple(files))

    def checkpoint_pieces(self, job_id: str, step: int, path: str, offset: int) -> Iterator[bytes]:
        from trainmaster.control import checkpoints

        listing = checkpoints.find_step(self.home, self._row(job_id), step)
        while piece := checkpoints.read(listing, path, offset=offset, limit=_PIECE):
            yield piece
            offset += len(piece)

    def cost(self, *, job_id: str | None, project: str | None, month: datetime | None, limit: int) -> CostPage:
        from trainmaster.pages import cost

        return cost.read(self.db, job=job_id, project=project, month=month, limit=limit)

    def cost_csv(self, *, each: Each, project: str | None, month: datetime | None) -> Iterator[str]:
        from trainmaster.pages.parts import cost_csv

        return cost_csv.read(self.db, each=each, project=project, month=month)

    def goodput(self, *, project: str | None, month: datetime | None, limit: int) -> GoodputPage:
        from trainmaster.pages import goodput

        return goodput.read(self.db, project=project, month=month, limit=limit)

    def job_goodput(self, job_id: str) -> JobGoodput:
        from trainmaster.pages import job_goodput

        ledger = job_goodput.read(self.db, job_id)
        if ledger is None:
            raise UsageError(f"there is no job {job_id}")
        return ledger

    def set_budget(self, project: str, period: str, cents: int | None) -> None:
        """Set a budget; None removes it."""
        from trainmaster.store import audit, costs

        if recognise(project):
            raise UsageError("the project looks like a secret, and names are stored and shown; choose another one")
        subject = f"budget:{project}/{period}"
        with self.db.write() as conn:
            if cents is not None:
                costs.set_budget(conn, project, period, cents, at=datetime.now(UTC))
                audit.record(conn, who=_BY, action="budget.set", subject=subject, detail={"cap_cents": cents})
            elif costs.remove_budget(conn, project, period):
                audit.record(conn, who=_BY, action="budget.remove", subject=subject)

    def tokens(self) -> tuple[Token, ...]:
        from trainmaster.store import tokens

        return tuple(tokens.list_tokens(self.db))

    def create_token(self, name: str, *, role: str, project: str | None) -> str:
        from trainmaster.core.roles import Role
        from trainmaster.store import audit, tokens

        if not re.fullmatch(_NAME, name) or (project is not None and not re.fullmatch(_NAME, project)):
            raise UsageError(
                f"{name!r}, {project!r}: a name has letters, digits, dots, dashes and underscores, at most 63"
            )
        if recognise(name) or recognise(project or ""):
            raise UsageError("the name looks like a secret, and names are stored and shown; choose another one")
        with self.db.write() as conn:
            made = tokens.issue(conn, name=name, role=Role(role), project=project, at=datetime.now(UTC))
            if made is None:
                raise UsageError(f"the name {name} was used by another token; choose a new one")
            detail = {"role": role, "project": project}
            audit.record(conn, who=_BY, action="token.create", subject=f"token:{name}", detail=detail)
        return made

    def revoke_token(self, name: str) -> None:
        from trainmaster.store import audit, tokens

        with self.db.write() as conn:
            if not tokens.revoke(conn, name, at=datetime.now(UTC)):
                raise UsageError(f"no token {name!r}; `trainmaster token list` lists them")
            audit.record(conn, who=_BY, action="token.revoke", subject=f"token:{name}")

    def targets(self) -> tuple[KnownTarget, ...]:
        from trainmaster.control import known_targets

        return tuple(known_targets.show(self.db))

    def add_target(self, name: str, word: str) -> None:
        from trainmaster.cli._home import find_storage
        from trainmaster.control import known_targets

        storage = self._storage or find_storage(self.home)
        known_targets.add(self.db, name, word, home=self.home, storage=storage, by=_BY)

    def remove_target(self, name: str) -> None:
        from trainmaster.control import known_targets

        known_targets.remove(self.db, name, by=_BY)

    def grant_target(self, name: str, project: str, *, user: str | None) -> None:
        from trainmaster.control import known_targets

        known_targets.grant(self.db, name, project, user=user, by=_BY)

    def revoke_target(self, name: str, project: str) -> None:
        from trainmaster.control import known_targets

        known_targets.revoke(self.db, name, project, by=_BY)

    def _row(self, job_id: str) -> JobRow:
        from trainmaster.store import jobs

        row = jobs.find_job(self.db, job_id)
        if row is None:
            raise _missing(job_id)
        return row

    def _attempt(self, job_id: str, number: int | None) -> AttemptRow:
        from trainmaster.store.attempts import list_attempts

        placed = [row for row in list_attempts(self.db, job_id) if row.handle is not None]
        if not placed:
            raise UsageError("the job has not started yet; there is no log")
        matching = [row for row in placed if number in (None, row.number)]
        if not matching:
            raise UsageError(f"--attempt {number}: the job has {len(placed)}")
        return matching[-1]

    def _open_storage(self) -> Store:
        from trainmaster.cli._home import find_storage, open_storage

        return open_storage(self._storage or find_storage(self.home), self.home)


class _Receiver:
    """Chunks and snapshots of one project of a home folder."""

    def __init__(self, db: Database, storage: Store, project: str) -> None:
        self._db, self._storage, self._project = db, storage, project

    def find_missing(self, digests: Sequence[str]) -> Sequence[str]:
        from trainmaster.control import workdir

        return workdir.find_missing(self._db, self._project, digests)

    def put_chunk(self, sha256: str, data: bytes) -> None:
        from trainmaster.control import workdir

        workdir.put_chunk(self._db, self._storage, self._project, sha256, data)

    def put_workdir(self, sha256: str, chunks: Sequence[str]) -> Sequence[str]:
        from trainmaster.control import workdir

        return workdir.put_workdir(self._db, self._storage, self._project, sha256, chunks)


def _missing(job_id: str) -> UsageError:
    return UsageError(f"no job {job_id!r}; `trainmaster jobs` lists them")


def _refuse_unknown(job_id: str, stream: str, attempt: int, streams: tuple[LogStream, ...]) -> None:
    """UsageError where an empty log is one that does not exist."""
    names = [item.stream for item in streams if item.attempt == attempt]
    if stream not in names:
        there = ", ".join(names) or "no log"
        raise UsageError(f"attempt {attempt} of job {job_id} has no {stream}; it has {there}")
