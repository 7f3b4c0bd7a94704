"""Rate at which a backlog of events becomes rows on one core, and peak memory for a file of a gigabyte.

    python benchmarks/ingest.py                    200,000 STEP events into SQLite, three times
    python benchmarks/ingest.py --iterations       and as many ITERATION starts and ends, numbered at the top and in
                                                   `data`; also one job with 1 iteration; with the longest transaction
    python benchmarks/ingest.py --bytes 1000000000 one file of this size; peak memory, sampled on the way
    python benchmarks/ingest.py --url postgresql+psycopg://…

Measured from the read of the file to the commit with its fsync. The process is pinned to one core, threads and all.
`cpu` is its processor time, `wall` the time that passed: on a shared machine only the first describes this program.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from trainmaster.control.ingest import ingest
from trainmaster.core.spec import JobSpec
from trainmaster.store import attempts, jobs
from trainmaster.store.database import Connection, Database
from trainmaster.store.migrate import open_database

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200_000, help="events of the backlog")
    parser.add_argument("--bytes", type=int, help="instead: one file of about so many bytes, with memory sampled")
    parser.add_argument("--iterations", action="store_true", help="also lines that become records of iterations")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", help="database; not stated: SQLite in a folder that is removed afterwards")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})
    with tempfile.TemporaryDirectory(prefix="ingest-", dir=Path.cwd()) as name:
        file = Path(name) / "events.jsonl"
        kinds = ("plain", "top", "data", "one") if options.iterations else ("plain",)
        for kind in kinds:
            _run(options, file, Path(name), kind)


def _run(options: argparse.Namespace, file: Path, folder: Path, kind: str) -> None:
    count = _write(file, events=options.events, size=options.bytes, kind=kind)
    size = f"{file.stat().st_size / 1e6:,.0f} MB"
    print(f"{kind}: {count:,} events, {size}; core {options.core}, load {os.getloadavg()[0]:.1f}")
    for number in range(1 if options.bytes else options.rounds):
        db = open_database(options.url or folder / f"{kind}-{number}.db")
        try:
            asyncio.run(_measure(db, file, count, size=file.stat().st_size, sampled=options.bytes is not None))
        finally:
            db.close()


def _write(file: Path, *, events: int, size: int | None, kind: str) -> int:
    """Lines as our trainer writes them; or starts and ends of iterations, numbered as `kind` names it."""
    start, count, written = datetime(2026, 1, 1, tzinfo=UTC), 0, 0
    with file.open("wb") as out:
        while written < size if size else count < events:
            ts = (start + timedelta(seconds=count * 0.25)).isoformat(timespec="microseconds").replace("+00:00", "Z")
            data = {
                "step": count, "loss": 4.0 / (1 + count / 1000), "lr": 3e-4, "grad_norm": 1.234567,
                "tokens_per_s": 298_000.5, "step_s": 0.25, "mfu": 0.463, "memory_gib": 71.2,
            }  # fmt: skip
            line = {"v": 1, "ts": ts, "seq": count, "phase": "STEP", "event": "metrics", "data": data}
            if kind != "plain":
                number = 1 if kind == "one" else count // 2
                data = {"lr": 3e-4, "batch": 64} if count % 2 == 0 else {"duration": 1.5}
                place = {"iteration": number} if kind == "top" else {}
                inside = {"iteration": number} if kind == "data" else {}
                line |= {"phase": "ITERATION", "event": "end" if count % 2 else "start", **place}
                line["data"] = {**data, **inside}
            written += out.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            count += 1
    return count


async def _measure(db: Database, file: Path, count: int, *, size: int, sampled: bool) -> None:
    job_id, at = str(uuid.uuid4()), datetime.now(UTC)
    with db.write() as conn:
        jobs.insert_job(conn, job_id, JobSpec(name="backlog", command=("true",)), at=at)
        attempt = attempts.insert_attempt(conn, job_id, 1, handle={}, at=at)
    tenth, next_sample = size // 10, 0
    with file.open("rb") as source:

        async def read(offset: int, limit: int) -> bytes:
            nonlocal next_sample
            if sampled and offset >= next_sample:
                print(f"  at {offset / 1e6:>5,.0f} MB: {_resident() / MIB:.0f} MiB resident", flush=True)
                next_sample += tenth
            source.seek(offset)
            return source.read(limit)

        longest = _watch_writes(db)
        cpu, wall = time.process_time(), time.monotonic()
        while not await ingest(db, attempt, read, zone=UTC):
            pass
        cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    print(
        f"  {count / cpu:>9,.0f} events/s of cpu, {count / wall:>9,.0f} of wall ({cpu:.1f} s, {wall:.1f} s); "
        f"longest write transaction {1000 * max(wall for wall, _ in longest):.0f} ms, "
        f"{1000 * max(cpu for _, cpu in longest):.0f} ms of cpu",
        flush=True,
    )
    if sampled:
        print(f"  peak {_peak() / MIB:.0f} MiB")


def _watch_writes(db: Database) -> list[tuple[float, float]]:
    """Write transactions from the lock to the end of the commit: seconds that passed, and of the processor."""
    took = [(0.0, 0.0)]
    write = db.write

    @contextlib.contextmanager
    def measured() -> Iterator[Connection]:
        with write() as conn:
            began, cpu = time.monotonic(), time.thread_time()
            yield conn
        took.append((time.monotonic() - began, time.thread_time() - cpu))

    db.write = measured  # type: ignore[method-assign]
    return took


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main()
