"""A new target is one file: help, completion, `--on`, the table of the docs, metrics and the contract tests have it."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import traits_contract
from machines import H200
from pages import samples
from trainmaster import targets
from trainmaster.cli._views import target_option
from trainmaster.core.errors import UsageError
from trainmaster.core.states import Stage
from trainmaster.store import costs, jobs
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.web.app import create_app
from traits_contract import run
from web.conftest import BASE, LOCAL

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
# What one more function in the same file adds: a way to its nodes.
OPEN_NODES = f"""
    def open_nodes(self, *, limit_s, home, retest=False):
        from machines import RecordedNodes

        return RecordedNodes(dict.fromkeys(["red", "blue"], {str(H200)!r}))
"""


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "more-targets"
    folder.mkdir()
    (folder / "toy.py").write_text(TOY)
    monkeypatch.setattr(targets, "__path__", [*targets.__path__, str(folder)])
    importlib.invalidate_caches()
    yield folder / "toy.py"
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


def test_with_a_way_to_its_nodes_the_verbs_use_them(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TOY.replace("paid=False,", "paid=False, nodes=True,").replace('instead={"check": "shake the box"},', "")
    toy.write_text(text + OPEN_NODES)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "box.yaml").write_text("{}\n")
    ran = run("check", "--on", "toy:box.yaml", "--only", "gpu_count", "--json", TRAINMASTER_HOME=str(tmp_path / "home"))
    nodes = {node["node"]: node["results"] for node in json.loads(ran.stdout)["nodes"]}
    assert {name: [result["check"] for result in results] for name, results in nodes.items()} == {
        "red": ["gpu_count"], "blue": ["gpu_count"],
    }  # fmt: skip
    for verb in ("check", "accept", "bandwidth", "isolate"):
        assert "toy:toy.yaml" in targets.spell_all(verb) and "toy:toy.yaml" in run(verb, "--help").output, verb
    assert isinstance(targets.load("toy:box.yaml"), targets.ReachesNodes)


def test_its_jobs_are_in_the_metrics_of_the_server(db: Database, tmp_path: Path) -> None:
    samples.Story(db, samples.spec(target="toy:a.yaml")).start().move(Stage.RUNNING)
    app = create_app(db, tmp_path, reconcile=False)
    app.state.ledgers.refresh()
    scraped = TestClient(app, base_url=BASE, client=LOCAL).get("/metrics").text
    assert 'trainmaster_target_gpu_seconds{bin="queued",target="toy"}' in scraped


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
