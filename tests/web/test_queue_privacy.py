"""A user of one project reads no name and no id of another's jobs in the queue, however many wait."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from control.test_unreadable_jobs import NOW, _queue
from trainmaster.control.queueing import dispatch
from trainmaster.core.roles import Role
from trainmaster.core.states import Stage
from trainmaster.queueing.state import Device, Rules
from trainmaster.store import attempts, jobs
from trainmaster.store.capacity import devices
from trainmaster.store.database import Database
from web.conftest import TestClient
from web.furnished import JOBS, issue


@pytest.mark.parametrize("project", ["lab", "other"])
def test_nothing_of_another_project_is_read(project: str, client: TestClient, db: Database) -> None:
    """Both have a job that runs, 15 that wait for devices or a quota, and one that is more urgent than all."""
    ids: dict[str, list[str]] = {"lab": [], "other": []}
    with db.write() as conn:
        devices.record(conn, "p", "gpu", [Device(id=f"g{n}", machine="m") for n in range(2)], at=NOW)
        devices.set_share(conn, "other", quota=1)
    for number, owner in enumerate(ids):
        running = _queue(db, owner, name=f"{owner}-runs", queue={"preemptible": True, "priority": "low"})
        ids[owner].append(running)
        with db.write() as conn:
            long_ago = NOW - timedelta(days=1)
            attempt = attempts.insert_attempt(conn, running, 1, handle={}, at=long_ago)
            for seen, to in ((Stage.QUEUED, Stage.PLACING), (Stage.PLACING, Stage.RUNNING)):
                jobs.advance(conn, running, seen=seen, to=to, at=long_ago)
            devices.book(conn, "p", attempt, {"m": (f"g{number}",)}, at=long_ago)
    for number in range(15):
        for owner, some in ids.items():
            some.append(_queue(db, owner, name=f"{owner}-{number}", later_s=number))
    for owner, some in ids.items():
        some.append(_queue(db, owner, name=f"{owner}-urgent", later_s=99, queue={"priority": "high"}))
    context: Any = SimpleNamespace(
        db=db, now=lambda: NOW, rules=Rules(), token="tok", bookings={}, kinds={}, drained=(), checks=dict
    )
    dispatch.Dispatcher(context)._pass("p", ["ssh:x"], late=False)
    own, foreign = ids[project], ids["lab" if project == "other" else "other"]
    who = issue(db, project, Role.USER, project)
    paths = ["/queue", "/v1/queue?limit=200", "/v1/queue?limit=5&offset=8", "/v1/machines", "/nodes", JOBS]
    paths += [f"{JOBS}/{job}" for job in (own[0], own[1], own[-1])]
    read = {path: client.get(path, headers=who) for path in paths}
    assert {answer.status_code for answer in read.values()} == {200}
    assert own[1] in read["/v1/queue?limit=200"].text and f"{project}-14" in read["/queue"].text
    names = [f"{'lab' if project == 'other' else 'other'}-{number}" for number in (*range(15), "runs", "urgent")]
    for path, answer in read.items():
        assert not [word for word in (*foreign, *(job[:8] for job in foreign), *names) if word in answer.text], path
