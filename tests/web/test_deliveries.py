"""Transitions and deliveries of a job: on its page, by path, by the client and by the command line."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from starlette.testclient import TestClient
from typer.testing import CliRunner

from client.served import serve
from pages import samples
from trainmaster.cli.main import build
from trainmaster.client import Client
from trainmaster.core.roles import Role
from trainmaster.store import outbox, tokens
from trainmaster.store.database import Database

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOOK = "6f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a11"
JOBS = "/v1/training/jobs"


def plant_delivery(db: Database, job_id: str) -> None:
    """A notification of the job that a webhook refused for good."""
    with db.write() as conn:
        outbox.insert_news(conn, key="k", topic="job.failed", project="lab", job_id=job_id, payload={}, at=AT)
        news = outbox.list_unspread(conn)[0]
        outbox.spread(conn, news, [f"webhook:{HOOK}"], at=AT)
    waiting = outbox.list_deliveries(db, job_id=job_id)[0]
    assert waiting.next_at is not None
    with db.write() as conn:
        outbox.mark_failed(
            conn, waiting.id, claimed_until=waiting.next_at, next_at=None, status=500, error="HTTP 500", took_s=0.1
        )


def test_the_api_and_the_page_have_them(client: TestClient, db: Database) -> None:
    job_id = samples.failed_run(db).id
    plant_delivery(db, job_id)
    moves = client.get(f"{JOBS}/{job_id}/transitions").json()["transitions"]
    assert moves[0]["stage_from"] is None and moves[-1]["stage_to"] is None and moves[-1]["status"] == "failed"
    sent = client.get(f"{JOBS}/{job_id}/deliveries").json()["deliveries"]
    assert [(delivery["topic"], delivery["state"], delivery["error"]) for delivery in sent] == [
        ("job.failed", "failed", "HTTP 500")
    ]
    assert client.get(f"{JOBS}/{job_id}/deliveries?failed=true").json()["deliveries"] == sent
    assert client.get(f"/v1/webhooks/{HOOK}/deliveries").status_code == 404, "there is no such webhook any more"
    page = client.get(f"/jobs/{job_id}/attempts").text
    assert "Transitions" in page and "Notifications" in page and "HTTP 500" in page


def test_a_viewer_sees_transitions_and_no_deliveries(client: TestClient, db: Database) -> None:
    job_id = samples.failed_run(db).id
    plant_delivery(db, job_id)
    with db.write() as conn:
        token = tokens.issue(conn, name="eve", role=Role.VIEWER, project=None, at=AT)
    headers = {"Authorization": f"Bearer {token}"}
    assert client.get(f"{JOBS}/{job_id}/transitions", headers=headers).status_code == 200
    assert client.get(f"{JOBS}/{job_id}/deliveries", headers=headers).status_code == 403
    assert "HTTP 500" not in client.get(f"/jobs/{job_id}", headers=headers).text


def test_client_and_verb_have_them(db: Database, tmp_path: Path) -> None:
    job_id = samples.failed_run(db).id
    plant_delivery(db, job_id)
    with serve(db, tmp_path) as url:
        with Client(url) as server:
            moves = server.transitions(job_id)
            assert moves[-1].stage_to is None and moves[-1].status == "failed"
            assert server.deliveries(job_id)[0].state == "failed"
        for option, says in (("--transitions", "failed"), ("--deliveries", "HTTP 500")):
            done = CliRunner(env={"COLUMNS": "200"}).invoke(build(), ["show", job_id, option, "--server", url])
            assert done.exit_code == 0 and says in done.output, done.output
