"""The page of a job that waits: its place in the queue and its expected start, and nothing that it has not yet."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pages import samples
from trainmaster.api.queue import QueueLine, QueuePage
from trainmaster.core.states import Stage
from trainmaster.pages import queue
from trainmaster.store.database import Database

from .conftest import TestClient


def line(story: samples.Story, position: int | None, *before: str) -> QueueLine:
    return QueueLine(
        job_id=story.id, name=story.spec.name, project="research", target="local", priority="normal", nodes=1,
        processes_per_node=1, since=samples.T0, position=position, reason="2 of 2 slots are taken", before=before,
        expected_at=samples.T0 + timedelta(hours=3), expected_latest=True,
    )  # fmt: skip


def test_it_says_its_place_and_leads_there(client: TestClient, db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = samples.pending(db, name="ahead"), samples.pending(db, name="waits")
    made = QueuePage(
        jobs=(line(first, 1), line(second, 2, first.id)), total=2, limit=100, offset=0, shares=(),
        made_at=datetime.now(UTC),
    )  # fmt: skip
    asked: list[str | None] = []

    def read(_: Database, *, project: str | None, limit: int) -> QueuePage:
        asked.append(project)
        return made

    monkeypatch.setattr(queue, "read", read)
    for path in ("", "/part"):
        text = client.get(f"/jobs/{second.id}{path}").text
        assert f'<a id="to-queue" href="/queue#q-{second.id}">2</a>; before it: ahead' in text
        assert "2 of 2 slots are taken" in text and "2026-03-01 15:00 UTC</time> at the latest" in text
    assert asked == ["research"], "once in two seconds, and of its own project alone"


@pytest.mark.proof
def test_a_job_without_an_attempt_offers_no_log(client: TestClient, db: Database) -> None:
    waiting, running = samples.pending(db), samples.Story(db).start().move(Stage.RUNNING)
    text = client.get(f"/jobs/{waiting.id}").text
    assert "No step yet" in text and "Read its log" not in text and 'id="to-queue"' in text
    text = client.get(f"/jobs/{running.id}").text
    assert "Read its log" in text and 'id="to-queue"' not in text
