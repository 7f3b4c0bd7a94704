"""Every route, and every field of the spec on every target, as each of six callers: no leak, no act of the server.

Made from the OpenAPI document, the app's own routes and the schema of the spec: a new route or field is in it at once.
The first half asks every route about the job, token, webhook, budget and target of a project of its own and of another
one, and compares the rows before and after each caller. The second submits a spec for every field that may name
something, with a path of the server in it, as a job and in the `matrix` of a set, and listens to what the process
opens, starts and connects to meanwhile.
"""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from pages import samples
from trainmaster import targets
from trainmaster.control import checkpoints, inputs, known_targets
from trainmaster.control.notify import send
from trainmaster.control.queueing import sets
from trainmaster.core.config.spec_places import PLACES, is_naming
from trainmaster.core.config.sweep import parse_sweep
from trainmaster.core.errors import TrainmasterError
from trainmaster.core.events import Event
from trainmaster.core.roles import Role
from trainmaster.core.schema import describe
from trainmaster.core.spec import JobSpec
from trainmaster.queueing.state import Device
from trainmaster.storage import open_store
from trainmaster.store import attempts, costs, jobs, tables, webhooks
from trainmaster.store.capacity import devices
from trainmaster.store.capacity.sets import list_trials
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database
from trainmaster.web.app import create_app
from trainmaster.web.auth import PUBLIC
from web.conftest import BASE, LOCAL
from web.furnished import JOBS, answer_as_spelled, issue, iterated, keep

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
MARK = "words-of-{}"  # in a file of each project's job
SECRET = "words-of-a-file-of-the-server"
# In the order of what they may change, so that each finds what the one before it was refused.
CALLERS: dict[str, tuple[Role, str | None] | None] = {
    "none": None, "viewer": (Role.VIEWER, "lab"), "stranger": (Role.USER, "other"), "user": (Role.USER, "lab"),
    "project admin": (Role.ADMIN, "lab"), "server admin": (Role.ADMIN, None),
}  # fmt: skip
OF_USERS = {
    "jobs",
    "transitions",
    "audit",
    "blobs",
    "workdirs",
    "outbox",
    "job_sets",
    "set_trials",
    "schedules",
}  # tables that a user's requests write
OF_OPERATORS = {"known_targets", "target_grants", "machines", "budgets"}


@dataclass(frozen=True, kw_only=True)
class World:
    db: Database
    home: Path
    client: TestClient
    parts: dict[str, dict[str, str]]  # project → what the parameters of a path are there


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    monkeypatch = pytest.MonkeyPatch()
    home = tmp_path_factory.mktemp("home-of-the-server")
    db = open_database(home / "trainmaster.db")
    read = send.look_up  # a host that is an address is read as ever; a name is asked of no name server
    monkeypatch.setattr(send, "look_up", lambda *at, flags=0: read(*at, flags=flags) if flags else [])
    app = create_app(db, home, reconcile=False, require_token=True, rate=None)
    parts = {name: furnish(db, home, name) for name in ("lab", "victim")}
    with TestClient(app, base_url=BASE, client=LOCAL, follow_redirects=False) as client:  # one loop for all requests
        yield World(db=db, home=home, client=client, parts=parts)
    monkeypatch.undo()
    db.close()


def furnish(db: Database, home: Path, project: str) -> dict[str, str]:
    """Something of everything in a project; what its parts are called."""
    story, hook = iterated(db, name=f"of-{project}", project=project, target="lambda"), str(uuid.uuid4())
    spare = str(uuid.uuid4())
    host = Event(phase="PROJECT", event="start", data={"host": f"node-of-{project}", "version": "0"})
    story.tell([host, *samples.preflight()])
    keep(
        db, home, story.id, {path: MARK.format(project).encode() for path in ("outputs/m.bin", "attempts/1/agent.log")}
    )
    with db.write() as conn:
        attempts.mark_released(conn, story.attempt, at=AT)
        costs.set_budget(conn, project, "month", 10_000, at=AT)
        for each in (hook, spare):
            url = f"https://{project}.example.org/{each[:8]}"
            webhooks.insert_webhook(conn, each, url=url, project=project, topics=[], at=AT)
        devices.record(conn, "local@elsewhere", "gpu", [Device(id="GPU-0", machine="gpu-1")], at=AT)
    issue(db, f"spare-{project}", Role.USER, project)
    known_targets.grant(db, "lambda", project, user=None, by="local")
    trials = {"name": f"set-of-{project}", "project": project, "command": ["x"], "matrix": {"env.A": ["1", "2"]}}
    submitted = sets.submit_set(db, parse_sweep({**trials, "target": "lambda", "schedule": {"cron": "0 3 * * *"}}))
    return {
        "uuid": story.id, "id": hook, "project": project, "project_id": project, "job_id": story.id, "period": "month",
        "n": "1", "stream": "agent.log", "path": "outputs/m.bin", "step": "1", "sha256": "0" * 64, "code": "x",
        "model_id": "m1", "tab": "events", "node": f"node-of-{project}", "spare": spare, "machine": "gpu-1",
        "set_id": submitted.id,
    }  # fmt: skip


# Of pages: what a request needs besides its path, which no document states.
QUERIES = {
    "GET /nodes/one": "node={node}", "GET /nodes/drain": "node={node}", "GET /nodes/readmit": "node={node}",
    "GET /compare": "jobs={uuid}", "GET /compare/curves": "jobs={uuid}",
    "GET /compare.csv": "jobs={uuid}", "GET /cost": "project={project}",
    "GET /settings": "subject=webhook:{id}",
}  # fmt: skip
FORMS: dict[str, str | tuple[str, ...]] = {
    "POST /nodes/drain": ("node={node}", "node={machine}&reason=a+fan"),
    "POST /nodes/readmit": ("node={node}", "node={machine}"),
    "POST /jobs/{uuid}/priority": "priority=high",
    "POST /settings/budgets": "project={project}&dollars=12.50&period=month",
    "POST /settings/shares": "project={project}&quota=1&weight=2",
    "POST /settings/tokens": "name=form-{any}&role=admin&project={project}",
    "POST /settings/tokens/revoke": "name=spare-{project}",
    "POST /settings/webhooks": "url=https://h.example.org/y&project={project}",
    "POST /settings/webhooks/switch": "id={id}&enabled=1", "POST /settings/webhooks/test": "id={id}",
    "POST /settings/webhooks/remove": "id={spare}", "POST /settings/channels/test": "name=ops",
}  # fmt: skip


def test_every_route_as_every_caller(world: World) -> None:
    leaks, asked, useful = [], 0, set[str]()
    for caller, rights in CALLERS.items():
        token = issue(world.db, f"m-{caller.replace(' ', '-')}", *rights) if rights is not None else {}
        own = {rights[1]} if rights is not None and rights[1] is not None else set()
        sees = {"lab", "victim"} if rights == (Role.ADMIN, None) else own
        before = snapshot(world.db)
        for operation, url, body in requests(world):
            sent = {"content": body} if isinstance(body, str) else {"json": body}
            answer = world.client.request(operation.split()[0], url, headers=token, **sent)
            asked += 1
            path = operation.split()[1]
            assert answer.status_code < 500, (caller, operation, answer.text)
            if answer.status_code < 400:
                useful.add(operation)
            for project in {"lab", "victim"} - sees:
                told = [MARK.format(project), f"of-{project}", f"https://{project}", f"spare-{project}"]
                written = f"{url} {body}"  # a refusal may repeat what the caller wrote
                heard = [word for word in told if word in answer.text and word not in written]
                leaks += [(caller, operation, url, word) for word in heard]
            if str(world.home) in answer.text:
                leaks.append((caller, operation, url, "the home's path"))
            if rights is None and path not in PUBLIC and not path.startswith(("/static/", "/enter/", "/login")):
                assert answer.status_code in (401, 303, 403), (operation, answer.status_code)
        hold_changes(caller, world, before)
    assert leaks == [] and asked > 6 * 60
    # A request that is wrong for everybody would prove nothing: of each route one was answered to somebody.
    hardly = {operation for operation, *_ in requests(world)} - useful
    assert hardly <= {
        "GET /v1/training/jobs/{uuid}/checkpoint", "GET /v1/training/jobs/{uuid}/checkpoint/{step}/{name}",  # on lambda
        "POST /v1/training/jobs/{uuid}/cancel", "POST /jobs/{uuid}/cancel", "POST /v1/training/jobs/{uuid}/resume",
        "POST /jobs/{uuid}/resume",  # of a job that is over and has saved nothing
        "PUT /v1/training/jobs/{uuid}/priority", "POST /jobs/{uuid}/priority",  # of one that is over
        "PUT /v1/projects/{project}/chunks/{sha256}", "PUT /v1/projects/{project}/workdirs/{sha256}",  # other bytes
        "POST /sets/{set_id}/cancel", "POST /sets/{set_id}/pause",
            "POST /sets/{set_id}/resume",  # the set was cancelled through the API before
        "GET /enter/{code}", "POST /login", "GET /static/{name}", "POST /v1/targets",
        "DELETE /v1/targets/{name}",  # jobs run there
        # For people who signed in by OpenID Connect (sign_in/test_oidc.py), not for tokens:
        "POST /settings/project", "POST /settings/own-tokens", "POST /settings/own-tokens/revoke",
    }, hardly  # fmt: skip


def requests(world: World) -> Iterator[tuple[str, str, Any]]:
    """Every operation of the document and of the pages, about each project; with each body that it takes."""
    document = world.client.app.openapi()  # type: ignore[attr-defined]
    operations = {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    for route in world.client.app.routes:  # type: ignore[attr-defined]
        for method in getattr(route, "methods", None) or ():
            operations.setdefault(f"{method} {re.sub(r':path', '', route.path)}", {})
    order = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")  # what is removed is looked at first
    for operation in sorted(operations, key=lambda word: order.index(word.split()[0])):
        path = operation.split()[1]
        for project, parts in world.parts.items():
            name = {"/v1/tokens": f"spare-{project}", "/v1/targets": "lambda"}.get(path.partition("/{")[0], "app.css")
            url = path.format(**{**parts, "name": name})
            stated = [item["name"] for item in operations[operation].get("parameters", ()) if item["in"] == "query"]
            if operation in QUERIES:
                yield operation, f"{url}?{QUERIES[operation].format(**parts)}", None
            if operation in FORMS:
                forms = FORMS[operation]
                for form in (forms,) if isinstance(forms, str) else forms:
                    yield operation, url, form.format(**parts, any=uuid.uuid4().hex[:8])
                continue
            for body in bodies(document, operations[operation], project):
                yield operation, url, body
            for one in set(stated) & parts.keys():
                yield operation, f"{url}?{one}={parts[one]}", None


def bodies(document: dict[str, Any], operation: dict[str, Any], project: str) -> list[Any]:
    """A body of the operation for the project, and for no project where it may name one; None where it takes none."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return [None]
    name = content["schema"]["$ref"].rpartition("/")[2]
    if name == "JobSpec":
        return [{"name": "x", "project": project, "command": ["true"], "target": "lambda"}]
    if name == "SetSpec":
        return [{"name": "x", "project": project, "command": ["true"], "target": "lambda", "matrix": {"env.A": ["1"]}}]
    properties = document["components"]["schemas"][name]["properties"]
    known = {
        "name": f"x-{uuid.uuid4().hex[:8]}", "role": "admin", "project": project, "url": "https://h.example.org/y",
        "word": "ssh:/etc/trainmaster/x.yaml", "cap_cents": 5, "enabled": False, "topics": [], "user": None,
        "priority": "high", "chunks": [], "sha256": [], "weight": 2.0, "quota": 4, "reason": "a fan", "target": None,
    }  # fmt: skip
    unknown = properties.keys() - known.keys()
    assert not unknown, f"{name} has a new field {unknown}: write a value for it here"
    whole = {field: known[field] for field in properties}
    return [whole, {**whole, "project": None}] if "project" in properties else [whole]


def snapshot(db: Database) -> dict[str, set[str]]:
    """Every row, as text; the time of a token's last use left out."""
    with db.read() as conn:
        return {
            table.name: {repr({**row, "used_at": None}) for row in conn.execute(table.select()).mappings()}
            for table in tables.metadata.sorted_tables
        }


def hold_changes(caller: str, world: World, before: dict[str, set[str]]) -> None:
    """What a caller changed is what it may change."""
    after = snapshot(world.db)
    changed = {name: before[name] ^ after[name] for name in before if before[name] != after[name]}
    changed.pop("ledger_tallies", None)  # derived: the server writes them once somebody reads the sums
    others = {"stranger": ("lab", "victim"), "user": ("victim",), "project admin": ("victim",)}.get(caller, ())
    for name, rows in changed.items():
        for row in rows:
            for project in others:
                parts = world.parts[project]
                assert not any(word in row for word in (parts["uuid"], parts["id"], f"'{project}'")), (
                    caller,
                    name,
                    row,
                )
    if caller in ("none", "viewer"):
        assert changed == {}, caller
    if caller in ("stranger", "user"):
        assert changed.keys() <= OF_USERS, (caller, changed.keys())
    if caller != "server admin":
        assert not changed.keys() & OF_OPERATORS, (caller, changed)


# The second half.

_heard: list[tuple[str, str]] = []
_ACTS = frozenset({"open", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect"})


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _ACTS:
        _heard.append((event, str(arguments[0] if event == "open" else arguments)))
        del _heard[:-1000]  # a hook cannot be removed again: it also hears the tests after these


sys.addaudithook(_listen)


@pytest.fixture(scope="module")
def granted(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Target → the name by which the project lab may use it; every kind but those that need root."""
    files = {
        "ssh": "hosts: [{host: gpu-01, user: u}]", "pool": "access: {user: u}\nhosts: [{host: 10.0.0.2}]",
        "slurm": "login: {host: login-1, user: u}", "kubernetes": "image: i", "hyperpod": "image: i",
        "sagemaker": '{region: us-east-1, role: "arn:aws:iam::123456789012:role/R", storage: "s3://bucket/x", '
        "image: i, instance_type: ml.p5.48xlarge}",
    }  # fmt: skip
    names, folder, monkeypatch = {"lambda": "lambda"}, tmp_path_factory.mktemp("settings"), pytest.MonkeyPatch()
    monkeypatch.setattr(targets, "identify", answer_as_spelled)
    for kind, text in files.items():
        file = folder / f"{kind}.yaml"
        file.write_text(text)
        names[kind] = f"known-{kind}"
        known_targets.add(world.db, names[kind], f"{kind}:{file}", home=world.home, by="local")
        account = {"ssh": "tm-lab", "slurm": "tm-lab", "kubernetes": "lab", "hyperpod": "lab"}.get(kind)
        known_targets.grant(world.db, names[kind], "lab", user=account, by="local")
    if os.geteuid() == 0:
        known_targets.grant(world.db, "local", "lab", user="nobody", by="local")
        names["local"] = "local"
    assert {*names, "local"} == set(targets.names()), "grant the new target here"
    yield names
    monkeypatch.undo()


@pytest.fixture
def trap(world: World) -> Path:
    """A folder of a job of the project victim, with what looks like settings, a checkpoint and words of its own."""
    trap = world.home / "jobs" / world.parts["victim"]["uuid"] / "checkpoints"
    (trap / "step-00000001").mkdir(parents=True, exist_ok=True)
    for file in ("x.yaml", "step-00000001/manifest.json", "step-00000001/w.bin"):
        (trap / file).write_text(f'{{"files": {{"w.bin": {{"size_bytes": 3, "sha256": "{SECRET}"}}}}}}')
    return trap


def naming_fields() -> dict[str, str]:
    """Fields of a spec that may name something, with their types."""
    fields = {row.path: row.type for row in describe(JobSpec) if is_naming(row.type)}
    assert fields.keys() == PLACES.keys()
    return fields


@pytest.mark.matrix(one_in=13, of="every route by hostile callers")
@pytest.mark.parametrize("route", ["job", "set"])
@pytest.mark.parametrize("caller", CALLERS)
def test_no_field_on_any_target_reaches_a_file_of_the_server(
    world: World, granted: dict[str, str], trap: Path, caller: str, route: str
) -> None:
    """A spec may hold any path; nothing of it is opened, started or connected to, and no answer repeats a word.

    Of a job, and of a trial whose field is in the matrix of a set: that trial is then begun.
    """
    rights = CALLERS[caller]
    token = issue(world.db, f"field-{caller.replace(' ', '-')}-{route}", *rights) if rights is not None else {}
    acts, leaks, asked, made = [], [], 0, 0
    for kind, target in granted.items():
        for field, type_text in naming_fields().items():
            stored = [f"jobs/{world.parts['victim']['uuid']}/outputs/m.bin"] if field.startswith("inputs.") else []
            for value in (str(trap), *stored):
                body = place({"name": "x", "project": "lab", "target": target}, field, value, type_text)
                if field == "target":
                    body["target"] = f"{kind}:{trap}/x.yaml"
                _heard.clear()
                url, body = send_as(route, body, field)
                answer = world.client.post(url, json=body, headers=token)
                job_ids = begin(world, route, answer)
                if caller != "server admin":  # who may name files of the server, and connect with its rights
                    acts += [(kind, field, *act) for act in _heard if act[0] != "open" or str(trap) in act[1]]
                asked, made = asked + 1, made + (answer.status_code == 201)
                assert answer.status_code in (201, 401, 403, 422), (kind, field, answer.text)
                if SECRET in answer.text or "words-of-victim" in answer.text:
                    leaks.append((kind, field, answer.text))
                for job_id in job_ids:
                    leaks += later(world, job_id, token, kind, field, mapped=caller != "server admin")
    assert acts == [] and leaks == []
    if caller in ("none", "viewer", "stranger"):
        assert made == 0
    else:
        assert made > 15 * len(granted), f"{made} of {asked} were accepted: too few to prove anything"


def send_as(route: str, body: dict[str, Any], field: str) -> tuple[str, dict[str, Any]]:
    """Address and body: as it is, or with the field in the matrix of a set where it may be there."""
    if route == "job":
        return JOBS, body
    if "parts" in field or field in ("name", "project", "resume_from"):
        return "/v1/sets", {**body, "matrix": {"env.A": ["1"]}}
    here, (*parents, last) = body, field.split(".")
    for name in parents:
        here = here[name]
    return "/v1/sets", {**body, "matrix": {field: [here.pop(last)]}}


def begin(world: World, route: str, answer: Any) -> list[str]:
    """The jobs of an answer. A set begins its trials first."""
    if answer.status_code != 201:
        return []
    if route == "job":
        return [answer.json()["id"]]
    set_id = answer.json()["set"]["id"]
    sets.advance(world.db)
    begun = [trial.job_id for trial in list_trials(world.db, set_id)]
    sets.cancel(world.db, set_id)
    return [job_id for job_id in begun if job_id is not None]


def place(body: dict[str, Any], field: str, value: str, type_text: str) -> dict[str, Any]:
    """A spec with the value in one field, and what that field needs beside it."""
    if field.startswith("train."):
        body["train"] = {"model": {"preset": "tiny"}, "data": {"source": "tales"}, "steps": 1}
    else:
        body["command"] = ["true"]
    if field.startswith("container."):
        body["container"] = {
            "image": "i",
            **({"login": {"user": "u", "password_from": "P"}} if "login" in field else {}),
        }
    here, (*parents, last) = body, field.split(".")
    for name in parents:
        if name == "parts":
            here.setdefault("parts", [{}])
            here = here["parts"][0]
        else:
            here = here.setdefault(name, {})
    wrapped: Any = value
    if type_text.startswith("list"):
        wrapped = [value]
    elif type_text.startswith("mapping"):
        wrapped = {"train": value}
    here[last] = wrapped
    return body


def later(world: World, job_id: str, user: dict[str, str], kind: str, field: str, *, mapped: bool) -> list[Any]:
    """What the control plane would do with an accepted spec, and what it tells of it afterwards."""
    row = jobs.find_job(world.db, job_id)
    assert row is not None
    assert not mapped or kind == "lambda" or row.target != row.spec.target, "as the project's account"
    found = []
    if field.startswith("inputs."):
        for pull in pulls(row.spec, world):
            found.append((kind, field, pull.name, "is sent to the node"))
    if field == "train.checkpoint.folder":
        page = world.client.get(f"{JOBS}/{job_id}/checkpoint", headers=user)
        found += [(kind, field, page.text)] if page.status_code == 200 or SECRET in page.text else []
        with pytest.raises(TrainmasterError):
            checkpoints.find_newest(world.home, replace(row, project="lab"))
    return found


def pulls(spec: JobSpec, world: World) -> tuple[Any, ...]:
    try:
        return inputs.find_pulls(spec, open_store(world.home / "storage"))
    except TrainmasterError:
        return ()
