"""Seed 004, phase 1.2: each of its checkboxes, from a request's JSON to a file in a real bucket."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from s3_server import S3
from trainmaster.control import collect, project_yaml
from trainmaster.control.context import Context
from trainmaster.control.submit import submit
from trainmaster.core.errors import SpecError
from trainmaster.core.spec import parse_spec
from trainmaster.storage import open_store
from trainmaster.storage.transfer import Receipt, verify
from trainmaster.store import artifacts, leases
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.store.rows import JobRow
from trainmaster.targets import load

STORAGE = "s3://bucket/team"
REQUEST = json.dumps(
    {
        "name": "tales",
        "project": "innotone",
        "command": ["python", "train.py"],
        "inputs": {"train": "datasets/tales/train.jsonl", "eval": "s3://other/eval.jsonl", "config": "configs/t.yaml"},
        "env": {"RUN_LABEL": "hunter2"},
        "resources": {"processes_per_node": 2},
    }
)
TRAIN = json.dumps(
    {"name": "own", "train": {"data": {"source": "text", "path": "/data/a", "held_out_path": "/data/b"}}}
)


@pytest.fixture
def sqlite(tmp_path: Path) -> Any:
    db = open_database(tmp_path / "trainmaster.db")
    yield db
    db.close()


def a_job(db: Database, request: str = REQUEST) -> JobRow:
    return submit(db, parse_spec(json.loads(request)))


def read_back(job: JobRow, url: str = STORAGE) -> dict[str, Any]:
    """What the file says to whoever reads it, as YAML."""
    document: dict[str, Any] = yaml.safe_load(project_yaml.build(job, url)["project.yaml"])
    return document


def test_parses_training_request_json_correctly(sqlite: Database) -> None:
    job = a_job(sqlite)
    document = read_back(job)
    assert (document["job"], document["name"], document["project"], document["target"]) == (
        job.id,
        "tales",
        "innotone",
        "local",
    )
    assert document["workload"] == {"command": ["python", "train.py"]}
    assert document["resources"]["processes_per_node"] == 2


@pytest.mark.parametrize("words", [["python", "train.py"], ["python", "-c", "x = 'é: 1'\n" * 40], ["x" * 5000]])
def test_its_parts_are_written_as_the_whole_would_be(sqlite: Database, words: list[str]) -> None:
    job = a_job(sqlite, json.dumps({**json.loads(REQUEST), "command": words}))
    document = project_yaml.describe(job, STORAGE)
    whole = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)
    assert [project_yaml.build(job, STORAGE)["project.yaml"] for _ in range(2)] == [whole] * 2


@pytest.mark.parametrize(
    "name", ["tales", "00000000-0000-4000-8000-00000000dead", "2000-01-01T00:00:00.000001+00:00", "1234-05-06", "größe"]
)
def test_jobs_that_differ_in_id_and_time_alone_have_files_of_their_own(sqlite: Database, name: str) -> None:
    ids = ["12345678-1234-4123-8123-123456789012", "1e234567-8901-4e23-8e45-67e890123456", "a-word", str(uuid.uuid4())]
    times = [datetime(2026, 1, 2, 3, 4, 5, us, tzinfo=UTC) for us in (0, 6, 123456)]
    job = a_job(sqlite)
    for each, at in itertools.product(ids, times):
        spec = replace(job.spec, name=name, inputs=replace(job.spec.inputs, train=f"{each}/ 7"))
        one = replace(job, id=each, created_at=at, spec=spec)
        whole = yaml.safe_dump(project_yaml.describe(one, STORAGE), sort_keys=False, allow_unicode=True, width=120)
        assert project_yaml.build(one, STORAGE)["project.yaml"] == whole


def test_generates_proper_yaml_structure(sqlite: Database) -> None:
    job = a_job(sqlite)
    document = read_back(job)
    assert list(document) == [
        "version", "job", "name", "project", "target", "created_at", "paths", "workload", "resources", "preflight",
        "limits", "zone", "environment",
    ]  # fmt: skip
    assert project_yaml.build(job, STORAGE) == project_yaml.build(job, STORAGE)  # again gives the same bytes


@pytest.mark.parametrize("request_json", [REQUEST, TRAIN])
def test_all_required_fields_are_populated(sqlite: Database, request_json: str) -> None:
    document = read_back(a_job(sqlite, request_json))
    assert all(value not in (None, "") for value in document.values())
    assert all(document["paths"].values())
    assert datetime.fromisoformat(document["created_at"]).tzinfo is not None


def test_s3_paths_are_constructed_correctly(sqlite: Database) -> None:
    job = a_job(sqlite)
    paths = read_back(job)["paths"]
    assert paths["project"] == f"s3://bucket/team/jobs/{job.id}/project.yaml"
    assert paths["outputs"] == f"s3://bucket/team/jobs/{job.id}/outputs"


def test_train_dataset_path_is_correct(sqlite: Database) -> None:
    assert read_back(a_job(sqlite))["paths"]["train"] == "s3://bucket/team/datasets/tales/train.jsonl"
    assert read_back(a_job(sqlite, TRAIN))["paths"]["train"] == "/data/a"


def test_eval_dataset_path_is_correct(sqlite: Database) -> None:
    assert read_back(a_job(sqlite))["paths"]["eval"] == "s3://other/eval.jsonl"
    assert read_back(a_job(sqlite, TRAIN))["paths"]["eval"] == "/data/b"


def test_config_path_is_correct(sqlite: Database) -> None:
    assert read_back(a_job(sqlite))["paths"]["config"] == "s3://bucket/team/configs/t.yaml"
    job = a_job(sqlite, TRAIN)
    assert read_back(job)["paths"]["config"] == f"s3://bucket/team/jobs/{job.id}/inputs/config.json"
    config = json.loads(project_yaml.build(job, STORAGE)["inputs/config.json"])
    assert config["data"]["path"] == "/data/a"


@pytest.mark.parametrize("request_json", [REQUEST, TRAIN])
def test_can_upload_yaml_to_s3(
    sqlite: Database, s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request_json: str
) -> None:
    """Also `can download and verify uploaded YAML`: every file is fetched again and compared with its row."""
    s3.use(monkeypatch)
    store = open_store(f"s3://{s3.bucket}/{tmp_path.name}")
    job = a_job(sqlite, request_json)
    plane = Context(db=sqlite, home=tmp_path, load=load, token="me", storage=store)
    with sqlite.write() as conn:
        leases.take(conn, "me", owner="test")
    for _ in range(2):  # a second time changes nothing
        asyncio.run(collect.store_project(plane, job))
    rows = {row.path: row for row in artifacts.list_artifacts(sqlite, job.id)}
    assert set(rows) == set(project_yaml.build(job, store.url))
    for path, row in rows.items():
        verify(store, f"jobs/{job.id}/{path}", Receipt(size_bytes=row.size_bytes, sha256=row.sha256))


def test_can_download_and_verify_uploaded_yaml(
    sqlite: Database, s3: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    s3.use(monkeypatch)
    store = open_store(f"s3://{s3.bucket}/{tmp_path.name}")
    job = a_job(sqlite)
    for path, text in project_yaml.build(job, store.url).items():
        store.put(f"jobs/{job.id}/{path}", text.encode())
    document = yaml.safe_load(store.get(f"jobs/{job.id}/project.yaml"))
    assert document == project_yaml.describe(job, store.url)
    assert f"{store.url}/jobs/{job.id}/project.yaml" == document["paths"]["project"]


def test_no_value_of_the_environment_is_in_the_file(sqlite: Database) -> None:
    text = project_yaml.build(a_job(sqlite), STORAGE)["project.yaml"]
    assert "hunter2" not in text and "RUN_LABEL" in text


@pytest.mark.parametrize(
    "place", ["s3://key:secret@bucket/a", "s3://bucket/a?X-Amz-Signature=1", "../a", "a/../b", "ftp://x/y", "s3://b"]
)
def test_a_place_that_is_none_is_refused(place: str) -> None:
    with pytest.raises(SpecError, match=r"inputs\.train"):
        parse_spec({"name": "a", "command": ["true"], "inputs": {"train": place}})
