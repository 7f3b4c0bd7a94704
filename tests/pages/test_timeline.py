"""The timeline of a job: cells sum to the ledger with their money, and a strip has what was said of its node."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert, update

from pages import samples
from trainmaster.core.events import Event
from trainmaster.core.states import Reason, Stage
from trainmaster.pages import job_goodput, timeline
from trainmaster.store import attempts, costs, tables
from trainmaster.store.database import Database


def resumed(db: Database, *, nodes: tuple[str, ...] = ("node-a", "node-b")) -> samples.Story:
    """Two attempts on two nodes: the first lost, the second with a straggler and a hang."""
    story = samples.Story(db, samples.spec(limits={"attempts": 3}, resources={"nodes": 2})).start()
    place(db, story, nodes)
    story.tell(timed(story, samples.training(1, 60, end=False))).move(Stage.RUNNING)
    story.at += timedelta(seconds=90)
    story.end_attempt(Reason.NODE_LOST, "gone")
    with db.write() as conn:
        attempts.mark_released(conn, story.attempt, at=story.at)
    story.move(Stage.QUEUED).start(2)
    place(db, story, (*nodes[:1], "node-c"))
    story.tell(timed(story, samples.training(51, 90, resumed_from=50, end=False))).move(Stage.RUNNING)
    story.tell(timed(story, [watch("straggler", node=1, rank=9, score=0.31), watch("hang", nodes=[0, 7])]))
    story.at += timedelta(seconds=60)
    return story


def place(db: Database, story: samples.Story, nodes: tuple[str, ...]) -> None:
    with db.write() as conn:
        mine = update(tables.attempts).where(tables.attempts.c.id == story.attempt)
        conn.execute(mine.values(handle={"nodes": list(nodes)}, created_at=story.at, price_cents_per_hour=3600.0))
        for node, verdict in zip(nodes, ("pass", "warn"), strict=True):
            finding = {"verdict": verdict, "reason": "41 GiB free", "device": None}
            conn.execute(insert(tables.check_results).values(
                attempt=story.attempt, node=node, check="disk", verdict=verdict, findings=[finding], at=story.at,
            ))  # fmt: skip


def timed(story: samples.Story, events: Any) -> list[Event]:
    listed = enumerate(events)
    return [
        Event(phase=e.phase, event=e.event, ts=story.at + timedelta(seconds=n), data=e.data) for n, e in listed
    ]  # fmt: skip


def watch(event: str, **data: Any) -> Event:
    return Event(phase="WATCH", event=event, data=data)


def test_cells_are_the_ledger_along_its_time(any_db: Database) -> None:
    story = resumed(any_db)
    page = timeline.read(any_db, story.id, now=story.at)
    ledger = job_goodput.read(any_db, story.id, now=story.at)
    assert page is not None and ledger is not None and page.whole
    assert (page.start, page.end) == (ledger.started_at, ledger.ended_at)
    cells = page.cells
    assert cells[0].start_s == 0 and cells[-1].end_s == (page.end - page.start).total_seconds()
    assert all(one.end_s == pytest.approx(two.start_s) for one, two in itertools.pairwise(cells))
    for line in ledger.goodput.bins:
        seconds = sum((cell.end_s - cell.start_s) * cell.shares.get(line.bin, 0.0) for cell in cells)
        assert seconds * ledger.gpus == pytest.approx(line.gpu_us / 1e6), line.bin
    assert sum(cell.cents or 0 for cell in cells) == pytest.approx(ledger.goodput.cents, rel=0.01)
    assert [parts.attempt for parts in page.attempts] == [0, 1, 2]
    assert {part.stage for part in page.attempts[1].parts} >= {"provisioning", "working"}


def test_a_long_run_has_so_many_cells_with_shares(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    story = resumed(db)
    exact = timeline.read(db, story.id, now=story.at)
    monkeypatch.setattr(timeline, "CELLS", 5)
    page = timeline.read(db, story.id, now=story.at)
    assert page is not None and exact is not None and len(exact.cells) > 5 >= len(page.cells)
    assert all(sum(cell.shares.values()) == pytest.approx(1, abs=0.001) for cell in page.cells)
    assert any(len(cell.shares) > 1 for cell in page.cells) and page.cells[-1].end_s == exact.cells[-1].end_s
    assert sum(cell.cents or 0 for cell in page.cells) == pytest.approx(sum(cell.cents or 0 for cell in exact.cells))


def test_nodes_have_their_attempts_and_what_was_said_of_them(any_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    story = resumed(any_db)
    page = timeline.read(any_db, story.id, now=story.at)
    assert page is not None
    said = {strip.node: (strip.attempts, [(mark.kind, mark.tone) for mark in strip.marks]) for strip in page.nodes}
    assert said == {
        "node-a": ((1, 2), [("check", "good"), ("check", "good"), ("hang", "bad")]),
        "node-b": ((1,), [("check", "warn")]),
        "node-c": ((2,), [("check", "warn"), ("straggler", "warn")]),
    }  # node 7, which the hang names too, is not there
    assert [strip.node for strip in page.nodes] == ["node-a", "node-b", "node-c"] and page.more_nodes == 0
    assert page.nodes[1].marks[0].text == "pre-flight: warn, disk: 41 GiB free"
    assert page.nodes[2].marks[1].text == "straggler: rank 9, 31% of a step behind"
    monkeypatch.setattr(timeline, "NODES", 1)
    few = timeline.read(any_db, story.id, now=story.at)
    assert few is not None and [strip.node for strip in few.nodes] == ["node-a"] and few.more_nodes == 2


def test_without_a_price_there_is_no_money(db: Database) -> None:
    story = samples.completed(db)
    with db.write() as conn:
        costs.set_price(conn, story.attempt, 0.0)  # the default of this machine: nobody stated it
    page = timeline.read(db, story.id, now=story.at)
    assert page is not None and page.cells and all(cell.cents is None for cell in page.cells)
    assert timeline.read(db, "00000000-0000-4000-8000-000000000000") is None
