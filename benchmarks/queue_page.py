"""The queue with many waiting jobs: one pass, and what `GET /v1/queue` and the page take while a server decides.

    PYTHONPATH=src:tests .venv/bin/python benchmarks/queue_page.py [--jobs 10000] [--machines 125] [--asks 200]

A database with the jobs of twenty projects and 1,000 GPUs, all held; the queue is decided again and again in the same
process, as a server does. The ratio is that of the 95th percentile to its goal of 100 ms. Beside it what an answer
takes where the order has to be decided first, as it was before the order was kept; and, as a measure of the machine and
of what else it does, `GET /api/hello`, which reads nothing, asked in turns with the others.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import delete
from starlette.testclient import TestClient

from trainmaster.control.context import Context
from trainmaster.control.queueing.dispatch import Dispatcher
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Stage
from trainmaster.queueing.state import Device, DeviceListing
from trainmaster.storage import open_store
from trainmaster.store import attempts, jobs, leases, tables
from trainmaster.store.capacity import devices
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.targets import find_place
from trainmaster.web.app import create_app, warm_up
from trainmaster.web.kept import Kept
from web.conftest import BASE, LOCAL

GOAL_S = 0.100


class Machines:
    """A place whose machines say at once what they have."""

    def __init__(self, listed: list[Device]) -> None:
        self._listed = listed

    async def list_devices(self) -> DeviceListing:
        machines = list({device.machine: None for device in self._listed})
        return DeviceListing(devices={"gpu": self._listed}, answered=machines)

    def list_machines(self) -> list[str]:
        return []


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--jobs", type=int, default=10_000)
    options.add_argument("--machines", type=int, default=125)
    options.add_argument("--asks", type=int, default=200)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="queue-page-") as folder:
        db = open_database(Path(folder) / "trainmaster.db")
        listed = furnish(db, jobs_count=chosen.jobs, machines=chosen.machines)
        measure(db, Path(folder), Machines(listed), asks=chosen.asks)
        db.close()


def furnish(db: Database, *, jobs_count: int, machines: int) -> list[Device]:
    """Waiting jobs of 1 to 8 GPUs; on every machine a job that holds it whole."""
    rng, now, place = random.Random(7), datetime.now(UTC), find_place("local")
    listed = [Device(id=f"GPU-{m}-{k}", machine=f"m{m}", model="H200") for m in range(machines) for k in range(8)]
    with db.write() as conn:
        devices.record(conn, place, "gpu", listed, at=now)
        for m in range(machines):
            job = str(uuid.UUID(int=rng.getrandbits(128)))
            spec = parse_spec({"name": f"r{m}", "command": ["x"], "resources": {"processes_per_node": 8}})
            jobs.insert_job(conn, job, spec, at=now)
            attempt = attempts.insert_attempt(conn, job, 1, handle={}, at=now)
            jobs.advance(conn, job, seen=Stage.QUEUED, to=Stage.RUNNING, at=now)
            devices.book(conn, place, attempt, {f"m{m}": tuple(f"GPU-{m}-{k}" for k in range(8))}, at=now)
        for n in range(jobs_count):
            spec = parse_spec({
                "name": f"j{n}", "command": ["python", "train.py", f"--seed={n}"], "project": f"p{n % 20}",
                "resources": {"processes_per_node": rng.choice((1, 2, 4, 8))},
                "queue": {"priority": rng.choice(("low", "normal", "high", "urgent"))},
            })  # fmt: skip
            at = now - timedelta(seconds=rng.uniform(0, 200_000))
            jobs.insert_job(conn, str(uuid.UUID(int=rng.getrandbits(128))), spec, at=at)
        leases.take(conn, "a", owner=f"{socket.gethostname()} {os.getpid()}")
    return listed


def measure(db: Database, home: Path, target: Machines, *, asks: int) -> None:
    context = Context(
        db=db, home=home, load=lambda _: target, token="a", storage=open_store(home / "storage"), kinds={}  # type: ignore[arg-type]
    )  # fmt: skip
    passes: list[float] = []
    load = os.getloadavg()[0]
    stop = threading.Event()

    async def decide() -> None:
        dispatcher, renewed = Dispatcher(context), 0.0
        while not stop.is_set():
            begin = time.perf_counter()
            if begin - renewed > leases.LENGTH_S / 3:  # as a server does
                with db.write() as conn:
                    leases.take(conn, "a", owner=f"{socket.gethostname()} {os.getpid()}")
                renewed = begin
            await dispatcher.decide()
            passes.append(time.perf_counter() - begin)
            await asyncio.sleep(0.5)  # as often as a server ticks
        await dispatcher.close()

    app = create_app(db, home, reconcile=False)
    with TestClient(app, base_url=BASE, client=LOCAL) as client:

        def ask(path: str) -> Callable[[], None]:
            def go() -> None:
                app.state.kept = Kept()  # each answer is made, none is kept
                assert client.get(path).status_code == 200

            return go

        fresh = clock(ask("/v1/queue"), 3)
        warm_up()  # as a server does
        worker = threading.Thread(target=lambda: asyncio.run(decide()))
        worker.start()
        while not passes or not context.kinds:
            time.sleep(0.1)
        paths = ("/api/hello", "/v1/queue", "/queue")
        rounds = [[clock(ask(path), 1)[0] for path in paths] for _ in range(asks)]
        stop.set()
        worker.join()
    with db.write() as conn:
        conn.execute(delete(tables.queue_orders))
    print(f"the queue decided for each who asks: {sorted(fresh)[1]:.3f} s")
    print(f"a tick of the queue: slowest {max(passes):.3f} s, median {sorted(passes)[len(passes) // 2]:.3f} s")
    trivial_s = 0.0
    for path, times in zip(paths, zip(*rounds, strict=True), strict=True):
        p50, p95 = (sorted(times)[int(len(times) * part)] for part in (0.5, 0.95))
        trivial_s = trivial_s or p50
        goal = f"{p95 / GOAL_S:.2f} of the goal of 100 ms, p50 {p50 / trivial_s:.1f} × that of {paths[0]}"
        print(f"GET {path}: p50 {1000 * p50:.1f} ms, p95 {1000 * p95:.1f} ms; {goal}")
    print(f"load average {os.getloadavg()[0]:.1f} (it was {load:.1f} before)")


def clock(ask: Callable[[], None], times: int) -> list[float]:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - begin)
    return taken


if __name__ == "__main__":
    main()
