"""Queries over many jobs, one of which has a stored spec that cannot be read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from control.test_unreadable_jobs import KINDS, SECRET, is_stored
from pages import samples
from trainmaster.control import budget
from trainmaster.core.errors import JobUnreadable
from trainmaster.core.states import Status
from trainmaster.store import goodput, jobs, spending, workdirs
from trainmaster.store.capacity import queue
from trainmaster.store.database import Database
from trainmaster.store.page_rows import runs


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("kind", KINDS)
def test_every_query_leaves_it_out(kind: str, any_db: Database) -> None:
    good, bad = (samples.Story(any_db, samples.spec(project=project)).id for project in ("lab", "other"))
    if not is_stored(any_db, bad, kind):
        return
    both = [good, bad]
    assert [job.id for job in jobs.list_jobs(any_db)] == [good]
    assert [job.id for job in jobs.list_jobs(any_db, limit=1)] == [good]  # a page of nothing but the other goes on
    assert [job.id for job in jobs.search_jobs(any_db, "llama-trial")] == [good]
    assert [job.id for job in runs.find_jobs(any_db, both)] == [good]
    assert queue.find_unreadable(any_db, both) == {bad}
    assert good in queue.list_rows(any_db, both)
    with any_db.read() as conn:
        assert good in {job.id for job in goodput.list_histories(conn)} and spending.list_spending(conn) == []
        assert good in runs.find_runs(conn, both) and {*runs.list_prices(conn, both)} == {*both}
    with pytest.raises(JobUnreadable, match=bad) as refused:
        jobs.find_job(any_db, bad)
    assert refused.value.project == "other" and SECRET not in str(refused.value)
    with any_db.write() as conn:
        assert jobs.request_cancel(conn, bad, at=datetime.now(UTC))
        assert jobs.find_writer(conn, good, besides=good) is None  # of another project it uses nothing


@pytest.mark.parametrize("kind", ["no JSON", "no mapping"])
def test_what_an_open_one_may_use_is_kept(kind: str, any_db: Database) -> None:
    """Its fields are gone: it may go on with any checkpoints of its project, and need any of its working folders."""
    now = datetime.now(UTC)
    first, apart = (samples.completed(any_db, project=project) for project in ("lab", "other"))
    folder = {"sha256": "a" * 64, "manifest": (), "files": 0, "size_bytes": 0}
    with any_db.write() as conn:
        for project in ("lab", "other"):
            row = workdirs.WorkdirRow(project=project, **folder)  # type: ignore[arg-type]
            workdirs.put_workdir(conn, row, at=now - timedelta(days=99))
    spec = samples.spec(project="lab", resume_from=first.id, workdir="sha256:" + "a" * 64)
    later = samples.Story(any_db, spec)
    for spoiled in (False, True):
        if spoiled and not is_stored(any_db, later.id, kind):
            return
        with any_db.write() as conn:
            assert jobs.find_writer(conn, first.id, besides="") == later.id
            assert jobs.find_writer(conn, apart.id, besides="") is None
            assert workdirs.delete_unused(conn, before=now) == (0 if spoiled else 1)
        assert jobs.find_resumed(any_db, first.id) == later.id and jobs.find_resumed(any_db, apart.id) is None
    assert [row.project for row in workdirs.list_workdirs(any_db)] == ["lab"]
    later.finish(Status.CANCELLED)  # once it is over it keeps nothing
    with any_db.write() as conn:
        assert jobs.find_writer(conn, first.id, besides="") is None and jobs.find_resumed(any_db, first.id) is None
        assert workdirs.delete_unused(conn, before=now) == 1


@pytest.mark.parametrize("cap", ['"ten dollars"', "-1", "0", "1e300", "[5]", '{"usd": 5}', "false"])
def test_a_cap_that_is_no_amount_leaves_the_others_held(cap: str, any_db: Database) -> None:
    bad, good = (samples.Story(any_db, samples.spec(limits={"max_cost": 7.5})).start() for _ in range(2))
    stored = "CAST(:spec AS jsonb)" if any_db.engine.dialect.name == "postgresql" else ":spec"
    with any_db.write() as conn:
        written = {"spec": f'{{"limits": {{"max_cost": {cap}}}}}', "id": bad.id}
        conn.execute(text(f"UPDATE jobs SET spec = {stored} WHERE id = :id"), written)
    with any_db.read() as conn:
        for capped in (False, True):
            held = {each.job_id: each.max_cost for each in spending.list_spending(conn, capped=capped)}
            assert held == {bad.id: None, good.id: 7.5}
    budget.enforce(any_db)
