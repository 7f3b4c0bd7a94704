"""What `reap` believes of processes that carry the mark of an attempt."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from trainmaster.control import reap, submit
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Stage, Status
from trainmaster.store import jobs
from trainmaster.store.database import Database
from trainmaster.targets import Owned


def owned(attempt: str, folder: Path) -> Owned:
    return Owned(attempt=attempt, what="1 process", handle={"attempt": attempt, "folder": str(folder)})


def test_a_process_does_not_choose_the_folder_of_a_job_that_has_ended(db: Database, tmp_path: Path) -> None:
    """The lock of the attempt was made in whatever folder its TRAINMASTER_EVENTS named, as the server."""
    job = submit.submit(db, JobSpec(name="x", command=("true",)))
    with db.write() as conn:
        now = datetime.now(UTC)
        assert jobs.finish(conn, job.id, seen=Stage.QUEUED, status=Status.CANCELLED, at=now, reason=None, message="")
    home = tmp_path / "home"
    left = reap._judge(db, home, "local", owned(f"{job.id}.1", tmp_path / "etc"))
    assert left is not None and left.ours
    assert left.handle["folder"] == str(home / "jobs" / job.id / "attempts" / "1")


@pytest.mark.parametrize("how", ["dots", "link"])
def test_a_folder_outside_the_home_is_not_ours_however_it_is_spelled(db: Database, tmp_path: Path, how: str) -> None:
    home, outside = tmp_path / "home", tmp_path / "outside"
    outside.mkdir()
    home.mkdir()
    (home / "link").symlink_to(outside)
    folder = home / ".." / "outside" if how == "dots" else home / "link"
    attempt = "00000000-0000-4000-8000-000000000000.1"
    assert jobs.find_job(db, attempt[:-2]) is None
    left = reap._judge(db, home, "local", owned(attempt, folder))
    assert left is not None and not left.ours
    inside = reap._judge(db, home, "local", owned(attempt, home / "jobs" / "x" / "attempts" / "1"))
    assert inside is not None and inside.ours
