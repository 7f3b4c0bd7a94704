"""Seed 004 phase 6.1, one test for each of its checkboxes, on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from starlette.testclient import TestClient

from pages import samples
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.web.app import create_app
from web.conftest import BASE, LOCAL
from web.furnished import JOBS, NOBODY, iterated


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.spawns)])
def db(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """Read by all tests of the module, which change it only by what each says itself."""
    if request.param == "sqlite":
        where: Any = tmp_path_factory.mktemp("seed") / "trainmaster.db"
    else:
        where = request.getfixturevalue("postgres").create()
    database = open_database(where)
    yield database
    database.close()


@pytest.fixture(scope="module")
def stories(db: Database) -> dict[str, samples.Story]:
    return {
        "iterated": iterated(db),
        "running": samples.resumed(db),
        "failed": samples.failed_run(db),
        "pending": samples.pending(db, project="infra"),
    }


@pytest.fixture(scope="module")
def client(
    db: Database, stories: dict[str, samples.Story], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TestClient]:
    app = create_app(db, Path(tmp_path_factory.mktemp("home")), reconcile=False)
    with TestClient(app, base_url=BASE, client=LOCAL) as found:
        yield found


def ids(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["jobs"]]


def test_get_api_hello_returns_200(client: TestClient) -> None:
    answer = client.get("/api/hello")
    assert (answer.status_code, answer.json()["message"]) == (200, "Hello World")


def test_get_job_returns_status(client: TestClient, stories: dict[str, samples.Story]) -> None:
    answer = client.get(f"{JOBS}/{stories['running'].id}")
    assert (answer.status_code, answer.json()["status"], answer.json()["stage"]) == (200, "running", "running")
    ended = client.get(f"{JOBS}/{stories['iterated'].id}").json()
    names = ("uuid", "project_id", "completed_at")  # of earlier programs
    assert tuple(ended[name] for name in names) == (ended["id"], ended["project"], ended["ended_at"])
    assert ended["completed_at"] is not None


def test_get_job_returns_404_for_non_existent_job(client: TestClient) -> None:
    answer = client.get(f"{JOBS}/{NOBODY}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_get_job_details_returns_iterations(client: TestClient, stories: dict[str, samples.Story]) -> None:
    answer = client.get(f"{JOBS}/{stories['iterated'].id}/details")
    assert answer.status_code == 200
    assert answer.json()["job"]["training_config"] == {"iterations": 2}
    job = answer.json()["job"]
    assert (job["uuid"], job["project_id"], job["completed_at"]) == (job["id"], job["project"], job["ended_at"])
    first, second = answer.json()["iterations"]
    assert (first["iteration_number"], second["steps"][0]["step_config"]) == (1, second["steps"][0]["config"])
    assert (first["number"], first["epochs"], first["config"], first["time_taken"]) == (1, 3, {"lr": 0.1}, 12.0)
    assert [(step["kind"], step["step_time"]) for step in second["steps"]] == [("traj_gen", 1.5), ("training", 9.0)]


def test_get_jobs_lists_all_jobs(client: TestClient, stories: dict[str, samples.Story]) -> None:
    assert set(ids(client.get(JOBS))) == {story.id for story in stories.values()}
    for job in client.get(JOBS).json()["jobs"]:
        assert (job["uuid"], job["project_id"], job["completed_at"]) == (job["id"], job["project"], job["ended_at"])


def test_get_jobs_filters_by_status(client: TestClient, stories: dict[str, samples.Story]) -> None:
    assert ids(client.get(f"{JOBS}?status=running")) == [stories["running"].id]
    assert ids(client.get(f"{JOBS}?status=cancelled")) == []


def test_get_jobs_filters_by_project(client: TestClient, stories: dict[str, samples.Story]) -> None:
    assert ids(client.get(f"{JOBS}?project_id=infra")) == [stories["pending"].id]


def test_get_jobs_pagination_works(client: TestClient) -> None:
    everything = ids(client.get(JOBS))
    assert ids(client.get(f"{JOBS}?limit=2&offset=1")) == everything[1:3]


def test_get_iteration_epochs_returns_epochs(client: TestClient, stories: dict[str, samples.Story]) -> None:
    answer = client.get(f"{JOBS}/{stories['iterated'].id}/iterations/1/epochs")
    assert (answer.status_code, answer.json()["total"]) == (200, 3)
    last = answer.json()["epochs"][-1]
    assert (last["number"], last["avg_loss"], last["model_path"]) == (3, pytest.approx(1 / 3), "/m/1/3")
    assert last["metrics"]["lr"] == 0.1


def test_get_epochs_returns_404_for_non_existent_iteration(
    client: TestClient, stories: dict[str, samples.Story]
) -> None:
    answer = client.get(f"{JOBS}/{stories['iterated'].id}/iterations/999/epochs")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_get_evaluations_returns_eval_results(client: TestClient, stories: dict[str, samples.Story]) -> None:
    answer = client.get(f"/v1/training/evaluations?job_id={stories['iterated'].id}")
    assert answer.status_code == 200
    evaluations = [
        (each["model_id"], each["iteration"], each["metrics"]["f1"]) for each in answer.json()["evaluations"]
    ]
    assert evaluations == [("m2", 2, 0.5), ("m1", 1, 0.5)]
    assert len(client.get("/v1/training/evaluations?limit=1&offset=1").json()["evaluations"]) == 1


def test_get_evaluations_filters_by_model(client: TestClient) -> None:
    answer = client.get("/v1/training/evaluations?model_id=m1")
    assert (answer.status_code, [each["model_id"] for each in answer.json()["evaluations"]]) == (200, ["m1"])


def test_post_cancel_cancels_job(client: TestClient, db: Database) -> None:
    story = samples.pending(db, project="cancelled")
    answer = client.post(f"{JOBS}/{story.id}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelling")


@pytest.mark.parametrize("which", ["iterated", "failed"])
def test_post_cancel_returns_400_for_completed_job(
    client: TestClient, stories: dict[str, samples.Story], which: str
) -> None:
    answer = client.post(f"{JOBS}/{stories[which].id}/cancel")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "already_final")


def test_response_models_match_schema(client: TestClient, stories: dict[str, samples.Story]) -> None:
    """Every field that is answered is in the document, with its type, and every field of the document is answered."""
    document = strict(client.get("/v1/openapi.json").json())
    job = stories["iterated"].id
    paths = {
        JOBS: JOBS,
        f"{JOBS}/{{uuid}}": f"{JOBS}/{job}",
        f"{JOBS}/{{uuid}}/details": f"{JOBS}/{job}/details",
        f"{JOBS}/{{uuid}}/iterations/{{n}}/epochs": f"{JOBS}/{job}/iterations/1/epochs",
        f"{JOBS}/{{uuid}}/events": f"{JOBS}/{job}/events",
        f"{JOBS}/{{uuid}}/attempts": f"{JOBS}/{job}/attempts",
        f"{JOBS}/{{uuid}}/checks": f"{JOBS}/{stories['failed'].id}/checks",
        f"{JOBS}/{{uuid}}/cost": f"{JOBS}/{job}/cost",
        "/v1/training/evaluations": "/v1/training/evaluations",
        "/v1/nodes": "/v1/nodes",
        "/v1/cost": "/v1/cost",
        "/v1/audit": "/v1/audit",
        "/v1/me": "/v1/me",
        "/healthz": "/healthz",
        "/readyz": "/readyz",
    }
    for path, address in paths.items():
        answer = client.get(address)
        assert answer.status_code == 200, answer.text
        shape = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema_rs.validate({**shape, "components": document["components"]}, answer.json())


def strict(value: Any) -> Any:
    """The same schemas, in which what is not named is not allowed."""
    if isinstance(value, list):
        return [strict(item) for item in value]
    if not isinstance(value, dict):
        return value
    closed = {name: strict(item) for name, item in value.items()}
    return {**closed, "additionalProperties": False} if isinstance(value.get("properties"), dict) else closed


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", JOBS, 200),
        ("GET", f"{JOBS}/{NOBODY}", 404),
        ("GET", f"{JOBS}/{NOBODY}/details", 404),
        ("GET", f"{JOBS}/{NOBODY}/iterations/1/epochs", 404),
        ("POST", f"{JOBS}/{NOBODY}/cancel", 404),
        ("GET", f"{JOBS}?status=great", 422),
        ("GET", f"{JOBS}?statsu=running", 400),
    ],
)
def test_http_status_codes_are_correct(client: TestClient, method: str, path: str, status: int) -> None:
    answer = client.request(method, path)
    assert answer.status_code == status
    assert ("error" in answer.json()) is (status >= 400)


def test_a_request_may_call_the_project_project_id(client: TestClient) -> None:
    request = {"name": "earlier", "project_id": "innotone", "command": ["true"]}
    answer = client.post(JOBS, json=request)
    assert (answer.status_code, answer.json()["project"], answer.json()["project_id"]) == (201, "innotone", "innotone")
    assert client.post(JOBS, json={**request, "project": "other"}).status_code == 422


@pytest.mark.parametrize("name", ["project", "project_id"])
def test_a_fault_of_the_project_has_the_name_that_the_caller_used(client: TestClient, name: str) -> None:
    answer = client.post(JOBS, json={"name": "earlier", name: "no spaces please", "command": ["true"]})
    assert answer.status_code == 422
    assert [fault["path"] for fault in answer.json()["error"]["faults"]] == [name]
