"""Server time of every page and list of the API, with many jobs in the database: median and 95th percentile.

    PYTHONPATH=src python3 benchmarks/pages.py
    PYTHONPATH=src python3 benchmarks/pages.py --jobs 10000 --nodes 200 --runs 200 --rounds 40 --json

The application is asked in this process, without a socket: what is measured is its own work, as time and, for a machine
that is busy, as CPU time. After each request an application with one bare answer of the same number of bytes is asked
in the same way: the last two columns are its 95th percentile and what that of the page is beyond it.

Rows are written as the control plane leaves them: jobs of five projects and eight people, an attempt each, a pre-flight
of ten checks on a node of eight GPUs, prices, budgets, twenty sets of fifty runs, and curves of 1,000 steps for as many
runs as a comparison takes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
import uuid
import warnings
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import insert
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from trainmaster.core.schema import to_plain
from trainmaster.core.spec import parse_spec
from trainmaster.store import costs, tables
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.web.app import create_app, warm_up

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

NOW = datetime.now(UTC)
SETS, TRIALS = 20, 50
CHECKS = ("gpu_model", "gpu_ecc", "gpu_nvlink", "gpu_power", "clock", "disk", "memory", "cpu", "shm", "network")


def fill(db: Database, options: argparse.Namespace) -> list[str]:
    """Rows of so many jobs; the ids of the runs to compare."""
    dice = random.Random(1)
    spec = to_plain(parse_spec({"name": "job", "project": "p0", "target": "slurm", "train": {"steps": 1000}}))
    ids = [str(uuid.UUID(int=dice.getrandbits(128), version=4)) for _ in range(options.jobs)]
    jobs, attempts, checks = [], [], []
    for number, job in enumerate(ids):
        start = NOW - timedelta(minutes=15 * number)
        going, project = number < 50, f"p{number % 5}"
        own = {**spec, "name": f"run-{number}", "project": project}
        own["train"] = {**spec["train"], "optimizer": {"lr": 10 ** -dice.randint(2, 5)}}
        jobs.append({
            "id": job, "name": own["name"], "project": project, "target": "slurm" if number % 2 else "lambda",
            "status": "running" if going else "completed", "stage": "running" if going else None, "message": "",
            "spec": own, "attempts": 1, "cancel_requested": False, "created_at": start, "started_at": start,
            "ended_at": None if going else start + timedelta(hours=1), "submitted_by": f"person-{number % 8}",
            "tries": 0, "gpus": costs.count_gpus(own),
        })  # fmt: skip
        node = f"node-{dice.randrange(options.nodes):04}"
        attempts.append({
            "id": f"{job}.1", "job_id": job, "number": 1, "handle": {"nodes": [node]}, "message": "",
            "created_at": start, "started_at": start, "price_cents_per_hour": 3120.0,
            "released_at": None if going else start + timedelta(hours=1),
            "ended_at": None if going else start + timedelta(hours=1),
        })  # fmt: skip
        checks += [check(f"{job}.1", node, name, start) for name in CHECKS]
    with db.write() as conn:
        for table, rows in ((tables.jobs, jobs), (tables.attempts, attempts), (tables.check_results, checks)):
            for first in range(0, len(rows), 5000):
                conn.execute(insert(table), rows[first : first + 5000])
        for number in range(5):
            costs.set_budget(conn, f"p{number}", "month", 10_000_000, at=NOW)
        for number in range(SETS):  # of jobs that are over
            own = str(uuid.UUID(int=number, version=4))
            row = {"id": own, "name": f"set-{number}", "project": f"p{number % 5}", "parallel": 4, "message": ""}
            conn.execute(insert(tables.job_sets).values({**row, "created_at": NOW, "over": True}))
            trials = ids[options.runs + TRIALS * number :][:TRIALS]
            rows = [
                {"set_id": own, "number": place, "values": {"lr": place}, "spec": spec, "job_id": job}
                for place, job in enumerate(trials, start=1)
            ]
            conn.execute(insert(tables.set_trials), rows)
    for job in ids[options.runs :][: SETS * TRIALS]:
        steps(db, f"{job}.1", 2)
    for job in ids[: options.runs]:
        steps(db, f"{job}.1", options.steps)
    return ids[: options.runs]


def check(attempt: str, node: str, name: str, at: datetime) -> dict[str, Any]:
    devices = [f"gpu{number}" for number in range(8)] if name.startswith("gpu") else [None]
    findings = [
        {"verdict": "pass", "reason": "as expected", "device": device, "action": None,
         "values": {"serial": f"1652{node[5:]}{device}", "model": "H100"} if name == "gpu_model" else {}}
        for device in devices
    ]  # fmt: skip
    return {"attempt": attempt, "node": node, "check": name, "verdict": "pass", "took_s": 0.1, "findings": findings,
            "at": at}  # fmt: skip


def steps(db: Database, attempt: str, count: int) -> None:
    rows = [
        {"attempt": attempt, "stream": "events.jsonl", "offset": 200 * step, "length": 200, "ts": NOW, "seq": step,
         "phase": "STEP", "event": "metrics", "data": {"step": step, "loss": 5 / step, "tokens_per_s": 1e5}}
        for step in range(1, count + 1)
    ]  # fmt: skip
    with db.write() as conn:
        conn.execute(insert(tables.events), rows)


def measure(client: TestClient, bare: TestClient, path: str, rounds: int) -> dict[str, Any]:
    times, work, plain, size = [], [], [], 0
    for _ in range(rounds):
        began, busy = time.perf_counter(), time.process_time()
        answer = client.get(path)
        times.append(1000 * (time.perf_counter() - began))
        work.append(1000 * (time.process_time() - busy))
        assert answer.status_code == 200, (path, answer.text[:300])
        size = len(answer.content)
        began = time.perf_counter()
        bare.get("/", params={"bytes": size})
        plain.append(1000 * (time.perf_counter() - began))
    place = min(rounds - 1, int(0.95 * rounds))
    return {"bare_p95_ms": round(sorted(plain)[place], 1),
            "p95_over_bare_ms": round(sorted(times)[place] - sorted(plain)[place], 1),
            "first_ms": round(times[0], 1), "median_ms": round(statistics.median(times), 1),
            "p95_ms": round(sorted(times)[place], 1), "first_cpu_ms": round(work[0], 1),
            "p95_cpu_ms": round(sorted(work)[place], 1), "bytes": size}  # fmt: skip


async def answer_bare(request: Request) -> Response:
    return Response(b"x" * int(request.query_params["bytes"]), media_type="text/html")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("jobs", 10_000), ("nodes", 200), ("runs", 200), ("steps", 1000), ("rounds", 40)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        db = open_database(home / "trainmaster.db")
        chosen = fill(db, options)
        ids = ",".join(chosen)
        one, jobs = f"/jobs/{chosen[0]}", "/v1/training/jobs"
        paths = {
            "runs": "/", "runs, page 20": "/?offset=1000", "runs, one status": "/?status=completed",
            "runs by name": "/?find=run-77", "search, a run": "/search?q=run-77",
            "search, a GPU": "/search?q=16520001gpu3", "search, nothing": "/search?q=no+such+words",
            "a run": one, "a run, fragment": f"{one}/part",
            "a run, events": f"{one}/events", "a run, attempts": f"{one}/attempts", "a run, cost": f"{one}/cost",
            "nodes": "/nodes", "nodes, page 2": "/nodes?offset=60", "one node": "/nodes/one?node=node-0001",
            "one GPU": "/nodes/one?gpu=serial:16520001gpu3", "cost": "/cost", "cost, all months": "/cost?month=all",
            "compare, picker": "/compare", f"compare, {len(chosen)} runs": f"/compare?jobs={ids}",
            "curves of 20 runs": f"/compare/curves?jobs={','.join(chosen[:20])}", "settings": "/settings",
            "API jobs": jobs, "API jobs, 200": f"{jobs}?limit=200", "API curves": f"{jobs}/{chosen[1]}/curves",
            "API timeline": f"{jobs}/{chosen[1]}/timeline", "API search": "/v1/search?q=run-77",
            "API nodes": "/v1/nodes", "API instances": "/v1/instances", "API cost": "/v1/cost",
            "API cost of jobs": "/v1/cost/jobs", "API budgets": "/v1/budgets", "API tokens": "/v1/tokens",
            "API webhooks": "/v1/webhooks", "API targets": "/v1/targets", "API sets": "/v1/sets",
            "a set of runs": f"/sets/{uuid.UUID(int=0, version=4)}",
        }  # fmt: skip
        app = create_app(db, home, reconcile=False, rate=None)
        warm_up(app)  # as `trainmaster serve` does
        plain = Starlette(routes=[Route("/", answer_bare)])
        base = "http://127.0.0.1:8470"
        with TestClient(app, base_url=base, client=("127.0.0.1", 50_000)) as client, TestClient(plain) as bare:
            measured = {name: measure(client, bare, path, options.rounds) for name, path in paths.items()}
        db.close()
    if options.json:
        print(json.dumps({"jobs": options.jobs, "pages": measured}, indent=2))
        return
    print(f"{options.jobs:,} jobs, {options.nodes} nodes, {options.rounds} requests each; milliseconds of the server")
    print(f"{'page':22}{'first':>9}{'median':>9}{'p95':>9}{'first, CPU':>12}{'p95, CPU':>10}{'bytes':>10}"
          f"{'bare p95':>10}{'beyond':>9}")  # fmt: skip
    for name, row in measured.items():
        print(
            f"{name:22}{row['first_ms']:9}{row['median_ms']:9}{row['p95_ms']:9}{row['first_cpu_ms']:12}"
            f"{row['p95_cpu_ms']:10}{row['bytes']:10,}{row['bare_p95_ms']:10}{row['p95_over_bare_ms']:9}"
        )


if __name__ == "__main__":
    main()
