"""Every shape of a secret in every field that a user can write, against a real server; then everything is searched.

`make test` plants two shapes in each field, by turns; `make secrets` plants all of them and prints the counts.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from core.test_secrets import SHAPES, text_fields
from e2e.test_planted_secrets import MEANT_FOR_THEM, Served, served
from trainmaster.core import schema
from trainmaster.core.spec import parse_spec

__all__ = ["served"]  # the fixture
Request = tuple[str, str, dict[str, Any]]  # method, path, and arguments of httpx
JOBS = "/v1/training/jobs"
WHOLE_VARIABLE = "TRAINMASTER_SECRETS_WHOLE"
SAMPLE = 2  # shapes in each field
COMMAND: dict[str, Any] = {"name": "leaky", "command": ["true"]}


def fragment(secret: str) -> bytes:
    """Ten characters of the secret's random part: enough to know it by, few enough to be found in a cut-off message."""
    longest = max(re.findall(r"[A-Za-z0-9]+", secret), key=len)
    return (longest[-10:] if len(longest) >= 9 else secret).encode()


def spec_with(path: str, secret: str) -> dict[str, Any]:
    plain: dict[str, Any] = schema.to_plain(
        parse_spec({"name": "leaky", "train": {"data": {"source": "text", "path": "x"}}})
    )
    *parents, last = path.split(".")
    here = plain
    for name in parents:
        here = here[name]
    here[last] = secret
    return {name: value for name, value in plain.items() if value is not None}


def plantings(secret: str) -> Iterator[tuple[str, Request]]:
    """Every place of the API in which a user can write text, with the request that plants the secret there."""
    for path in text_fields():
        yield f"spec {path}", ("POST", JOBS, {"json": spec_with(path, secret)})
    words: dict[str, dict[str, Any]] = {
        "command word": {**COMMAND, "command": ["run", secret]},
        "command option": {**COMMAND, "command": ["run", f"--with={secret}"]},
        "command in a script": {**COMMAND, "command": ["bash", "-c", f"cd /x; {secret}; run"]},
        "env value": {**COMMAND, "env": {"A": secret}},
        "env name": {**COMMAND, "env": {secret: "x"}},
        "input path": {**COMMAND, "inputs": {"train": secret}},
        "input config": {**COMMAND, "inputs": {"config": f"s3://bucket/{secret}"}},
        "retry reason": {**COMMAND, "limits": {"retry": {secret: True}}},
        "unknown field": {**COMMAND, secret: 1},
        "number": {**COMMAND, "limits": {"timeout_s": secret}},
        "skipped check": {**COMMAND, "preflight": {"skip": [secret]}},
        "workdir": {**COMMAND, "workdir": f"/{secret}"},
        "target options": {**COMMAND, "target": f"local:{secret}"},
    }
    for name, spec in words.items():
        yield name, ("POST", JOBS, {"json": spec})
    yield "body that is no JSON", ("POST", JOBS, {"content": secret, "headers": {"Content-Type": "application/json"}})
    yield "webhook url", ("POST", "/v1/webhooks", {"json": {"url": f"https://hooks.example.org/{secret}"}})
    yield "webhook query", ("POST", "/v1/webhooks", {"json": {"url": f"https://hooks.example.org/x?key={secret}"}})
    yield "webhook topic", ("POST", "/v1/webhooks", {"json": {"url": "https://h.example.org/", "topics": [secret]}})
    yield "webhook project", ("POST", "/v1/webhooks", {"json": {"url": "https://h.example.org/", "project": secret}})
    yield "token name", ("POST", "/v1/tokens", {"json": {"name": secret, "role": "viewer"}})
    yield "token project", ("POST", "/v1/tokens", {"json": {"name": "t", "role": "viewer", "project": secret}})
    yield "token role", ("POST", "/v1/tokens", {"json": {"name": "t2", "role": secret}})
    inside = quote(secret, safe="")
    yield "token to revoke", ("DELETE", f"/v1/tokens/{inside}", {})
    yield "budget project", ("PUT", f"/v1/budgets/{inside}/month", {"json": {"cap_cents": 5}})
    yield "budget value", ("PUT", "/v1/budgets/default/month", {"json": {"cap_cents": secret}})
    yield "project of chunks", ("POST", f"/v1/projects/{inside}/chunks/missing", {"json": {"sha256": []}})
    yield "job id", ("GET", f"{JOBS}/{inside}", {})
    yield "stored file", ("GET", f"{JOBS}/6f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a11/artifacts/{inside}", {})
    yield "filter", ("GET", JOBS, {"params": {"find": secret}})
    yield "unknown parameter", ("GET", JOBS, {"params": {secret: "1"}})
    yield "unknown path", ("GET", f"/{inside}", {})
    key = {"headers": {"Idempotency-Key": inside}}
    yield "idempotency key", ("POST", JOBS, {"json": {**COMMAND, "command": ["no", "job"], "target": "nowhere"}, **key})
    yield "user agent", ("GET", JOBS, {"headers": {"User-Agent": secret}})


def chosen() -> Iterator[tuple[str, str, Request]]:
    """Shape, field and request of each planting: all of them, or a sample with every shape and every field."""
    whole = bool(os.environ.get(WHOLE_VARIABLE))
    for turn, (shape, secret) in enumerate(SHAPES.items()):
        for number, (field, request) in enumerate(plantings(secret)):
            if whole or (number + turn) % (len(SHAPES) // SAMPLE) == 0:
                yield shape, field, request


@pytest.mark.matrix(one_in=12, of="servers and owners killed, held up and searched")
@pytest.mark.spawns
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_shape_in_any_field_is_stored_logged_or_shown(served: Served) -> None:
    hidden = {shape: fragment(secret) for shape, secret in SHAPES.items()}
    counts: Counter[str] = Counter()
    fields: set[str] = set()
    leaks: list[str] = []
    bearer = {"Authorization": f"Bearer {served.token}"}
    with httpx.Client(base_url=served.url, timeout=60) as client:
        for shape, field, (method, path, more) in chosen():
            more["headers"] = {**bearer, **more.get("headers", {})}
            while (answer := client.request(method, path, **more)).status_code == 429:
                time.sleep(0.1)
            counts["plantings"] += 1
            counts["accepted" if answer.is_success else "refused"] += 1
            fields.add(field)
            assert answer.status_code < 500, (shape, field, answer.text)
            if hidden[shape] in answer.content:
                leaks.append(f"answer: {shape} in {field}: {answer.text[:200]}")
        pages = [client.get(page, headers=bearer).content for page in _pages(client, bearer)]
    served.process.terminate()
    served.process.wait(timeout=30)
    argv = served.watch.end()
    files = [path for path in served.home.rglob("*") if path.is_file() and path.name not in MEANT_FOR_THEM]
    rows = _dump(served.home / "trainmaster.db")
    searched = {"rows": rows, "pages": b"\n".join(pages), "argv": argv, "server log": served.said.read_bytes()}
    searched |= {str(path.relative_to(served.home)): path.read_bytes() for path in files}
    for place, content in searched.items():
        leaks += [f"{place}: {shape}" for shape, word in hidden.items() if word in content]
    print(
        f"\n{len(SHAPES)} shapes x {len(fields)} fields: {counts['plantings']} plantings, {counts['refused']} refused, "
        f"{counts['accepted']} accepted; searched {len(rows):,} bytes of rows, {len(pages)} pages, {len(files)} files, "
        f"{len(argv):,} bytes of argv, {len(searched['server log']):,} bytes of log: {len(leaks)} found"
    )
    assert counts["plantings"] >= SAMPLE * len(fields) * 0.9 and len(pages) > 5 and b"leaky" not in rows
    assert leaks == []


def _pages(client: httpx.Client, bearer: dict[str, str]) -> list[str]:
    found = client.get(JOBS, headers=bearer, params={"limit": 200}).json()["jobs"]
    own = [f"/jobs/{job['id']}" for job in found[:5]] + [f"/v1/training/jobs/{job['id']}" for job in found[:5]]
    return ["/", JOBS, "/v1/webhooks", "/v1/tokens", "/v1/budgets", "/v1/cost", "/v1/audit", "/v1/nodes", *own]


def _dump(database: Any) -> bytes:
    with sqlite3.connect(database) as conn:
        return "\n".join(conn.iterdump()).encode()
