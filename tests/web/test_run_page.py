"""Job page and report of a run: iterations with epochs and evaluations, checkpoints that exist, lost work at most."""

from __future__ import annotations

from pages import samples
from trainmaster.control import budget
from trainmaster.core.events import Event
from trainmaster.core.states import Reason, Stage
from trainmaster.pages import cost, job, jobs
from trainmaster.report import render_html, render_markdown
from trainmaster.store import costs
from trainmaster.store.database import Database

from .conftest import TestClient
from .furnished import iterated


def read(db: Database, story: samples.Story) -> job.JobPage:
    page = job.read(db, story.id, now=story.at)
    assert page is not None
    return page


def test_page_and_report_show_iterations_epochs_and_evaluations(db: Database, client: TestClient) -> None:
    story = iterated(db)
    page = read(db, story)
    assert [iteration.number for iteration in page.run.iterations] == [1, 2]
    assert all(iteration.epochs == 3 and len(iteration.newest_epochs) == 3 for iteration in page.run.iterations)
    assert all(iteration.evaluations and iteration.phases for iteration in page.run.iterations)
    model = page.run.iterations[0].evaluations[0].model_id
    assert model is not None
    dashboard = client.get(f"/jobs/{story.id}").text
    for text in (dashboard, render_html(page), client.get(f"/jobs/{story.id}/report").text):
        assert 'id="iterations"' in text and "traj_gen" in text and model in text
    assert "## Iterations" in render_markdown(page) and "traj" in render_markdown(page)


def test_a_bound_is_a_figure_and_no_checkpoint(db: Database, client: TestClient) -> None:
    story = samples.Story(db, samples.spec()).start()
    story.tell(
        [*samples.training(last=60), Event(phase="CHECKPOINT", event="bound", data={"lost_steps": 12, "lost_s": 90.0})]
    )
    page = read(db, story)
    assert (page.run.lost_steps_max, page.run.lost_s_max) == (12, 90.0)
    assert "bound" not in page.run.checkpoint_events
    assert {checkpoint.event for checkpoint in page.run.checkpoints} == {"saved"}
    for text in (render_html(page), client.get(f"/jobs/{story.id}").text):
        assert "Lost with a node, at most" in text and "12 steps" in text


def test_a_checkpoint_that_was_pruned_has_no_path(db: Database) -> None:
    page = read(db, samples.completed(db, train={"steps": 200, "checkpoint": {"keep": 2}}))
    saved = [checkpoint.path for checkpoint in page.run.checkpoints]
    assert len(saved) == 4 and all(saved)
    text = render_html(page)
    assert [str(path) in text for path in saved] == [False, False, True, True]
    assert text.count("removed since") == 2


def test_a_skipped_step_counts_once_over_attempts(db: Database) -> None:
    story = samples.Story(db, samples.spec()).start()
    skips = [Event(phase="WATCH", event="skipped", data={"step": step}) for step in (7, 9)]
    story.tell(skips).end_attempt(Reason.NODE_LOST).move(Stage.QUEUED)
    story.start(2).tell([skips[1], Event(phase="WATCH", event="skipped", data={"step": 11})])
    assert read(db, story).run.skipped_steps == 3


def test_an_unpriced_local_job_costs_unknown_not_nothing(db: Database) -> None:
    story = samples.completed(db)
    with db.write() as conn:
        costs.set_price(conn, story.attempt, budget.price_of(story.spec, {}))
    assert read(db, story).cost_cents is None
    assert [line.cost_cents for line in jobs.read(db).jobs] == [None]
    (line,) = cost.read(db, job=story.id, now=story.at).jobs
    assert line.cents is None and line.forecast_cents is None
