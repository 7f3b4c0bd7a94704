"""Every target is what it states: its option, its verbs, and who may name a file of the server.

All but the last tests run over `targets.names()`: a new target is held to them without a change here.
"""

from __future__ import annotations

import ast
import importlib.util
import uuid
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from starlette.testclient import TestClient

import traits_contract
from client.served import serve
from trainmaster import targets
from trainmaster.control.submit import submit
from trainmaster.core.config.queue import Queue
from trainmaster.core.errors import SpecError, UsageError
from trainmaster.core.roles import Role
from trainmaster.core.spec import JobSpec, parse_spec
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.targets import Placement
from trainmaster.targets._queueing import OWN_QUEUE
from trainmaster.web.app import create_app
from web.furnished import issue

ROOT = Path(__file__).parents[2]
every_target = pytest.mark.parametrize("target", targets.names())


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    database = open_database(tmp_path / "trainmaster.db")
    yield database
    database.close()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, TestClient]]:
    home = tmp_path_factory.mktemp("api")
    database = open_database(home / "trainmaster.db")
    yield database, traits_contract.open_api(database, home)
    database.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address of a server, and a token of a user."""
    home = tmp_path_factory.mktemp("server")
    database = open_database(home / "trainmaster.db")
    token = issue(database, "alice", Role.USER)["Authorization"].removeprefix("Bearer ")
    with serve(database, home, require_token=True) as url:
        yield url, token
    database.close()


@every_target
def test_what_it_states_agrees(target: str) -> None:
    traits_contract.hold_statement(target)


@every_target
def test_only_an_admin_of_the_server_names_a_file_of_it(
    target: str, api: tuple[Database, TestClient], tmp_path: Path
) -> None:
    traits_contract.hold_api(target, *api, tmp_path)


@every_target
def test_also_on_the_command_line(target: str, server: tuple[str, str], tmp_path: Path) -> None:
    traits_contract.hold_server(target, *server, tmp_path)


@every_target
def test_a_relative_file_is_made_absolute(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traits_contract.hold_absolute(target, tmp_path, monkeypatch)


@every_target
def test_a_verb_that_it_lacks_is_refused_with_another_way(target: str) -> None:
    traits_contract.hold_refusals(target)


QUEUE = {"name": "team-a", "priority": "high", "preemptible": True, "max_wait_s": 60.0}
# Engines that queue by themselves, with settings under which they do every field of `queue:`.
ENGINES: dict[str, dict[str, object]] = {
    "slurm": {"folder": "/shared", "priorities": {"high": "--nice=-100"}},
    "kubernetes": {"image": "i", "queue": "all", "folder": "/fsx", "volumes": [{"mount": "/fsx", "claim": "c"}]},
    "hyperpod": {"image": "i", "queue": "all", "folder": "/fsx", "volumes": [{"mount": "/fsx", "claim": "c"}]},
}


@pytest.mark.parametrize("field", QUEUE)
@every_target
def test_each_field_of_the_queue_is_mapped_or_refused(target: str, field: str, tmp_path: Path) -> None:
    assert set(QUEUE) == {item.name for item in fields(Queue)}, "a new field of `queue:` belongs here"
    stated, spec = targets.traits(target), spec_of(queue={field: QUEUE[field]})
    if field not in stated.queue:
        with pytest.raises(SpecError) as refused:
            targets.refuse_queue(target, spec)
        (fault,) = refused.value.faults
        assert fault.path == f"queue.{field}" and target in fault.message
        assert all(f"`{name}`" in fault.message for name in stated.queue), "what it can do instead"
        return
    targets.refuse_queue(target, spec)
    (line,) = targets.describe_queue(stated, spec.queue)
    assert line.startswith(f"{field} ") and line.endswith(stated.queue[field])
    if stated.queue is OWN_QUEUE or field == "max_wait_s":
        return  # kept by the control plane: tests/control
    assert target in ENGINES, "settings under which the engine does it belong above"
    (tmp_path / "file.yaml").write_text(yaml.safe_dump(ENGINES[target]))
    word = f"{target}:{tmp_path / 'file.yaml'}"
    mapped, plain = (engine_text(word, one) for one in (spec, spec_of()))
    assert mapped != plain or (target, field) == ("hyperpod", "preemptible")  # its operator restarts pods anyway


@every_target
def test_spares_are_kept_or_refused(target: str) -> None:
    stated = targets.traits(target)
    assert stated.spares or stated.no_spares, "what becomes of them, or why there are none"
    train = {"steps": 8, "batch_sequences": 8}
    spec = parse_spec({"name": "a", "train": train, "resources": {"nodes": 2, "spares": 1}})
    if stated.spares:
        targets.refuse_queue(target, spec)
        return
    with pytest.raises(SpecError) as refused:
        targets.refuse_queue(target, spec)
    (fault,) = refused.value.faults
    assert fault.path == "resources.spares" and target in fault.message and stated.no_spares in fault.message


def spec_of(**more: object) -> JobSpec:
    return parse_spec({"name": "a", "command": ["true"], **more})


def engine_text(word: str, spec: JobSpec) -> str:
    """What the engine gets, without the plan for the agent, which repeats the spec."""
    placement = Placement(attempt=f"{uuid.UUID(int=1)}.1", spec=spec, job_folder=Path("/home/jobs/a"))
    made = targets.load(word).plan(placement)
    (text,) = (text for name, text in made.files.items() if not name.endswith("plan.json"))
    return text.rpartition("---\n")[2] + str(made.handle.get("restarts"))


def test_a_field_that_a_target_cannot_do_is_refused_before_there_is_a_row(db: Database) -> None:
    for queue in ({"name": "team-a"}, {"priority": "later"}):
        with pytest.raises(SpecError, match="queue"):
            submit(db, spec_of(queue=queue))
    assert submit(db, spec_of(queue={"priority": "low"})).spec.queue.priority == "low"


def test_a_user_makes_the_server_call_aws_by_no_settings_file(db: Database, tmp_path: Path) -> None:
    """As it was possible while `sagemaker` was missing from a list of targets whose option is a file."""
    file = tmp_path / "account.yaml"
    file.write_text(
        '{region: us-east-1, role: "arn:aws:iam::123456789012:role/R", storage: "s3://bucket/x", image: i,\n'
        " instance_type: ml.p5.48xlarge}\n"
    )
    client = TestClient(create_app(db, tmp_path, reconcile=False, require_token=True), base_url="http://127.0.0.1:8470")
    spec = {"name": "a", "command": ["true"], "target": f"sagemaker:{file}"}
    answer = client.post("/v1/training/jobs", json=spec, headers=issue(db, "alice", Role.USER))
    assert answer.status_code == 403, answer.text
    assert answer.json()["error"]["code"] == "file_of_server"
    assert client.post("/v1/training/jobs", json=spec, headers=issue(db, "root", Role.ADMIN)).status_code == 201


def test_every_route_that_starts_a_job_asks_for_trust() -> None:
    """Functions of web/ that submit: as many as the contract has routes, and each asks whether the caller may.

    It asks itself, or hands the submission to `follow`, which asks before it submits.
    """
    starts = {f"submitting.{verb}" for verb in ("submit", "submit_once", "resume", "run_again")}
    functions = [
        (path.name, function)
        for path in (ROOT / "src" / "trainmaster" / "web").rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    found = 0
    for file, function in functions:
        used = {ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Attribute)}
        if used & starts:
            found += 1
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            handed = [
                ast.unparse(call.func).removeprefix("routes.") == "follow"
                for call in calls
                if any(ast.unparse(word) in starts for word in call.args)
            ]
            assert "dependencies.need_trust" in used or (handed and all(handed)), f"{file}: {function.name}"
    assert found == len(traits_contract.ROUTES)
    (follow,) = [function for file, function in functions if (file, function.name) == ("jobs.py", "follow")]
    called = [ast.unparse(node.func) for node in ast.walk(follow) if isinstance(node, ast.Call)]
    assert called.index("dependencies.need_trust") < called.index("submit")


def test_unknown_words() -> None:
    for word in ("nowhere", "", "_traits", "ssh.hosts", "../ssh", "Local"):
        assert targets.find_traits(word) is None and not targets.is_free(word)
        with pytest.raises(UsageError, match="is not one of hyperpod, kubernetes"):
            targets.traits(word)


def test_the_table_in_the_docs_is_what_the_targets_state() -> None:
    page = (ROOT / "docs" / "how" / "targets.md").read_text()
    for table in (load_tool().render(), load_tool().render_queue()):
        assert table in page, "docs/how/targets.md is old; run tools/write_target_table.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_target_table", ROOT / "tools" / "write_target_table.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool
