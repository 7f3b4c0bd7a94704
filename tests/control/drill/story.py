"""One job from its submit to its end, while its control planes are killed as the case says."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from sqlalchemy import func, select

from trainmaster.control import failpoints
from trainmaster.control import submit as submitting
from trainmaster.core.plan import ATTEMPT_VARIABLE
from trainmaster.core.spec import parse_spec
from trainmaster.storage import open_store
from trainmaster.store import artifacts, jobs, outbox, tables
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.store.rows import JobRow

from . import ledger, workload
from .warm import SOURCE, Warm

LIMIT_S = 500.0  # for one story; on a quiet machine it takes two seconds, and a quarter of one for each death


@dataclass(frozen=True, kw_only=True)
class Told:
    """What came of it."""

    ledger: Mapping[str, list[str]]
    deaths: int
    places: list[str]  # where control planes came by, or died, as the case asked for
    begun: list[str] = field(default_factory=list)  # one line for each agent that began


class Case:
    """A home, a database, and how many control planes there are at once."""

    def __init__(self, warm: Warm, home: Path, url: str, *, planes: int = 1, env: Mapping[str, str] = {}) -> None:
        self.warm, self.home, self.url, self.planes = warm, home, url, planes
        self.env = {"PYTHONPATH": str(SOURCE), "TRAINMASTER_DATABASE": url, **env}

    def undisturbed(self) -> Told:
        return self._live({failpoints.PLACES_VARIABLE: str(self.home / "places")}, first_life_only=False)

    def killed_at(self, place: str) -> Told:
        """Dies once, at this place and time (`commit lines: after 3`)."""
        return self._live({failpoints.KILL_AT_VARIABLE: place}, first_life_only=True)

    def killed_everywhere(self) -> Told:
        """Each life goes a little further than the last: it dies at the first place where none has died before."""
        return self._live({failpoints.KILL_ONCE_VARIABLE: str(self.home / "places")}, first_life_only=False)

    def _live(self, drill: Mapping[str, str], *, first_life_only: bool) -> Told:
        self.home.mkdir(parents=True, exist_ok=True)
        db = open_database(self.url)
        try:
            job = submitting.submit(db, parse_spec(workload.spec()))
            deaths = self._drive(db, job, drill, first_life_only=first_life_only)
            return self._tell(db, job, deaths)
        finally:
            db.close()

    def _drive(self, db: Database, job: JobRow, drill: Mapping[str, str], *, first_life_only: bool) -> int:
        lives: list[int] = []
        deaths, opened, until = 0, 0, time.monotonic() + LIMIT_S
        while (now := jobs.find_job(db, job.id)) is not None and (
            not now.status.final or outbox.has_unspread(db)  # its last news is on the way too
        ):
            assert time.monotonic() < until, f"{now.stage} {now.message!r} after {LIMIT_S:g} s\n{self.log()}"
            while len(lives) < self.planes:
                extra = {} if first_life_only and deaths else drill
                argv = [str(self.home), "--tick-s", "0.02"]
                lives.append(self.warm.start(argv, env={**self.env, **extra}, log=self.home / "control.log"))
            told = _count_epochs(db)
            while opened <= min(told, workload.ITERATIONS * workload.EPOCHS - 1):
                workload.gate(self.home, job.id, opened)
                opened += 1
            for pid in list(lives):
                if (code := self.warm.poll(pid)) is not None:
                    assert code == -signal.SIGKILL, f"a control plane ended with {code}\n{self.log()}"
                    lives.remove(pid)
                    deaths += 1
            time.sleep(0.02)
        return deaths + sum(self.warm.end(pid, signal.SIGTERM) == -signal.SIGKILL for pid in lives)

    def _tell(self, db: Database, job: JobRow, deaths: int) -> Told:
        left = processes_of(job.id)
        assert left == [], f"left running: {left}"
        self._compare_storage(db, job)
        places = self.home / "places"
        log = self.home / "jobs" / job.id / "attempts" / "1" / "agent.log"
        begun = [line for line in log.read_text().splitlines() if "starting" in line]
        assert len(begun) == 1, f"begun {len(begun)} times\n{self.log()}"
        return Told(
            ledger=ledger.read(db, job.id, self.home),
            deaths=deaths,
            places=places.read_text().splitlines() if places.exists() else [],
            begun=begun,
        )

    def _compare_storage(self, db: Database, job: JobRow) -> None:
        """Every artifact is in storage with the bytes its row says, and is what the attempt left."""
        store = open_store(self.home / "storage")
        for row in artifacts.list_artifacts(db, job.id):
            content = store.get(f"jobs/{job.id}/{row.path}")
            assert (len(content), sha256(content).hexdigest()) == (row.size_bytes, row.sha256), row.path
            if row.kind != "project":
                left = self.home / "jobs" / job.id / ("" if row.kind != "output" else "attempts/1") / row.path
                assert left.read_bytes() == content, row.path

    def log(self) -> str:
        return (self.home / "control.log").read_text()[-4000:]


def number(places: Sequence[str]) -> list[str]:
    """Each place with its time, as TRAINMASTER_CONTROL_KILL_AT takes it."""
    times: Counter[str] = Counter()
    found = []
    for place in places:
        times[place] += 1
        # News is spread by a clock of its own: how often is chance, but once it is.
        if times[place] == 1 or not place.startswith("commit spread"):
            found.append(f"{place} {times[place]}")
    return found


def _count_epochs(db: Database) -> int:
    with db.read() as conn:
        return int(conn.execute(select(func.count()).select_from(tables.epochs)).scalar_one())


def processes_of(job_id: str) -> list[int]:
    """Every process that carries the name of an attempt of the job in its environment."""
    mark = f"{ATTEMPT_VARIABLE}={job_id}.".encode()
    pids = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
        except OSError:
            continue
    return [pid for pid in pids if pid != os.getpid()]
