"""Requests about the queue, the machines that it gives out, and sets of runs."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from trainmaster.api.codec import decode
from trainmaster.api.jobs import Job, JobsPage
from trainmaster.api.paths import JOBS
from trainmaster.api.queue import MachinesPage, ProjectShare, QueuePage
from trainmaster.api.sets import SetLine, SetPage, SubmittedSet
from trainmaster.client.transport import Transport
from trainmaster.core.config.search import MOST_TRIALS

T = TypeVar("T")
# For the check of one trial: 25 times what one of our trainer takes, so that a busy server answers in time too.
_TRIAL_S = 0.1


class QueueCalls:
    """The part of a client that asks for the queue."""

    _transport: Transport

    def get(self, path: str, **params: Any) -> Any:
        """The parsed JSON of any path."""
        return self._transport.request("GET", path, params=params).json()

    def queue(self, *, project: str | None = None, limit: int = 50, offset: int = 0) -> QueuePage:
        """Jobs that wait, in the order of the queue."""
        return decode(QueuePage, self.get("/v1/queue", project_id=project, limit=limit, offset=offset))

    def machines(self, *, project: str | None = None) -> MachinesPage:
        return decode(MachinesPage, self.get("/v1/machines", project_id=project))

    def drain_machine(self, node: str, *, reason: str, target: str | None = None) -> None:
        """The server's own queue starts nothing new on a machine."""
        path = f"/v1/machines/{quote(node, safe='')}/drain"
        self._transport.request("PUT", path, body={"reason": reason, "target": target})

    def readmit_machine(self, node: str, *, target: str | None = None) -> None:
        """A drained machine takes jobs again."""
        path = f"/v1/machines/{quote(node, safe='')}/drain"
        self._transport.request("DELETE", path, params={"target": target} if target else None)

    def set_share(self, project: str, *, weight: float, quota: int | None) -> ProjectShare:
        """Set the weight and the quota of a project in the server's own queue."""
        body = {"weight": weight, "quota": quota}
        return decode(
            ProjectShare, self._transport.request("PUT", f"/v1/shares/{quote(project, safe='')}", body=body).json()
        )

    def set_priority(self, job_id: str, priority: str) -> Job:
        """Change the priority of a job that waits in the server's own queue; Conflict where it does not."""
        path = f"{JOBS}/{quote(job_id, safe='')}/priority"
        return decode(Job, self._transport.request("PUT", path, body={"priority": priority}).json())

    def submit_set(self, document: Mapping[str, Any], *, key: str | None = None) -> SubmittedSet:
        """Submit a spec with `matrix`, `search` or `schedule`. The same `key` and document return the same set, also
        from another process. Without a key a random one is sent, so that a retry creates nothing twice.

        The server checks each trial before it answers, and is given time for that.
        """
        more_s = _count_trials(document) * _TRIAL_S
        return self._create(SubmittedSet, "/v1/sets", key=key, body=dict(document), more_s=more_s)

    def _create(self, kind: type[T], path: str, *, key: str | None, body: object = None, more_s: float = 0.0) -> T:
        """What a submission made, or an earlier one with this key; without a key a random one is sent."""
        sent = {"Idempotency-Key": key or str(uuid.uuid4())}
        answer = self._transport.request("POST", path, body=body, headers=sent, more_s=more_s)
        return decode(kind, {**answer.json(), "new": answer.status_code == 201})

    def sets(self, *, project: str | None = None, find: str | None = None, limit: int = 50) -> tuple[SetLine, ...]:
        """Sets of runs, newest first; `find` is a name, or the beginning of an id."""
        page = self.get("/v1/sets", project_id=project, find=find, limit=limit)
        return decode(tuple[SetLine, ...], page["sets"])

    def jobs_alone(self, *, project: str | None = None, limit: int = 50, offset: int = 0) -> JobsPage:
        """Jobs that are no trials of a set, newest first."""
        page = self.get("/v1/training/jobs", project_id=project, alone=True, limit=limit, offset=offset)
        return decode(JobsPage, page)

    def set(self, set_id: str) -> SetPage:
        """A set with its table of results."""
        return decode(SetPage, self.get(f"/v1/sets/{quote(set_id, safe='')}"))

    def cancel_set(self, set_id: str) -> SetPage:
        """No further trial begins, and those that are open are asked to save and stop."""
        return self._change_set(set_id, "cancel")

    def pause_set(self, set_id: str) -> SetPage:
        """No time of its schedule comes until it is resumed."""
        return self._change_set(set_id, "pause")

    def resume_set(self, set_id: str) -> SetPage:
        """Its schedule goes on with the next time from now."""
        return self._change_set(set_id, "resume")

    def _change_set(self, set_id: str, how: str) -> SetPage:
        path = f"/v1/sets/{quote(set_id, safe='')}/{how}"
        return decode(SetPage, self._transport.request("POST", path).json())


def _count_trials(document: Mapping[str, Any]) -> int:
    """Trials of a matrix; 1 where there is none, or it is none."""
    matrix = document.get("matrix")
    values = matrix.values() if isinstance(matrix, Mapping) else ()
    return min(math.prod(len(each) for each in values if isinstance(each, list)), MOST_TRIALS)
