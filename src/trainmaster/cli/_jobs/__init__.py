"""Requests about jobs, for every verb: one protocol, answered by the home folder or by a server.

A verb opens `connect(home, server)` and calls the same methods in both cases. `home.py` answers from the
database, the targets and the storage of a home folder; `server.py` from the REST API of a server.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainmaster.cli import _console

if TYPE_CHECKING:
    from trainmaster.api.access import Token
    from trainmaster.api.compare import RunCurve
    from trainmaster.api.costs import CostPage
    from trainmaster.api.events import Event
    from trainmaster.api.files import Artifact, CheckpointFiles, LogStream
    from trainmaster.api.goodput import GoodputPage, JobGoodput
    from trainmaster.api.jobs import Job, JobLine, JobPage, JobsPage, Submitted, Transition
    from trainmaster.api.queue import MachinesPage, QueuePage
    from trainmaster.api.sets import SetLine, SetPage, SubmittedSet
    from trainmaster.api.targets import KnownTarget
    from trainmaster.api.webhooks import Delivery
    from trainmaster.client.workdir import Receiver
    from trainmaster.core.config.sweep import Sweep
    from trainmaster.core.spec import JobSpec
    from trainmaster.core.states import Status

_EVERY_S = 0.5


class Jobs(Protocol):
    """Requests about jobs. A job id is the whole id; `find` turns a word of the user into one."""

    def find(self, word: str) -> str:
        """The id of the job with this id, a unique beginning of it, or the newest with this name; else UsageError."""

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

    def show(self, job_id: str) -> JobPage: ...

    def line(self, job_id: str) -> JobLine:
        """The job as a line of the list: cheap enough to poll."""

    def curve(self, job_id: str, *, points: int) -> RunCurve:
        """About so many points of its loss."""

    def transitions(self, job_id: str) -> tuple[Transition, ...]: ...

    def deliveries(self, job_id: str) -> tuple[Delivery, ...]: ...

    def submit(self, spec: JobSpec, *, key: str | None) -> Submitted: ...

    def check(self, spec: JobSpec, *, key: str | None) -> None:
        """Refuse what `submit` would refuse, before the working folder is uploaded."""

    def receiver(self, project: str) -> Receiver:
        """Where snapshots of working folders of a project go."""

    def submit_set(self, sweep: Sweep, *, key: str | None) -> SubmittedSet: ...

    def find_set(self, word: str) -> SetPage | None:
        """The set of runs with this id, a unique beginning of it, or the newest of this name."""

    def sets(self, *, project: str | None, find: str | None = None) -> Sequence[SetLine]:
        """Sets, newest first; `find`: of this name, or whose id begins so."""

    def cancel_set(self, set_id: str) -> SetPage: ...

    def pause_set(self, set_id: str) -> SetPage:
        """No time of its schedule comes until it is resumed."""

    def resume_set(self, set_id: str) -> SetPage:
        """Its schedule goes on with the next time from now."""

    def resume(self, job_id: str, values: Sequence[str]) -> Submitted:
        """Continue an ended job as a new one; `values` are `key.path=value` changes of its spec."""

    def rerun(self, job_id: str, values: Sequence[str]) -> Submitted:
        """Run a job again from the beginning, as a new one."""

    def cancel(self, job_id: str) -> Job: ...

    def delete(self, job_id: str) -> None:
        """Delete a final job with everything it left."""

    def drive(self, job_id: str) -> contextlib.AbstractContextManager[None]:
        """Keep this job progressing while the block runs, and those that have begun, where no server does."""

    def is_driven(self) -> bool:
        """Whether a server or a worker drives the jobs now."""

    def last_driven(self) -> datetime | None:
        """When the jobs were last driven; None: never, or not known."""

    def events(
        self,
        job_id: str,
        *,
        phase: str | None = None,
        follow: bool = False,
        after: tuple[int, int] | None = None,
        node: int = 0,
    ) -> Iterator[Event]: ...

    def log(self, job_id: str, stream: str, *, attempt: int | None, follow: bool) -> Iterator[bytes]: ...

    def log_streams(self, job_id: str) -> tuple[LogStream, ...]: ...

    def log_piece(self, job_id: str, stream: str, *, attempt: int, offset: int) -> bytes:
        """Bytes of a stream from an offset; empty at its end."""

    def artifacts(self, job_id: str) -> tuple[Artifact, ...]: ...

    def pieces(self, job_id: str, path: str, offset: int) -> Iterator[bytes]: ...

    def checkpoint(self, job_id: str) -> CheckpointFiles:
        """The newest checkpoint of a job; an error where it has saved none."""

    def checkpoint_pieces(self, job_id: str, step: int, path: str, offset: int) -> Iterator[bytes]: ...

    def cost(self, *, job_id: str | None, project: str | None, month: datetime | None, limit: int) -> CostPage: ...

    def goodput(self, *, project: str | None, month: datetime | None, limit: int) -> GoodputPage: ...

    def job_goodput(self, job_id: str) -> JobGoodput: ...

    def queue(self, *, project: str | None, limit: int) -> QueuePage: ...

    def machines(self, *, project: str | None) -> MachinesPage: ...

    def drain_machine(self, node: str, *, reason: str, target: str | None) -> None: ...

    def readmit_machine(self, node: str, *, target: str | None) -> None: ...

    def set_share(self, project: str, *, weight: float, quota: int | None) -> None: ...

    def set_priority(self, job_id: str, priority: str) -> Job:
        """Of a job that waits in our own queue."""

    def set_budget(self, project: str, period: str, cents: int | None) -> None:
        """Set a budget; None removes it."""

    def tokens(self) -> tuple[Token, ...]: ...

    def create_token(self, name: str, *, role: str, project: str | None) -> str: ...

    def revoke_token(self, name: str) -> None: ...

    def targets(self) -> tuple[KnownTarget, ...]: ...

    def add_target(self, name: str, word: str) -> None: ...

    def remove_target(self, name: str) -> None: ...

    def grant_target(self, name: str, project: str, *, user: str | None) -> None: ...

    def revoke_target(self, name: str, project: str) -> None: ...


@contextlib.contextmanager
def connect(
    home: Path | None, server: str | None, *, storage: str | None = None, reads: bool = False
) -> Iterator[Jobs]:
    """The server where one is given, else the home folder. `reads`: say where the home was not there yet."""
    if server:
        from trainmaster.cli._jobs.server import ServerJobs
        from trainmaster.cli._server import explain_missing_token, open_client

        with open_client(server, home) as client, explain_missing_token():
            yield ServerJobs(client)
        return
    from trainmaster.cli._home import is_new, open_home
    from trainmaster.cli._jobs.home import HomeJobs

    new = reads and is_new(home)
    folder, db = open_home(home)
    if new:  # of a mistyped --home an empty answer would be all
        _console.note(f"new, empty home {_console.plain(str(folder))}; name another one with --home")
    try:
        yield HomeJobs(folder, db, storage=storage)
    finally:
        db.close()


def warn_undriven(jobs: Jobs) -> bool:
    """Say on standard error that nothing drives the jobs, and since when their state is unknown; whether it did."""
    if jobs.is_driven():
        return False
    since = jobs.last_driven()
    known = f"open jobs are shown as of {since.astimezone():%Y-%m-%d %H:%M:%S}" if since else "no job was started yet"
    _console.note(f"no server or worker runs on this home folder: {known}; start one with: trainmaster serve")
    return True


def wait(jobs: Jobs, job_id: str, *, tick: Callable[[], None] = lambda: None) -> JobLine:
    """Wait for the end of a job; `tick` is called between two polls."""
    while not (line := jobs.line(job_id)).final:
        tick()
        time.sleep(_EVERY_S)
    return line
