"""How the control plane stands with many jobs at once: one process serves and reconciles, another asks and watches.

    python benchmarks/control_plane.py                    1,000 jobs, 3 minutes
    python benchmarks/control_plane.py --minutes 30       the figure that is promised
    python benchmarks/control_plane.py --jobs 100 --kept 1000 --minutes 0.5
    python benchmarks/control_plane.py --minutes 0        starts a second alone

The server is `create_app` behind uvicorn on loopback with the reconciler, budgets and news in the same process, over
SQLite; its jobs run on the simulated place (sims.timed_target), which lives in that process too. The database
holds `--kept` finished jobs beside those that run. Requests are sent at their times whether earlier ones are answered
or not, and timed from when they were due. Event lag is from the time in the event until a reader of the database
sees its row; the reader looks every 50 ms, which is in the figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import Connection

from trainmaster.core.events import Event, render, split
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Stage, Status, TargetState
from trainmaster.store import attempts
from trainmaster.store.database import Database
from trainmaster.store.events import append_events
from trainmaster.store.jobs import advance, finish, insert_job
from trainmaster.store.migrate import open_database
from trainmaster.targets import Submission

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from sims.timed_target import NAME, Place, parse

_KEPT_EVENTS = 10  # lines of each finished job
_LOOK_S = 0.05
_JOBS = "/v1/training/jobs"
# What is asked, and how often among a hundred: a dashboard, people who look at a job, programs that follow one.
_MIX = {"list": 20, "list running": 10, "status": 40, "details": 15, "events": 15}
_WANTED = {"lag": 2.0, "api": 0.050, "kept": 0.100, "rss": 400.0}


@dataclass(slots=True)
class Measured:
    """What was seen of the server."""

    lags_s: list[float] = field(default_factory=list)
    answers_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    wrong: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    rss_mb: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    lasted_s: float = 0.0
    load: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="how long it is measured, once all jobs run")
    parser.add_argument("--jobs", type=int, default=1000, help="that run at once")
    parser.add_argument("--kept", type=int, default=9000, help="finished jobs in the database")
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second")
    parser.add_argument("--shape", default="event_s=4", help="of the simulated attempts, as sims.timed_target")
    parser.add_argument("--begun", action="store_true", help="put the jobs in as running: their start is not measured")
    parser.add_argument("--home", type=Path, help="not stated: a folder that is removed afterwards")
    parser.add_argument("--profile", type=Path, help="cProfile of the server's main thread into this file")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)  # the server's half: the socket it serves on
    options = parser.parse_args()
    if options.serve is not None:
        _serve(options)
        return 0
    with contextlib.ExitStack() as stack:
        if options.home is None:
            options.home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="control-plane-")))
        return _measure(options)


def _serve(options: argparse.Namespace) -> None:
    """The server's process: everything that `trainmaster serve` runs, with the simulated place as its target."""
    import uvicorn

    from trainmaster.control import budget, reconcile
    from trainmaster.control.notify import outbox
    from trainmaster.web.app import create_app

    db = open_database(options.home / "trainmaster.db")
    place = Place(parse(options.shape))

    async def run() -> None:
        stop = asyncio.Event()
        for row in _list_begun(db):
            await place.submit(Submission(handle={"attempt": row}, files={}, commands=()))
        app = create_app(db, options.home, reconcile=False)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", server_header=False, timeout_keep_alive=75))
        beside = [
            asyncio.create_task(reconcile.run(db, options.home, stop=stop, load=place.load)),
            asyncio.create_task(budget.run(db, stop=stop)),
            asyncio.create_task(outbox.run(db, options.home, stop=stop)),
        ]
        await server.serve(sockets=[socket.socket(fileno=options.serve)])
        stop.set()
        await asyncio.gather(*beside)

    if options.profile is None:
        asyncio.run(run())
        return
    import cProfile

    with cProfile.Profile() as profile:
        asyncio.run(run())
    profile.dump_stats(options.profile)


def _list_begun(db: Database) -> list[str]:
    """Attempts that were put in as running; their place lives in this process and must know them."""
    with db.read() as conn:
        found = conn.exec_driver_sql(
            "SELECT a.id FROM attempts a JOIN jobs j ON j.id = a.job_id WHERE j.stage = 'running'"
        )
        return [row.id for row in found]


def _measure(options: argparse.Namespace) -> int:
    shape = f"{options.shape},run_s={options.minutes * 60 + 3600:g}"
    path = options.home / "trainmaster.db"
    kept, running = _fill(path, kept=options.kept, jobs=options.jobs, begun=options.begun)
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC  {options.jobs} jobs  {options.kept} finished  {shape}", flush=True)
    with _server(options, shape) as (process, url):
        began = time.monotonic()
        _wait_running(path, options.jobs, process)
        start_s = time.monotonic() - began
        rate = f"{options.jobs / start_s:.1f} starts a second, {_cpu_s(process.pid):.1f} CPU s of the server"
        print(f"all jobs run and were heard of after {start_s:.1f} s: {rate}", flush=True)
        if not options.minutes:
            return 0
        found = _watch(options, path, url, process.pid, kept=kept, running=running)
    return _tell(found, options, start_s)


def _fill(path: Path, *, kept: int, jobs: int, begun: bool = False) -> tuple[list[str], list[str]]:
    """Finished jobs with their events, and queued ones."""
    db = open_database(path)
    spec = parse_spec({"name": "load", "target": NAME, "command": ["true"], "preflight": {"level": 1}})
    done, queued = [str(uuid.uuid4()) for _ in range(kept)], [str(uuid.uuid4()) for _ in range(jobs)]
    now = datetime.now(UTC)
    with db.write() as conn:
        for first in done[:1]:
            insert_job(conn, first, spec, at=now - timedelta(minutes=kept))
            _finish(conn, first, now - timedelta(minutes=kept))
        for job_id in queued:
            insert_job(conn, job_id, spec, at=now)
            if begun:
                handle = {"attempt": f"{job_id}.1", "submitted": True}
                attempt = attempts.insert_attempt(conn, job_id, 1, handle=handle, at=now)
                attempts.record_poll(conn, attempt, TargetState.RUNNING, at=now)
                advance(conn, job_id, seen=Stage.QUEUED, to=Stage.RUNNING, at=now)
    db.close()
    _copy(path, done)
    return done, queued


def _finish(conn: Connection, job_id: str, at: datetime) -> None:
    """The rows of a job that ran: moves, one attempt and its lines."""
    attempt = attempts.insert_attempt(conn, job_id, 1, handle={"attempt": f"{job_id}.1"}, at=at)
    seen = Stage.QUEUED
    for to in (Stage.RUNNING, Stage.COLLECTING, Stage.RELEASING):
        advance(conn, job_id, seen=seen, to=to, at=at)
        seen = to
    step = {"loss": 2.1, "lr": 0.0003, "grad_norm": 0.71, "tokens_per_s": 64_447.0, "step_s": 1.016}
    events = [Event(phase="STEP", event="metrics", ts=at, seq=n, data={"step": n, **step}) for n in range(_KEPT_EVENTS)]
    lines = split("".join(render(event) + "\n" for event in events).encode(), offset=0, zone=UTC)
    append_events(conn, attempt, EVENTS_FILE, seen_offset=0, lines=lines)
    attempts.end_attempt(conn, attempt, report=TargetState.SUCCEEDED, reason=None, message="", exit_record=None, at=at)
    finish(conn, job_id, seen=seen, status=Status.COMPLETED, at=at)


def _copy(path: Path, done: Sequence[str]) -> None:
    """The rows of the first job for each of the others, a minute later each; through the writers it takes minutes."""
    tables = {"jobs": "id", "attempts": "job_id", "transitions": "job_id", "streams": "attempt", "events": "attempt"}
    with contextlib.closing(sqlite3.connect(path)) as conn, conn:
        for table, key in tables.items():
            found = conn.execute(f"SELECT * FROM {table} WHERE {key} LIKE ?", (f"{done[0]}%",))
            names, rows = [name for name, *_ in found.description], found.fetchall()
            copies = (
                [_renew(name, value, done[0], job_id, number) for name, value in zip(names, row, strict=True)]
                for number, job_id in enumerate(done[1:], 1)
                for row in rows
            )
            if table == "transitions":
                copies = ([None, *copy[1:]] for copy in copies)
            conn.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", copies)


def _renew(name: str, value: object, first: str, job_id: str, number: int) -> object:
    if not isinstance(value, str):
        return value
    if name in ("at", "ts") or name.endswith(("_at", "_since")):
        return str(datetime.fromisoformat(value) + timedelta(minutes=number, microseconds=1))[:26]
    return value.replace(first, job_id)


@contextlib.contextmanager
def _server(options: argparse.Namespace, shape: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(256)
        command = [sys.executable, __file__, "--serve", str(listening.fileno()), "--home", str(options.home)]
        command += ["--shape", shape, *(["--profile", str(options.profile)] if options.profile else [])]
        process = subprocess.Popen(command, pass_fds=[listening.fileno()])
        try:
            yield process, f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            process.terminate()
            process.wait(60)


def _wait_running(path: Path, jobs: int, process: subprocess.Popen[bytes]) -> None:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as conn:
        heard = "SELECT count(*) FROM jobs WHERE stage = 'running' AND heard_at IS NOT NULL"
        while conn.execute(heard).fetchone()[0] < jobs:
            if process.poll() is not None:
                raise SystemExit("the server ended")
            time.sleep(0.5)


def _watch(
    options: argparse.Namespace, path: Path, url: str, pid: int, *, kept: Sequence[str], running: Sequence[str]
) -> Measured:
    found, stop = Measured(), threading.Event()
    threads = [
        threading.Thread(target=_watch_events, args=(path, found, stop)),
        threading.Thread(target=_watch_process, args=(pid, found, stop)),
    ]
    began, cpu = time.monotonic(), _cpu_s(pid)
    for thread in threads:
        thread.start()
    try:
        asyncio.run(_ask(options, url, found, kept=kept, running=running))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    found.lasted_s, found.cpu_s = time.monotonic() - began, _cpu_s(pid) - cpu
    return found


def _watch_events(path: Path, found: Measured, stop: threading.Event) -> None:
    """Every row that becomes visible, and how old its event is then."""
    began = datetime.now(UTC)
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as conn:
        last = conn.execute("SELECT max(rowid) FROM events").fetchone()[0]
        while not stop.wait(_LOOK_S):
            rows = conn.execute("SELECT rowid, ts FROM events WHERE rowid > ? ORDER BY rowid", (last,)).fetchall()
            now = datetime.now(UTC)
            for last, ts in rows:  # noqa: B007 (the last one is where the next look begins)
                written = datetime.fromisoformat(ts).replace(tzinfo=UTC)
                if written > began:
                    found.lags_s.append((now - written).total_seconds())


def _watch_process(pid: int, found: Measured, stop: threading.Event) -> None:
    while True:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            found.rss_mb.append(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
            found.load.append(os.getloadavg()[0])
        if stop.wait(2.0):
            return


def _cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def _ask(
    options: argparse.Namespace, url: str, found: Measured, *, kept: Sequence[str], running: Sequence[str]
) -> None:
    """Requests at their times, whether the ones before are answered or not."""
    import httpx

    draw = random.Random(1)
    kinds, weights = list(_MIX), list(_MIX.values())
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client, asyncio.TaskGroup() as tasks:
        began = time.monotonic()
        for number in range(int(options.minutes * 60 * options.rate)):
            due = began + number / options.rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            job = draw.choice(running if draw.random() < 0.5 or not kept else kept)
            kind = draw.choices(kinds, weights)[0]
            tasks.create_task(_ask_once(client, found, kind, job, due))


async def _ask_once(client: object, found: Measured, kind: str, job: str, due: float) -> None:
    import httpx

    assert isinstance(client, httpx.AsyncClient)
    try:
        answer = await client.get(_path(kind, job))
    except httpx.HTTPError as wrong:
        found.wrong[type(wrong).__name__] += 1
        return
    if answer.status_code != 200:
        found.wrong[f"{kind}: {answer.status_code}"] += 1
    found.answers_s[kind].append(time.monotonic() - due)


def _path(kind: str, job: str) -> str:
    paths: Mapping[str, str] = {
        "list": _JOBS,
        "list running": f"{_JOBS}?status=running",
        "status": f"{_JOBS}/{job}",
        "details": f"{_JOBS}/{job}/details",
        "events": f"{_JOBS}/{job}/events?limit=50",
    }
    return paths[kind]


def _tell(found: Measured, options: argparse.Namespace, start_s: float) -> int:
    asked = [took for times in found.answers_s.values() for took in times]
    lists = [took for kind, times in found.answers_s.items() if kind.startswith(("list", "status")) for took in times]
    rss = found.rss_mb
    tenth = max(1, len(rss) // 10)
    first, last = sum(rss[:tenth]) / tenth, sum(rss[-tenth:]) / tenth
    everything = options.jobs + options.kept
    rows = [
        ("event lag, s", _pair(found.lags_s), "p95 < 2", _at(found.lags_s, 0.95) < _WANTED["lag"]),
        (f"API at {options.rate:g}/s, ms", _pair(asked, 1000), "p95 < 50", _at(asked, 0.95) < _WANTED["api"]),
        (f"list and status, {everything:,} jobs, ms", _pair(lists, 1000), "p95 < 100",
         _at(lists, 0.95) < _WANTED["kept"]),
        *((f"  {kind}, ms", _pair(times, 1000), "", True) for kind, times in sorted(found.answers_s.items())),
        ("resident, MB", f"first {first:.0f}, last {last:.0f}, most {max(rss):.0f}", "< 400",
         max(rss) < _WANTED["rss"]),
        ("server's CPU, of one core", f"{found.cpu_s / found.lasted_s:.0%}", "", True),
        ("events a second", f"{len(found.lags_s) / found.lasted_s:.0f}", "", True),
        ("until all run and were heard of, s", f"{start_s:.1f}", "", True),
        ("answers that were wrong", str(dict(found.wrong) or 0), "0", not found.wrong),
        ("load average of the machine", f"{min(found.load):.1f} to {max(found.load):.1f}", "", True),
    ]  # fmt: skip
    print("| what | figure | wanted | |\n|---|---|---|---|")
    for name, figure, wanted, fine in rows:
        print(f"| {name} | {figure} | {wanted} | {'' if not wanted else 'yes' if fine else 'NO'} |")
    return 0 if all(fine for *_, fine in rows) else 1


def _pair(values: Sequence[float], scale: float = 1.0) -> str:
    digits = 0 if scale > 1 else 2
    return f"p50 {_at(values, 0.5) * scale:.{digits}f}, p95 {_at(values, 0.95) * scale:.{digits}f}"


def _at(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


if __name__ == "__main__":
    raise SystemExit(main())
