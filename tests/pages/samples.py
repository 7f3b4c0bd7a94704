"""Jobs written into a real database the way the control plane writes them: spec, stages, attempts, event lines."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from trainmaster.core.events import Event, render, split
from trainmaster.core.plan import EVENTS_FILE, ExitRecord
from trainmaster.core.schema import build
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.store import attempts, jobs
from trainmaster.store.database import Database
from trainmaster.store.events import append_events

T0 = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
STEPS = 200

CHECKS: tuple[dict[str, Any], ...] = (
    {"check": "cpu", "verdict": "pass", "reason": "8 CPUs usable", "values": {"cpus": 8}},
    {"check": "memory", "verdict": "pass", "reason": "31 GiB free of 62.7 GiB", "values": {"free_gib": 31.02}},
    {
        "check": "disk",
        "verdict": "warn",
        "reason": "41 GiB free where checkpoints go",
        "action": "free space, or keep fewer checkpoints",
        "values": {"free_gib": 41.3, "path": "/data/checkpoints"},
    },
    {"check": "clock", "verdict": "pass", "reason": "the clock follows its source", "values": {"offset_s": 0.0002}},
    {"check": "gpu_present", "verdict": "skip", "reason": "this machine has no GPU on its PCI bus"},
)


def spec(**changes: Any) -> JobSpec:
    return build(JobSpec, {"name": "llama-trial", "project": "research", "train": {"steps": STEPS}, **changes})


def preflight(rows: Iterable[dict[str, Any]] = CHECKS, *, silent: tuple[str, ...] = ()) -> Iterator[Event]:
    rows = list(rows)
    planned = [row["check"] for row in rows] + list(silent)
    yield Event(phase="PREFLIGHT", event="start", data={"planned": planned})
    for row in rows:
        finding = {key: row.get(key) for key in ("verdict", "reason", "action", "device")}
        finding["values"] = row.get("values", {})
        data = {"check": row["check"], "verdict": row["verdict"], "took_s": 0.02, "findings": [finding]}
        yield Event(phase="PREFLIGHT", event="check", data=data)


def training(
    first: int = 1, last: int = STEPS, *, resumed_from: int | None = None, end: bool = True
) -> Iterator[Event]:
    started = {
        "steps": STEPS, "parameters": 1_050_000, "ranks": 2, "device": "cpu", "device_name": "AMD EPYC 9654",
        "precision": "fp32", "batch_sequences": 16, "sequence_tokens": 128, "resumed_from": resumed_from,
        "torch": "2.11.0", "data_source": "tales",
    }  # fmt: skip
    yield Event(phase="TRAINING", event="start", data=started)
    for step in range(first, last + 1):
        yield Event(phase="STEP", event="metrics", data=metrics(step))
        if step % 50 == 0:
            held_out = loss_at(step) + 0.07
            yield Event(
                phase="EVAL_MODEL",
                event="metrics",
                data={"step": step, "loss": held_out, "perplexity": math.exp(held_out)},
            )
            saved = {"step": step, "path": f"/data/checkpoints/step-{step}", "seconds": 0.31, "bytes": 12_800_000}
            yield Event(phase="CHECKPOINT", event="saved", data=saved)
    if end:
        summary = {"step": last, "loss_first": loss_at(1), "loss_last": loss_at(last), "tokens_per_s": 18_432.0,
                   "duration": 71.2, "stopped": False}  # fmt: skip
        yield Event(phase="TRAINING", event="end", data=summary)


def loss_at(step: int) -> float:
    return 1.85 + 3.7 * math.exp(-step / 45) + 0.05 * math.sin(step * 1.7) + 0.03 * math.sin(step * 7.3)


def metrics(step: int) -> dict[str, Any]:
    rate = 18_400 + 600 * math.sin(step / 9) - (6_000 if step % 50 == 1 else 0)
    lr = 3e-3 * min(1, step / 10) * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
    norm = 0.4 + 1.8 * math.exp(-step / 20) + 0.1 * math.sin(step * 2.1)
    return {"step": step, "loss": loss_at(step), "lr": lr, "grad_norm": norm, "tokens_per_s": rate, "step_s": 0.111,
            "mfu": None, "memory_gib": None}  # fmt: skip


def project(attempt: str) -> Event:
    return Event(phase="PROJECT", event="start", data={"attempt": attempt, "host": "node-17", "version": "0.1.0"})


def encode(events: Iterable[Event | bytes]) -> bytes:
    """Event lines, and raw lines between them as they are."""
    return b"".join(item if isinstance(item, bytes) else (render(item) + "\n").encode() for item in events)


class Story:
    """One job, told step by step."""

    def __init__(self, db: Database, job: JobSpec | None = None, *, at: datetime = T0) -> None:
        self.db, self.at, self.spec = db, at, job or spec()
        self.id = str(uuid.uuid4())
        self.stage = Stage.QUEUED
        self._offset = 0
        self.attempt = ""
        with db.write() as conn:
            jobs.insert_job(conn, self.id, self.spec, at=at)

    def start(self, number: int = 1) -> Story:
        with self.db.write() as conn:
            self.attempt = attempts.insert_attempt(conn, self.id, number, handle={"folder": "/x"}, at=self.at)
            attempts.record_poll(conn, self.attempt, TargetState.RUNNING, at=self._later(2))
        self._offset = 0
        self.move(Stage.PLACING)
        return self.move(Stage.CHECKING)

    def move(self, to: Stage, **why: Any) -> Story:
        with self.db.write() as conn:
            assert jobs.advance(conn, self.id, seen=self.stage, to=to, at=self._later(1), **why)
        self.stage = to
        return self

    def tell(self, events: Iterable[Event | bytes]) -> Story:
        raw = encode(events)
        lines = split(raw, offset=self._offset, zone=UTC, last=True)
        with self.db.write() as conn:
            assert append_events(conn, self.attempt, EVENTS_FILE, seen_offset=self._offset, lines=lines)
        self._offset += len(raw)
        return self

    def end_attempt(self, reason: Reason | None = None, message: str = "", **record: Any) -> Story:
        exit_record = ExitRecord(
            attempt=self.attempt, ok=reason is None, ended_at=self._later(70).isoformat(), reason=reason,
            message=message, **record,
        )  # fmt: skip
        with self.db.write() as conn:
            attempts.end_attempt(
                conn, self.attempt, report=TargetState.FAILED if reason else TargetState.SUCCEEDED, reason=reason,
                message=message, exit_record=exit_record, at=self.at,
            )  # fmt: skip
        return self.move(Stage.RELEASING, reason=reason, message=message)

    def finish(self, status: Status, reason: Reason | None = None, message: str = "") -> Story:
        with self.db.write() as conn:
            assert jobs.finish(
                conn, self.id, seen=self.stage, status=status, at=self._later(1), reason=reason, message=message
            )
        return self

    def _later(self, seconds: float) -> datetime:
        self.at += timedelta(seconds=seconds)
        return self.at


def completed(db: Database, **changes: Any) -> Story:
    story = Story(db, spec(**changes)).start()
    story.tell([project(story.attempt), *preflight(), Event(phase="PREFLIGHT", event="end", data={"overall": "WARN"})])
    story.move(Stage.RUNNING).tell(training())
    return story.end_attempt(exit_codes={"0": 0, "1": 0}).finish(Status.COMPLETED)


def failed_check(db: Database) -> Story:
    bad = {
        "check": "ecc", "verdict": "fail", "device": "gpu3", "reason": "2 uncorrectable ECC errors since boot",
        "action": "drain the node and replace GPU 3", "values": {"volatile_uncorrectable": 2},
    }  # fmt: skip
    story = Story(db, spec(name="llama-8b", target="slurm")).start()
    story.tell([project(story.attempt), *preflight([*CHECKS, bad], silent=("nccl",))])
    message = "ecc on gpu3: 2 uncorrectable ECC errors since boot"
    story.end_attempt(Reason.CHECK_FAILED, message, evidence={"check": "ecc", "device": "gpu3"})
    return story.finish(Status.FAILED, Reason.CHECK_FAILED, message)


LAST_LINES = (
    "Traceback (most recent call last):",
    '  File "/srv/app/train.py", line 212, in main',
    "    loss.backward()",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has 139.81 GiB of which 1.2 is free",
)


def failed_run(db: Database) -> Story:
    story = Story(db).start()
    story.tell([project(story.attempt), *preflight(), Event(phase="PREFLIGHT", event="end", data={"overall": "WARN"})])
    story.move(Stage.RUNNING).tell([*training(last=83, end=False), b"%%% half a li\n", b'{"phase": 7}\n'])
    message = "rank 1 ran out of memory at step 84"
    story.end_attempt(
        Reason.OUT_OF_MEMORY,
        message,
        exit_codes={"0": -15, "1": 1},
        evidence={"rank": 1, "last_lines": list(LAST_LINES)},
    )
    return story.finish(Status.FAILED, Reason.OUT_OF_MEMORY, message)


def resumed(db: Database) -> Story:
    """Two attempts: lost at step 83, resumed from step 50, still running at step 140."""
    story = Story(db, spec(limits={"attempts": 3})).start()
    story.tell([project(story.attempt), *preflight()])
    story.move(Stage.RUNNING).tell(training(last=83, end=False))
    story.end_attempt(Reason.NODE_LOST, "the node stopped answering for 120 s")
    story.move(Stage.QUEUED).start(2)
    story.tell([project(story.attempt), *preflight(), Event(phase="PREFLIGHT", event="end", data={"overall": "WARN"})])
    story.move(Stage.RUNNING)
    return story.tell(training(first=51, last=140, resumed_from=50, end=False))


def pending(db: Database, **changes: Any) -> Story:
    return Story(db, spec(**changes))


def job_row(story: Story) -> Any:
    row = jobs.find_job(story.db, story.id)
    assert row is not None
    return row
