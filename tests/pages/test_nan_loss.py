"""A run whose loss stopped being a number: the last number never stands as its end, on no page and in no verb."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pages import samples
from trainmaster.cli.main import build
from trainmaster.core.events import Event
from trainmaster.core.states import Stage, Status
from trainmaster.pages import job, jobs
from trainmaster.report import phrases, render_html, render_markdown
from trainmaster.store.database import Database


def diverged(db: Database, *, numbers: int = 28, steps: int = 120, **changes: object) -> samples.Story:
    """Completed; its loss grows, and is NaN behind the first `numbers` steps."""
    story = samples.Story(db, samples.spec(name="lr-0.3", **changes)).start().move(Stage.RUNNING)
    losses = [36.7242 * 1.4**n if n < numbers else math.nan for n in range(steps)]
    story.tell(
        Event(phase="STEP", event="metrics", data={"step": n, "loss": loss, "tokens_per_s": 100.0})
        for n, loss in enumerate(losses, 1)
    )
    return story.end_attempt().finish(Status.COMPLETED)


def read(db: Database, story: samples.Story) -> job.JobPage:
    page = job.read(db, story.id, now=story.at)
    assert page is not None
    return page


def run_verb(home: Path, *words: str) -> str:
    env = {"TRAINMASTER_HOME": str(home), "COLUMNS": "200", "TERM": "dumb"}
    printed = CliRunner(env=env).invoke(build(), list(words))
    assert printed.exit_code == 0, printed.output
    return printed.output


def test_the_headline_does_not_end_with_the_last_number(db: Database) -> None:
    page = read(db, diverged(db))
    assert (page.run.sick_steps, page.run.sick_since, page.run.loss_last_step) == (92, 29, 28)
    words = "Loss 36.72 → NaN (last number 324k at step 28)."
    assert phrases.sentence(page).endswith(words)
    (loss,) = [figure for figure in phrases.figures(page) if figure.name == "Loss"]
    assert (loss.value, loss.note) == ("36.72 → NaN", "92 steps without a number; last number 324k at step 28")
    for text in (render_html(page), render_markdown(page)):
        assert "×" not in text.partition("Steps")[0]
        assert "92 steps reported a loss that is not a number, every one since step 29" in text


def test_a_loss_that_is_infinite_is_not_called_nan(db: Database) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING)
    for step, loss in enumerate((5.0, math.nan, math.inf), 1):
        story.tell([Event(phase="STEP", event="metrics", data={"step": step, "loss": loss})])
    page = read(db, story.end_attempt().finish(Status.COMPLETED))
    assert phrases.sentence(page).endswith("Loss 5 → Infinity (last number 5 at step 1).")


def test_a_run_that_never_had_a_number_says_so(db: Database) -> None:
    page = read(db, diverged(db, numbers=0, steps=3))
    assert (page.run.sick_since, page.run.loss_last_step) == (1, None)
    assert phrases.sentence(page).endswith("Loss NaN from the first step on.")
    assert [figure.value for figure in phrases.figures(page) if figure.name == "Loss"] == ["NaN"]


def test_a_run_that_recovered_ends_with_its_number(db: Database) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING)
    for step, loss in enumerate((5.0, math.nan, 4.0), 1):
        story.tell([Event(phase="STEP", event="metrics", data={"step": step, "loss": loss})])
    page = read(db, story.end_attempt().finish(Status.COMPLETED))
    assert (page.run.sick_steps, page.run.sick_since, page.run.loss_last_step) == (1, None, 3)
    assert phrases.sentence(page).endswith("Loss 5 → 4 (×0.8).")
    assert page.careful == "1 step reported a loss that is not a number"


def test_show_and_jobs_say_it(db: Database, tmp_path: Path) -> None:
    story = diverged(db)
    shown = run_verb(tmp_path, "show", story.id)
    assert "careful     92 steps reported a loss that is not a number, every one since step 29" in shown
    assert "36.7242 → NaN (last number 323" in shown
    assert '"sick_since": 29' in run_verb(tmp_path, "show", story.id, "--json")
    (line,) = [line for line in run_verb(tmp_path, "jobs").splitlines() if "lr-0.3" in line]
    assert " NaN " in line
    assert '"loss_text": "NaN"' in run_verb(tmp_path, "jobs", "--json")


@pytest.mark.parametrize(("loss", "text"), [(math.nan, "NaN"), (-math.inf, "-Infinity"), (2.5, None), ("low", None)])
def test_a_line_tells_a_loss_that_is_no_number_from_none(db: Database, loss: object, text: str | None) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING)
    story.tell([Event(phase="STEP", event="metrics", data={"step": 1, "loss": loss})])
    assert [line.loss_text for line in jobs.read(db).jobs] == [text]
