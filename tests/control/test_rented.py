"""Rented machines whose cloud, clock or disk is against us: never two for one, and none that is paid for ever."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from control.scripted import GOOD, Scripted, at_once, take_over
from trainmaster.control import reconcile, rented, rented_sweep
from trainmaster.control import submit as submitting
from trainmaster.control.clock import Clock
from trainmaster.control.context import Context
from trainmaster.control.deadlines import Deadlines
from trainmaster.control.stage_handlers import handle_stage
from trainmaster.control.transitions import end_overdue
from trainmaster.core.errors import DiskFull, PathDenied, StorageUnreachable, TargetError, Unreachable, UsageError
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.storage import open_store
from trainmaster.store import attempts, instances, jobs, tables
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.rows import JobRow
from trainmaster.targets import Handle, Instance, InstanceState, LaunchRequest, Offer, Poll
from trainmaster.targets._provider import SshAccess, Timing
from trainmaster.targets._rented import Rented


class Cloud:
    """An account in memory: what is launched is listed `late` listings later."""

    name, access, timing = "lambda", SshAccess(), Timing(listing_s=0.0, settle_s=120.0)

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        self.launched: list[str] = []
        self.hidden = self.blind = self.wrong_key = False
        self.lacks: str | None = None
        self.answers = True
        self._ids = (f"{number:032x}" for number in itertools.count(1))

    async def list_offers(self) -> Sequence[Offer]:
        return [Offer(kind="gpu_1x", region="r", price_cents_per_hour=100.0, available=True, gpus=8)]

    async def list_instances(self) -> Sequence[Instance]:
        if self.blind:
            raise Unreachable("the listing fails")
        if self.wrong_key:
            raise TargetError("lambda: listInstances: wrong API key")
        return [] if self.hidden else list(self.instances.values())

    async def find_instance(self, instance_id: str) -> Instance | None:
        return self.instances.get(instance_id)

    async def list_regions(self) -> list[str]:
        return ["r", "sold-out"]

    def may_launch(self) -> bool:
        return True

    async def launch(self, request: LaunchRequest) -> str:
        if self.lacks is not None:
            raise UsageError(self.lacks)
        instance_id = next(self._ids)
        self.launched.append(request.name)
        self.instances[instance_id] = Instance(
            id=instance_id,
            name=request.name,
            state=InstanceState.ACTIVE,
            kind="gpu_1x",
            region="r",
            address="127.0.0.1",
        )
        if not self.answers:
            raise Unreachable("no answer")
        return instance_id

    async def terminate(self, ids: Sequence[str]) -> None:
        for instance_id in ids:
            self.instances.pop(instance_id, None)

    async def list_file_systems(self) -> Mapping[str, str]:
        return {}

    def describe(self, request: LaunchRequest) -> str:
        return request.name


class Boxes(Scripted):
    """The machines of a handle, as the script says."""

    def __init__(self) -> None:
        super().__init__(GOOD)
        self.refusal: TargetError | None = None

    async def release(self, handle: Handle) -> None:
        if self.refusal is not None:
            raise self.refusal
        await super().release(handle)

    async def list_files(self, handle: Handle) -> Any:
        if self.refusal is not None:
            raise self.refusal
        return await super().list_files(handle)

    async def close(self, handle: Handle) -> None:
        pass


class Target(Rented):
    def __init__(self, cloud: Cloud) -> None:
        super().__init__("lambda", lambda: cloud)
        self.boxes = Boxes()

    def _rented_ssh(self) -> Any:
        return self.boxes

    async def connect(self, handle: Handle, instances: Sequence[Instance]) -> Handle:
        hosts = [{"id": instance.id, "name": instance.id, "host": "h", "port": 22, "key": ""} for instance in instances]
        return {**handle, "nodes": [instance.id for instance in instances], "hosts": hosts}


class Time:
    """A wall clock that somebody sets, and one that nobody does."""

    def __init__(self) -> None:
        self.steady_s, self.offset_s = 1000.0, datetime.now(UTC).timestamp()

    def clock(self, home: Path) -> Clock:
        return Clock(home, wall=lambda: self.steady_s + self.offset_s, steady=lambda: self.steady_s, boot="b")


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


def begin(db: Database, target: Target, home: Path, clock: Clock | None = None, **spec: Any) -> tuple[Context, JobRow]:
    document = {"name": "a", "target": "lambda", "command": ["true"], "preflight": {"level": 0}, **spec}
    job = submitting.submit(db, parse_spec(document), load=lambda _: target)
    clock = clock or Clock()
    context = Context(
        db=db, home=home, load=lambda _: target, token=take_over(db), storage=open_store(home / "storage"),
        rest_s=at_once, deadlines=Deadlines(elapsed_s=clock.elapsed_s), now=clock.now,
    )  # fmt: skip
    return context, job


def again(db: Database, job: JobRow) -> JobRow:
    row = find_job(db, job.id)
    assert row is not None
    return row


async def drive(db: Database, target: Target, home: Path) -> JobRow:
    """Run a job to its end."""
    document = {"name": "a", "target": "lambda", "command": ["true"], "preflight": {"level": 0}}
    job, stop = submitting.submit(db, parse_spec(document), load=lambda _: target), asyncio.Event()
    loop = asyncio.create_task(reconcile.run(db, home, stop=stop, tick_s=0.02, load=lambda _: target))
    try:
        async with asyncio.timeout(60):
            while not again(db, job).status.final:  # noqa: ASYNC110 (a database has no event)
                await asyncio.sleep(0.05)
    finally:
        stop.set()
        await loop
    return again(db, job)


@pytest.mark.parametrize("step_s", [-7200.0, 7200.0])
def test_a_clock_that_is_set_while_a_launch_has_no_answer_launches_no_second(
    db: Database, tmp_path: Path, cloud: Cloud, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    time, target = Time(), Target(cloud)
    clock = time.clock(tmp_path)

    class Wall(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(time.steady_s + time.offset_s, tz=tz)

    monkeypatch.setattr("trainmaster.targets._rented.datetime", Wall)
    context, job = begin(db, target, tmp_path, clock)
    cloud.answers, cloud.hidden = False, True

    async def go() -> None:
        while again(db, job).stage is not Stage.PROVISIONING:
            await handle_stage(context, again(db, job))
        await handle_stage(context, again(db, job))  # the intent
        await target.listing()  # of before the step
        with pytest.raises(Unreachable):
            await handle_stage(context, again(db, job))
        time.offset_s += step_s
        clock.observe()
        time.steady_s += 5
        for _ in range(3):
            await handle_stage(context, again(db, job))
        assert len(cloud.launched) == 1, "its listing is 5 s old: it may still appear"
        cloud.hidden = False
        time.steady_s += 5
        for _ in range(3):
            await handle_stage(context, again(db, job))
        assert again(db, job).stage is not Stage.PROVISIONING and len(cloud.launched) == 1

    asyncio.run(go())


def test_a_launch_without_an_answer_that_never_appears_is_launched_again_under_another_name(
    db: Database, tmp_path: Path, cloud: Cloud
) -> None:
    time, target = Time(), Target(cloud)
    clock = time.clock(tmp_path)
    context, job = begin(db, target, tmp_path, clock)
    cloud.answers, cloud.hidden = False, True

    async def go() -> None:
        while not cloud.launched:
            try:
                await handle_stage(context, again(db, job))
            except Unreachable:
                break
        row = instances.list_of_attempt(db, f"{job.id}.1")[0]
        with db.write() as conn:
            instances.begin_launch(conn, row.nonce, at=clock.now())
        late = await target.listing()
        assert row.launched_at is not None
        late = type(late)(at=row.launched_at + timedelta(seconds=121), instances=late.instances)
        attempt = attempts.list_attempts(db, job.id)[-1]
        assert await rented._resolve(context, again(db, job), attempt, row, late, settle_s=120.0) is True
        cloud.answers, cloud.hidden = True, False
        while again(db, job).stage is Stage.PROVISIONING:
            await handle_stage(context, again(db, job))
        assert len(set(cloud.launched)) == 2
        assert await rented_sweep.sweep(context) >= 0  # the first one appeared after all
        assert [instance.name for instance in cloud.instances.values()] == cloud.launched[1:]

    asyncio.run(go())


def test_a_setting_that_a_launch_lacks_ends_the_job_with_a_sentence(db: Database, tmp_path: Path, cloud: Cloud) -> None:
    cloud.lacks = "lambda: no SSH key; run ssh-keygen"
    ended = asyncio.run(drive(db, Target(cloud), tmp_path))
    assert (ended.status, ended.reason) == (Status.FAILED, Reason.TARGET_ERROR)
    assert "run ssh-keygen" in (ended.message or "")
    assert {row.state for row in instances.list_of_attempt(db, f"{ended.id}.1")} == {"gone"}


def test_a_storage_that_fails_does_not_keep_a_rented_machine_for_hours(
    db: Database, tmp_path: Path, cloud: Cloud
) -> None:
    target = Target(cloud)
    context, job = begin(db, target, tmp_path)

    async def until(stage: Stage | None) -> None:
        for _ in range(40):
            if again(db, job).stage is stage:
                return
            await handle_stage(context, again(db, job))
        raise AssertionError(f"still {again(db, job).stage}")

    asyncio.run(until(Stage.COLLECTING))
    began, late = context.now(), timedelta()
    context = replace(context, now=lambda: began + late)

    def fail(tries: int) -> bool:
        with db.write() as conn:
            jobs.set_backoff(conn, job.id, until=None, tries=tries - 1, message="")
        return asyncio.run(end_overdue(context, again(db, job), StorageUnreachable("no bucket")))

    def told() -> list[str]:
        with db.read() as conn:
            return list(conn.execute(select(tables.outbox.c.topic)).scalars())

    late = timedelta(minutes=14)
    assert not fail(28) and "job.stalled" not in told()
    late = timedelta(minutes=16)
    assert not fail(32) and not fail(33) and told().count("job.stalled") == 1, "somebody may mend the storage"
    late = timedelta(hours=3)
    assert not fail(3), "it copied for hours, and failed for seconds"
    assert fail(121) and again(db, job).stage is Stage.RELEASING
    asyncio.run(until(None))
    assert cloud.instances == {} and "could be kept: no bucket" in (again(db, job).message or "")


def test_a_machine_that_still_boots_is_terminated_while_the_listing_fails(
    db: Database, tmp_path: Path, cloud: Cloud
) -> None:
    context, job = begin(db, Target(cloud), tmp_path)

    async def go() -> None:
        for _ in range(20):
            if cloud.launched:
                break
            await handle_stage(context, again(db, job))
        submitting.cancel(db, job.id)
        cloud.blind = True
        for _ in range(10):
            with contextlib.suppress(Unreachable):
                await handle_stage(context, again(db, job))
        assert len(cloud.launched) == 1 and cloud.instances == {}, "half an API works, and each minute is paid"
        assert again(db, job).stage is not None, "the job waits for the listing"
        cloud.blind = False
        for _ in range(10):
            if again(db, job).stage is not None:
                await handle_stage(context, again(db, job))
        assert again(db, job).status is Status.CANCELLED

    asyncio.run(go())


@pytest.mark.parametrize("refusal", [DiskFull("no space left"), PathDenied("read-only file system"), TargetError("no")])
def test_a_machine_that_refuses_every_request_is_returned(
    db: Database, tmp_path: Path, cloud: Cloud, refusal: TargetError
) -> None:
    target = Target(cloud)
    target.boxes.refusal = refusal

    ended = asyncio.run(drive(db, target, tmp_path))
    assert cloud.instances == {} and len(cloud.launched) == 1
    assert ended.status is Status.COMPLETED and str(refusal) in (ended.message or "")


def test_a_server_that_restarts_during_an_empty_listing_asks_for_its_machines_by_id(
    db: Database, tmp_path: Path, cloud: Cloud
) -> None:
    target = Target(cloud)
    context, job = begin(db, target, tmp_path)
    target.boxes.polls = [Poll(state=TargetState.UNKNOWN, note="no route")]

    async def until(stage: Stage | None, *, at_most: int = 20) -> None:
        for _ in range(at_most):
            if again(db, job).stage is stage:
                return
            with contextlib.suppress(Unreachable):
                await handle_stage(context, again(db, job))
        raise AssertionError(f"still {again(db, job).stage}")

    asyncio.run(until(Stage.CHECKING))
    cloud.hidden = True
    (machine,) = cloud.instances

    async def look() -> None:  # another event loop has seen no listing before, as a new process
        with pytest.raises(Unreachable, match="no route"):
            await handle_stage(context, again(db, job))

    asyncio.run(look())
    assert again(db, job).stage is Stage.CHECKING, "its machine runs, although the listing is empty"
    submitting.cancel(db, job.id)
    target.boxes.polls = [GOOD]
    asyncio.run(until(None, at_most=40))
    assert machine not in cloud.instances, "it is returned by its id"


def test_an_address_that_changed_is_looked_up(tmp_path: Path, cloud: Cloud) -> None:
    target = Rented("lambda", lambda: cloud)
    cloud.instances["m"] = Instance(
        id="m", name="n", state=InstanceState.ACTIVE, kind="gpu_1x", region="r", address="10.0.0.9"
    )
    host = {"id": "m", "name": "i-m", "host": "10.0.0.2", "port": 22, "key": "10.0.0.2 ssh-ed25519 AAAA\n"}
    handle = {"attempt": "x.1", "nodes": ["i-m"], "instances": [{"id": "m", "name": "n"}], "hosts": [host]}

    async def addresses() -> list[tuple[str, bytes]]:
        before = target._rented_ssh()._hosts_of(handle)
        assert await target._find_fate(handle) is None
        return [(host.host, key) for host, key in (*before, *target._rented_ssh()._hosts_of(handle))]

    key = b" ssh-ed25519 AAAA\n"
    assert asyncio.run(addresses()) == [("10.0.0.2", b"10.0.0.2" + key), ("10.0.0.9", b"10.0.0.9" + key)]


@pytest.mark.parametrize("fault", ["unknown region nowhere", "wrong API key"])
def test_a_region_or_key_that_is_wrong_ends_the_job_at_once_with_that_word(
    db: Database, tmp_path: Path, cloud: Cloud, fault: str
) -> None:
    region = "nowhere" if "region" in fault else "r"
    context, job = begin(db, Target(cloud), tmp_path, rent={"regions": [region]})

    fault_ends: list[str] = []

    async def go() -> None:
        for _ in range(12):
            if again(db, job).stage is None:
                return
            cloud.wrong_key = bool(cloud.launched) and "key" in fault and not fault_ends
            await handle_stage(context, again(db, job))
            if again(db, job).stage is Stage.RELEASING:
                fault_ends.append(fault)  # a machine that was launched is returned with the right key

    asyncio.run(go())
    row = again(db, job)
    assert (row.status, row.reason) == (Status.FAILED, Reason.TARGET_ERROR)
    assert fault in (row.message or "") and cloud.instances == {}
