"""Seconds from submit to running on a host behind sshd on loopback, one job after another.

    PYTHONPATH=tests python benchmarks/ssh_start.py            50 jobs
    PYTHONPATH=tests python benchmarks/ssh_start.py --jobs 10

The control plane runs as in `trainmaster serve`, over SQLite and with its usual pause between two looks (0.5 s). The
first job opens the connection and sends the node half; the others find both. Running means that the agent holds its
lock and the workload may start: the jobs have no pre-flight checks.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path

from sshd import bench
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Status
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.migrate import open_database


async def measure(db: Database, home: Path, target: str, jobs: int) -> list[float]:
    """Seconds of each job, in order."""
    stop, took = asyncio.Event(), []
    loop = asyncio.create_task(reconcile.run(db, home, stop=stop))
    spec = parse_spec({"name": "start", "target": target, "command": ["sleep", "0.5"], "preflight": {"level": 0}})
    try:
        for _ in range(jobs):
            began = time.monotonic()
            job = await asyncio.to_thread(submitting.submit, db, spec)
            while (now := find_job(db, job.id)) is not None and now.status is Status.PENDING:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            took.append(time.monotonic() - began)
            while (now := find_job(db, job.id)) is not None and not now.status.final:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert now is not None and now.status is Status.COMPLETED, now
    finally:
        stop.set()
        await loop
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=50)
    args = parser.parse_args()
    with bench("ssh-start", 1) as (_, home, target):
        db = open_database(home / "trainmaster.db")
        used = time.process_time()
        first, *others = asyncio.run(measure(db, home, target, args.jobs))
        used = time.process_time() - used
        db.close()
    others.sort()
    print(f"first job, connection and package included: {first:.2f} s")
    print(f"{len(others)} others: p50 {statistics.median(others):.2f} s, most {others[-1]:.2f} s")
    print(f"CPU time of the control plane: {1000 * used / args.jobs:.0f} ms per job")


if __name__ == "__main__":
    main()
