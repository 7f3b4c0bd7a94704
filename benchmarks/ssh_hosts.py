"""Concurrent jobs, one on each of many hosts behind sshd on loopback; all run at once before the first may end.

    PYTHONPATH=tests python benchmarks/ssh_hosts.py --hosts 64        make ssh-64
    PYTHONPATH=tests python benchmarks/ssh_hosts.py --hosts 5         as in the tests

Prints how many completed, the memory of the control plane per job, and that of the programs of a host: the server of
the connection and the agent. Ends with 1 unless every job has completed and stored its output.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter
from pathlib import Path

from sshd import bench
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Status
from trainmaster.storage import open_store
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.migrate import open_database


def own_mib() -> float:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def hosts_mib(folder: Path) -> float:
    """Memory of the servers of connections and agents whose home is below a folder, shared pages counted once."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, StopIteration):
            command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
            if f"HOME={folder}/".encode() not in environment:
                continue
            if b"trainmaster.remote.node_server" in command or b"trainmaster.agent" in command:
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return total / 1024


async def measure(db: Database, home: Path, target: str, jobs: int) -> bool:
    gate, stop = home / "gate", asyncio.Event()
    script = f"until [ -e {gate} ]; do sleep 0.2; done; echo $TRAINMASTER_ATTEMPT > $TRAINMASTER_OUTPUTS/done"
    spec = parse_spec({"name": "one", "target": target, "command": ["sh", "-c", script], "preflight": {"level": 0}})
    before, began = own_mib(), time.monotonic()
    loop = asyncio.create_task(reconcile.run(db, home, stop=stop))
    ids = [(await asyncio.to_thread(submitting.submit, db, spec)).id for _ in range(jobs)]

    def states() -> Counter[Status]:
        return Counter(row.status for one in ids if (row := find_job(db, one)) is not None)

    try:
        while states()[Status.PENDING]:  # noqa: ASYNC110 (a database has no event)
            await asyncio.sleep(0.2)
        found = states()
        print(f"{found[Status.RUNNING]} of {jobs} run at once after {time.monotonic() - began:.1f} s")
        print(f"memory of the control plane: {(own_mib() - before) / jobs:.2f} MiB per job over {before:.0f} MiB")
        print(f"memory on a host: {await asyncio.to_thread(hosts_mib, home.parent) / jobs:.1f} MiB, server and agent")
        gate.touch()
        while any(not status.final for status in states()):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    finally:
        stop.set()
        await loop
    stored = {item.path for item in open_store(home / "storage").list() if item.path.endswith("/outputs/done")}
    kept = sum(f"jobs/{one}/outputs/done" in stored for one in ids)
    print(f"{states()[Status.COMPLETED]} of {jobs} completed, {kept} outputs stored, {time.monotonic() - began:.1f} s")
    return states()[Status.COMPLETED] == kept == jobs == found[Status.RUNNING]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=64)
    args = parser.parse_args()
    with bench("ssh-hosts", args.hosts) as (_, home, target):
        db = open_database(home / "trainmaster.db")
        done = asyncio.run(measure(db, home, target, args.hosts))
        db.close()
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
