"""`trainmaster report` finds the job or the folder and writes what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pages import samples
from trainmaster.cli.main import build
from trainmaster.core.errors import UsageError
from trainmaster.store.database import Database


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINMASTER_HOME", str(tmp_path))
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(build(), ["report", *words])


def test_a_job_by_the_beginning_of_its_id(db: Database, home: Path) -> None:
    story = samples.completed(db)
    done = run(story.id[:8], "--format", "html,md,json", "--out", str(home / "out"))
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (home / "out").iterdir()) == ["report.html", "report.json", "report.md"]
    assert json.loads((home / "out" / "report.json").read_text())["id"] == story.id


def test_without_out_it_lies_beside_the_job(db: Database, home: Path) -> None:
    story = samples.completed(db)
    assert run(story.id).exit_code == 0
    assert (home / "jobs" / story.id / "report.html").read_text().startswith("<!doctype html>")


def test_a_folder_needs_no_database(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(samples.encode(samples.training()))
    done = run(str(tmp_path), "--format", "md", "--out", "-")
    assert done.exit_code == 0, done.output
    assert "5.544 → 1.948" in done.output


@pytest.mark.slow
def test_the_name_of_a_job_comes_before_a_folder_of_that_name(
    db: Database, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = samples.completed(db)
    name = story.spec.name
    for folder in (name, "other", story.id[:8]):
        (home / folder).mkdir()
        (home / folder / "events.jsonl").write_bytes(samples.encode(samples.training()))
    monkeypatch.chdir(home)
    done = run(name, "--format", "json", "--out", "-")
    assert json.loads(done.stdout)["id"] == story.id
    said = " ".join(done.stderr.split())
    assert said == f"report of job {story.id}; for the folder of this name: trainmaster report ./{name}"
    for words in (f"./{name}", "other", story.id[:8]):  # the beginning of an id is no name
        shown = run(words, "--format", "json", "--out", "-")
        assert json.loads(shown.stdout)["id"] != story.id and not shown.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [(["nobody"], "no job"), (["./nowhere"], "no such folder"), (["x", "--format", "pdf"], "html, md, json")],
)
def test_mistakes_say_what_to_do(db: Database, home: Path, words: list[str], message: str) -> None:
    done = run(*words)
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)
