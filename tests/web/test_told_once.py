"""What is said of a run that went on, had losses which are no numbers, or whose checks failed: once, and rightly."""

from __future__ import annotations

import csv
import math

from pages import samples
from trainmaster.core.events import Event
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.pages import job
from trainmaster.report import phrases, render_html, render_markdown
from trainmaster.store.database import Database

from .conftest import TestClient


def steps(story: samples.Story, first: int, last: int, *, start: dict[str, object] | None = None) -> samples.Story:
    story.start().move(Stage.RUNNING)
    if start is not None:
        story.tell([Event(phase="TRAINING", event="start", data=start)])
    story.tell(
        Event(phase="STEP", event="metrics", data={"step": step, "loss": 0.1}) for step in range(first, last + 1, 5)
    )
    return story.end_attempt().finish(Status.COMPLETED)


def say(db: Database, story: samples.Story) -> str:
    page = job.read(db, story.id)
    assert page is not None
    return phrases.sentence(page)


def test_the_headline_of_a_resumed_run_counts_its_own_steps(db: Database) -> None:
    spec = {"name": "long", "command": ["x"]}
    first = steps(samples.Story(db, parse_spec(spec)), 1, 21)
    told = steps(samples.Story(db, parse_spec({**spec, "resume_from": first.id})), 25, 120, start={"resumed_from": 20})
    script = steps(samples.Story(db, parse_spec({**spec, "resume_from": first.id})), 25, 120)
    assert say(db, first).startswith("21 steps in ")
    assert say(db, told).startswith("Steps 21 to 120 in ") and f", on from long {first.id[:8]}. Loss" in say(db, told)
    assert say(db, script).startswith("Steps 25 to 120 in "), "a script reports no start: its first step that is known"


def test_a_loss_that_is_no_number_is_a_row_of_the_csv(client: TestClient, db: Database) -> None:
    story = samples.Story(db).start()
    values = (0.5, math.nan, math.inf, -math.inf)
    story.tell(
        Event(phase="STEP", event="metrics", data={"step": step, "loss": loss, "note": "NaN?", "none": None})
        for step, loss in enumerate(values, 1)
    )
    rows = list(csv.DictReader(client.get(f"/jobs/{story.id}/curves.csv").text.splitlines()))
    assert [(row["step"], row["metric"], row["value"]) for row in rows] == [
        ("1", "loss", "0.5"), ("2", "loss", "nan"), ("3", "loss", "inf"), ("4", "loss", "-inf"),
    ]  # fmt: skip


def test_findings_are_told_once_as_a_table_and_never_as_json(client: TestClient, db: Database) -> None:
    bad = {"check": "ecc", "verdict": "fail", "device": "gpu3", "reason": "2 errors", "action": "replace GPU 3",
           "values": {"errors": 2}}  # fmt: skip
    story = samples.Story(db).start()
    story.tell(samples.preflight([bad]))
    story.end_attempt(Reason.CHECK_FAILED, "ecc: 2 errors", evidence={"overall": "FAIL", "findings": [bad]})
    story.finish(Status.FAILED, Reason.CHECK_FAILED, "ecc: 2 errors")
    page = job.read(db, story.id)
    assert page is not None
    told = "ecc gpu3: fail: 2 errors → replace GPU 3"
    for text in (client.get(f"/jobs/{story.id}").text, render_html(page), render_markdown(page)):
        found = [word for word in ("Findings", "findings:", "&#34;check&#34;", '"check": ') if word in text]
        assert not found, text[text.index(found[0]) - 200 :][:400]
        assert "2 errors" in text
    tab = client.get(f"/jobs/{story.id}/attempts").text
    assert told in tab and "&#34;check&#34;" not in tab, "there is no table beside it"
