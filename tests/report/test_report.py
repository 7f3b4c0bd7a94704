"""A report is one small file that says what happened, whole, in HTML, Markdown and JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
import yaml

from pages import samples
from trainmaster import report
from trainmaster.api.codec import to_plain
from trainmaster.core.errors import UsageError
from trainmaster.core.events import Event
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Stage
from trainmaster.pages import job
from trainmaster.report import phrases
from trainmaster.store.database import Database


def read(db: Database, story: samples.Story) -> job.JobPage:
    page = job.read(db, story.id, now=story.at)
    assert page is not None
    return page


def test_html_says_what_happened(db: Database) -> None:
    html = report.render_html(read(db, samples.completed(db)))
    for words_ in (
        "Completed",
        "200 of 200 steps in 1 min 13 s. Loss 5.544 → 1.948 (×0.351).",
        "18.4k",
        "AMD EPYC 9654",
    ):
        assert words_ in html
    for row in samples.CHECKS:
        assert row["reason"] in html
    assert "1 check does not apply here" in html
    assert html.count("<figure") == 4


def test_a_script_that_says_no_number_of_steps_is_told_by_those_it_did(db: Database) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING)
    story.tell([b'{"phase":"STEP","event":"metrics","data":{"step":7,"loss":2.5}}\n'])
    page = read(db, story)
    assert phrases.sentence(replace(page, run=replace(page.run, steps=None))) == "7 steps."


def test_a_failure_shows_reason_action_and_evidence(db: Database) -> None:
    html = report.render_html(read(db, samples.failed_run(db)))
    assert "Failed: out of memory" in html
    assert "lower the batch or the sequence" in html
    assert "torch.OutOfMemoryError" in html
    assert "%%% half a li" in html
    assert html.index("torch.OutOfMemoryError") < html.index("<figure")  # what went wrong stands before the curves


def test_without_checks_it_says_that_nothing_was_proven(db: Database) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING).tell(samples.training())
    story.end_attempt().finish(samples.Status.COMPLETED)
    assert "No check ran before the start" in report.render_html(read(db, story))


def test_a_report_needs_nothing_from_outside(db: Database) -> None:
    html = report.render_html(read(db, samples.completed(db)))
    assert not re.findall(
        r"(?:src|href|action)\s*=|url\(|@import|//[a-z]", re.sub(r"<script>.*?</script>", "", html, flags=re.S)
    )
    assert "default-src 'none'" in unescape(html)


@pytest.mark.slow
def test_a_long_run_is_still_a_small_file(db: Database) -> None:
    story = samples.Story(db).start().move(Stage.RUNNING)
    story.tell(Event(phase="STEP", event="metrics", data=samples.metrics(step)) for step in range(1, 8_001))
    page = read(db, story)
    assert page.run.step == 8_000
    assert len(report.render_html(page).encode()) < 100_000


def test_json_is_the_page(db: Database) -> None:
    page = read(db, samples.resumed(db))
    assert json.loads(report.render_json(page)) == to_plain(page)


def test_markdown_says_the_same(db: Database) -> None:
    page = read(db, samples.failed_check(db))
    text = report.render_markdown(page)
    assert text.startswith("# llama-8b: Failed: check failed\n")
    assert "| ecc | fail | gpu3 | 2 uncorrectable ECC errors since boot → drain the node and replace GPU 3 |" in text
    assert "| nccl | error |" in text


def test_the_spec_reads_back_to_the_same_job(db: Database) -> None:
    story = samples.pending(db, env={"A": "yes", "B": "1e5", "C": "x: #y", "D": ""}, limits={"timeout_s": 1e-5 + 1})
    page = read(db, story)
    assert page.spec is not None
    assert parse_spec(yaml.safe_load(phrases.spec_text(page.spec))) == story.spec


@pytest.mark.parametrize("suffix", ["html", "md", "json"])
def test_write_chooses_by_suffix_and_leaves_nothing_else(db: Database, tmp_path: Path, suffix: str) -> None:
    page = read(db, samples.completed(db))
    path = report.write(page, tmp_path / "new" / f"report.{suffix}")
    assert path.read_text(encoding="utf-8") == report.FORMATS[suffix](page)
    assert list(path.parent.iterdir()) == [path]


def test_write_refuses_a_suffix_it_does_not_know(db: Database, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.html, \.md, \.json"):
        report.write(read(db, samples.pending(db)), tmp_path / "report.pdf")
