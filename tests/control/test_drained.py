"""A drained machine of our own queue: nothing new starts there, what runs goes on, and its operator reads why."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from control import test_dispatch as base
from trainmaster.control.context import Context
from trainmaster.control.queueing import dispatch
from trainmaster.control.queueing import machines as drains
from trainmaster.control.stage_handlers import handle_stage
from trainmaster.core.errors import UsageError
from trainmaster.core.states import Stage
from trainmaster.pages import machines as machines_page
from trainmaster.pages import queue as queue_page
from trainmaster.storage import open_store
from trainmaster.store import leases
from trainmaster.store.database import Database


def test_on_a_drained_machine_nothing_new_starts_and_what_runs_goes_on(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_PATIENCE_S", 60.0)
    monkeypatch.setattr(dispatch, "_REST", 0.0)
    target = base.Shared(2)
    context = Context(
        db=db, home=tmp_path, load=target.load, token="a", storage=open_store(tmp_path / "storage"), kinds={}
    )
    jobs = [base._submit(db, target, f"j{number}") for number in range(3)]
    with db.write() as conn:
        leases.take(conn, "a", owner=f"{socket.gethostname()} 1")
    asyncio.run(dispatch.Dispatcher(context).decide())
    assert asyncio.run(handle_stage(context, base._find(db, jobs[0])))
    drains.drain(db, "m0", reason="a fan \n is replaced", by="eve")
    assert not asyncio.run(handle_stage(context, base._find(db, jobs[1]))), "chosen before, and not booked any more"
    asyncio.run(dispatch.Dispatcher(context).decide())
    assert not any(dispatch.may_start(context, base._find(db, job)) for job in jobs[1:])
    (machine,) = machines_page.read(db, home=tmp_path).machines
    since = f"drained since {machine.drained_at:%Y-%m-%d %H:%M} UTC"
    says = f"it needs 1 GPU; machines closed (m0: {since})"
    assert [line.reason for line in queue_page.read(db).jobs if line.job_id != jobs[0].id] == [says, says]
    assert [base._find(db, job).message for job in jobs[1:]] == [says, says], "everybody of a project reads it"
    assert (machine.closed, machine.drained_by) == (f"{since}: a fan is replaced", "eve")
    assert machines_page.read(db, project="other").machines[0].closed == since, "the operator's words are not theirs"
    assert [device.job for device in machine.devices] == ["j0", None]
    assert (base._find(db, jobs[0]).stage, target.stopped) == (Stage.PLACING, {})
    drains.readmit(db, "m0")
    asyncio.run(dispatch.Dispatcher(context).decide())
    assert dispatch.may_start(context, base._find(db, jobs[1])) and not dispatch.may_start(
        context, base._find(db, jobs[2])
    )
    with pytest.raises(UsageError, match="m0 is not drained"):
        drains.readmit(db, "m0")
    with pytest.raises(UsageError, match="no machine 'm9' of the queue is known"):
        drains.drain(db, "m9", reason="a fan")


def test_this_machine_is_drained_also_where_jobs_need_no_device(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_PATIENCE_S", 60.0)
    monkeypatch.setattr(dispatch, "_REST", 0.0)
    target, host = base.Shared(0), socket.gethostname()
    context = Context(
        db=db, home=tmp_path, load=target.load, token="a", storage=open_store(tmp_path / "storage"), kinds={}
    )
    job = base._submit(db, target, "j")
    with db.write() as conn:
        leases.take(conn, "a", owner=f"{host} 1")
    asyncio.run(dispatch.Dispatcher(context).decide())
    assert dispatch.may_start(context, base._find(db, job))
    drains.drain(db, host, reason="a fan")
    assert not asyncio.run(handle_stage(context, base._find(db, job))), "before the next pass, too"
    asyncio.run(dispatch.Dispatcher(context).decide())
    assert not dispatch.may_start(context, base._find(db, job))
    reason = queue_page.read(db).jobs[0].reason
    assert reason.startswith(f"machines closed ({host}: drained since 20") and "fan" not in reason
    assert base._find(db, job).message == reason
    drains.readmit(db, host)
    asyncio.run(dispatch.Dispatcher(context).decide())
    assert asyncio.run(handle_stage(context, base._find(db, job)))
