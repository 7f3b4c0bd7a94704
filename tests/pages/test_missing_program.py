"""What is to be done about a program that is not there names that program, on pages, in commands and in news."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import select

from pages import samples
from trainmaster.agent.diagnose import advise_on_start, judge
from trainmaster.control.notify.job_news import put_job_news
from trainmaster.core.failures import find_action
from trainmaster.core.plan import WORK_FOLDER
from trainmaster.core.states import Reason, Status
from trainmaster.pages import job
from trainmaster.store import jobs, tables
from trainmaster.store.database import Database

LOG = Reason.SCRIPT_FAILED.rule.action
NO_SCRIPT = "python: can't open file '{}/x.py': [Errno 2] No such file or directory"
SENT = "x.py is not in the working folder that was sent: check the name, and .trainmasterignore"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (NO_SCRIPT.format(f"/h/jobs/a/{WORK_FOLDER}"), SENT),
        (NO_SCRIPT.format("/data; of mine"), "x.py is not on that machine: check its path"),
        ("bash: line 1: pythn3: command not found",
         "pythn3 is not in PATH on that machine: name the whole path, or use python3"),
        ("sh: 1: torchrum: not found", "torchrum is not in PATH on that machine: name the whole path"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'data.bin'", LOG),
    ],
)  # fmt: skip
def test_it_is_what_the_agent_says(line: str, says: str) -> None:
    message = judge(rank=0, ranks=1, code=2, lines=["before", line], oom_kills=0).message
    assert find_action(Reason.SCRIPT_FAILED, message) == says
    assert find_action(Reason.SCRIPT_FAILED, f"{message}; 1 file was not stored: outputs/a: full") == says
    assert find_action(Reason.NODE_LOST, message) == Reason.NODE_LOST.rule.action and find_action(None, message) is None


@pytest.mark.parametrize(
    "cause",
    [
        FileNotFoundError(2, "x", "pythn3"), FileNotFoundError(2, "x", "/opt/no/python"),
        PermissionError(13, "x", "./train.py"),
    ],
)  # fmt: skip
def test_a_program_that_did_not_start(cause: OSError) -> None:
    message = f"rank 0 of 1 could not start: {cause}; {advise_on_start(cause)}"
    assert find_action(Reason.SCRIPT_FAILED, message) == advise_on_start(cause)


def test_page_attempt_and_news_say_it(db: Database) -> None:
    message = f"rank 0 of 1 exited with 2: {NO_SCRIPT.format('/h')}; {SENT}"
    story = samples.Story(db, samples.spec()).start().end_attempt(Reason.SCRIPT_FAILED, message)
    story.finish(Status.FAILED, Reason.SCRIPT_FAILED, message)
    page, row = job.read(db, story.id), jobs.find_job(db, story.id)
    assert page is not None and row is not None
    assert (page.action, page.attempts[-1].action) == (SENT, SENT) and SENT in str(page.to_do)
    with db.write() as conn:
        put_job_news(conn, row, "job.failed", reason=Reason.SCRIPT_FAILED, message=message, at=story.at)
        payload = conn.execute(select(tables.outbox.c.payload).where(tables.outbox.c.job_id == story.id)).scalar_one()
    assert (payload if isinstance(payload, dict) else json.loads(payload))["action"] == SENT
