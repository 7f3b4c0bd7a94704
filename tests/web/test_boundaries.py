"""A project's token gets no rights of the server through a job, and a job sets no verdict of another machine."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from trainmaster.core.events import split
from trainmaster.core.roles import Role
from trainmaster.core.spec import JobSpec
from trainmaster.remote.job_user import job_environment
from trainmaster.store import attempts, events, jobs, tokens
from trainmaster.store.database import Database
from trainmaster.web.app import create_app

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
SPEC = {"name": "a", "project": "lab", "command": ["true"]}
MINE, THEIRS = "6f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a11", "7f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a22"


@pytest.mark.parametrize(("trusted", "status"), [(False, 403), (True, 201)])
def test_a_project_token_needs_trust_on_local(db: Database, tmp_path: Path, trusted: bool, status: int) -> None:
    with db.write() as conn:
        token = tokens.issue(conn, name="alice", role=Role.USER, project="lab", at=AT)
        admin = tokens.issue(conn, name="root", role=Role.ADMIN, project=None, at=AT)
    app = create_app(db, tmp_path, reconcile=False, require_token=True, trust_jobs=trusted)
    client = TestClient(app, base_url="http://127.0.0.1:8470", client=("127.0.0.1", 50_000))
    answer = client.post("/v1/training/jobs", json=SPEC, headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == status, answer.text
    assert trusted or answer.json()["error"]["code"] == "not_granted"
    assert trusted or "trainmaster target grant local --project lab --user UNIX-USER" in answer.text, "the line to add"
    unstated = {name: value for name, value in SPEC.items() if name != "project"}
    taken = client.post("/v1/training/jobs", json=unstated, headers={"Authorization": f"Bearer {token}"})
    assert taken.status_code == status and (not trusted or taken.json()["project"] == "lab")
    other = client.post(
        "/v1/training/jobs", json={**SPEC, "project": "examples"}, headers={"Authorization": f"Bearer {token}"}
    )
    assert other.status_code == 403 and "it is of lab: write project=lab" in other.json()["error"]["message"]
    made = client.post("/v1/training/jobs", json=SPEC, headers={"Authorization": f"Bearer {admin}"})
    assert made.status_code == 201
    again = f"/v1/training/jobs/{made.json()['id']}/rerun"
    assert client.post(again, headers={"Authorization": f"Bearer {token}"}).status_code == status


def test_a_preflight_event_sets_no_verdict_of_another_machine(db: Database, client: TestClient) -> None:
    for job_id, host, claimed, verdict in ((THEIRS, "gpu-7", None, "pass"), (MINE, "laptop", "gpu-7", "fail")):
        lines = [
            {"phase": "PROJECT", "event": "start", "data": {"host": host}},
            {
                "phase": "PREFLIGHT",
                "event": "check",
                "data": {"check": "gpu_count", "verdict": verdict, "node": claimed},
            },
        ]
        text = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        with db.write() as conn:
            jobs.insert_job(conn, job_id, JobSpec(name="a", command=("true",)), at=AT)
            attempt = attempts.insert_attempt(conn, job_id, 1, handle={"attempt": f"{job_id}.1"}, at=AT)
            events.append_events(conn, attempt, "events.jsonl", seen_offset=0, lines=split(text, offset=0, zone=UTC))
    verdicts = {node["node"]: node["verdict"] for node in client.get("/v1/nodes").json()["nodes"]}
    assert verdicts == {"gpu-7": "pass", "laptop": "fail"}


def test_a_job_gets_nothing_of_the_servers_environment() -> None:
    server = {
        "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "LC_ALL": "C", "PYTHONPATH": "/x",
        "TRAINMASTER_HOME": "/h", "TRAINMASTER_DATABASE": "postgresql://", "TRAINMASTER_TOKEN": "t", "HF_TOKEN": "h",
        "AWS_SECRET_ACCESS_KEY": "a", "AWS_PROFILE": "p", "WANDB_API_KEY": "w", "SSH_AUTH_SOCK": "/s",
        "KUBECONFIG": "/k", "PGPASSWORD": "p", "GITHUB_TOKEN": "g", "http_proxy": "http://me:pw@proxy",
        "CUDA_API_KEY": "x",
        "TRAINMASTER_JOB_ENV": "HF_TOKEN, AWS_PROFILE",
    }  # fmt: skip
    passed = {"PATH", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "LC_ALL", "PYTHONPATH", "HF_TOKEN", "AWS_PROFILE"}
    assert set(job_environment(server)) == passed


def test_a_refused_name_is_explained_in_our_own_words(db: Database, tmp_path: Path) -> None:
    with db.write() as conn:
        admin = tokens.issue(conn, name="root", role=Role.ADMIN, project=None, at=AT)
    client = TestClient(create_app(db, tmp_path, reconcile=False, require_token=True), base_url="http://127.0.0.1:8470")
    headers = {"Authorization": f"Bearer {admin}"}
    answer = client.post("/v1/tokens", json={"name": "tm_" + "a1B2" * 10 + "xyz", "role": "user"}, headers=headers)
    assert answer.status_code == 422, answer.text
    message = answer.json()["error"]["message"]
    assert "looks like a secret" in message and "Value error" not in message
