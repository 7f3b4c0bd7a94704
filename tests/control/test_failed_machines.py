"""A machine whose check failed: hosts given out by their slots are chosen with it last."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import insert

from control import test_dispatch as base
from trainmaster.control.context import Context
from trainmaster.control.stage_handlers import handle_stage
from trainmaster.core.results import Verdict
from trainmaster.core.states import Stage
from trainmaster.storage import open_store
from trainmaster.store import attempts, jobs, leases
from trainmaster.store import tables as t
from trainmaster.store.database import Database
from trainmaster.targets import Handle, Submission

MINUTE = timedelta(minutes=1)


class Hosts(base.Shared):
    """Two hosts without a GPU, which are chosen when a job is placed."""

    def __init__(self) -> None:
        super().__init__(0)
        self.last: tuple[str, ...] = ()

    def list_machines(self) -> list[str]:
        return ["m0", "m1"]

    async def place(self, submission: Submission) -> Handle:
        self.last = submission.last
        return {**submission.handle, "nodes": ["m1"]}


def test_the_target_is_told_which_hosts_come_last(db: Database, tmp_path: Path) -> None:
    target, now = Hosts(), datetime.now(UTC)
    storage = open_store(tmp_path / "storage")
    context = Context(db=db, home=tmp_path, load=lambda _: target, token="a", storage=storage, kinds={})
    failed, job = base._submit(db, target, "failed"), base._submit(db, target, "next")
    with db.write() as conn:
        leases.take(conn, "a", owner="here 1")
        attempt = attempts.insert_attempt(conn, failed.id, 1, handle={}, at=now)
        row = {"attempt": attempt, "node": "m0", "check": "xid", "verdict": "fail", "findings": [], "at": now - MINUTE}
        conn.execute(insert(t.check_results).values(row))
        attempts.insert_attempt(conn, job.id, 1, handle={"attempt": f"{job.id}.1"}, at=now)
        jobs.advance(conn, job.id, seen=Stage.QUEUED, to=Stage.PLACING, at=now)
    asyncio.run(handle_stage(context, base._find(db, job)))
    assert target.last == ("m0",)
    with db.write() as conn:
        conn.execute(t.jobs.update().where(t.jobs.c.id == job.id).values(stage=Stage.PLACING.value))
    checked = replace(context, checks=lambda: {"m0": (now, Verdict.PASS), "m1": (now, Verdict.FAIL)})
    asyncio.run(handle_stage(checked, base._find(db, job)))
    assert target.last == ("m1",)
