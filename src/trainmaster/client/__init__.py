"""A typed client of a Trainmaster server.

    from trainmaster import Client

    with Client("http://127.0.0.1:8470") as server:
        job = server.submit({"name": "trial", "command": ["python", "train.py"]})
        for event in server.events(job.id):           # goes on after a lost connection, each event once
            print(event.phase, event.data)
        server.fetch(job.id, "results/")

What can be repeated safely is repeated after a lost connection (a submission too, by its idempotency key). Errors are
those of client/errors.py.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainmaster.client import files
from trainmaster.client.answers import (
    Artifact,
    Budget,
    Check,
    Cost,
    Details,
    Epoch,
    Evaluation,
    Event,
    Health,
    Iteration,
    Job,
    JobCost,
    JobLine,
    Jobs,
    LogStream,
    ProjectCost,
    Spending,
    Step,
    Submitted,
    Token,
    decode,
)
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
from trainmaster.client.transport import Lost, Wire, rest, server_sent, worth_waiting

__all__ = [
    "Artifact", "BadRequest", "Budget", "Check", "Client", "Conflict", "Cost", "Details", "Download", "Epoch",
    "Evaluation", "Event", "Health", "Iteration", "Job", "JobCost", "JobLine", "Jobs", "LogStream", "NoAccess",
    "NotFound", "OverBudget", "ProjectCost", "Refusal", "ServerError", "ServerUnreachable", "Spending", "Step",
    "Submitted", "Token", "TooMany", "Unavailable",
]  # fmt: skip

_JOBS = "/v1/training/jobs"
_PIECE = 1 << 20  # bytes of a log in one answer


class Client:
    """One server. `token` is what `trainmaster token create` showed; none is needed over loopback."""

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 30.0, retries: int = 5) -> None:
        self._wire = Wire(url, token, timeout_s=timeout_s, retries=retries)

    def __repr__(self) -> str:
        return f"Client({self._wire.url!r})"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._wire.close()

    def get(self, path: str, **params: Any) -> Any:
        """The JSON of any path, as it is."""
        return self._wire.ask("GET", path, params=params).json()

    # Jobs

    def submit(self, spec: Mapping[str, Any], *, key: str | None = None) -> Submitted:
        """A new job. The same `key` and spec give the same job, also from another process; without one, one is made
        up for this call, so that repeating it after a lost connection creates nothing twice."""
        sent = {"Idempotency-Key": key or str(uuid.uuid4())}
        answer = self._wire.ask("POST", _JOBS, body=dict(spec), headers=sent)
        return decode(Submitted, {**answer.json(), "new": answer.status_code == 201})

    def jobs(
        self, *, status: str | None = None, project: str | None = None, find: str | None = None, limit: int = 50,
        offset: int = 0,
    ) -> Jobs:  # fmt: skip
        """Jobs, newest first; `find` is the beginning of an id or a part of a name."""
        return decode(Jobs, self.get(_JOBS, status=status, project_id=project, find=find, limit=limit, offset=offset))

    def job(self, job_id: str) -> Job:
        """Everything the page of a job says."""
        return decode(Job, self.get(_job(job_id)))

    def cancel(self, job_id: str) -> Submitted:
        """Ask a job to save and stop; BadRequest if it is over."""
        return decode(Submitted, self._wire.ask("POST", _job(job_id, "cancel")).json())

    def resume(self, job_id: str, *, key: str | None = None) -> Submitted:
        """A new job that goes on from the last checkpoint of one that is over; Conflict while that one runs."""
        answer = self._wire.ask("POST", _job(job_id, "resume"), headers={"Idempotency-Key": key or str(uuid.uuid4())})
        return decode(Submitted, {**answer.json(), "new": answer.status_code == 201})

    def wait(self, job_id: str, *, every_s: float = 1.0) -> Job:
        """The job once it is over."""
        while not (job := self.job(job_id)).final:
            time.sleep(every_s)
        return job

    # What the training said

    def details(self, job_id: str) -> Details:
        return decode(Details, self.get(_job(job_id, "details")))

    def epochs(self, job_id: str, iteration: int = 1) -> tuple[Epoch, ...]:
        """All epochs of one iteration; NotFound where the job has no such iteration."""
        found: list[Epoch] = []
        while True:
            page = self.get(_job(job_id, f"iterations/{iteration}/epochs"), offset=len(found))
            found += [decode(Epoch, item) for item in page["epochs"]]
            if not page["epochs"] or len(found) >= page["total"]:
                return tuple(found)

    def evaluations(
        self,
        *,
        model: str | None = None,
        job: str | None = None,
        project: str | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> tuple[Evaluation, ...]:
        """Evaluations, newest first."""
        params = {"model_id": model, "job_id": job, "project_id": project, "limit": limit, "offset": offset}
        page = self.get("/v1/training/evaluations", **params)
        return decode(tuple[Evaluation, ...], page["evaluations"])

    def checks(self, job_id: str) -> tuple[Check, ...]:
        """What the checks before the workload found."""
        return decode(tuple[Check, ...], self.get(_job(job_id, "checks"))["checks"])

    # What comes while a job runs

    def events(
        self, job_id: str, *, follow: bool = True, phase: str | None = None, after: tuple[int, int] | None = None
    ) -> Iterator[Event]:
        """A job's events in their order, each exactly once: until it is over, or without `follow` those there are now.

        A lost connection is taken up again behind the last event. `after` is the cursor of an event.
        """
        told = self._follow(job_id, after) if follow else self._page_events(job_id, phase, after)
        return (event for event in told if phase is None or event.phase == phase)

    def _page_events(self, job_id: str, phase: str | None, after: tuple[int, int] | None) -> Iterator[Event]:
        while True:
            page = self.get(_job(job_id, "events"), phase=phase, after=_place(after))
            events = decode(tuple[Event, ...], page["events"])
            if not events:
                return
            yield from events
            after = events[-1].cursor

    def _follow(self, job_id: str, after: tuple[int, int] | None) -> Iterator[Event]:
        turn = 0
        while True:
            sent = {"Accept": "text/event-stream"}
            if after is not None:
                sent["Last-Event-ID"] = _place(after) or ""
            try:
                with self._wire.stream(_job(job_id, "events"), headers=sent) as answer:
                    for place, name, data in server_sent(answer.iter_lines()):
                        turn = 0
                        if name == "end":
                            return
                        if name != "event" or (after is not None and _cursor(place) <= after):
                            continue  # not a word of ours, or told already
                        after = _cursor(place)
                        yield decode(Event, json.loads(data))
                # Ended without saying so: the server is on its way down, or a proxy was tired of us.
            except (Refusal, Lost) as wrong:
                if turn >= self._wire.retries or not worth_waiting(wrong):
                    raise
            time.sleep(rest(turn))
            turn += 1

    def log_streams(self, job_id: str) -> tuple[LogStream, ...]:
        """Every stream that can be read: agent.log, rank-N.log, events.jsonl, exit.json, by attempt."""
        return decode(tuple[LogStream, ...], self.get(_job(job_id, "logs"))["streams"])

    def logs(
        self, job_id: str, stream: str = "rank-0.log", *, attempt: int | None = None, offset: int = 0,
        limit: int = _PIECE,
    ) -> bytes:  # fmt: skip
        """At most `limit` (and 1 MiB) bytes of a stream from `offset`; empty where there is no more."""
        return self._log(job_id, stream, attempt, offset, limit)[0]

    def _log(
        self, job_id: str, stream: str, attempt: int | None, offset: int, limit: int = _PIECE
    ) -> tuple[bytes, int]:
        params = {"attempt": attempt, "offset": offset, "limit": min(limit, _PIECE)}
        answer = self._wire.ask("GET", _job(job_id, f"logs/{quote(stream, safe='')}"), params=params)
        return answer.content, int(answer.headers["Trainmaster-Attempt"])

    def follow_logs(
        self, job_id: str, stream: str = "rank-0.log", *, attempt: int | None = None, offset: int = 0
    ) -> Iterator[bytes]:
        """A stream's bytes as they come, until nobody writes it any more. A lost connection is taken up again."""
        turn = 0
        while True:
            params = {"attempt": attempt, "offset": offset, "follow": "true"}
            try:
                with self._wire.stream(_job(job_id, f"logs/{quote(stream, safe='')}"), params=params) as answer:
                    attempt = int(answer.headers["Trainmaster-Attempt"])  # the same one when it is taken up again
                    for piece in answer.iter_bytes():
                        turn, offset = 0, offset + len(piece)
                        yield piece
                job = self.job(job_id)
                if job.final or job.attempts[-1].number > attempt:
                    return
            except (Refusal, Lost) as wrong:
                if turn >= self._wire.retries or not worth_waiting(wrong):
                    raise
            time.sleep(rest(turn))
            turn += 1

    # What is kept

    def artifacts(self, job_id: str) -> tuple[Artifact, ...]:
        """Everything that is kept of a job: project file, logs, events, outputs."""
        return decode(tuple[Artifact, ...], self.get(_job(job_id, "artifacts"))["artifacts"])

    def download(
        self, job_id: str, artifact: Artifact, to: Path, *, told: Callable[[int], None] = lambda _: None
    ) -> None:
        """An artifact into a file, whole and with its checksum verified; goes on where an earlier try was cut off.

        `told` hears how many bytes have come.
        """
        files.download(lambda offset: self.pieces(job_id, artifact.path, offset), artifact, to, told=told)

    def pieces(self, job_id: str, path: str, offset: int = 0) -> Iterator[bytes]:
        """An artifact from an offset, piece by piece. A lost connection is taken up again."""
        turn = 0
        while True:
            try:
                params = {"offset": offset} if offset else None
                with self._wire.stream(_job(job_id, f"artifacts/{quote(path)}"), params=params) as answer:
                    for piece in answer.iter_bytes():
                        turn, offset = 0, offset + len(piece)
                        yield piece
                return
            except (Refusal, Lost) as wrong:
                if turn >= self._wire.retries or not worth_waiting(wrong):
                    raise
            time.sleep(rest(turn))
            turn += 1

    def fetch(self, job_id: str, folder: str | Path) -> list[Path]:
        """Every artifact of a job into a folder, and the logs that are not kept yet. Files that are there and right
        are left alone."""
        return files.fetch(self, job_id, Path(folder))

    # Money, access, health

    def job_cost(self, job_id: str) -> JobCost:
        return decode(JobCost, self.get(_job(job_id, "cost")))

    def cost(self, *, project: str | None = None) -> tuple[ProjectCost, ...]:
        """What each project has cost, this month and in all."""
        return decode(tuple[ProjectCost, ...], self.get("/v1/cost", project_id=project)["projects"])

    def spending(self, *, project: str | None = None, month: str | None = None, limit: int = 50) -> Spending:
        """Costs job by job: in a month as "2026-11", or without one from the beginning."""
        return decode(Spending, self.get("/v1/cost/jobs", project_id=project, month=month, limit=limit))

    def budgets(self, *, project: str | None = None) -> tuple[Budget, ...]:
        return decode(tuple[Budget, ...], self.get("/v1/budgets", project_id=project)["budgets"])

    def set_budget(self, project: str, period: str, cap_cents: int) -> Budget:
        """What a project may spend: `period` is "total" or "month"."""
        path = f"/v1/budgets/{quote(project, safe='')}/{quote(period, safe='')}"
        return decode(Budget, self._wire.ask("PUT", path, body={"cap_cents": cap_cents}).json())

    def remove_budget(self, project: str, period: str) -> None:
        """Let a project spend what it likes. NotFound if it did already."""
        self._wire.ask("DELETE", f"/v1/budgets/{quote(project, safe='')}/{quote(period, safe='')}")

    def create_token(self, name: str, *, role: str, project: str | None = None) -> str:
        """A new token; it cannot be had again. Not repeated by itself: a second try would find the name taken."""
        wish = {"name": name, "role": role, "project": project}
        return str(self._wire.ask("POST", "/v1/tokens", body=wish, again=False).json()["token"])

    def tokens(self) -> tuple[Token, ...]:
        return decode(tuple[Token, ...], self.get("/v1/tokens")["tokens"])

    def revoke_token(self, name: str) -> None:
        self._wire.ask("DELETE", f"/v1/tokens/{quote(name, safe='')}")

    def health(self) -> Health:
        """Whether the server serves and drives jobs; a server that says it does not is no error here."""
        return decode(Health, self._wire.ask("GET", "/healthz", fine=frozenset({503})).json())


def _job(job_id: str, rest_of_it: str = "") -> str:
    return f"{_JOBS}/{quote(job_id, safe='')}" + (f"/{rest_of_it}" if rest_of_it else "")


def _place(cursor: tuple[int, int] | None) -> str | None:
    return None if cursor is None else f"{cursor[0]}:{cursor[1]}"


def _cursor(place: str) -> tuple[int, int]:
    number, _, offset = place.partition(":")
    return int(number), int(offset)
