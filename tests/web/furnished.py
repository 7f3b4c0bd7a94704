"""What the tests of the API share: a server on a real socket, tokens, and a job that has iterations."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from fastapi import FastAPI

from pages import samples
from trainmaster import targets
from trainmaster.core.events import Event
from trainmaster.core.roles import Role
from trainmaster.core.states import Status
from trainmaster.storage import open_store
from trainmaster.store import artifacts, tokens
from trainmaster.store.database import Database

if TYPE_CHECKING:
    from playwright.sync_api import Page

JOBS = "/v1/training/jobs"
NOBODY = "00000000-0000-4000-8000-000000000000"


def issue(db: Database, name: str, role: Role, project: str | None = None) -> dict[str, str]:
    """A new token, as the header that carries it."""
    with db.write() as conn:
        token = tokens.issue(conn, name=name, role=role, project=project, at=datetime.now(UTC))
    assert token is not None
    return {"Authorization": f"Bearer {token}"}


def iterations(count: int = 2, epochs: int = 3) -> Iterator[Event]:
    """What a run of seed 004 tells: iterations with trajectories, training, epochs, an evaluation each."""
    yield Event(phase="GROUP_ITERATION", event="start", data={"iterations": count})
    for number in range(1, count + 1):
        yield Event(phase="ITERATION", event="start", iteration=number, data={"config": {"lr": 0.1}})
        yield Event(phase="TRAJECTORY", event="start", iteration=number, data={})
        yield Event(phase="TRAJECTORY", event="end", iteration=number, data={"duration": 1.5})
        yield Event(phase="TRAINING", event="start", iteration=number, data={})
        for epoch in range(1, epochs + 1):
            data = {"avg_loss": 1 / epoch, "model_path": f"/m/{number}/{epoch}", "optimizer_path": "/o", "lr": 0.1}
            yield Event(phase="TRAINING", event="epoch_complete", iteration=number, epoch=epoch, data=data)
        yield Event(phase="TRAINING", event="end", iteration=number, data={"duration": 9.0})
        yield Event(phase="EVAL_MODEL", event="metrics", iteration=number, data={"model_id": f"m{number}", "f1": 0.5})
        yield Event(phase="ITERATION", event="end", iteration=number, data={"duration": 12.0})


def iterated(db: Database, **changes: Any) -> samples.Story:
    """A completed job with two iterations of three epochs."""
    story = samples.Story(db, samples.spec(**changes)).start()
    story.tell(iterations())
    return story.end_attempt().finish(Status.COMPLETED)


def keep(db: Database, home: Path, job_id: str, files: dict[str, bytes]) -> None:
    """Put files into a job's storage, as the control plane does when an attempt is over."""
    store = open_store(home / "storage")
    with db.write() as conn:
        for path, content in files.items():
            store.put(f"jobs/{job_id}/{path}", content)
            artifacts.insert_artifact(
                conn, job_id=job_id, attempt=None, kind="log", path=path, size_bytes=len(content), sha256="0" * 64,
                at=datetime.now(UTC),
            )  # fmt: skip


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The application behind a real socket."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def answer_as_spelled(word: str) -> dict[str, str]:
    """In place of `targets.identify`, for hosts that do not exist: every place is another machine."""
    account = targets.runs_as(word)
    return {} if account is None or account.alone else {place: f"{place}/{account.name}" for place in account.places}


def read_page(answer: httpx.Response) -> str:
    """The page without its style, which must be the one that the policy allows by its hash."""
    (style,) = re.findall(r"<style[^>]*>(.*?)</style>", answer.text, re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{allowed}';" in answer.headers["content-security-policy"], "this style and no other"
    return re.sub(r"<style[^>]*>.*?</style>", "", answer.text, flags=re.DOTALL)


def wait_until(tab: Page, expression: str) -> None:
    """Until it is true on the page. Playwright's own way evaluates a text there, which the policy of pages refuses."""
    until = time.monotonic() + 60
    while not tab.evaluate(expression):
        assert time.monotonic() < until, f"never true: {expression}"
        tab.wait_for_timeout(50)
