"""A real control plane in a process of its own, jobs that misbehave, and a job that behaves beside them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import func, select

from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.store import jobs, tables
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database

from .misbehaviours import Misbehaviour

SOURCE = str(Path(__file__).parents[2] / "src")
END_S = 120.0  # from the start of a job to its end; more is stuck
_GOOD = """while :; do printf '{"ts":"%s","phase":"STEP","event":"metrics"}\\n' "$(date -u +%Y-%m-%dT%H:%M:%S.%NZ | \
sed 's/\\([0-9]\\{6\\}\\)[0-9]*Z/\\1Z/')" >> "$TRAINMASTER_EVENTS"; sleep 0.5; done"""


@dataclass(kw_only=True)
class Verdict:
    """What a run of misbehaviours did to the service."""

    ended: dict[str, str] = field(default_factory=dict)  # name → status and reason
    stuck: list[str] = field(default_factory=list)
    wedged: list[str] = field(default_factory=list)  # what no longer worked for a job that behaves
    leaked: list[str] = field(default_factory=list)
    longest_lag_s: float = 0.0

    @property
    def clean(self) -> bool:
        return not (self.stuck or self.wedged or self.leaked)


@contextlib.contextmanager
def serving(home: Path, database: str) -> Iterator[subprocess.Popen[bytes]]:
    """A reconciler, budgets and news in a process of their own, until the block ends."""
    environment = {**os.environ, "PYTHONPATH": SOURCE, "TRAINMASTER_DATABASE": database}
    with (home / "server.log").open("wb") as log:
        command = [sys.executable, "-m", "trainmaster.control", str(home), "--tick-s", "0.2"]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=home)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()


def run(home: Path, database: str, wanted: Sequence[Misbehaviour], *, at_once: int) -> Verdict:
    """Run them all, `at_once` at a time."""
    home.mkdir(parents=True, exist_ok=True)
    db, verdict = open_database(database), Verdict()
    try:
        with serving(home, database) as process:
            good = _submit(db, "good", _GOOD, {"grace_s": 1})
            waiting, open_jobs, ids = list(wanted), {}, {}
            while waiting or open_jobs:
                while waiting and len(open_jobs) < at_once:
                    one = waiting.pop(0)
                    job_id = _submit(db, f"h{one.number}", one.script, one.limits)
                    open_jobs[job_id], ids[job_id] = (one, time.monotonic()), one.name
                _look(db, verdict, open_jobs)
                if process.poll() is not None:
                    verdict.wedged.append(f"the control plane ended with {process.returncode}")
                    break
                verdict.longest_lag_s = max(verdict.longest_lag_s, _lag_s(db, good))
                time.sleep(0.2)
            _check_service(db, good, verdict)
            verdict.leaked = _leaked(ids)
    finally:
        db.close()
    return verdict


def _submit(db: Database, name: str, script: str, limits: dict[str, object]) -> str:
    spec = {
        "name": name,
        "command": ["sh", "-c", script],
        "preflight": {"level": 0},
        "limits": {"grace_s": 2, **limits},
    }
    return submitting.submit(db, parse_spec(spec)).id


def _look(db: Database, verdict: Verdict, open_jobs: dict[str, tuple[Misbehaviour, float]]) -> None:
    for job_id, (one, began) in list(open_jobs.items()):
        row, lasted_s = jobs.find_job(db, job_id), time.monotonic() - began
        assert row is not None
        if row.status.final:
            verdict.ended[one.name] = f"{row.status} {row.reason or ''}".strip()
            del open_jobs[job_id]
        elif lasted_s > END_S:
            verdict.stuck.append(f"{one.name}: {row.stage} {row.message[:200]}")
            del open_jobs[job_id]
        elif one.cancel_after_s is not None and lasted_s > one.cancel_after_s and not row.cancel_requested:
            submitting.cancel(db, job_id)


def _lag_s(db: Database, good: str) -> float:
    """Seconds since the last event of the job that behaves, which writes two a second."""
    own = tables.events.c
    with db.read() as conn:
        newest = select(func.max(own.ts)).where(own.attempt.startswith(f"{good}."), own.phase == "STEP")
        last = conn.execute(newest).scalar_one()
    return (datetime.now(UTC) - last).total_seconds() if last is not None else 0.0


def _check_service(db: Database, good: str, verdict: Verdict) -> None:
    """The job that behaves still runs and can be cancelled; a new one completes."""
    after = _submit(db, "after", "exit 0", {})
    submitting.cancel(db, good)
    end = time.monotonic() + END_S
    wanted = {good: "cancelled", after: "completed"}
    while time.monotonic() < end and wanted:
        for job_id, status in list(wanted.items()):
            row = jobs.find_job(db, job_id)
            if row is not None and row.status == status:
                del wanted[job_id]
        time.sleep(0.2)
    verdict.wedged += [f"a job that behaves did not become {status}" for status in wanted.values()]


def _leaked(ids: dict[str, str]) -> list[str]:
    """Processes that carry the name of an attempt of a job that is over."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (path / "environ").read_bytes()
            for job_id, name in ids.items():
                if f"TRAINMASTER_ATTEMPT={job_id}".encode() in environment:
                    found.append(f"{name}: pid {path.name}")
    return found
