"""Runs sorted by a figure: the best first, runs without a number last; and NaN on the pages that list runs."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta

import pytest

from pages import samples
from trainmaster.cli._views import sets as table
from trainmaster.control.queueing import sets
from trainmaster.core.config.sweep import parse_sweep
from trainmaster.core.events import Event
from trainmaster.core.states import Stage, Status
from trainmaster.pages import compare, jobs
from trainmaster.pages import sets as set_pages
from trainmaster.store import attempts, costs
from trainmaster.store.capacity import sets as store
from trainmaster.store.database import Database

from .conftest import TestClient

HOUR = timedelta(hours=1)


def run(db: Database, name: str, loss: object, *, steps: int = 5, rate: float = 100.0) -> samples.Story:
    story = samples.Story(db, samples.spec(name=name)).start().move(Stage.RUNNING)
    if loss is not None:
        data = {"step": steps, "loss": loss, "tokens_per_s": rate}
        story.tell([Event(phase="STEP", event="metrics", data=data)])
    return story.end_attempt().finish(Status.COMPLETED)


@pytest.fixture
def furnished(db: Database) -> None:
    run(db, "best", 0.5, steps=3, rate=10.0)
    run(db, "silent", None)
    run(db, "worst", 7.0, steps=9, rate=30.0)
    run(db, "burst", math.nan, steps=4, rate=5.0)
    run(db, "middle", 2.5, steps=6, rate=20.0)


def names(text: str) -> list[str]:
    return re.findall(r'class="job-name"[^>]*>([^<]+)<', text)


@pytest.mark.parametrize(
    ("asked", "order"),
    [
        ("loss", ["best", "middle", "worst", "burst", "silent"]),
        ("-loss", ["worst", "middle", "best", "burst", "silent"]),
        ("tokens", ["worst", "middle", "best", "burst", "silent"]),
        ("progress", ["worst", "middle", "burst", "best", "silent"]),
    ],
)
@pytest.mark.usefixtures("furnished")
def test_a_header_sorts_without_a_script(client: TestClient, asked: str, order: list[str]) -> None:
    text = client.get(f"/?sort={asked}").text
    assert names(text) == order
    column = asked.removeprefix("-")
    way = "ascending" if asked == "loss" else "descending"
    assert re.search(rf'aria-sort="{way}"><a id="sort-{column}"', text) and text.count(' aria-sort="') == 1
    other = f"-{column}" if asked == column else column
    assert f'<a id="sort-{column}" href="/?sort={other}"' in text
    assert f"sort={asked}&amp;part=1" in text, "an open page stays sorted"
    assert f'<input type="hidden" name="sort" value="{asked}">' in text, "and a search in it"


@pytest.mark.usefixtures("furnished")
def test_a_sorted_list_has_pages_and_a_filter(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(client.get("/?sort=loss&limit=2&offset=2").text) == ["worst", "burst"]
    assert names(client.get("/?sort=loss&status=completed&find=rst").text) == ["worst", "burst"]
    plain = client.get("/").text
    assert '<a id="sort-loss" href="/?sort=loss"' in plain and ' aria-sort="' not in plain
    assert client.get("/?sort=name").status_code == 422
    monkeypatch.setattr(jobs, "SORTED", 3)
    some = client.get("/?sort=loss").text
    assert len(names(some)) == 3 and "The newest 3 of 5 runs are sorted" in some


def priced(db: Database, name: str, cents: float | None, *, target: str = "lambda", project: str = "research") -> None:
    begun = datetime.now(UTC) - HOUR
    story = samples.Story(db, samples.spec(name=name, target=target, project=project), at=begun).start()
    with db.write() as conn:
        costs.set_price(conn, story.attempt, cents)
        attempts.mark_released(conn, story.attempt, at=story.at + HOUR)
    story.end_attempt().finish(Status.COMPLETED)


def test_a_cost_that_is_unknown_is_the_last_in_both_directions(client: TestClient, db: Database) -> None:
    for name, cents, target in (("free", 0, "local"), ("dear", 900, "lambda"), ("cheap", 100, "lambda")):
        priced(db, name, cents, target=target)
    priced(db, "unpriced", None)
    samples.pending(db, name="waits", target="lambda")
    for asked, order in (("cost", ["cheap", "dear"]), ("-cost", ["dear", "cheap"])):
        text = client.get(f"/?sort={asked}").text
        assert names(text)[:2] == order and set(names(text)[2:]) == {"free", "unpriced", "waits"}
        cells = dict(re.findall(r'class="job-name"[^>]*>([^<]+)<.*?data-name="cost">([^<]+)<', text, re.DOTALL))
        assert {cells[name] for name in names(text)[2:]} <= {"–", "unknown"}, cells


def test_the_column_of_costs_is_on_each_page_of_a_list(client: TestClient, db: Database) -> None:
    for name in ("one", "two", "three"):
        priced(db, name, 0, target="local")
    priced(db, "dear", 900, project="lab")
    for query in ("sort=-cost&", "sort=cost&", ""):
        for offset in (0, 2):
            text = client.get(f"/?{query}limit=2&offset={offset}").text
            assert len(names(text)) == 2 and '<a id="sort-cost"' in text and 'data-name="cost"' in text, (query, offset)
    other = client.get("/?project=research&limit=2").text
    assert len(names(other)) == 2 and "sort-cost" not in other, "no job of this project has a price"


@pytest.mark.usefixtures("furnished")
def test_a_loss_that_is_no_number_is_not_a_dash(client: TestClient) -> None:
    text = client.get("/").text
    cells = dict(re.findall(r'class="job-name"[^>]*>([^<]+)<.*?data-name="loss">([^<]+)<', text, re.DOTALL))
    assert (cells["burst"], cells["silent"], cells["best"]) == ("NaN", "–", "0.5")


def test_compare_shows_nan(client: TestClient, db: Database) -> None:
    burst, silent = run(db, "burst", math.nan), run(db, "silent", None)
    page = compare.read(db, ids=[burst.id, silent.id])
    assert [dict(each.texts) for each in page.runs] == [{"loss": "NaN"}, {}]
    text = client.get(f"/compare?jobs={burst.id},{silent.id}").text
    final = text.partition('<table class="final">')[2].partition("</table>")[0]
    assert '<td class="num">NaN</td>' in final and '<td class="num">–</td>' in final


def test_a_set_shows_nan(client: TestClient, db: Database, capsys: pytest.CaptureFixture[str]) -> None:
    made = sets.submit_set(db, parse_sweep({"name": "lr", "command": ["x"], "matrix": {"env.A": ["1", "2"]}}))
    for number, loss in ((1, math.nan), (2, 0.5)):
        story = run(db, f"t-{number}", loss)
        with db.write() as conn:
            assert store.take_trial(conn, made.id, number, story.id)
    page = set_pages.read_one(db, made.id)
    assert page is not None and [trial.best for trial in page.trials] == [False, True]
    assert '<td class="num">NaN</td>' in client.get(f"/sets/{made.id}").text
    table.print_set(page)
    assert "  NaN" in capsys.readouterr().out
