"""Who submitted a run, its price an hour and its cost so far: the same on every page, to the caller's project alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient

from pages import samples
from report.test_hostile import HOSTILE
from trainmaster.cli import _console
from trainmaster.cli.jobs.nodes import _print
from trainmaster.cli.jobs.show import _price, _submitted
from trainmaster.core.money.cost import dollars
from trainmaster.core.roles import Role
from trainmaster.core.states import Stage, Status
from trainmaster.pages import cost, job, job_goodput, jobs, machines, node_map, spending
from trainmaster.store import attempts, costs, tables
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from trainmaster.web.sections.run import BINS
from trainmaster.web.templating import render
from web.conftest import BASE, LOCAL
from web.furnished import issue

HOUR = timedelta(hours=1)
NODE = "gpu-box-7"


def running(db: Database, *, cents: float | None, by: str | None, target: str = "slurm") -> samples.Story:
    """A job that has held one node for two hours."""
    start = datetime.now(UTC) - 2 * HOUR
    story = samples.Story(db, samples.spec(target=target), at=start).start()
    with db.write() as conn:
        costs.set_price(conn, story.attempt, cents)
        attempts.set_handle(conn, story.attempt, {"nodes": [NODE]})
        conn.execute(update(tables.attempts).where(tables.attempts.c.id == story.attempt).values(created_at=start))
    name(db, story.id, by)
    return story.move(Stage.RUNNING)


def queued(db: Database, *, by: str | None, price: float | None = None) -> samples.Story:
    story = samples.Story(db, samples.spec(target="slurm", resources={"price_per_hour": price}), at=datetime.now(UTC))
    name(db, story.id, by)
    return story


def name(db: Database, job_id: str, by: str | None) -> None:
    with db.write() as conn:
        conn.execute(update(tables.jobs).where(tables.jobs.c.id == job_id).values(submitted_by=by))


def row(text: str, job_id: str) -> str:
    """The line of a table that links to a job."""
    (line,) = [part for part in text.split("<tr")[1:] if f"/jobs/{job_id}" in part]
    return line.partition("</tr>")[0]


def test_every_page_names_the_submitter_the_price_and_the_cost(db: Database, client: TestClient) -> None:
    story = running(db, cents=150, by="ana-laptop")
    for path in ("/", "/cost"):
        line = row(client.get(path).text, story.id)
        assert "ana-laptop" in line and "$1.50" in line and "$3.00" in line, path
    for path in (f"/jobs/{story.id}", "/nodes", f"/nodes/one?node={NODE}"):
        text = client.get(path).text
        assert "ana-laptop" in text and "$1.50 an hour, $3.00 so far" in text, path


def test_the_queue_names_the_submitter_and_the_stated_price(db: Database, client: TestClient) -> None:
    priced, other = queued(db, by="ana-laptop", price=12.5), queued(db, by=None)
    text = client.get("/queue").text
    assert "ana-laptop" in row(text, priced.id) and "$12.50 an hour" in row(text, priced.id)
    assert ">local<" in row(text, other.id) and "price unknown" in row(text, other.id)
    text = client.get("/").text
    assert "at $12.50 an hour" in row(text, priced.id)
    assert "unknown" in row(text, other.id) and "$" not in row(text, other.id)


def test_pages_and_the_command_line_say_one_number(db: Database) -> None:
    story, now = running(db, cents=150, by="ana"), datetime.now(UTC)
    shown = job.read(db, story.id, now=now)
    assert shown is not None and _price(shown) == "$1.50 an hour, $3.00 so far"
    (line,) = jobs.read(db, now=now).jobs
    (going,) = spending.read(db, now=now).going
    ((use,),) = [node.used_by for node in node_map.read(db, now=now).nodes]
    (spent,) = cost.read(db, now=now).jobs
    figures = [
        (shown.price_cents_per_hour, shown.cost_cents),
        (line.price_cents_per_hour, line.cost_cents),
        (going.cents_per_hour, going.cents),
        (use.price_cents_per_hour, use.cost_cents),
        (spent.cents_per_hour, spent.cents),
    ]
    assert figures == [(150.0, 300)] * 5


def test_a_cost_under_a_cent_reads_the_same_everywhere(db: Database, client: TestClient) -> None:
    story = running(db, cents=0.2, by="ana")
    for path in ("/", "/cost"):
        assert "under $0.01" in row(client.get(path).text, story.id), path
    text = client.get("/cost").text
    figures = text.split("<dt>End of this month")[0]
    assert (
        "under $0.01" in figures
        and "$0.00" not in figures
        and f"All figures are of {datetime.now(UTC):%Y-%m-%d}" in text
    )
    for path in (f"/jobs/{story.id}", "/nodes"):
        assert "under $0.01 an hour, under $0.01 so far" in client.get(path).text, path
    assert "<dt>So far</dt><dd>under $0.01</dd>" in client.get(f"/jobs/{story.id}/cost").text
    shown = job.read(db, story.id)
    assert shown is not None and _price(shown) == "under $0.01 an hour, under $0.01 so far"
    (line,) = cost.read(db).jobs
    assert line.cents is not None and 0 < line.cents < 1 and dollars(line.cents) == "under $0.01"


def test_nodes_on_the_command_line_name_the_submitter_and_the_price(
    db: Database, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    story = running(db, cents=150, by="ana-laptop")
    monkeypatch.setattr(_console.out, "_width", 200)
    _print(machines.read(db))
    line = next(line for line in capsys.readouterr().out.splitlines() if NODE in line)
    assert story.id[:8] in line and line.split()[-2:] == ["ana-laptop", "$1.50"]
    name(db, story.id, None)
    ((use,),) = [machine.used_by for machine in machines.read(db).machines]
    assert (use.submitted_by, use.price_cents_per_hour) == (None, 150.0)
    _print(machines.read(db))
    assert "local" in capsys.readouterr().out
    assert machines.read(db, project="other").machines == ()


def test_who_submitted_is_worded_in_one_way(db: Database, client: TestClient) -> None:
    story = running(db, cents=150, by=None)
    for path in ("/", "/cost", f"/jobs/{story.id}", "/nodes"):
        text = client.get(path).text
        assert ("command line" not in text and ">local<" in text) or "by local" in text, path
    shown = job.read(db, story.id)
    assert shown is not None and " by local, " in str(_submitted(shown))


@pytest.mark.parametrize(("device", "word"), [("cpu", "slot"), ("cuda", "GPU"), (None, "GPU")])
def test_a_job_without_gpus_has_slot_hours(db: Database, device: str | None, word: str) -> None:
    """Where the device is not known the trade's word stays."""
    page, ledger = SimpleNamespace(run=SimpleNamespace(device=device)), job_goodput.read(db, samples.completed(db).id)
    text = bytes(render("goodput.html", page=page, goodput=ledger, **BINS).body).decode()
    assert f"What the {word}s did" in text and f"{word} hours</th>" in text and f" {word} hours held, ETTR" in text


def test_a_job_that_is_over_has_cost_in_all_and_not_so_far(db: Database, client: TestClient) -> None:
    story = running(db, cents=150, by="ana").move(Stage.RELEASING).finish(Status.COMPLETED)
    with db.write() as conn:
        attempts.mark_released(conn, story.attempt, at=datetime.now(UTC))
    for path in (f"/jobs/{story.id}", f"/jobs/{story.id}/cost"):
        assert "so far" not in client.get(path).text.lower(), path
    shown = job.read(db, story.id)
    assert shown is not None and _price(shown) == "$1.50 an hour, $3.00 in all"


@pytest.mark.parametrize(("cents", "target"), [(None, "slurm"), (0.0, "local")])
def test_a_price_that_nobody_stated_is_unknown_and_never_nothing(
    db: Database, client: TestClient, cents: float | None, target: str
) -> None:
    story = running(db, cents=cents, by="ana", target=target)
    priced = running(db, cents=100, by="ben")
    line = row(client.get("/").text, story.id)
    assert "unknown" in line and "$" not in line
    line = row(client.get("/cost").text, story.id)
    assert line.count("unknown") == 2 and "$" not in line
    assert "$1.00" in row(client.get("/cost").text, priced.id)
    page = client.get(f"/jobs/{story.id}").text
    assert "<dt>Price</dt><dd>unknown</dd>" in page and "$" not in page
    assert "price unknown" in client.get("/nodes").text


def test_the_price_is_the_attempts_else_the_specs_else_unknown(any_db: Database) -> None:
    free = samples.Story(any_db, samples.spec(target="local", resources={"price_per_hour": 0.0})).start()
    with any_db.write() as conn:
        costs.set_price(conn, free.attempt, 0.0)
    ran, waits, unknown = (
        running(any_db, cents=150, by="ana"),
        queued(any_db, by="ben", price=12.5),
        queued(any_db, by=None),
    )
    ids = [free.id, ran.id, waits.id, unknown.id]
    found = cost.list_prices(any_db, ids)
    assert [found[job_id] for job_id in ids] == [(None, 0.0), ("ana", 150.0), ("ben", 1250.0), (None, None)]


def test_a_hostile_name_stays_text(db: Database, client: TestClient) -> None:
    story, waits = running(db, cents=100, by=HOSTILE[:63]), queued(db, by=HOSTILE[:63])
    for path in ("/", "/cost", "/queue", "/nodes", f"/nodes/one?node={NODE}", f"/jobs/{story.id}", f"/jobs/{waits.id}"):
        text = client.get(path).text
        assert "<script>alert(1)" not in text and "<img src=x" not in text, path
        assert "&lt;script&gt;alert(1)" in text, path


def test_a_viewer_of_another_project_learns_nothing(db: Database, tmp_path: Path) -> None:
    story, waits = running(db, cents=150, by="ana-laptop"), queued(db, by="ben-laptop", price=77.0)
    own, other = issue(db, "own", Role.VIEWER, story.spec.project), issue(db, "other", Role.VIEWER, "elsewhere")
    with TestClient(create_app(db, tmp_path, reconcile=False), base_url=BASE, client=LOCAL) as client:
        paths = ("/", "/queue", "/nodes", "/cost", f"/nodes/one?node={NODE}", f"/jobs/{story.id}", f"/jobs/{waits.id}")
        seen = {path: client.get(path, headers=own).text for path in paths}
        assert all("-laptop" in text for text in seen.values())
        for path in paths:
            text = client.get(path, headers=other).text
            assert not any(word in text for word in ("-laptop", "$1.50", "$3.00", "$77.00")), path
