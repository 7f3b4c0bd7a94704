"""docs/reference/api.md is true: examples do what it says, every path is named, every code is one that is answered."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from pages import samples
from trainmaster.store.database import Database
from trainmaster.store.tokens import Role
from trainmaster.web.app import create_app
from web.conftest import BASE, LOCAL
from web.furnished import issue, iterated, keep

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "api.md").read_text()
WITHOUT_VALUE = {"-s", "-N", "-L"}


def request(line: str, values: dict[str, str]) -> tuple[str, str, dict[str, str], str | None]:
    """Method, address, headers and body of a curl command."""
    for name, value in values.items():
        line = line.replace(f"${name}", value)
    assert "$" not in line, line
    words = shlex.split(line)[1:]
    method, address, headers, body = "GET", "", {}, None
    while words:
        word = words.pop(0)
        if word == "-X":
            method = words.pop(0)
        elif word == "-H":
            name, _, value = words.pop(0).partition(": ")
            headers[name] = value
        elif word == "-d":
            body = words.pop(0)
        elif word == "-o":
            words.pop(0)
        elif word not in WITHOUT_VALUE:
            assert not address, line
            address = word
    return method, address, headers, body


def test_every_example_works(db: Database, tmp_path: Path) -> None:
    job, running = iterated(db), samples.resumed(db)
    keep(db, tmp_path, job.id, {"outputs/model.bin": b"m", "attempts/1/rank-0.log": b"log\n"})
    token = issue(db, "ann", Role.ADMIN)["Authorization"].removeprefix("Bearer ")
    values = {"URL": BASE, "TOKEN": token, "JOB": job.id, "RUNNING": running.id}
    client = TestClient(create_app(db, tmp_path, reconcile=False, require_token=True), base_url=BASE, client=LOCAL)
    lines = re.findall(r"^curl .*$", PAGE, re.MULTILINE)
    assert len(lines) > 12
    for line in lines:
        method, address, headers, body = request(line, values)
        answer: Any = client.request(method, address, headers=headers, content=body)
        assert answer.status_code in (200, 201), (line, answer.text)


def test_the_table_names_every_path_and_no_other(client: TestClient) -> None:
    paths = client.get("/v1/openapi.json").json()["paths"]
    there = {f"{method.upper()} {path}" for path, operations in paths.items() for method in operations}
    assert set(re.findall(r"^\| `([A-Z]+ /[^`]*)` \|", PAGE, re.MULTILINE)) == there


def test_the_document_states_patterns_and_no_default_that_other_fields_decide(client: TestClient) -> None:
    document = client.get("/v1/openapi.json").json()
    query = {item["name"]: item["schema"] for item in document["paths"]["/v1/training/jobs"]["get"]["parameters"]}
    assert query["project_id"]["anyOf"][0]["pattern"].startswith("^[A-Za-z0-9")
    assert all("{1,63}" in query[name]["anyOf"][0]["pattern"] for name in ("find", "by", "name"))
    (sets,) = [item for item in document["paths"]["/v1/sets"]["get"]["parameters"] if item["name"] == "find"]
    assert sets["description"] == "name of a set, or beginning of its id"
    schemas = document["components"]["schemas"]
    assert "pattern" in schemas["HookWish"]["properties"]["project"]["anyOf"][0]
    optimizer = schemas["SpecOptimizerConfig"]["properties"]
    assert "default" not in optimizer["lr"] and "1.2288 / width" in optimizer["lr"]["description"]
    assert "default" not in optimizer["warmup_steps"] and optimizer["beta1"]["default"] == 0.9
    assert "Report" in schemas and "TargetState" not in schemas


def test_every_code_is_one_that_the_server_has() -> None:
    package = ROOT / "src" / "trainmaster"
    source = "".join(path.read_text() for part in ("web", "control") for path in (package / part).rglob("*.py"))
    listed = re.findall(r"^\| [0-9, ]+ \| (.*) \|$", PAGE, re.MULTILINE)
    codes = {code for line in listed for code in re.findall(r"`([a-z_]+)`", line)}
    assert len(codes) > 20
    assert {code for code in codes if f'"{code}"' not in source} == set()
