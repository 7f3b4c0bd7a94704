"""Typed client of a Trainmaster server.

    from trainmaster import Client

    with Client("http://127.0.0.1:8470") as server:
        job = server.submit({"name": "trial", "command": ["python", "train.py"]})
        for event in server.events(job.id):  # reconnects; each event exactly once
            print(event.phase, event.data)
        server.fetch(job.id, "results/")

Answers are the shapes of `trainmaster.api`. Requests that are safe to repeat are retried after a lost connection; a
submission is safe by its idempotency key. Errors are those of client/errors.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainmaster.api.access import Token
from trainmaster.api.codec import decode
from trainmaster.api.compare import RunCurve
from trainmaster.api.costs import Budget, Cost, CostPage, JobCost, ProjectCost
from trainmaster.api.events import Event
from trainmaster.api.files import Artifact, CheckpointFiles, LogStream
from trainmaster.api.goodput import Goodput, GoodputPage, GoodputSum, JobGoodput
from trainmaster.api.health import Health
from trainmaster.api.iterations import CheckRecord, Details, Epoch, Evaluation, Iteration, Step
from trainmaster.api.jobs import Attempt, Job, JobLine, JobPage, JobsPage, Submitted, Transition
from trainmaster.api.paths import JOBS, JOBS_CHECK, TRAINING
from trainmaster.api.run import Run
from trainmaster.api.targets import KnownTarget
from trainmaster.api.webhooks import Delivery
from trainmaster.client import files, workdir
from trainmaster.client.errors import (
    BadRequest,
    Conflict,
    Download,
    NoAccess,
    NotFound,
    OverBudget,
    Refusal,
    ServerError,
    ServerUnreachable,
    TooMany,
    Unavailable,
)
from trainmaster.client.queueing import QueueCalls
from trainmaster.client.receiver import Receiver
from trainmaster.client.transport import Transport, server_sent

__all__ = [
    "Artifact", "Attempt", "BadRequest", "Budget", "CheckRecord", "Client", "Conflict", "Cost", "CostPage", "Delivery",
    "Details", "Download", "Epoch", "Evaluation", "Event", "Goodput", "GoodputPage", "GoodputSum", "Health",
    "Iteration", "Job", "JobCost", "JobGoodput", "JobLine", "JobPage", "JobsPage", "LogStream", "NoAccess", "NotFound",
    "OverBudget", "ProjectCost", "Refusal", "Run",
    "ServerError", "ServerUnreachable", "Step", "Submitted", "Token", "TooMany", "Transition", "Unavailable",
]  # fmt: skip

_PIECE = 1 << 20  # bytes of a log in one answer


class Client(QueueCalls):
    """Connection to one server. `token` is the output of `trainmaster token create`.

    `on_wait` is called with the reason before each wait of more than a second for a server that is away or busy.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_s: float = 30.0,
        retries: int = 5,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        self._transport = Transport(url, token, timeout_s=timeout_s, retries=retries, on_wait=on_wait)

    def __repr__(self) -> str:
        return f"Client({self._transport.url!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    # Jobs

    def submit(self, spec: Mapping[str, Any], *, key: str | None = None) -> Submitted:
        """Submit a job. The same `key` and spec return the same job, also from another process. Without a key a random
        one is sent, so that a retry after a lost connection creates nothing twice."""
        return self._create(Submitted, JOBS, key=key, body=dict(spec))

    def check(self, spec: Mapping[str, Any], *, key: str | None = None) -> None:
        """Raise what `submit` would raise for this spec, and create nothing. An older server is not asked."""
        sent = {"Idempotency-Key": key} if key is not None else None
        # An older server has no such path: it refuses at the submission.
        self._transport.request("POST", JOBS_CHECK, body=dict(spec), headers=sent, fine=frozenset({404, 405}))

    def upload(
        self, folder: str | Path, *, project: str = "default", told: Callable[[int, int], None] | None = None
    ) -> str:
        """Upload a folder as the working folder of jobs; the value for `workdir` in a spec.

        Only chunks that the project does not have are sent. Keys and tokens are left out, as are files
        that the folder's ignore file names (client/workdir.py). `told` gets the bytes sent and those to send.
        """
        return workdir.upload(workdir.scan(Path(folder)), self.receiver(project), on_progress=told)

    def receiver(self, project: str) -> workdir.Receiver:
        """Where snapshots of working folders of a project go."""
        return Receiver(self._transport, project)

    def jobs(
        self, *, status: str | None = None, project: str | None = None, find: str | None = None, limit: int = 50,
        offset: int = 0, after: str | None = None, by: str | None = None, name: str | None = None,
    ) -> JobsPage:  # fmt: skip
        """Jobs, newest first. `find`: an id begins with it, or the name of the job or of its submitter contains it.

        `by` and `name` are whole names, of the submitter and of the job; a server of an earlier version refuses them.
        `after` is `next` of the page before: unlike `offset` it gives no job twice while others are submitted.
        """
        words = {"status": status, "project_id": project, "find": find, "by": by, "name": name, "after": after}
        return decode(JobsPage, self.get(JOBS, **words, limit=limit, offset=offset))

    def job(self, job_id: str) -> JobPage:
        """The page of a job."""
        return decode(JobPage, self.get(_job(job_id)))

    def curve(self, job_id: str, *, metric: str = "loss", points: int = 240) -> RunCurve:
        """About so many points of a metric, evenly spread over the run; `eval/loss` is that of evaluations."""
        return decode(RunCurve, self.get(_job(job_id, "curve"), metric=metric, points=points))

    def cancel(self, job_id: str) -> Job:
        """Request that a job saves and stops; BadRequest if it has ended."""
        return decode(Job, self._transport.request("POST", _job(job_id, "cancel")).json())

    def delete(self, job_id: str) -> None:
        """Delete a final job with everything it left; Conflict while it runs or another one needs it."""
        self._transport.request("DELETE", _job(job_id))

    def resume(self, job_id: str, *, key: str | None = None) -> Submitted:
        """Submit a job that continues from the last checkpoint of an ended one; Conflict while that one runs."""
        return self._create(Submitted, _job(job_id, "resume"), key=key)

    def rerun(self, job_id: str, *, key: str | None = None) -> Submitted:
        """Submit the spec of a job again, from the beginning."""
        return self._create(Submitted, _job(job_id, "rerun"), key=key)

    def wait(self, job_id: str, *, every_s: float = 1.0) -> JobPage:
        """Wait for the end of a job and return its page."""
        while not (job := self.job(job_id)).final:
            time.sleep(every_s)
        return job

    # Records of the training

    def details(self, job_id: str) -> Details:
        return decode(Details, self.get(_job(job_id, "details")))

    def epochs(self, job_id: str, iteration: int = 1) -> tuple[Epoch, ...]:
        """All epochs of one iteration; NotFound if the job has no such iteration."""
        epochs: list[Epoch] = []
        while True:
            page = self.get(_job(job_id, f"iterations/{iteration}/epochs"), offset=len(epochs))
            epochs += [decode(Epoch, item) for item in page["epochs"]]
            if not page["epochs"] or len(epochs) >= page["total"]:
                return tuple(epochs)

    def evaluations(
        self,
        *,
        model: str | None = None,
        job: str | None = None,
        project: str | None = None,
        limit: int = 50,
        offset: int = 0,
        after: int | None = None,
    ) -> tuple[Evaluation, ...]:
        """Evaluations, newest first; with `after` those behind the one with this id."""
        filters = {"model_id": model, "job_id": job, "project_id": project, "after": after}
        page = self.get(f"{TRAINING}/evaluations", **filters, limit=limit, offset=offset)
        return decode(tuple[Evaluation, ...], page["evaluations"])

    def checks(self, job_id: str) -> tuple[CheckRecord, ...]:
        """Pre-flight checks of a job."""
        return decode(tuple[CheckRecord, ...], self.get(_job(job_id, "checks"))["checks"])

    def transitions(self, job_id: str) -> tuple[Transition, ...]:
        """Every change of a job's stage, in order."""
        return decode(tuple[Transition, ...], self.get(_job(job_id, "transitions"))["transitions"])

    def deliveries(self, job_id: str, *, failed: bool = False, limit: int = 50) -> tuple[Delivery, ...]:
        """Deliveries of a job's notifications, newest first. Needs an admin token."""
        page = self.get(_job(job_id, "deliveries"), failed=failed or None, limit=limit)
        return decode(tuple[Delivery, ...], page["deliveries"])

    # Events and logs

    def events(
        self, job_id: str, *, follow: bool = True, phase: str | None = None, after: tuple[int, int] | None = None,
        node: int = 0,
    ) -> Iterator[Event]:  # fmt: skip
        """Events of a job in order, each exactly once: until it ends, or without `follow` those recorded now.

        After a lost connection the stream continues behind the last event. `after` is the cursor of an event.
        `node` is the node that wrote them.
        """
        events = self._follow(job_id, after, node) if follow else self._page_events(job_id, phase, after, node)
        return (event for event in events if phase is None or event.phase == phase)

    def _page_events(self, job_id: str, phase: str | None, after: tuple[int, int] | None, node: int) -> Iterator[Event]:
        while True:
            page = self.get(_job(job_id, "events"), phase=phase, after=_place(after), node=node or None)
            events = decode(tuple[Event, ...], page["events"])
            if not events:
                return
            yield from events
            after = events[-1].cursor

    def _follow(self, job_id: str, after: tuple[int, int] | None, node: int) -> Iterator[Event]:
        def opened() -> Generator[Event, None, bool]:
            nonlocal after
            headers = {"Accept": "text/event-stream"}
            if after is not None:
                headers["Last-Event-ID"] = _place(after) or ""
            params = {"node": node or None}
            with self._transport.stream(_job(job_id, "events"), headers=headers, params=params) as answer:
                for place, name, data in server_sent(answer.iter_lines()):
                    if name == "end":
                        return True
                    if name == "event" and (after is None or _cursor(place) > after):
                        after = _cursor(place)
                        yield decode(Event, json.loads(data))
            return False  # without "end": the server is stopping, or a proxy closed the connection

        return self._transport.reopen(opened)

    def log_streams(self, job_id: str) -> tuple[LogStream, ...]:
        """Log streams by attempt: agent.log, rank-N.log, events.jsonl, exit.json."""
        return decode(tuple[LogStream, ...], self.get(_job(job_id, "logs"))["streams"])

    def logs(
        self, job_id: str, stream: str = "rank-0.log", *, attempt: int | None = None, offset: int = 0,
        limit: int = _PIECE,
    ) -> bytes:  # fmt: skip
        """Up to `limit` bytes (at most 1 MiB) of a stream from `offset`; empty at its end."""
        return self._log(job_id, stream, attempt, offset, limit)[0]

    def _log(
        self, job_id: str, stream: str, attempt: int | None, offset: int, limit: int = _PIECE
    ) -> tuple[bytes, int]:
        params = {"attempt": attempt, "offset": offset, "limit": min(limit, _PIECE)}
        answer = self._transport.request("GET", _job(job_id, f"logs/{quote(stream, safe='')}"), params=params)
        return answer.content, int(answer.headers["Trainmaster-Attempt"])

    def follow_logs(
        self, job_id: str, stream: str = "rank-0.log", *, attempt: int | None = None, offset: int = 0
    ) -> Iterator[bytes]:
        """Bytes of a stream while it grows, until the attempt has ended. Reconnects at the byte offset."""

        def opened() -> Generator[bytes, None, bool]:
            nonlocal attempt, offset
            params = {"attempt": attempt, "offset": offset, "follow": "true"}
            with self._transport.stream(_job(job_id, f"logs/{quote(stream, safe='')}"), params=params) as answer:
                attempt = int(answer.headers["Trainmaster-Attempt"])  # the same attempt after a reconnect
                for piece in answer.iter_bytes():
                    offset += len(piece)
                    yield piece
            job = self.job(job_id)
            return job.final or job.attempts[-1].number > attempt

        return self._transport.reopen(opened)

    # Stored files

    def artifacts(self, job_id: str) -> tuple[Artifact, ...]:
        """Stored files of a job: project file, logs, events, outputs."""
        return decode(tuple[Artifact, ...], self.get(_job(job_id, "artifacts"))["artifacts"])

    def download(
        self, job_id: str, artifact: Artifact, to: Path, *, told: Callable[[int], None] = lambda _: None
    ) -> None:
        """Download an artifact to a file and verify its checksum; continues an interrupted download.

        `told` is called with the number of bytes of each piece.
        """
        files.download(lambda offset: self.pieces(job_id, artifact.path, offset), artifact, to, on_progress=told)

    def pieces(self, job_id: str, path: str, offset: int = 0) -> Iterator[bytes]:
        """Bytes of an artifact from an offset, piece by piece. Reconnects at the byte offset."""
        return self._pieces(_job(job_id, f"artifacts/{quote(path)}"), offset)

    def _pieces(self, address: str, offset: int) -> Iterator[bytes]:
        def opened() -> Generator[bytes, None, bool]:
            nonlocal offset
            params = {"offset": offset} if offset else None
            with self._transport.stream(address, params=params) as answer:
                for piece in answer.iter_bytes():
                    offset += len(piece)
                    yield piece
            return True

        return self._transport.reopen(opened)

    def checkpoint(self, job_id: str) -> CheckpointFiles:
        """The newest checkpoint of a job; NotFound where it has saved none."""
        return decode(CheckpointFiles, self.get(_job(job_id, "checkpoint")))

    def checkpoint_pieces(self, job_id: str, step: int, path: str, offset: int = 0) -> Iterator[bytes]:
        """Bytes of a file of a checkpoint from an offset, piece by piece. Reconnects at the byte offset."""
        return self._pieces(_job(job_id, f"checkpoint/{step}/{quote(path)}"), offset)

    def fetch(self, job_id: str, folder: str | Path) -> list[Path]:
        """Download every artifact of a job and the logs that are not stored yet. Complete files are left alone."""
        written = []
        for artifact in self.artifacts(job_id):
            to = files.place(Path(folder), artifact.path)
            self.download(job_id, artifact, to)
            written.append(to)
        for log in self.log_streams(job_id):
            if not log.stored:
                to = files.place(Path(folder), f"attempts/{log.attempt}/{log.stream}")
                files.grow(to, lambda at, s=log: self.logs(job_id, s.stream, attempt=s.attempt, offset=at))  # type: ignore[misc]
                written.append(to)
        return written

    # Costs, access, health

    def job_cost(self, job_id: str) -> JobCost:
        return decode(JobCost, self.get(_job(job_id, "cost")))

    def cost(self, *, project: str | None = None) -> tuple[ProjectCost, ...]:
        """Cost of each project: this month and in total."""
        return decode(tuple[ProjectCost, ...], self.get("/v1/cost", project_id=project)["projects"])

    def spending(self, *, project: str | None = None, month: str | None = None, limit: int = 50) -> CostPage:
        """Costs by job, in a month such as "2026-11" or from the beginning."""
        return decode(CostPage, self.get("/v1/cost/jobs", project_id=project, month=month, limit=limit))

    def cost_csv(self, *, each: str = "jobs", project: str | None = None, month: str | None = None) -> Iterator[str]:
        """All jobs with their costs as CSV, or sums of projects; in a month such as "2026-11" or from the beginning."""
        params = {"each": each, "project_id": project, "month": month}
        with self._transport.stream("/v1/cost.csv", params=params) as answer:
            yield from answer.iter_text()

    def goodput(self, *, project: str | None = None, month: str | None = None, limit: int = 20) -> GoodputPage:
        """What the GPUs did: sums by project, target and month, in a month such as "2026-11" or from the beginning."""
        return decode(GoodputPage, self.get("/v1/goodput", project_id=project, month=month, limit=limit))

    def job_goodput(self, job_id: str, *, month: str | None = None) -> JobGoodput:
        """What the GPUs of a job did."""
        return decode(JobGoodput, self.get(_job(job_id, "goodput"), month=month))

    def budgets(self, *, project: str | None = None) -> tuple[Budget, ...]:
        return decode(tuple[Budget, ...], self.get("/v1/budgets", project_id=project)["budgets"])

    def set_budget(self, project: str, period: str, cap_cents: int) -> Budget:
        """Set the budget of a project; `period` is "total" or "month"."""
        path = f"/v1/budgets/{quote(project, safe='')}/{quote(period, safe='')}"
        return decode(Budget, self._transport.request("PUT", path, body={"cap_cents": cap_cents}).json())

    def remove_budget(self, project: str, period: str) -> None:
        """Remove a budget. NotFound if there is none."""
        self._transport.request("DELETE", f"/v1/budgets/{quote(project, safe='')}/{quote(period, safe='')}")

    def create_token(self, name: str, *, role: str, project: str | None = None) -> str:
        """Create a token; it cannot be read again. Not retried: a second try would find the name taken."""
        wish = {"name": name, "role": role, "project": project}
        return str(self._transport.request("POST", "/v1/tokens", body=wish, again=False).json()["token"])

    def tokens(self) -> tuple[Token, ...]:
        return decode(tuple[Token, ...], self.get("/v1/tokens")["tokens"])

    def revoke_token(self, name: str) -> None:
        self._transport.request("DELETE", f"/v1/tokens/{quote(name, safe='')}")

    def targets(self) -> tuple[KnownTarget, ...]:
        """Targets that the server knows; for its admins."""
        return decode(tuple[KnownTarget, ...], self.get("/v1/targets")["targets"])

    def add_target(self, name: str, word: str) -> KnownTarget:
        """Make a target known: `word` is a kind and a path of the server, as ssh:/etc/trainmaster/lab.yaml."""
        wish = {"name": name, "word": word}
        return decode(KnownTarget, self._transport.request("POST", "/v1/targets", body=wish, again=False).json())

    def remove_target(self, name: str) -> None:
        self._transport.request("DELETE", f"/v1/targets/{quote(name, safe='')}")

    def grant_target(self, name: str, project: str, *, user: str | None = None) -> None:
        """Let the jobs of a project run on a target, as this account."""
        path = f"/v1/targets/{quote(name, safe='')}/projects/{quote(project, safe='')}"
        self._transport.request("PUT", path, body={"user": user})

    def revoke_target(self, name: str, project: str) -> None:
        self._transport.request("DELETE", f"/v1/targets/{quote(name, safe='')}/projects/{quote(project, safe='')}")

    def health(self) -> Health:
        """Liveness of the server. An answer of `failing` (503) is returned, not raised."""
        return decode(Health, self._transport.request("GET", "/healthz", fine=frozenset({503})).json())


def _job(job_id: str, rest_of_it: str = "") -> str:
    return f"{JOBS}/{quote(job_id, safe='')}" + (f"/{rest_of_it}" if rest_of_it else "")


def _place(cursor: tuple[int, int] | None) -> str | None:
    return None if cursor is None else f"{cursor[0]}:{cursor[1]}"


def _cursor(place: str) -> tuple[int, int]:
    number, _, offset = place.partition(":")
    return int(number), int(offset)
