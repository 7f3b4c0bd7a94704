"""A new target is one file: help, completion, `--on`, the table of the docs and the contract tests have it at once."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import traits_contract
from trainmaster import targets
from trainmaster.cli._views import target_option
from trainmaster.core.errors import UsageError
from trainmaster.store import costs, jobs
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from traits_contract import run

TOY = '''
"""Target `toy:toy.yaml`: runs nothing."""

from trainmaster.core.errors import UsageError
from trainmaster.targets import Submission, Traits

TRAITS = Traits(
    title="a box of toys", option="file", example="toy.yaml", required=True, paid=False,
    instead={"check": "shake the box"},
)


def create(options):
    if not options:
        raise UsageError("target: write toy:toy.yaml")
    return Toy(options)


class Toy:
    def __init__(self, file):
        self.file = file

    def plan(self, placement):
        return Submission(handle={}, files={}, commands=(("play", self.file),))
'''


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "more-targets"
    folder.mkdir()
    (folder / "toy.py").write_text(TOY)
    monkeypatch.setattr(targets, "__path__", [*targets.__path__, str(folder)])
    importlib.invalidate_caches()
    yield
    sys.modules.pop("trainmaster.targets.toy", None)
    vars(targets).pop("toy", None)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    database = open_database(tmp_path / "trainmaster.db")
    yield database
    database.close()


def test_it_is_in_the_help_and_in_completion() -> None:
    assert "toy:toy.yaml" in run("submit", "--help").output
    assert "toy" not in run("remedy", "--help").output, "it does not drain"
    assert target_option.complete("to") == ["toy:"] and "ssh:" in target_option.complete("")


def test_it_is_taken_by_on_and_refused_by_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.yaml").write_text("name: a\ncommand: ['true']\n")
    monkeypatch.chdir(tmp_path)
    planned = run("submit", "job.yaml", "--on", "toy:box.yaml", "--dry-run")
    assert planned.output.endswith(f"\n$ play {tmp_path}/box.yaml\n")
    assert "shake the box" in str(run("check", "--on", "toy:box.yaml").exception)
    assert "submit a job there" in str(run("bandwidth", "--on", "toy:box.yaml").exception)
    with pytest.raises(UsageError, match="ssh, toy"):
        targets.load("nowhere")


def test_it_is_in_the_table_of_the_docs() -> None:
    tests = runpy.run_path(str(Path(__file__).with_name("test_traits.py")))
    assert (
        "| `toy` | a box of toys | file, `toy.yaml` | of its settings | 0 | no | no |"
        in tests["load_tool"]().render().splitlines()
    )


def test_the_contract_tests_run_over_it(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = runpy.run_path(str(Path(__file__).with_name("test_traits.py")))
    marked = [test.pytestmark[0].args for name, test in tests.items() if hasattr(test, "pytestmark")]
    assert len(marked) == 7 and all("toy" in values for _, values in marked)
    traits_contract.hold_statement("toy")
    traits_contract.hold_api("toy", db, traits_contract.open_api(db, tmp_path), tmp_path)
    traits_contract.hold_refusals("toy")
    traits_contract.hold_absolute("toy", tmp_path, monkeypatch)
    for field in tests["QUEUE"]:  # it states nothing of `queue:`, so all of it is refused
        tests["test_each_field_of_the_queue_is_mapped_or_refused"]("toy", field, tmp_path)
    tests["test_spares_are_kept_or_refused"]("toy")


def test_a_job_there_costs_nothing_and_its_price_is_unknown(db: Database) -> None:
    from trainmaster.control.budget import price_of
    from trainmaster.core.spec import parse_spec

    words = {"toy:a.yaml": True, "toy": True, "local": True, "toyshop": False, "ssh:lab": False}
    ids = {word: f"6f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a{number:02}" for number, word in enumerate(words)}
    for word, free in words.items():
        spec = parse_spec({"name": "a", "command": ["true"], "target": word})
        with db.write() as conn:
            jobs.insert_job(conn, ids[word], spec, at=traits_contract.AT)
        assert price_of(spec, {}) == (0.0 if free else None), word
    with db.read() as conn:
        unpriced = costs.list_unpriced(conn, free=["local", "toy"])
    assert unpriced == {ids[word] for word, free in words.items() if free}
