"""A job whose stored spec cannot be read keeps no sweep from the others: leaked machines, leftovers, retention."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import insert, update

from control.test_unreadable_jobs import KINDS, spoil
from pages import samples
from trainmaster.control import maintain, reap, rented_sweep
from trainmaster.core.states import Status
from trainmaster.storage import open_store
from trainmaster.store import jobs
from trainmaster.store import tables as t
from trainmaster.store.database import Database
from trainmaster.targets import Instance, InstanceState, Label, Listing, Owned, home_mark, make_home_mark

NOW = datetime.now(UTC)


def _story(db: Database, project: str, *, over: bool = False) -> samples.Story:
    story = samples.Story(db, samples.spec(project=project), at=NOW - timedelta(days=100)).start()
    if over:
        story.end_attempt().finish(Status.COMPLETED)
    return story


@pytest.mark.parametrize("kind", KINDS)
def test_machines_are_judged_without_the_spec(kind: str, db: Database, tmp_path: Path) -> None:
    """An open one keeps its machine, an ended one does not, and another project's machine that leaked is found."""
    make_home_mark(tmp_path)
    wanted, over, other = (_story(db, "lab"), _story(db, "lab", over=True), _story(db, "other", over=True))
    for story in (wanted, over):
        spoil(db, story.id, kind)
    label = {story.id: Label(attempt=f"{story.id}.1", home=home_mark(tmp_path)) for story in (wanted, over, other)}
    with db.write() as conn:
        conn.execute(
            insert(t.instances).values(
                attempt=f"{wanted.id}.1", target="lambda", nonce=label[wanted.id].name, provider_id=wanted.id,
                state="active", created_at=NOW,
            )
        )  # fmt: skip
    listing = Listing(
        at=NOW,
        instances=tuple(
            Instance(id=job, name=each.name, state=InstanceState.ACTIVE, kind="k", region="r")
            for job, each in label.items()
        ),
    )
    context: Any = SimpleNamespace(db=db, home=tmp_path)
    found = rented_sweep.find_unwanted(context, listing, settle_s=1.0)
    assert {each.instance.id for each in found} == {over.id, other.id} and all(each.outlives for each in found)
    rented_sweep._tell(db, found[0])


@pytest.mark.parametrize("kind", KINDS)
def test_leftovers_are_judged_without_the_spec(kind: str, db: Database, tmp_path: Path) -> None:
    live, over = _story(db, "lab"), _story(db, "lab", over=True)
    for story in (live, over):
        spoil(db, story.id, kind)

    def judge(attempt: str) -> reap.Leftover | None:
        return reap._judge(db, tmp_path, "ssh:x", Owned(attempt=attempt, handle={}, what="processes"))

    assert judge(f"{live.id}.1") is None
    left = judge(f"{over.id}.1")
    assert left is not None and left.ours and left.why == "its job is completed"


@pytest.mark.parametrize("kind", KINDS)
def test_retention_goes_on_behind_it(
    kind: str, db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = _story(db, "lab", over=True), _story(db, "other", over=True)
    with db.write() as conn:
        for days, story in ((99, bad), (98, good)):
            long_ago = NOW - timedelta(days=days)
            conn.execute(update(t.jobs).where(t.jobs.c.id == story.id).values(ended_at=long_ago))
            conn.execute(update(t.attempts).where(t.attempts.c.job_id == story.id).values(released_at=long_ago))
    spoil(db, bad.id, kind)
    monkeypatch.setenv(maintain.RETAIN_VARIABLE, "30")
    caplog.set_level(logging.ERROR)
    for _ in range(2):
        maintain._sweep(db, tmp_path, open_store(tmp_path / "s"))
    assert jobs.list_ids(db) == [bad.id]
    assert [record.getMessage().count(bad.id) for record in caplog.records] == [1]
