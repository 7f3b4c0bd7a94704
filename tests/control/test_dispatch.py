"""Our own queue in the control plane: who gets which device, who waits, who is stopped; no device is given twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control.driving import driven, wait
from control.scripted import GOOD, RUNNING, Scripted, at_once, ended
from trainmaster.control import submit as submitting
from trainmaster.control.context import Context
from trainmaster.control.queueing import dispatch
from trainmaster.control.stage_handlers import handle_stage
from trainmaster.core.errors import SpecError
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.pages import machines as machines_page
from trainmaster.pages import queue as queue_page
from trainmaster.queueing.state import Device, DeviceListing, Rules
from trainmaster.storage import open_store
from trainmaster.store import attempts, leases
from trainmaster.store.capacity import devices
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.rows import JobRow
from trainmaster.targets import Handle, Poll, Submission, find_place

_SOURCE = str(Path(__file__).parents[2] / "src")


class Shared(Scripted):
    """A machine with a few GPUs. Attempts run until `ends` names them; a device that two hold at once is a fault."""

    def __init__(self, gpus: int) -> None:
        super().__init__(RUNNING)
        self.gpus = [f"GPU-{number}" for number in range(gpus)]
        self.used: dict[str, str] = {}
        self.ends: set[str] = set()  # jobs
        self.holds: dict[str, list[str]] = {}  # attempt → devices
        self.faults: list[str] = []
        self.stopped: dict[str, str] = {}
        self.told: list[str] = []  # why an attempt was to stop
        self.fault: str | None = None  # of its nvidia-smi
        self.bare: list[str] = []  # machines without a GPU

    def list_machines(self) -> list[str]:
        return ["m0"]

    def load(self, word: str) -> Shared:
        return self

    async def list_devices(self) -> DeviceListing:
        await self._asked("devices", {"attempt": ""})
        if self.fault is not None:
            return DeviceListing(devices={"gpu": []}, silent={"m0": self.fault}, answered=self.bare)
        gpus = [Device(id=gpu, machine="m0", model="H200", used=self.used.get(gpu)) for gpu in self.gpus]
        return DeviceListing(devices={"gpu": gpus}, answered=["m0"])

    async def submit(self, submission: Submission) -> Handle:
        attempt = str(submission.handle["attempt"])
        mine = [device for some in submission.handle["devices"].values() for device in some]
        others = {device for other, some in self.holds.items() if other != attempt for device in some}
        self.faults += [f"{attempt} was given {device}, which another has" for device in mine if device in others]
        self.holds[attempt] = mine
        return await super().submit(submission)

    async def poll(self, handle: Handle) -> Poll:
        attempt = await self._asked("poll", handle)
        if attempt in self.stopped:
            return ended(TargetState.FAILED, Reason(self.stopped[attempt]))
        return GOOD if attempt.partition(".")[0] in self.ends else RUNNING

    async def cancel(self, handle: Handle, *, reason: str) -> None:
        self.told = list({*self.told, reason})
        self.stopped[str(handle["attempt"])] = reason.partition(":")[0]

    async def release(self, handle: Handle) -> None:
        await super().release(handle)
        self.holds.pop(str(handle["attempt"]), None)


def _submit(db: Database, target: Shared, name: str, *, gpus: int = 1, **more: Any) -> JobRow:
    mapping = {"name": name, "command": ["x"], "preflight": {"level": 0}, "resources": {"processes_per_node": gpus}}
    return submitting.submit(db, parse_spec({**mapping, **more}), load=target.load)


def _find(db: Database, job: JobRow) -> JobRow:
    row = find_job(db, job.id)
    assert row is not None
    return row


def _runs(db: Database, job: JobRow) -> bool:
    return _find(db, job).stage is Stage.RUNNING


@contextlib.contextmanager
def _driven(db: Database, home: Path, target: Shared, **more: Any):  # type: ignore[no-untyped-def]
    with driven(db, home, open_store(home / "storage"), load=target.load, rest_s=at_once, **more):
        yield


@pytest.mark.both_databases
def test_a_job_waits_for_its_gpu_and_gets_it_when_nothing_of_the_other_is_left(db: Database, tmp_path: Path) -> None:
    target = Shared(2)
    first, second, third = (_submit(db, target, f"j{n}") for n in range(3))
    with _driven(db, tmp_path, target):
        wait(lambda: _runs(db, first) and _runs(db, second) and bool(_find(db, third).message))
        waiting = _find(db, third)
        assert waiting.stage is Stage.QUEUED
        assert waiting.message.startswith("it needs 1 GPU, none is free; what becomes free is kept for it")
        held = {row.device: row.attempt for row in devices.list_devices(db)}
        assert sorted(held.values()) == sorted([f"{first.id}.1", f"{second.id}.1"])
        assert attempts.list_attempts(db, first.id)[0].handle["devices"] == {  # type: ignore[index]
            "m0": [name for name, attempt in held.items() if attempt == f"{first.id}.1"]
        }
        target.ends.add(first.id)
        wait(lambda: _runs(db, third))
        target.ends |= {second.id, third.id}
        wait(lambda: all(_find(db, job).status.final for job in (first, second, third)))
    assert [_find(db, job).status for job in (first, second, third)] == [Status.COMPLETED] * 3
    assert [row.attempt for row in devices.list_devices(db)] == [None, None]
    assert target.faults == []


@pytest.mark.proof
def test_two_reconcilers_never_book_a_gpu_twice(db: Database, tmp_path: Path) -> None:
    target = Shared(3)
    jobs = [_submit(db, target, f"j{n}", gpus=1 + n % 3) for n in range(7)]
    target.ends = {job.id for job in jobs}
    with _driven(db, tmp_path, target), _driven(db, tmp_path, target):
        wait(lambda: all(_find(db, job).status.final for job in jobs))
    assert {_find(db, job).status for job in jobs} == {Status.COMPLETED}
    assert target.faults == []
    assert len(target.started) == len(jobs)


@pytest.mark.both_databases
def test_of_two_servers_that_chose_one_gpu_the_second_writes_nothing_and_its_job_waits(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_PATIENCE_S", 60.0)
    target = Shared(1)
    first, second = (
        Context(db=db, home=tmp_path, load=target.load, token=token, storage=open_store(tmp_path / "storage"), kinds={})
        for token in ("first", "second")
    )
    slow = _submit(db, target, "slow")
    with db.write() as conn:
        leases.take(conn, "first", owner=f"{socket.gethostname()} 1")
    asyncio.run(dispatch.Dispatcher(first).decide())  # it chooses, and is slow to book
    urgent = _submit(db, target, "urgent", queue={"priority": "urgent"})
    with db.write() as conn:
        leases.take(conn, "second", owner=f"{socket.gethostname()} 2")
    asyncio.run(dispatch.Dispatcher(second).decide())
    assert (slow.id in first.bookings, urgent.id in second.bookings) == (True, True)
    assert asyncio.run(handle_stage(second, _find(db, urgent)))
    assert not asyncio.run(handle_stage(first, _find(db, slow)))
    assert (_find(db, slow).stage, attempts.list_attempts(db, slow.id)) == (Stage.QUEUED, [])
    assert [row.attempt for row in devices.list_devices(db)] == [f"{urgent.id}.1"]


def test_a_booking_is_for_one_attempt_and_not_for_the_next(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_PATIENCE_S", 60.0)
    target = Shared(1)
    context = Context(
        db=db, home=tmp_path, load=target.load, token="a", storage=open_store(tmp_path / "storage"), kinds={}
    )
    job = _submit(db, target, "victim")
    with db.write() as conn:
        leases.take(conn, "a", owner=f"{socket.gethostname()} 1")
    asyncio.run(dispatch.Dispatcher(context).decide())
    queued, late = _find(db, job), dict(context.bookings)
    assert dispatch.may_start(context, queued)
    assert asyncio.run(handle_stage(context, queued))
    context.bookings.update(late)  # by a pass that read the rows before the attempt was written
    again = replace(queued, attempts=1)  # as it is when it was preempted, and released
    assert not dispatch.may_start(context, again)
    assert dispatch.take_booking(context, again) == {}
    assert context.bookings == {}


def test_booking_a_device_that_was_taken_meanwhile_writes_nothing(db: Database) -> None:
    now = submitting.datetime.now(submitting.UTC)
    with db.write() as conn:
        devices.record(conn, "a", "gpu", [Device(id="GPU-0", machine="m0")], at=now)
        devices.record(conn, "b", "gpu", [Device(id="GPU-0", machine="m0")], at=now)  # one machine, two hosts files
        devices.book(conn, "a", "x.1", {"m0": ("GPU-0",)}, at=now)
    for place in ("a", "b"):
        with pytest.raises(devices.DeviceTaken), db.write() as conn:
            devices.book(conn, place, "y.1", {"m0": ("GPU-0",)}, at=now)
    assert [row.attempt for row in devices.list_devices(db)] == ["x.1", None]


@pytest.mark.parametrize("fault", ["it does not answer", None])
def test_a_gpu_that_could_not_be_read_when_it_was_given_back_is_not_free(db: Database, fault: str | None) -> None:
    now, gpus = submitting.datetime.now(submitting.UTC), [Device(id="GPU-0", machine="m0")]
    with db.write() as conn:
        devices.record(conn, "a", "gpu", gpus, at=now)
        devices.book(conn, "a", "x.1", {"m0": ("GPU-0",)}, at=now)
        if fault is not None:
            devices.record_fault(conn, "a", fault)
        else:
            devices.record(conn, "a", "gpu", [replace(gpus[0], used="its memory cannot be read: ERR!")], at=now)
        devices.give_back(conn, "x.1")
    with pytest.raises(devices.DeviceTaken), db.write() as conn:
        devices.book(conn, "a", "y.1", {"m0": ("GPU-0",)}, at=now)
    with db.write() as conn:
        devices.record(conn, "a", "gpu", gpus, at=now)
        devices.book(conn, "a", "y.1", {"m0": ("GPU-0",)}, at=now)


def test_a_gpu_that_another_program_uses_is_waited_for(db: Database, tmp_path: Path) -> None:
    target = Shared(1)
    target.used["GPU-0"] = "process 77 holds 900 MiB"
    job = _submit(db, target, "j")
    with _driven(db, tmp_path, target):
        wait(lambda: "process 77 holds 900 MiB" in _find(db, job).message)
        assert target.started == []
        target.used.clear()
        wait(lambda: _runs(db, job))
        target.ends.add(job.id)
        wait(lambda: _find(db, job).status.final)


def test_gpus_that_are_no_longer_listed_at_all_stay_and_are_not_given_out(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_PATIENCE_S", 60.0)
    target, place = Shared(2), find_place("local")
    context = Context(
        db=db, home=tmp_path, load=target.load, token="a", storage=open_store(tmp_path / "storage"), kinds={}
    )
    job = _submit(db, target, "j")
    with db.write() as conn:
        leases.take(conn, "a", owner=f"{socket.gethostname()} 1")
        listed = [Device(id=gpu, machine="m0") for gpu in target.gpus]
        devices.record(conn, place, "gpu", listed, at=context.now())
    target.gpus = []  # a driver that was updated, an nvidia-smi that left PATH
    asyncio.run(dispatch.Dispatcher(context).decide())
    assert not dispatch.may_start(context, _find(db, job))
    gone = f"gone since {context.now():%Y-%m-%d}"
    assert "nvidia-smi lists none of the 2 GPUs seen before" in _find(db, job).message
    assert [str(row.used)[:21] for row in devices.list_devices(db)] == [gone] * 2  # `trainmaster nodes` shows it
    assert context.kinds == {place: frozenset({"gpu"})}  # so that it is asked every two seconds
    target.gpus = ["GPU-0"]  # one is broken for good: it is forgotten
    asyncio.run(dispatch.Dispatcher(context).decide())
    assert [(row.device, row.used) for row in devices.list_devices(db)] == [("GPU-0", None)]
    assert dispatch.may_start(context, _find(db, job))


def test_gpus_that_were_never_listed_are_not_known_to_be_none(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_PATIENCE_S", 60.0)
    target, place = Shared(2), find_place("local")
    context = Context(
        db=db, home=tmp_path, load=target.load, token="a", storage=open_store(tmp_path / "storage"), kinds={}
    )
    target.fault = "nvidia-smi ended with 9: it could not communicate with the driver"
    job, large = _submit(db, target, "j"), _submit(db, target, "large", gpus=2)
    without = _submit(db, target, "without", env={"CUDA_VISIBLE_DEVICES": ""})
    with db.write() as conn:
        leases.take(conn, "a", owner=f"{socket.gethostname()} 1")

    def decide() -> list[bool]:
        asyncio.run(dispatch.Dispatcher(context).decide())
        return [dispatch.may_start(context, _find(db, each)) for each in (job, large, without)]

    assert decide() == [False, False, True]
    says = f"it needs 1 GPU; machines closed (m0: its GPUs are not known: {target.fault})"
    assert _find(db, job).message == says
    assert [line.reason for line in queue_page.read(db).jobs if line.job_id == job.id] == [says]
    (machine,) = machines_page.read(db).machines
    assert (machine.machine, machine.closed) == ("m0", f"its GPUs are not known: {target.fault}")
    target.bare = ["m1"]  # an ssh host beside it has none: by slots, on that one (targets/ssh/slots.py)
    assert decide() == [True, True, True]
    target.fault = None
    assert decide() == [True, False, True]
    assert [row.device for row in devices.list_devices(db, place=place)] == ["GPU-0", "GPU-1"]
    assert [line.closed for line in machines_page.read(db).machines] == [None]


def test_a_machine_that_does_not_say_what_it_has_holds_up_no_other_job(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_ASK_S", 0.0)
    monkeypatch.setattr(dispatch, "_LATE_S", 600.0)
    target, hung = Shared(1), asyncio.Event()
    first = _submit(db, target, "first")
    with _driven(db, tmp_path, target):
        wait(lambda: _runs(db, first))
        target.before["devices"] = lambda _: hung.wait()  # type: ignore[assignment,return-value]
        second = _submit(db, target, "second")  # the same machine, from the rows of before
        target.ends.add(first.id)
        wait(lambda: _runs(db, second))
        target.ends.add(second.id)
        wait(lambda: _find(db, second).status.final)


def test_nobody_starts_on_gpus_that_were_asked_for_too_long_ago(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_REST", 0.0)
    target, place = Shared(1), find_place("local")
    context = Context(
        db=db,
        home=tmp_path,
        load=target.load,
        token="a",
        storage=open_store(tmp_path / "storage"),
        kinds={place: frozenset({"gpu"})},
    )
    job = _submit(db, target, "j")
    with db.write() as conn:
        leases.take(conn, "a", owner=f"{socket.gethostname()} 1")
        devices.record(conn, place, "gpu", [Device(id="GPU-0", machine="m0")], at=context.now())

    async def go() -> None:
        answers = asyncio.Event()
        target.before["devices"] = lambda _: answers.wait()  # type: ignore[assignment,return-value]
        dispatcher = dispatch.Dispatcher(context)
        monkeypatch.setattr(dispatch, "_LATE_S", 0.0)
        assert await dispatcher.decide() == {job.id}
        assert not dispatch.may_start(context, _find(db, job))
        assert "no answer came yet" in _find(db, job).message
        answers.set()
        monkeypatch.setattr(dispatch, "_PATIENCE_S", 60.0)
        assert await dispatcher.decide() == frozenset()
        assert dispatch.may_start(context, _find(db, job))

    asyncio.run(go())


@pytest.mark.proof
@pytest.mark.parametrize("project", ["default", "secret"])
def test_a_preempted_job_goes_back_into_the_queue_and_uses_up_no_attempt(
    db: Database, tmp_path: Path, project: str
) -> None:
    target = Shared(1)
    victim = _submit(db, target, "victim", queue={"preemptible": True, "priority": "low"})
    with _driven(db, tmp_path, target, rules=Rules(min_run_s=0.0)):
        wait(lambda: _runs(db, victim))
        urgent = _submit(db, target, "urgent", project=project, queue={"priority": "urgent"})
        wait(lambda: _runs(db, urgent))
        stopped = _find(db, victim)
        assert (stopped.stage, stopped.reason) == (Stage.QUEUED, Reason.PREEMPTED)
        assert attempts.list_attempts(db, victim.id)[0].stop_reason is Reason.PREEMPTED
        who = f"job {urgent.id} (urgent)" if project == victim.project else "a job of another project"
        assert target.told == [f"preempted: stopped for {who}, which has a higher priority"]
        target.ends |= {urgent.id, victim.id}
        wait(lambda: _find(db, victim).status.final)
    assert (_find(db, victim).status, _find(db, victim).attempts) == (Status.COMPLETED, 2)
    assert victim.spec.limits.attempts == 1
    assert target.faults == []


def test_quota_and_longest_wait_hold(db: Database, tmp_path: Path) -> None:
    target = Shared(2)
    with db.write() as conn:
        devices.set_share(conn, "lab", quota=1)
    first = _submit(db, target, "one", project="lab")
    with _driven(db, tmp_path, target):
        wait(lambda: _runs(db, first))
        # Long enough that a pass says why it waits before its time is over, on a busy machine too.
        second = _submit(db, target, "two", project="lab", queue={"max_wait_s": 3})
        wait(lambda: _find(db, second).status.final)
        target.ends.add(first.id)
        wait(lambda: _find(db, first).status.final)
    assert _find(db, second).reason is Reason.TIMED_OUT
    assert "quota of 1 GPU" in _find(db, second).message
    assert target.started == [f"{first.id}.1"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"gpus": 3}, "3 GPUs on one machine, and the largest has 2: it could never start; it would fit at ssh:lab"),
        ({"gpus": 2, "project": "small"}, "2 are more than the quota of project small, 1: it could never start"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "1"}}, "the queue assigns the GPUs"),
    ],
)  # fmt: skip
def test_submit_says_at_once_that_a_job_can_never_start_and_where_it_would(
    db: Database, more: dict[str, Any], says: str
) -> None:
    target, now = Shared(2), submitting.datetime.now(submitting.UTC)
    with db.write() as conn:
        for place, count in ((find_place("local"), 2), ("ssh:lab", 8)):
            listed = [Device(id=f"GPU-{place}-{number}", machine=place) for number in range(count)]
            devices.record(conn, place, "gpu", listed, at=now)
        devices.set_share(conn, "small", quota=1)
    with pytest.raises(SpecError, match=says):
        _submit(db, target, "j", **more)
    _submit(db, target, "j", gpus=2)
    _submit(db, target, "j", gpus=16, env={"CUDA_VISIBLE_DEVICES": ""})  # it uses none, and nobody limits slots


_SMI = """#!/bin/sh
case "$1" in
-L) printf 'GPU 0: NVIDIA H200 (UUID: GPU-aa-0)\\nGPU 1: NVIDIA H200 (UUID: GPU-aa-1)\\n';;
--query-compute-apps=*) cat {folder}/apps;;
--query-gpu=*) printf 'GPU-aa-0, 4\\nGPU-aa-1, 4\\n';;
esac
"""


@pytest.mark.proof
@pytest.mark.spawns
def test_local_jobs_see_the_gpus_that_they_were_given(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "apps").write_text("GPU-aa-0, 1, 900\n")  # process 1 is none of ours
    program = folder / "nvidia-smi"
    program.write_text(_SMI.format(folder=folder))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{sys.exec_prefix}/bin:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", _SOURCE)
    code = "import os, pathlib; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
    spec = {"name": "see", "command": [sys.executable, "-c", code], "preflight": {"level": 0}}
    first = submitting.submit(db, parse_spec(spec))
    second = submitting.submit(db, parse_spec({**spec, "resources": {"processes_per_node": 2}}))
    with driven(db, tmp_path, open_store(tmp_path / "storage")):
        wait(lambda: _find(db, first).status.final and "process 1 holds 900 MiB" in _find(db, second).message)
        (folder / "apps").write_text("")
        wait(lambda: _find(db, second).status.final)
    logs = [(tmp_path / "jobs" / job.id / "attempts" / "1" / "rank-0.log").read_text() for job in (first, second)]
    assert logs == ["GPU-aa-1\n", "GPU-aa-0,GPU-aa-1\n"]
    plan = json.loads((tmp_path / "jobs" / first.id / "attempts" / "1" / "plan.json").read_text())
    assert plan["gpus"] == ["GPU-aa-1"]
