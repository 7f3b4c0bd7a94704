"""Killed at any point between two effects, the control plane goes on as if it had not been."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from trainmaster.control import submit as submitting
from trainmaster.control.context import Context
from trainmaster.control.stage_handlers import handle_stage
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status, TargetState
from trainmaster.storage import open_store
from trainmaster.store import attempts, events, jobs
from trainmaster.store.database import Connection, Database
from trainmaster.store.migrate import open_database

from .scripted import GOOD, RUNNING, Scripted, at_once, ended, take_over

pytestmark = pytest.mark.both_databases

T = TypeVar("T")
EVERY_VARIABLE = "TRAINMASTER_CRASH_POINTS_EVERY"
SPEC = parse_spec({"name": "a", "target": "scripted", "command": ["true"], "limits": {"attempts": 2}})


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    """SQLite alone: test_kill_everywhere.py kills real processes at every place on PostgreSQL too."""
    database = open_database(tmp_path / "trainmaster.db")
    yield database
    database.close()


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the control plane may catch it."""


class Fuse:
    """Counts the points where a process can die, and blows at one of them."""

    def __init__(self, blow_at: int | None) -> None:
        self.passed = 0
        self.blow_at = blow_at

    def point(self) -> None:
        self.passed += 1
        if self.passed == self.blow_at:
            raise Killed


class Mortal(Context):
    """A plane that may die before and after each effect on the target and on the database."""

    async def call(self, name: str, answer: Awaitable[T]) -> T:
        task = asyncio.ensure_future(answer)
        try:
            FUSE[0].point()
        except Killed:
            task.cancel()
            raise
        result = await task
        FUSE[0].point()
        return result

    async def apply(self, job_id: str, change: Callable[[Connection], T], *, what: str) -> T:
        FUSE[0].point()
        result = await super().apply(job_id, change, what=what)
        FUSE[0].point()
        return result


FUSE = [Fuse(None)]


def live(db: Database, home: Path, target: Scripted, job_id: str) -> None:
    """One life of the control plane: to the end of the job, or to its own."""
    plane = Mortal(
        db=db, home=home, load=target.load, token=take_over(db), rest_s=at_once, storage=open_store(home / "storage")
    )

    async def main() -> None:
        while (job := jobs.find_job(db, job_id)) is not None and job.stage is not None:
            await handle_stage(plane, job)

    asyncio.run(main())


def story(db: Database, home: Path, target: Scripted, *, kill_at: int | None) -> tuple[object, ...]:
    """What a user sees of a job whose control plane died once at that point."""
    job = submitting.submit(db, SPEC, load=target.load)
    FUSE[0] = Fuse(kill_at)
    try:
        live(db, home, target, job.id)
    except Killed:
        FUSE[0].blow_at = None
        live(db, home, target, job.id)
    found = jobs.find_job(db, job.id)
    assert found is not None
    return (
        found.status,
        found.reason,
        [(row.number, row.report, row.reason) for row in attempts.list_attempts(db, job.id)],
        [(move.stage_from, move.stage_to, move.status) for move in jobs.list_transitions(db, job.id)],
        [(row.cursor, row.length, row.phase, row.event) for row in events.list_events(db, job.id)],
        sorted(target.alive),
        len(target.started),
    )


@pytest.mark.matrix(one_in=2)
@pytest.mark.parametrize(
    "polls",
    [
        # One that completes is killed for real, in test_kill_everywhere.py.
        [RUNNING, RUNNING, ended(TargetState.FAILED, Reason.SCRIPT_FAILED)],
        [RUNNING, RUNNING, ended(TargetState.LOST)],
    ],
    ids=["fails", "is lost twice"],
)
def test_dying_at_any_point_changes_nothing_a_user_sees(db: Database, tmp_path: Path, polls: list[object]) -> None:
    undisturbed = story(db, tmp_path, Scripted(*polls), kill_at=None)
    points = FUSE[0].passed
    assert points > 20
    # Every third point, the last among them; `make chaos-control` takes each.
    every = int(os.environ.get(EVERY_VARIABLE, "3"))
    for point in range(points, 0, -every):
        assert story(db, tmp_path, Scripted(*polls), kill_at=point) == undisturbed, f"killed at point {point}"


def test_the_story_tells_lives_apart(db: Database, tmp_path: Path) -> None:
    """The comparison above can fail: a target that forgets its attempts is seen to start them twice."""
    undisturbed = story(db, tmp_path, Scripted(RUNNING, GOOD), kill_at=None)
    assert undisturbed[0] is Status.COMPLETED

    def differs(point: int) -> bool:
        target = Scripted(RUNNING, GOOD)
        target.forgetful = True
        return story(db, tmp_path, target, kill_at=point) != undisturbed

    assert any(differs(point) for point in range(1, FUSE[0].passed + 1))
