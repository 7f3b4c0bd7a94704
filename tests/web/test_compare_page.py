"""The page that compares runs: differences of specs first, final values, sampled curves, and the choice in its link."""

from __future__ import annotations

import csv
import html
import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from pages import samples
from report.test_hostile import HOSTILE
from trainmaster.core.events import Event
from trainmaster.core.roles import Role
from trainmaster.core.states import Stage, Status
from trainmaster.pages import compare
from trainmaster.store.database import Database
from trainmaster.web.app import create_app
from web.conftest import BASE, LOCAL
from web.furnished import NOBODY, issue, read_page


def run(db: Database, *, steps: int = 40, scale: float = 1.0, **changes: Any) -> samples.Story:
    story = samples.Story(db, samples.spec(**changes)).start().move(Stage.RUNNING)
    story.tell(
        Event(phase="STEP", event="metrics", data={"step": step, "loss": scale / step, "mfu": 0.4})
        for step in range(1, steps + 1)
    )
    story.tell([Event(phase="EVAL_MODEL", event="metrics", data={"step": steps, "loss": 9 * scale})])
    return story.end_attempt().finish(Status.COMPLETED)


def pair(db: Database) -> tuple[samples.Story, samples.Story, samples.Story]:
    trains = [{"steps": 200, "optimizer": {"lr": lr}} for lr in (0.001, 0.001, 0.01)]
    one, two, three = (run(db, scale=1.0 + n, name=f"run-{n}", train=train) for n, train in enumerate(trains))
    return one, two, three


def test_what_differs_comes_first(client: TestClient, db: Database) -> None:
    stories = pair(db)
    page = compare.read(db, ids=[story.id for story in stories], group="train.optimizer.lr")
    assert [part.field for part in page.differences] == ["train.optimizer.lr", "name"] and page.same > 3
    assert page.differences[0].values == (
        ("0.001", (stories[0].id, stories[1].id)), ("0.01", (stories[2].id,)),
    )  # fmt: skip
    assert [(line.value, line.runs, line.lowest, line.highest) for line in page.groups] == [
        ("0.001", 2, 1 / 40, 2 / 40), ("0.01", 1, 3 / 40, 3 / 40),
    ]  # fmt: skip
    assert page.runs[2].values == {"loss": 3 / 40, "mfu": 0.4, "eval/loss": 27.0} and page.runs[2].step == 40
    ids = ",".join(story.id for story in stories)
    text = read_page(client.get(f"/compare?jobs={ids}&group=train.optimizer.lr"))
    assert text.index("What differs") < text.index("Curves") < text.index("Final values")
    saved = re.search(r'id="permalink" href="([^"]+)"', text)
    assert saved is not None
    again = read_page(client.get(saved[1].replace("&amp;", "&")))
    assert again == text, "the link is the whole choice"


def test_of_commands_only_the_arguments_that_differ_are_shown(client: TestClient, db: Database) -> None:
    same = ["python", "train.py", "--data", "/data/c4", "--bf16"]
    one, two = (
        run(db, name=f"run-{lr}", train=None, command=[*same, "--lr", lr, "--note", HOSTILE]) for lr in ("0.1", "0.2")
    )
    text = read_page(client.get(f"/compare?jobs={one.id},{two.id}&group=command --lr"))
    first = text.partition("Whole command")[0]
    assert '<th scope="row" class="mono">command --lr</th>' in first and "/data/c4" not in first
    assert "<td>0.1</td>" in text and "By command --lr" in text
    whole = text.partition("Whole command")[2].partition("</details>")[0]
    assert whole.count("python train.py --data /data/c4 --bf16 --lr 0.") == 2 and f"/jobs/{one.id}/spec" in whole
    assert "<script>alert" not in text and "<img" not in text


def test_the_legend_names_each_run_or_each_group(client: TestClient, db: Database) -> None:
    stories = [*pair(db), run(db, name="run-0")]
    ids = ",".join(story.id for story in stories)

    def legend(query: str) -> list[str]:
        text = client.get(f"/compare?jobs={ids}{query}").text
        found = re.search(r'<ul class="keys"[^>]*>(.*?)</ul>', text, re.DOTALL)
        assert found is not None
        return re.findall(r"</svg>(.*?)</li>", found[1])

    first, *others, last = legend("")
    assert others == ["run-1", "run-2"]
    assert {first, last} == {f"run-0 {stories[0].id[:8]}", f"run-0 {stories[3].id[:8]}"}
    assert legend("&group=train.optimizer.lr") == ["0.001", "0.01", "0.003"]


def test_a_choice_by_check_boxes(client: TestClient, db: Database) -> None:
    empty = client.get("/compare").text
    assert "There are no jobs yet" in empty
    one, two, _ = pair(db)
    assert f'name="job" value="{one.id}"' in client.get("/compare").text
    text = client.get(f"/compare?job={one.id}&job={two.id}&job={NOBODY}&job=%27--").text
    assert "2 runs" in text and "1 of the chosen runs is not there" in text
    assert f'value="{one.id}" checked' in text
    kept = client.get(f"/compare?jobs={one.id}&find=run-2").text
    assert f'<input type="hidden" name="jobs" value="{one.id}">' in kept, "a run that the search hides stays chosen"
    many = ",".join(f"{n:08d}-0000-4000-8000-000000000000" for n in range(300))
    assert "200 of the chosen runs are not there" in client.get(f"/compare?jobs={many}").text


def test_curves_are_sampled_from_first_to_last_of_each_attempt(client: TestClient, db: Database) -> None:
    story = run(db, steps=3000)
    curve = compare.read_curve(db, story.id, metric="loss", points=100)
    steps = [point[0] for point in curve.points]
    assert (steps[0], steps[-1], sorted(steps)) == (1, 3000, steps)
    assert 90 <= len(steps) <= 101 and max(b - a for a, b in itertools.pairwise(steps)) < 60
    assert all(value == 1 / step for step, _, value in curve.points)
    assert [point[0] for point in compare.read_curve(db, run(db, steps=5).id, metric="loss").points] == [1, 2, 3, 4, 5]
    answer = client.get(f"/compare/curves?jobs={story.id}&metric=eval/loss").json()
    assert [(each["id"], [point[::2] for point in each["points"]]) for each in answer["curves"]] == [
        (story.id, [[3000.0, 9.0]])
    ]
    resumed = samples.resumed(db)
    assert [point[0] for point in compare.read_curve(db, resumed.id, metric="loss", points=1000).points] == [
        *range(1, 84), *range(51, 141),
    ]  # fmt: skip
    assert client.get(f"/compare/curves?jobs={story.id}&metric=nothing").json()["curves"][0]["points"] == []


def test_nothing_of_another_project(db: Database, tmp_path: Path) -> None:
    mine, other = run(db, name="of-lab", project="lab"), run(db, name="of-victim", project="victim")
    app = create_app(db, tmp_path, reconcile=False, require_token=True)
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:
        token = issue(db, "lab-viewer", Role.VIEWER, "lab")
        text = client.get(f"/compare?jobs={mine.id},{other.id}", headers=token).text
        assert "of-lab" in text and "of-victim" not in text and "1 of the chosen runs is not there" in text
        curves = client.get(f"/compare/curves?jobs={mine.id},{other.id}", headers=token).json()["curves"]
        assert [each["id"] for each in curves] == [mine.id]
        assert client.get(f"/compare/curves?jobs={mine.id}").status_code in (303, 401)


def test_hostile_metrics_and_values_are_text(client: TestClient, db: Database) -> None:
    story = samples.Story(db, samples.spec(env={"WORD": HOSTILE, "API_KEY": "tell-nobody"})).start().move(Stage.RUNNING)
    story.tell([Event(phase="STEP", event="metrics", data={"step": 1, HOSTILE: 1.0, "loss": 2.0})])
    plain = run(db)
    asked = {"jobs": f"{story.id},{plain.id}", "metric": HOSTILE, "group": "env.WORD"}
    text = client.get("/compare", params=asked).text
    assert "<script>alert" not in text and "<img" not in text and "tell-nobody" not in text
    assert "env.WORD" in text


def test_a_large_comparison_shows_fifty_rows_first_and_every_one_by_a_button(client: TestClient, db: Database) -> None:
    ids = [samples.Story(db, samples.spec(name=f"run-{n}")).start().id for n in range(53)]

    def table(query: str) -> str:
        return read_page(client.get(f"/compare?jobs={','.join(ids)}{query}")).partition("Final values")[2]

    short, whole = table(""), table("&every=1")
    assert short.count('aria-label="leave out') == 50 and "50 of 53 runs" in short and "Show all 53 runs" in short
    assert whole.count('aria-label="leave out') == 53 and "Show all" not in whole


def test_a_large_legend_names_forty_and_says_how_many_more(client: TestClient, db: Database) -> None:
    stories = [run(db, name=f"run-{n}") for n in range(42)]
    text = read_page(client.get(f"/compare?jobs={','.join(story.id for story in stories)}"))
    assert text.count("<li><svg class") == 40 and "and 2 more, with their colours beside the rows below" in text
    charted = json.loads(html.unescape(re.findall(r'data-runs="([^"]*)"', text)[0]))
    assert [each[0] for each in charted] == [story.id for story in stories], "every one is drawn"


def test_final_values_are_sorted_by_a_column_and_absent_ones_come_last(client: TestClient, db: Database) -> None:
    stories = [run(db, name=name, scale=scale) for name, scale in (("middle", 2.0), ("low", 1.0), ("high", 3.0))]
    stories.append(samples.Story(db, samples.spec(name="none")).start())
    ids = ",".join(story.id for story in stories)
    for sort, expected in (
        ("", ["middle", "low", "high", "none"]), ("loss", ["low", "middle", "high", "none"]),
        ("-loss", ["high", "middle", "low", "none"]), ("-no such", ["middle", "low", "high", "none"]),
    ):  # fmt: skip
        text = read_page(client.get("/compare", params={"jobs": ids, "sort": sort, "every": "1"}))
        assert re.findall(r'aria-label="leave out (\w+) ', text) == expected, sort
        shown = list(csv.DictReader(client.get("/compare.csv", params={"jobs": ids, "sort": sort}).text.splitlines()))
        assert [row["name"] for row in shown] == expected, sort
        header = re.search(r'<th scope="col" class="num"( aria-sort="\w+")?><button[^>]*value="(-?loss)">', text)
        assert header is not None
        said, following = {
            "loss": (' aria-sort="ascending"', "-loss"),
            "-loss": (' aria-sort="descending"', "loss"),
        }.get(sort, (None, "loss"))
        assert header.groups() == (said, following)


def test_a_comparison_is_downloaded_as_a_table(client: TestClient, db: Database) -> None:
    stories = pair(db)
    answer = client.get("/compare.csv", params={"jobs": ",".join(story.id for story in stories)})
    assert answer.headers["content-type"].startswith("text/csv")
    assert "comparison.csv" in answer.headers["content-disposition"]
    table = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["id"] for row in table] == [story.id for story in stories]
    assert [row["train.optimizer.lr"] for row in table] == ["0.001", "0.001", "0.01"]
    assert table[0]["loss"] == str(1 / 40) and table[0]["eval/loss"] == "9.0" and table[0]["step"] == "40"


def test_a_spreadsheet_gets_no_formula_of_a_user(client: TestClient, db: Database) -> None:
    notes = ["=cmd|' /C calc'!A0", "\t@SUM(1)", "fine"]
    stories = [run(db, train=None, command=["python", "train.py", "--note", note]) for note in notes]
    answer = client.get("/compare.csv", params={"jobs": ",".join(story.id for story in stories)})
    cells = [row["command --note"] for row in csv.DictReader(io.StringIO(answer.text))]
    assert cells[0] == f"'{notes[0]}" and cells[2] == "fine" and cells[1].startswith("'")


def test_a_column_of_a_spreadsheet_is_the_only_one_of_its_name(client: TestClient, db: Database) -> None:
    """A job names its metrics, and by names that we use it would put its own values in place of ours."""
    stories = []
    for number in range(2):
        story = samples.Story(db, samples.spec(name=f"run-{number}", project=f"p{number}")).start().move(Stage.RUNNING)
        forged = {"id": 1.0, "name": 2.0, "cost_cents": 0.0, "project": 3.0, "spec:project": 4.0, "loss": 0.5}
        story.tell([Event(phase="STEP", event="metrics", data={"step": 1, **forged})])
        stories.append(story)
    answer = client.get("/compare.csv", params={"jobs": ",".join(story.id for story in stories)})
    (header,) = itertools.islice(csv.reader(io.StringIO(answer.text)), 1)
    assert len(set(header)) == len(header), header
    for row, story in zip(csv.DictReader(io.StringIO(answer.text)), stories, strict=True):
        assert (row["id"], row["name"], row["project"]) == (story.id, story.spec.name, story.spec.project)
        assert (row["metric:id"], row["metric:project"], row["loss"]) == ("1.0", "3.0", "0.5")


def test_a_spreadsheet_keeps_numbers_and_sees_through_what_is_not_seen(client: TestClient, db: Database) -> None:
    formulas = ["\ufeff=1+1", "\u200b@x", "\uff1dcmd", "\u202e=1", "-1+cmd", "\n=1", "--1", "-", "=-1"]
    numbers, odd = ["-0.5", "+3", "-1e-05"], ["a,b", 'q"q', "n\nl", "fine-1"]
    stories = [
        run(db, steps=1, train=None, command=["python", "x", f"--note={note}"]) for note in (*formulas, *numbers, *odd)
    ]
    answer = client.get("/compare.csv", params={"jobs": ",".join(story.id for story in stories)})
    cells = [row["command --note"] for row in csv.DictReader(io.StringIO(answer.text, newline=""))]
    assert all(cell.startswith("'") for cell in cells[: len(formulas)]), cells
    assert cells[len(formulas) :] == [*numbers, *odd]
    assert "\u202e" not in answer.text
