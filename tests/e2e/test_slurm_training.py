"""Training on a real Slurm through the control plane: two nodes with gloo, a slurmd killed, resumed on the others."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import slurm as slurm_testbed
from reconciling import drive
from slurm import Cluster
from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status
from trainmaster.store import attempts, events
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow

pytestmark = [pytest.mark.spawns, pytest.mark.timeout(600)]

STEPS = 40
CONFIG = {
    "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 64},
    "steps": STEPS, "epoch_steps": STEPS, "batch_sequences": 8, "eval_sequences": 0, "sequence_tokens": 32,
    "device": "cpu", "checkpoint": {"every_steps": 10, "mode": "sync", "lease_s": 2.0},
}  # fmt: skip


@pytest.fixture
def target(slurm: Cluster, tmp_path: Path) -> str:
    document = {"folder": str(slurm.folder / "shared"), "env": {"SLURM_CONF": str(slurm.conf)}, "poll_s": 0.3}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(document))
    return f"slurm:{tmp_path / 'cluster.yaml'}"


def losses(db: Database, job_id: str) -> dict[int, set[float]]:
    """Every loss that any attempt reported, by step."""
    found: dict[int, set[float]] = {}
    for row in events.list_events(db, job_id, phase="STEP", limit=100_000):
        if row.event == "metrics":
            found.setdefault(int(row.data["step"]), set()).add(float(row.data["loss"]))
    return found


def lines_of(db: Database, job_id: str) -> list[tuple[str, int, object]]:
    return [(row.attempt, row.offset, row.data) for row in events.list_events(db, job_id, limit=100_000)]


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_two_nodes_train_and_the_job_that_slurm_requeues_goes_on_with_the_same_run(
    db: Database, tmp_path: Path, slurm: Cluster, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {
        "name": "pair", "target": target, "train": CONFIG, "resources": {"nodes": 2}, "preflight": {"level": 0},
        "limits": {"attempts": 1, "grace_s": 5}, "slurm": {"gpus_per_node": 1, "gpu_type": "h100", "requeue": True},
    }  # fmt: skip
    job = submitting.submit(db, parse_spec(spec))
    lost: list[tuple[str, float]] = []
    waiting: list[float] = []  # when it was seen to wait for its second start
    shared = slurm.folder / "shared" / "jobs" / job.id

    def lose(now: JobRow) -> None:
        """Switch the second node off once something was saved: its slurmd and all that runs there."""
        handle = attempts.list_attempts(db, job.id)[-1].handle if now.attempts else None
        if handle is None or "slurm_job" not in handle:
            return
        number = str(handle["slurm_job"])
        if lost:
            # Slurm rests for two minutes before it starts a requeued job; an operator need not wait for that. But a
            # node refuses to start it within the second in which it was told to end the first run.
            if "BeginTime" in slurm.call("squeue", "-h", "-j", number, "-o", "%r", check=False):
                waiting.append(time.monotonic())
                if waiting[-1] - waiting[0] > 3:
                    slurm.call("scontrol", "update", f"jobid={number}", "starttime=now", check=False)
        elif any((shared / "checkpoints").glob("step-*0/manifest.json")):
            nodes = slurm.call("squeue", "-h", "-j", number, "-o", "%N").strip()
            lost.append((slurm.call("scontrol", "show", "hostnames", nodes).split()[-1], time.monotonic()))
            slurm.kill_node(lost[0][0])

    try:
        ended = drive(db, tmp_path, job, lose)
        took_s = time.monotonic() - lost[0][1]
    finally:
        if lost:
            slurm.restart_node(lost[0][0])
            slurm.call("scontrol", "update", f"nodename={lost[0][0]}", "state=resume", check=False)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    assert ended.attempts == 1, "Slurm restarted the job; no second attempt was needed"
    assert (shared / "attempts" / "1" / "restart-0").read_text() == "1"
    found = losses(db, job.id)
    assert set(found) == set(range(1, STEPS + 1)), "no step is missing"
    assert all(len(values) == 1 for values in found.values()), "a step that was trained again has the same loss"
    rows = lines_of(db, job.id)
    assert len(rows) == len({(attempt, offset) for attempt, offset, _ in rows})
    started = [row for row in events.list_events(db, job.id, phase="PROJECT", limit=1000) if row.event == "start"]
    assert len(started) == 2, "the event file of the restart goes on from the first"
    with capsys.disabled():
        print(f"\n[slurm] {lost[0][0]} lost, requeued, resumed and completed {took_s:.1f} s later", end="")


def with_a_spare(target: str) -> dict[str, Any]:
    return {
        "name": "trio", "target": target, "train": CONFIG, "resources": {"nodes": 2, "spares": 1},
        "preflight": {"level": 0}, "limits": {"attempts": 1, "grace_s": 20}, "env": {"OMP_NUM_THREADS": "1"},
        "slurm": {"gpus_per_node": 1, "gpu_type": "h100"},
    }  # fmt: skip


def run_and_lose(db: Database, home: Path, slurm: Cluster, job: JobRow, *, node: int) -> tuple[JobRow, str, str]:
    """Run a job, and switch one of its nodes off once something was saved: its end, that node, and Slurm's state."""
    shared, lost, state = slurm.folder / "shared" / "jobs" / job.id, list[str](), ""

    def lose(now: JobRow) -> None:
        handle = attempts.list_attempts(db, job.id)[-1].handle if now.attempts else None
        if not lost and handle is not None and any((shared / "checkpoints").glob("step-*0/manifest.json")):
            nodes = slurm.call("squeue", "-h", "-j", str(handle["slurm_job"]), "-o", "%N").strip()
            lost.append(slurm.call("scontrol", "show", "hostnames", nodes).split()[node])
            slurm.kill_node(lost[0])

    try:
        ended = drive(db, home, job, lose)
        handle = attempts.list_attempts(db, job.id)[-1].handle
        assert handle is not None
        number = str(handle["slurm_job"])
        state = slurm.call("squeue", "-h", "--states=all", "-j", number, "-o", "%T", check=False).strip()
    finally:
        if lost:
            slurm.restart_node(lost[0])
            slurm.call("scontrol", "update", f"nodename={lost[0]}", "state=resume", check=False)
    return ended, lost[0], state


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_spare_takes_the_place_of_a_lost_node_in_the_same_slurm_job(
    db: Database, tmp_path: Path, slurm: Cluster, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = with_a_spare(target)
    job = submitting.submit(db, parse_spec(spec))
    ended, lost, state = run_and_lose(db, tmp_path, slurm, job, node=1)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    assert (ended.attempts, state) == (1, "COMPLETED"), "the same Slurm job"
    recoveries = list(events.list_events(db, job.id, phase="RECOVERY", limit=1000))
    assert [(row.event, row.data["how"]) for row in recoveries] == [("start", "spare"), ("done", "spare")]
    found = losses(db, job.id)
    plain = {key: spec[key] for key in ("name", "train", "preflight", "env")}
    whole = submitting.submit(db, parse_spec({**plain, "resources": {"processes_per_node": 2}}))
    assert drive(db, tmp_path, whole).status is Status.COMPLETED
    assert losses(db, whole.id) == found, "the same losses as undisturbed"
    with capsys.disabled():
        print(f"\n[slurm] {lost} lost, a spare took over: {recoveries[-1].data}", end="")


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_the_loss_of_node_0_ends_a_job_with_a_spare(db: Database, tmp_path: Path, slurm: Cluster, target: str) -> None:
    job = submitting.submit(db, parse_spec(with_a_spare(target)))
    ended, _, state = run_and_lose(db, tmp_path, slurm, job, node=0)
    assert (ended.status, ended.reason) == (Status.FAILED, Reason.NODE_LOST), (ended.message, state)


# Jobs of `urgent` take the nodes of those in `gpu`, which get a minute to save and are then requeued.
PREEMPTING = """PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=n1,n2,n3 PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=DEFAULT PriorityTier=1 GraceTime=60
"""
# Long enough to be seen in the middle; no save is due by its schedule.
LONG = {
    **CONFIG, "batch_sequences": 16, "sequence_tokens": 128,
    "checkpoint": {"every_steps": 1000, "mode": "sync", "lease_s": 2.0},
}  # fmt: skip


def stop_ranks(job_id: str) -> None:
    """SIGSTOP the ranks, so that the run is in the middle however fast it is: Slurm sends SIGCONT before SIGTERM."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            marked = f"TRAINMASTER_ATTEMPT={job_id}".encode() in (path / "environ").read_bytes()
            if marked and b"trainmaster.train" in (path / "cmdline").read_bytes():
                os.kill(int(path.name), signal.SIGSTOP)


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_preempted_run_saves_waits_again_and_goes_on_with_the_same_losses(db: Database, tmp_path: Path) -> None:
    (tmp_path / "slurm").mkdir()
    with slurm_testbed.start(tmp_path / "slurm", extra=PREEMPTING) as cluster:
        document = {"folder": str(tmp_path / "shared"), "env": {"SLURM_CONF": str(cluster.conf)}, "poll_s": 0.2}
        (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(document))
        spec = {
            "name": "victim", "target": f"slurm:{tmp_path / 'cluster.yaml'}", "preflight": {"level": 0},
            "train": LONG, "env": {"OMP_NUM_THREADS": "1"},
            "limits": {"attempts": 1, "grace_s": 30}, "slurm": {"exclusive": True}, "queue": {"preemptible": True},
        }  # fmt: skip
        job = submitting.submit(db, parse_spec(spec))
        notes: list[str] = []
        rests: list[float] = []

        def preempt(now: JobRow) -> None:
            """Take all nodes once it trains; let it start again soon after."""
            handle = attempts.list_attempts(db, job.id)[-1].handle if now.attempts else None
            if handle is None or "slurm_job" not in handle:
                return
            if not notes and losses(db, job.id):
                stop_ranks(job.id)
                cluster.call("sbatch", "-p", "urgent", "-N3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
                notes.append("asked")
            if notes and now.message and now.message != notes[-1]:
                notes.append(now.message)
            number = str(handle["slurm_job"])
            if "(BeginTime)" in now.message:
                rests.append(time.monotonic())
                if rests[-1] - rests[0] > 3:
                    cluster.call("scontrol", "update", f"jobid={number}", "starttime=now", check=False)

        ended = drive(db, tmp_path, job, preempt)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    assert ended.attempts == 1, "Slurm started it again; no second attempt was needed"
    assert any("preempted by Slurm at" in note and "BeginTime" in note for note in notes), notes
    found = losses(db, job.id)
    assert set(found) == set(range(1, STEPS + 1)) and all(len(values) == 1 for values in found.values())
    starts = [row for row in events.list_events(db, job.id, phase="PROJECT", limit=1000) if row.event == "start"]
    assert len(starts) == 2
    saved = [
        row.data["step"]
        for row in events.list_events(db, job.id, phase="CHECKPOINT", limit=1000)
        if row.event == "saved"
    ]
    assert saved[0] < STEPS, "it saved when it was asked to, not at a step of its schedule"
    plain = {"name": "whole", "train": LONG, "env": {"OMP_NUM_THREADS": "1"}, "preflight": {"level": 0}}
    whole = submitting.submit(db, parse_spec(plain))
    assert drive(db, tmp_path, whole, lambda _: None).status is Status.COMPLETED
    assert losses(db, whole.id) == found, "the same losses as undisturbed"
