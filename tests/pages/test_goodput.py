"""What the GPUs did, from rows of a real database: the page, the paths, the verb, the metrics and the board agree."""

from __future__ import annotations

import json
import re
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy import event, update
from starlette.testclient import TestClient
from typer.testing import CliRunner

from pages import samples
from trainmaster.api.goodput import Goodput
from trainmaster.cli.main import build
from trainmaster.core.errors import UsageError
from trainmaster.core.events import Event
from trainmaster.core.roles import Role
from trainmaster.core.states import Reason, Stage, Status
from trainmaster.pages import goodput, job_cost, job_goodput
from trainmaster.store import attempts, costs
from trainmaster.store import tables as t
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from trainmaster.web.ledgers import OTHERS, Ledgers
from web.conftest import BASE, LOCAL
from web.furnished import issue

ROOT = Path(__file__).parents[2]
T0 = samples.T0


def told(first: int, last: int, *, at: datetime, resumed_from: int | None = None) -> list[Event]:
    """A start and one step a second, the first of which takes five."""
    start = {"steps": 100, "ranks": 8, "device": "cuda", "resumed_from": resumed_from}
    events = [Event(phase="TRAINING", event="start", ts=at, data=start)]
    events += [
        Event(phase="STEP", event="metrics", ts=at + timedelta(seconds=4 + step - first + 1),
              data={"step": step, "step_s": 1.0, "mfu": 0.4})
        for step in range(first, last + 1)
    ]  # fmt: skip
    return events


def a_run(
    db: Database, *, last: int = 20, cents: float | None = 800.0, at: datetime = T0, **changes: Any
) -> samples.Story:
    """A job on 8 GPUs whose attempt is lost after some steps; it is final and was released."""
    spec = samples.spec(**{"resources": {"processes_per_node": 8}, "target": "slurm", **changes})
    story = samples.Story(db, spec, at=at).start().move(Stage.RUNNING)
    with db.write() as conn:
        costs.set_price(conn, story.attempt, cents)
    story.tell(told(1, last, at=story.at))
    story.at += timedelta(seconds=60)  # and 71 more until its end is known
    story.end_attempt(Reason.NODE_LOST, "gone")
    with db.write() as conn:
        attempts.mark_released(conn, story.attempt, at=story.at + timedelta(seconds=1))
    return story.finish(Status.FAILED, Reason.NODE_LOST, "gone")


def bins(page: Goodput) -> dict[str, float]:
    """GPU-seconds of each bin that has any."""
    assert sum(line.gpu_us for line in page.bins) == page.gpu_us
    return {line.bin: line.gpu_us / 1e6 for line in page.bins if line.gpu_us}


def test_rows_become_the_ledger_of_a_job(any_db: Database) -> None:
    story = a_run(any_db)
    page = job_goodput.read(any_db, story.id)
    assert page is not None and (page.gpus, page.month, page.notes) == (8, None, ())
    times = bins(page.goodput)
    assert times == {
        "queued": 8 * 3, "provisioning": 8, "starting": 8, "compiling": 8 * 4, "training": 8 * 20, "stalled": 8 * 107,
        "idle": 8,
    }  # fmt: skip
    cost = job_cost.read(any_db, story.id)
    assert cost is not None and page.goodput.cents == pytest.approx(cost.total.known_cents, abs=0.5)
    assert page.goodput.program == pytest.approx(0.4)
    assert page.goodput.ettr == pytest.approx(20 / sum(times.values()) * 8)
    assert job_goodput.read(any_db, str(uuid.uuid4())) is None


def test_a_resumed_job_repeats_what_the_first_one_lost(any_db: Database) -> None:
    first = a_run(any_db)
    later = T0 + timedelta(days=40)  # and in another month
    second = samples.Story(any_db, samples.spec(resume_from=first.id), at=later).start().move(Stage.RUNNING)
    second.tell(told(16, 24, at=second.at, resumed_from=15))
    for page in (
        job_goodput.read(any_db, second.id, now=second.at + timedelta(seconds=13)),
        next(job for job in goodput.read(any_db, month=later, now=second.at + timedelta(seconds=13)).jobs),
    ):
        assert page is not None and page.id == second.id
        assert bins(page.goodput)["repeated"] == 5 and bins(page.goodput)["training"] == 4


def test_sums_by_project_target_and_month(any_db: Database) -> None:
    a_run(any_db, project="a")
    a_run(any_db, project="a", cents=None)
    a_run(any_db, project="b", at=datetime(2026, 3, 31, 23, 59, 40, tzinfo=UTC), target="ssh:hosts.yaml")
    page = goodput.read(any_db)
    assert [(line.name, line.jobs) for line in page.projects] == [("a", 2), ("b", 1)]
    assert goodput.kind_of("me@ssh:hosts.yaml") == "ssh"
    assert [(line.name, line.jobs) for line in page.targets] == [("slurm", 2), ("ssh", 1)]
    assert [(line.name, line.jobs) for line in page.months] == [("2026-03", 3), ("2026-04", 1)]
    for sums in (page.projects, page.targets, page.months):
        assert sum(line.goodput.gpu_us for line in sums) == page.total.goodput.gpu_us
    assert page.total.goodput.unpriced_jobs == 1 and page.total.goodput.cents == pytest.approx(2 * 800 * 137 / 3600)
    months = [goodput.read(any_db, month=datetime(2026, month, 5, tzinfo=UTC)) for month in (2, 3, 4, 5)]
    assert [month.total.jobs for month in months] == [0, 3, 1, 0]
    assert sum(month.total.goodput.gpu_us for month in months) == page.total.goodput.gpu_us
    assert (len(goodput.read(any_db, limit=1).jobs), goodput.read(any_db, limit=1).more) == (1, 2)
    assert [job.project for job in goodput.read(any_db, project="b").jobs] == ["b"]


def test_queries_do_not_grow_with_the_jobs(db: Database) -> None:
    def count() -> int:
        asked: list[str] = []
        listen = (db.engine, "before_cursor_execute", lambda *arguments: asked.append(arguments[2]))
        event.listen(*listen)
        goodput.read(db)
        event.remove(*listen)
        return len(asked)

    a_run(db)
    few = count()
    for _ in range(5):
        a_run(db)
    assert 0 < count() == few


def over(db: Database, home: Path, **options: Any) -> TestClient:
    return TestClient(create_app(db, home, reconcile=False, **options), base_url=BASE, client=LOCAL)


def test_paths_show_a_project_its_own(any_db: Database, tmp_path: Path) -> None:
    own, other = a_run(any_db, project="lab"), a_run(any_db, project="victim", name="of-victim")
    client = over(any_db, tmp_path, require_token=True)
    token = issue(any_db, "of-lab", Role.VIEWER, "lab")
    page = client.get("/v1/goodput", headers=token).json()
    assert [line["name"] for line in page["projects"]] == ["lab"] and page["total"]["jobs"] == 1
    assert client.get("/v1/goodput?project_id=victim", headers=token).status_code == 403
    assert client.get("/v1/goodput?month=2026-13", headers=token).status_code == 422
    job = client.get(f"/v1/training/jobs/{own.id}/goodput", headers=token)
    assert job.json()["goodput"]["gpu_us"] == page["total"]["goodput"]["gpu_us"]
    assert client.get(f"/v1/training/jobs/{other.id}/goodput", headers=token).status_code == 404
    assert client.get("/metrics", headers=token).status_code == 403


def test_the_page_of_a_job_has_the_bar_and_its_words(db: Database, tmp_path: Path) -> None:
    story = a_run(db)
    client = over(db, tmp_path)
    for path in (f"/jobs/{story.id}", f"/jobs/{story.id}/part"):
        html = client.get(path).text
        section = html[html.index('id="goodput"') :].partition("</section>")[0]
        shares = [float(width) for width in re.findall(r'<rect x="[\d.]+%" width="([\d.]+)%"', section)]
        assert len(shares) == 7 and sum(shares) == pytest.approx(100, abs=0.1)
        for words in ("8 GPUs", "stalled", "idle after the end", "the work was up and recorded nothing"):
            assert words in section
        assert "style=" not in section  # the policy of the page forbids it


def test_metrics_have_sums_and_a_bound(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainmaster.web.ledgers.MOST_PROJECTS", 2)
    for number in range(4):
        a_run(db, project=f"p{number}", at=T0 + timedelta(seconds=number))
    samples.Story(db, samples.spec(project="p3")).start()
    app = create_app(db, tmp_path, reconcile=False)
    ledgers: Ledgers = app.state.ledgers
    assert ledgers.sums() is None
    ledgers.refresh()
    ledgers.refresh()  # jobs that are final are not counted twice
    sums = ledgers.sums()
    assert sums is not None and list(sums.projects) == ["p3", "p0", OTHERS]
    counted = sum(tally.total_us for name, tally in sums.projects.items() if name != "p3")
    assert counted == sum(goodput.read(db, project=f"p{number}").total.goodput.gpu_us for number in range(3))
    assert sums.projects["p3"].jobs == 2
    text = TestClient(app, base_url=BASE, client=LOCAL).get("/metrics").text
    assert 'trainmaster_gpu_seconds{bin="stalled",project="p3"}' in text
    assert text.count("trainmaster_gpu_seconds{") == 3 * 15
    assert 'trainmaster_target_gpu_seconds{bin="queued",target="slurm"}' in text
    assert "trainmaster_ettr_ratio{" in text and 'part="program"' in text and "trainmaster_gpu_cost_dollars{" in text


def test_every_metric_of_the_board_exists(db: Database, tmp_path: Path) -> None:
    a_run(db)
    app = create_app(db, tmp_path, reconcile=False)
    app.state.ledgers.refresh()
    client = TestClient(app, base_url=BASE, client=LOCAL)
    client.get("/")  # so that a request was timed
    names = {line.partition("{")[0].partition(" ")[0] for line in client.get("/metrics").text.splitlines()}
    board = json.loads((ROOT / "deploy" / "monitoring" / "grafana-goodput.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    used = {name for query in queries for name in re.findall(r"trainmaster_\w+", query)}
    assert len(used) >= 5 and used <= names
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def ask(home: Path, *words: str) -> Result:
    env = {"TRAINMASTER_HOME": str(home), "COLUMNS": "160", "TERM": "dumb"}
    return CliRunner(env=env).invoke(build(), ["goodput", *words])


def test_the_verb(db: Database, tmp_path: Path) -> None:
    story = a_run(db, project="lab")
    with db.write() as conn:
        conn.execute(update(t.jobs).where(t.jobs.c.id == story.id).values(name="[bold]x"))
    printed = ask(tmp_path, story.id[:8])
    assert printed.exit_code == 0, printed.output
    for words in ("[bold]x", "8 GPUs", "compiling", "█", "ETTR", "scheduling", "program 40.0%", "in all"):
        assert words in printed.output
    answer = json.loads(ask(tmp_path, story.id, "--json").output)
    assert sum(line["gpu_us"] for line in answer["goodput"]["bins"]) == answer["goodput"]["gpu_us"]
    everything = ask(tmp_path, "--all")
    assert "from the beginning: 1 job\n" in everything.output and "stalled 78%" in everything.output
    assert json.loads(ask(tmp_path, "--month", "2026-03", "--json").output)["total"]["jobs"] == 1
    assert "no job of project x was there so far" in ask(tmp_path, "--all", "--project", "x").output
    for words in ([story.id, "--all"], ["--month", "x"]):
        assert isinstance(ask(tmp_path, *words).exception, UsageError)


def test_the_verb_counts_slots_of_a_run_on_cpus_as_its_page_does(db: Database, tmp_path: Path) -> None:
    story = samples.completed(db)
    printed = ask(tmp_path, story.id).output
    assert "1 slot," in printed and "slot hours" in printed and "GPU hours" not in printed
    page = over(db, tmp_path).get(f"/jobs/{story.id}").text
    assert "1 slot," in page and "slot hours" in page, "as there"


def test_a_server_makes_the_sums_once_they_are_asked_for(db: Database, tmp_path: Path) -> None:
    a_run(db)
    with over(db, tmp_path) as client:
        while (
            "trainmaster_gpu_seconds{" not in client.get("/metrics").text
        ):  # pytest's own limit ends one that never has
            time.sleep(0.05)
