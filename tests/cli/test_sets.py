"""Sets of runs on the command line: one submit, one row in the list, one table with the best marked, one cancel."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from client.served import serve
from control.search_rows import end, report
from trainmaster.api.sets import Trial
from trainmaster.cli import _console
from trainmaster.cli.main import build
from trainmaster.control.queueing import sets, study
from trainmaster.core.config.sweep import Sweep
from trainmaster.core.errors import MissingExtra, SpecError, UsageError
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Stage, Status
from trainmaster.pages.sets import find_best, judge_status, read_one
from trainmaster.store import jobs
from trainmaster.store.capacity import sets as store_sets
from trainmaster.store.migrate import open_database

SPEC = """
name: lr-sweep
matrix: {train.optimizer.lr: [0.1, 0.3], env.SEED: ["1", "2"]}
parallel: 2
workdir: none
train: {steps: 5, device: cpu}
resources: {price_per_hour: 6}
"""


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_console.out, "_width", 200)


def run(*words: str) -> Result:
    env = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner(env=env).invoke(build(), list(words))


def test_a_name_of_two_sets_cancels_neither_and_shows_the_newest(tmp_path: Path) -> None:
    home, spec = str(tmp_path / "home"), tmp_path / "sweep.yaml"
    spec.write_text(SPEC)
    older, newer = (
        json.loads(run("submit", str(spec), "--json", "--home", home).stdout)["set"]["id"] for _ in range(2)
    )
    refused = run("cancel", "lr-sweep", "--home", home)
    assert refused.exit_code and isinstance(refused.exception, UsageError | SystemExit)
    text = f"{refused.output} {refused.exception}"
    assert "2 sets have the name 'lr-sweep'" in text and older in text and newer in text, text
    shown = run("show", "lr-sweep", "--home", home)
    assert newer in shown.stdout and f"2 sets have the name lr-sweep: this is the newest, {newer[:8]}" in shown.stderr
    assert "have the name" not in run("show", newer, "--home", home).stderr
    assert json.loads(run("show", older, "--json", "--home", home).stdout)["set"]["status"] != "cancelled"
    assert run("cancel", older, "--home", home).exit_code == 0
    assert json.loads(run("show", newer, "--json", "--home", home).stdout)["set"]["status"] != "cancelled"


def test_a_set_is_one_thing(tmp_path: Path) -> None:
    home, spec = str(tmp_path / "home"), tmp_path / "sweep.yaml"
    spec.write_text(SPEC)
    planned = run("submit", str(spec), "--dry-run", "--home", home)
    assert "4 trials, 2 at once" in planned.output and "lr-sweep-4" in planned.output
    assert not (tmp_path / "home" / "trainmaster.db").exists()
    made = run("submit", str(spec), "--home", home)
    assert made.exit_code == 0 and "4 trials" in made.output, made.output
    db = open_database(tmp_path / "home" / "trainmaster.db")
    queued = run("queue", "--home", home)
    assert "lr-sweep: 4 trials wait to begin" in queued.stderr and "no job waits" not in queued.stderr
    sets.advance(db)
    (first, second) = jobs.list_ids(db)
    with db.write() as conn:
        jobs.finish(conn, first, seen=Stage.QUEUED, status=Status.COMPLETED, at=datetime.now(UTC))
    sets.advance(db)
    db.close()
    listed = run("jobs", "--home", home).stdout.splitlines()
    assert len(listed) == 2 and "lr-sweep" in listed[1] and "1/4" in listed[1], "one row for all of them"
    assert "lr-sweep: 1 trial waits for `parallel: 2`" in run("queue", "--home", home).stderr
    short = listed[1].split()[0]
    for words in (("show", "lr-sweep"), ("jobs", "--set", "lr-sweep"), ("cost", "lr-sweep"), ("show", short)):
        shown = run(*words, "--home", home).stdout
        assert "1 of 4 completed, 2 pending, 1 waiting" in shown and "waits for its turn" in shown, shown
        assert "lr-sweep-3" in shown and second[:8] in shown
    page = json.loads(run("show", "lr-sweep", "--json", "--home", home).stdout)
    assert page["trials"][1]["values"] == {"train.optimizer.lr": 0.1, "env.SEED": "2"}
    assert page["set"]["status"] == "running" and page["set"]["trials"] == 4
    asked = run("cancel", short, "--home", home)
    assert asked.exit_code == 0 and "cancelled" in asked.output, asked.output
    assert "waiting" not in asked.output and "1 skipped" in asked.output
    ended = run("show", "lr-sweep", "--home", home).stdout
    assert "1 of 4 completed, 2 cancelled, 1 skipped" in ended and "will not run" in ended and "turn" not in ended
    assert "no job waits" in run("queue", "--home", home).stderr
    assert len(json.loads(run("jobs", "--json", "--home", home).stdout)["jobs"]) == 3, "the fourth never began"


def test_the_beginning_of_an_id_means_one_set_and_no_job(tmp_path: Path) -> None:
    """Sets 3a…, 3b… and 4a…; a job 4b…, and one with the name 3a."""
    db, at = open_database(tmp_path / "trainmaster.db"), datetime.now(UTC)
    spec = parse_spec({"name": "3a", "command": ["true"]})
    with db.write() as conn:
        for set_id in ("3a11", "3b11", "4a11"):
            store_sets.insert_set(
                conn, set_id, Sweep(name=f"of-{set_id}", project="lab", parallel=1, trials=()), by=None, at=at
            )
        for job_id, name in (("4b11", "other"), ("5a11", "3a")):
            jobs.insert_once(conn, job_id, replace(spec, name=name), key=None, by=None, at=at, word=spec.target)
    found = {
        word: page.set.id if (page := read_one(db, word)) else None for word in ("3a1", "3b", "4a", "3a", "4b", "")
    }
    assert found == {"3a1": "3a11", "3b": "3b11", "4a": "4a11", "3a": None, "4b": None, "": None}
    for word in ("3", "4"):
        with pytest.raises(UsageError, match="the beginning of 2 ids"):
            read_one(db, word)
    with db.write() as conn:  # a job with the name of a set: both are there, and neither hides the other
        jobs.insert_once(conn, "6a11", replace(spec, name="of-4a11"), key=None, by=None, at=at, word=spec.target)
    with pytest.raises(UsageError, match="'of-4a11' is the name of set 4a11 and of job 6a11; write the id"):
        read_one(db, "of-4a11")
    by_id = read_one(db, "4a11")
    assert by_id is not None and by_id.set.id == "4a11"
    db.close()


@pytest.mark.proof
@pytest.mark.parametrize("served", [False, True])
def test_a_verb_of_one_job_says_that_a_word_is_a_set_and_what_to_type(served: bool, tmp_path: Path) -> None:
    home, spec = tmp_path / "home", tmp_path / "sweep.yaml"
    spec.write_text(SPEC)
    set_id = json.loads(run("submit", str(spec), "--json", "--home", str(home)).stdout)["set"]["id"]
    db = open_database(home / "trainmaster.db")
    verbs = ("logs", "events", "fetch", "goodput", "delete", "report")
    with serve(db, home) if served else contextlib.nullcontext() as url:
        where = ("--server", url) if url is not None else ("--home", str(home))
        waiting = run("logs", "lr-sweep", *where)
        assert "a set of 4 runs, not a job" in str(waiting.exception) and "none has begun" in str(waiting.exception)
        sets.advance(db)
        for verb, word in [(verb, word) for verb in verbs for word in ("lr-sweep", set_id[:9])]:
            done = run(
                verb, word, *(["--yes"] if verb == "delete" else []), *where
            )  # `delete` goes on with the next word, and prints
            told = " ".join(f"{done.output} {done.exception}".split())
            assert f"{word!r} is a set of 4 runs, not a job" in told, (verb, told)
            assert "`trainmaster show lr-sweep` lists them: write one of them, as lr-sweep-1" in told
        told = str(run("logs", set_id, *where).exception)
        assert "is a set of" in told and "`trainmaster show lr-sweep`" in told, told
        unknown = str(run("logs", "nothing", *where).exception)
        assert "no job 'nothing'" in unknown
    db.close()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--follow",), "trainmaster show NAME"),
        (("parallel=0",), "how many trials"),
    ],
)
def test_what_a_set_has_not_is_refused(words: tuple[str, ...], text: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SPEC)
    done = run("submit", str(tmp_path / "sweep.yaml"), *words, "--home", str(tmp_path / "home"))
    assert isinstance(done.exception, UsageError) and text in str(done.exception), done.output
    assert not (tmp_path / "home" / "trainmaster.db").exists()


def trial(number: int, status: Status | None, loss: float | None) -> Trial:
    return Trial(number=number, values={}, job=str(number), name=f"a-{number}", status=status, value=loss)


def test_a_dry_run_tells_of_a_secret_in_any_trial(tmp_path: Path) -> None:
    spec, words = tmp_path / "sweep.yaml", ("--dry-run", "--home", str(tmp_path / "home"))
    spec.write_text(SPEC.replace('env.SEED: ["1", "2"]', "env.API_KEY: [none, sk-proj-4f9aQ2xL8vB7nC3d]"))
    refused = run("submit", str(spec), *words)
    assert isinstance(refused.exception, SpecError) and "sk-proj" not in refused.output
    allowed = run("submit", str(spec), *words, "--allow", "env.API_KEY=a made-up word")
    assert allowed.exit_code == 0, allowed.output


def test_what_is_allowed_reaches_a_server_too(tmp_path: Path) -> None:
    spec = tmp_path / "sweep.yaml"
    spec.write_text(SPEC.replace('env.SEED: ["1", "2"]', "env.API_KEY: [none, sk-proj-4f9aQ2xL8vB7nC3d]"))
    db = open_database(tmp_path / "trainmaster.db")
    with serve(db, tmp_path) as url:
        words = ("submit", str(spec), "--server", url)
        assert isinstance(run(*words).exception, SpecError)
        made = run(*words, "--allow", "env.API_KEY=a made-up word", "--json")
        assert made.exit_code == 0, f"{made.output} {made.exception}"
    set_id = json.loads(made.stdout)["set"]["id"]
    assert store_sets.find_spec(db, set_id, 4).allow == {"env.API_KEY": "a made-up word"}
    db.close()


def test_the_best_is_the_lowest_loss_of_what_is_complete() -> None:
    done, failed = Status.COMPLETED, Status.FAILED
    assert find_best([trial(1, done, 2.0), trial(2, failed, 0.1), trial(3, done, 1.0), trial(4, done, None)]) == 3
    assert find_best([trial(1, done, float("nan")), trial(2, done, 5.0), trial(3, done, 5.0)]) == 2
    assert find_best([trial(1, failed, 1.0), trial(2, None, None)]) is None


@pytest.mark.parametrize(
    ("statuses", "waiting", "cancelled", "status"),
    [
        ([None, None], 2, False, "pending"),
        (["pending", None], 1, False, "pending"),
        (["running", None], 1, False, "running"),
        (["completed", None], 1, False, "running"),
        (["completed", "pending"], 0, False, "running"),
        (["completed", "completed"], 0, False, "completed"),
        (["completed", "failed"], 0, False, "failed"),
        (["completed", "cancelled"], 0, False, "completed"),
        (["completed", "cancelled", "failed"], 0, False, "failed"),
        (["cancelled", "cancelled"], 0, False, "cancelled"),
        (["cancelling", None], 1, True, "cancelling"),
        (["completed", None], 1, True, "cancelled"),
    ],
)
def test_one_status_of_many(statuses: list[str | None], waiting: int, cancelled: bool, status: str) -> None:
    words = [Status(word) if word else None for word in statuses]
    assert judge_status(words, waiting=waiting, cancelled=cancelled) == status


def test_an_empty_word_is_no_job(tmp_path: Path) -> None:
    """`cancel "$UNSET"` would end the only job of a home: every id begins with nothing."""
    home = str(tmp_path / "home")
    (tmp_path / "job.yaml").write_text("name: only\ncommand: [sleep, '60']\npreflight: {level: 0}\n")
    assert run("submit", str(tmp_path / "job.yaml"), "--workdir", "none", "--home", home).exit_code == 0
    refused = run("cancel", "", "--home", home)
    assert isinstance(refused.exception, UsageError) and "no job ''" in str(refused.exception)
    assert json.loads(run("jobs", "--json", "--home", home).stdout)["jobs"][0]["status"] == "pending"


SEARCH = """
name: lr-search
search:
  parameters: {train.optimizer.lr: {float: [1e-4, 0.1], log: true}, env.SEED: ["1", "2"]}
  trials: 20
  pruner: asha
parallel: 2
workdir: none
train: {steps: 5, device: cpu}
"""


def test_a_search_is_shown_before_and_after_it_is_submitted(tmp_path: Path) -> None:
    home, spec = str(tmp_path / "home"), tmp_path / "search.yaml"
    spec.write_text(SEARCH)
    planned = run("submit", str(spec), "--dry-run", "--home", home)
    assert "20 trials, 2 at once: min loss, proposed by tpe with seed 0, pruned by asha" in planned.output, planned
    assert "lr-search-5" in planned.output and "trials after the first 10 are proposed from results" in planned.output
    assert not (tmp_path / "home" / "trainmaster.db").exists()
    made = run("submit", str(spec), "--home", home)
    assert made.exit_code == 0 and "20 trials" in made.output, made.output
    db = open_database(tmp_path / "home" / "trainmaster.db")
    sets.advance(db)
    shown_id = json.loads(run("show", "lr-search", "--json", "--home", home).stdout)["set"]["id"]
    trials = store_sets.list_trials(db, shown_id)
    assert len(trials) == 2
    for trial in trials:
        assert (
            f"lr-search-{trial.number}" in planned.output and str(trial.values["train.optimizer.lr"]) in planned.output
        )
    for trial in trials:
        report(db, trial.job_id or "", (1, 0.25 * trial.number))
        end(db, trial.job_id or "")
    sets.advance(db)
    db.close()
    shown = run("show", "lr-search", "--home", home).stdout
    assert "tpe, seed 0, pruned by asha, min loss" in shown and "pruned at step 1" in shown, shown
    assert "1 of 20 completed, 1 pruned, 2 pending, 16 waiting" in shown
    assert [line.split()[:2] for line in shown.splitlines() if "*" in line] == [["*", "lr-search-1"]]
    page = json.loads(run("show", "lr-search", "--json", "--home", home).stdout)
    assert (page["set"]["best_value"], page["trials"][1]["pruned"], page["trials"][1]["value"]) == (0.25, True, 0.5)
    cancelled = run("cancel", "lr-search", "--home", home)
    assert "16 skipped" in cancelled.output, cancelled.output


def test_a_fault_of_a_search_has_its_line(tmp_path: Path) -> None:
    spec = tmp_path / "search.yaml"
    spec.write_text(SEARCH.replace("trials: 20", "trials: 20000"))
    refused = run("submit", str(spec), "--dry-run", "--home", str(tmp_path / "home"))
    assert isinstance(refused.exception, SpecError) and "search.yaml:5: search.trials" in str(refused.exception)


def test_without_optuna_a_search_is_refused_and_its_plan_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise MissingExtra("search", "search")

    monkeypatch.setattr(study, "require", refuse)
    spec = tmp_path / "search.yaml"
    spec.write_text(SEARCH)
    planned = run("submit", str(spec), "--dry-run", "--home", str(tmp_path / "home"))
    assert planned.exit_code == 0 and "its first trials are not shown: search needs packages" in planned.output
    refused = run("submit", str(spec), "--home", str(tmp_path / "home"))
    assert isinstance(refused.exception, MissingExtra)
    assert not (tmp_path / "home" / "trainmaster.db").exists()


def test_a_schedule_needs_a_server_and_is_paused_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, spec = str(tmp_path / "home"), tmp_path / "nightly.yaml"
    spec.write_text('name: nightly\nschedule: {cron: "0 3 * * *"}\nworkdir: none\ncommand: [python3, train.py]\n')
    planned = run("submit", str(spec), "--dry-run", "--home", home).stdout
    assert "0 3 * * * UTC; missed: once, overlap: skip" in planned and planned.count("03:00 UTC") == 5, planned
    refused = run("submit", str(spec), "--home", home)
    text = f"{refused.output} {refused.exception}"
    assert refused.exit_code and "no server works on this home folder" in text and "trainmaster serve" in text, text
    monkeypatch.setattr("trainmaster.cli._jobs.home.HomeJobs.is_driven", lambda _self: True)
    made = run("submit", str(spec), "--home", home)
    assert made.exit_code == 0 and "next run 20" in made.output, made.output
    listed = run("jobs", "--home", home).stdout
    assert "nightly" in listed and "next " in listed
    assert "nightly: next run 20" in run("queue", "--home", home).stderr
    shown = run("show", "nightly", "--home", home).stdout
    assert "0 3 * * * UTC" in shown and "next run    20" in shown, shown
    assert "it is paused" in run("pause", "nightly", "--home", home).stdout
    assert "paused" in run("jobs", "--home", home).stdout
    again = run("resume", "nightly", "--again", "--home", home)
    assert again.exit_code and "are for a job" in f"{again.output} {again.exception}"
    assert "next run 20" in run("resume", "nightly", "--home", home).stdout
    assert json.loads(run("pause", "nightly", "--json", "--home", home).stdout)["set"]["paused"] is True
    assert run("cancel", "nightly", "--home", home).exit_code == 0
    after = run("resume", "nightly", "--home", home)
    assert after.exit_code and "is cancelled" in f"{after.output} {after.exception}"
    missing = run("pause", "other", "--home", home)
    assert missing.exit_code and "there is no schedule 'other'" in f"{missing.output} {missing.exception}"
