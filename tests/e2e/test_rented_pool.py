"""Jobs on machines of a static pool, behind real OpenSSH servers: rented, used, returned, never leaked."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sshd import Lab, lab, needs_sshd
from trainmaster import targets
from trainmaster.control import reap, reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status
from trainmaster.store import instances
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job, list_transitions
from trainmaster.store.rows import JobRow
from trainmaster.targets._provider import LaunchRequest
from trainmaster.targets.pool import Pool

pytestmark = [pytest.mark.spawns, needs_sshd, pytest.mark.timeout(300)]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Lab]:
    (tmp_path / "lab").mkdir()
    with lab(tmp_path / "lab") as made:
        for name in ("n1", "n2"):
            made.start(name, own_key=True, known=False)
        made.wait()
        yield made


@pytest.fixture
def pool(machines: Lab, tmp_path: Path) -> Path:
    hosts = [
        {"host": "127.0.0.1", "port": one.port, "gpus": 1, "gpu": "H100 80 GB", "price_per_hour": price}
        for one, price in zip(machines.hosts, (3.0, 2.0), strict=True)
    ]
    access = {"key": str(machines.key), "python": sys.executable, "lost_after_s": 2.0}
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump({"access": access, "hosts": hosts}))
    return path


def submit(db: Database, pool: Path, script: str, **spec: Any) -> JobRow:
    document = {"name": "a", "target": f"pool:{pool}", "command": ["sh", "-c", script], "preflight": {"level": 0}}
    return submitting.submit(db, parse_spec({**document, **spec}))


def drive(db: Database, home: Path, *jobs: JobRow, also: Callable[[], None] = lambda: None) -> list[JobRow]:
    async def go() -> list[JobRow]:
        stop = asyncio.Event()
        loop = asyncio.create_task(reconcile.run(db, home, stop=stop, tick_s=0.2))
        try:
            while True:
                now = [find_job(db, job.id) for job in jobs]
                assert all(job is not None for job in now)
                if all(job is not None and job.status.final for job in now):
                    return [job for job in now if job is not None]
                also()
                await asyncio.sleep(0.05)
        finally:
            stop.set()
            await loop

    return asyncio.run(go())


def rented(pool: Path) -> dict[str, str]:
    state = pool.with_name("pool.yaml.rented")
    found: dict[str, str] = json.loads(state.read_text()) if state.exists() else {}
    return found


def test_a_job_rents_a_machine_uses_it_and_returns_it(db: Database, tmp_path: Path, machines: Lab, pool: Path) -> None:
    job = submit(db, pool, 'echo hello; echo 7 > "$TRAINMASTER_OUTPUTS/x"')
    (ended,) = drive(db, tmp_path, job)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    (row,) = instances.list_of_attempt(db, f"{job.id}.1")
    assert (row.state, row.price_cents_per_hour) == ("gone", 200.0), "the cheaper one"
    assert row.provider_id == f"127.0.0.1:{machines.hosts[1].port}"
    assert row.launched_at is not None and row.gone_at is not None and rented(pool) == {}
    stages = [str(move.stage_to) for move in list_transitions(db, job.id)]
    assert [stage for stage in stages if stage in ("provisioning", "connecting", "staging")] == [
        "provisioning", "connecting", "staging",
    ]  # fmt: skip
    assert (tmp_path / "storage" / "jobs" / job.id / "outputs" / "x").read_text() == "7\n"
    assert not any(host.connections() for host in machines.hosts), "SSH connections are closed"


@pytest.mark.matrix(one_in=4, of="machines of a pool")
def test_two_nodes_are_rented_together_and_returned_together(
    db: Database, tmp_path: Path, pool: Path, machines: Lab
) -> None:
    document = yaml.safe_load(pool.read_text())
    for host in document["hosts"]:
        host["price_per_hour"] = 2.0
    pool.write_text(yaml.safe_dump(document))
    job = submit(db, pool, "echo $RANK $WORLD_SIZE", resources={"nodes": 2})
    (ended,) = drive(db, tmp_path, job)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    assert len(instances.list_of_attempt(db, f"{job.id}.1")) == 2 and rented(pool) == {}


@pytest.mark.matrix(one_in=4, of="machines of a pool")
@pytest.mark.parametrize("ending", ["failure", "cancel"])
def test_the_machine_is_returned_after(db: Database, tmp_path: Path, pool: Path, ending: str) -> None:
    job = submit(db, pool, "exit 3" if ending == "failure" else "echo up; sleep 600")

    def cancel() -> None:
        now = find_job(db, job.id)
        if ending == "cancel" and now is not None and now.stage == "running" and not now.cancel_requested:
            submitting.cancel(db, job.id)

    (ended,) = drive(db, tmp_path, job, also=cancel)
    expected = {"failure": (Status.FAILED, Reason.SCRIPT_FAILED), "cancel": (Status.CANCELLED, Reason.USER_CANCELLED)}
    assert (ended.status, ended.reason) == expected[ending], ended.message
    assert rented(pool) == {} and instances.list_of_attempt(db, f"{job.id}.1")[0].state == "gone"


@pytest.mark.matrix(one_in=4, of="machines of a pool")
def test_jobs_wait_for_capacity_and_one_that_may_not_wait_fails_with_its_reason(
    db: Database, tmp_path: Path, pool: Path
) -> None:
    jobs = [submit(db, pool, "sleep 1") for _ in range(3)]
    impatient = submit(db, pool, "true", rent={"types": ["host"], "regions": ["mars"]})
    ended = drive(db, tmp_path, *jobs, impatient)
    assert [job.status for job in ended[:3]] == [Status.COMPLETED] * 3, [job.message for job in ended]
    assert ended[3].reason is Reason.TARGET_ERROR and "unknown region mars" in ended[3].message
    assert rented(pool) == {}


@pytest.mark.matrix(one_in=4, of="machines of a pool")
def test_without_capacity_the_job_fails_as_no_capacity(db: Database, tmp_path: Path, pool: Path) -> None:
    taken = asyncio.run(_take_all(pool))
    job = submit(db, pool, "true", rent={"wait_minutes": 0.01})
    (ended,) = drive(db, tmp_path, job)
    assert (ended.status, ended.reason) == (Status.FAILED, Reason.NO_CAPACITY)
    assert "sold out" in ended.message and len(rented(pool)) == len(taken)


async def _take_all(pool: Path) -> list[str]:
    return [await Pool(pool).launch(LaunchRequest(name=f"somebody-{n}", kind="host", region="pool")) for n in range(2)]


@pytest.mark.matrix(one_in=4, of="machines of a pool")
def test_what_is_ours_and_not_wanted_is_returned_and_foreign_machines_stay(
    db: Database, tmp_path: Path, pool: Path
) -> None:
    job = submit(db, pool, "true")
    assert drive(db, tmp_path, job)[0].status is Status.COMPLETED
    label = targets.Label(attempt=f"{job.id}.1", home=targets.home_mark(tmp_path))
    asyncio.run(Pool(pool).launch(LaunchRequest(name=label.name, kind="host", region="pool")))
    asyncio.run(Pool(pool).launch(LaunchRequest(name="of somebody", kind="host", region="pool")))

    async def go() -> None:
        stop = asyncio.Event()
        loop = asyncio.create_task(reconcile.run(db, tmp_path, stop=stop, tick_s=0.2))
        while label.name in rented(pool).values():  # noqa: ASYNC110 (another program's file)
            await asyncio.sleep(0.05)
        stop.set()
        await loop

    asyncio.run(go())
    assert list(rented(pool).values()) == ["of somebody"]


def test_two_homes_have_two_marks_that_stay(tmp_path: Path) -> None:
    marks = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        targets.make_home_mark(tmp_path / name)
        marks.append(targets.home_mark(tmp_path / name))
        targets.make_home_mark(tmp_path / name)
        assert targets.home_mark(tmp_path / name) == marks[-1]
    assert marks[0] != marks[1]


def test_reap_needs_no_database_and_leaves_other_homes_and_foreign_machines(tmp_path: Path, pool: Path) -> None:
    attempt = "0b6c5c4e-53ad-4f0e-9c57-6a4f1f3c2d10.1"
    ours = targets.Label(attempt=attempt, home=targets.home_mark(tmp_path)).name
    other = targets.Label(attempt=attempt.replace("0b6c", "1b6c"), home="ffffffff").name

    async def go() -> tuple[list[reap.Leftover], list[reap.Leftover]]:
        for name in (ours, other):
            await Pool(pool).launch(LaunchRequest(name=name, kind="host", region="pool"))
        found = await reap.find(None, tmp_path, [f"pool:{pool}"])
        everybody = await reap.find(None, tmp_path, [f"pool:{pool}"], any_home=True)
        for left in found:
            if left.ours:
                await reap.end(None, left)
        return found, everybody

    found, everybody = asyncio.run(go())
    assert [(left.attempt, left.ours) for left in found] == [(attempt, True), (attempt.replace("0b6c", "1b6c"), False)]
    assert all(left.ours for left in everybody)
    assert list(rented(pool).values()) == [other]
