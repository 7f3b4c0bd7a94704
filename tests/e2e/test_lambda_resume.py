"""A preempted instance is replaced, and the run goes on from its newest checkpoint in storage on another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lambda_sim import drive, lambda_cloud, live
from sshd import needs_sshd
from trainmaster import control
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status
from trainmaster.pages import job as job_page
from trainmaster.store import Database, attempts, events

pytestmark = [pytest.mark.spawns, needs_sshd, pytest.mark.timeout(300)]

STEPS, EVERY = 60, 10


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
        job = control.submit(db, parse_spec({**document, "limits": {"attempts": 3}}))
        struck: list[str] = []

        def strike() -> None:
            if not struck and any(remote.rglob("manifest.json")):
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
    # The last lines of a preempted machine may be lost with it; what it resumed from is a stored checkpoint.
    assert after[-1] == STEPS and after[0] > 1 and (after[0] - 1) % EVERY == 0
    assert before[-1] - after[0] < 2 * EVERY, "no more is lost than since the newest checkpoint in storage"
    page = job_page.read(db, job.id)
    assert page is not None and page.attempts[1].recovered_s is not None
    with capsys.disabled():
        print(f"\npreempted at step {before[-1]}; training again from step {after[0]}, "
              f"{page.attempts[1].recovered_s:.1f} s after the last event")  # fmt: skip
