"""A preempted instance is replaced, and the run goes on from its newest checkpoint in storage on another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lambda_sim import drive, lambda_cloud, live
from sshd import needs_sshd
from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status
from trainmaster.pages import job as job_page
from trainmaster.store import attempts, events
from trainmaster.store.database import Database

pytestmark = [pytest.mark.spawns, needs_sshd, pytest.mark.timeout(300)]

STEPS, EVERY = 100, 10


def checkpoint_events(db: Database, job_id: str, event: str) -> list[tuple[str | None, dict[str, Any]]]:
    """Attempt and data of every such event, oldest first."""
    rows = events.list_events(db, job_id, phase="CHECKPOINT", limit=100_000)
    return [(row.attempt, dict(row.data)) for row in rows if row.event == event]


def stated_bounds(db: Database, job_id: str) -> list[tuple[str | None, int]]:
    """Attempt and steps that losing the machine with its disk costs at most, as the run stated it."""
    found = [(attempt, data["losses"]["disk"]) for attempt, data in checkpoint_events(db, job_id, "bound")]
    return [(attempt, int(held["lost_steps"])) for attempt, held in found if held["tier"] == "remote"]


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_preempted_run_resumes_on_another_instance_within_its_loss_bound(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = tmp_path / "remote"
    config: dict[str, Any] = {
        "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 64},
        "steps": STEPS, "epoch_steps": STEPS, "batch_sequences": 8, "eval_sequences": 0, "sequence_tokens": 32,
        "device": "cpu",
        "checkpoint": {"every_steps": EVERY, "mode": "sync", "lease_s": 2.0, "remote": {"url": str(remote)}},
    }  # fmt: skip
    with lambda_cloud(tmp_path / "lambda", monkeypatch) as cloud:
        document = {"name": "spot", "target": "lambda", "train": config, "preflight": {"level": 0}}
        job = submitting.submit(db, parse_spec({**document, "limits": {"attempts": 3}}))
        struck: list[str] = []

        def strike() -> None:
            if not struck and stated_bounds(db, job.id):
                struck.append(live(cloud)[0]["id"])
                cloud.inject("preempted", instance_id=struck[0])

        (ended,) = drive(db, tmp_path, job, also=strike)
        assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
        assert live(cloud) == [] and len(cloud.instances()) == 2
    first, second = attempts.list_attempts(db, job.id)
    assert (first.reason, second.reason) == (Reason.PREEMPTED, None)
    steps = {row.attempt: [] for row in events.list_events(db, job.id, phase="STEP", limit=100_000)}  # type: dict[str, list[int]]
    for row in events.list_events(db, job.id, phase="STEP", limit=100_000):
        if row.event == "metrics":
            steps[row.attempt].append(int(row.data["step"]))
    before, after = steps[first.id], steps[second.id]
    ((attempt, loaded),) = checkpoint_events(db, job.id, "loaded")
    resumed = loaded["step"]
    assert (attempt, loaded["tier"]) == (second.id, "remote")
    assert (after[0], after[-1]) == (resumed + 1, STEPS) and resumed > 0 and resumed % EVERY == 0
    # The last lines of a preempted machine may be lost with it: a newer checkpoint than these may be in storage.
    acknowledged = [
        data["step"] for attempt, data in checkpoint_events(db, job.id, "saved")
        if attempt == first.id and data["tier"] == "remote"
    ]  # fmt: skip
    assert resumed >= max(acknowledged), "what was said to be in storage was there to resume from"
    stated = [steps for attempt, steps in stated_bounds(db, job.id) if attempt == first.id][-1]
    assert before[-1] - resumed <= stated, "no more is lost than the run said"
    page = job_page.read(db, job.id)
    assert page is not None and page.attempts[1].recovered_s is not None
    with capsys.disabled():
        print(f"\npreempted at step {before[-1]}; training again from step {after[0]}, at most {stated} lost stated, "
              f"{page.attempts[1].recovered_s:.1f} s after the last event")  # fmt: skip
