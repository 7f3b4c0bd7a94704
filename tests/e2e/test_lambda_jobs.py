"""Jobs on Lambda Cloud, simulated with real SSH instances: each fault of the cloud, and nothing rented afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lambda_sim import PACE, ask, drive, lambda_cloud, live, submit
from sshd import needs_sshd
from trainmaster import targets
from trainmaster.cli.main import build
from trainmaster.control import failpoints
from trainmaster.control import submit as submitting
from trainmaster.core.states import Reason, Status
from trainmaster.core.vendors.lambda_api import Operation
from trainmaster.sim.lambda_cloud import operations
from trainmaster.sim.lambda_cloud.answering import Answer, Request
from trainmaster.sim.lambda_cloud.simulator import Simulator
from trainmaster.store import attempts, costs, instances
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.outbox import is_known
from trainmaster.targets import LaunchRequest
from trainmaster.targets.lambda_cloud.provider import LambdaCloud

pytestmark = [pytest.mark.spawns, needs_sshd, pytest.mark.timeout(300)]


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    with lambda_cloud(tmp_path / "lambda", monkeypatch) as simulator:
        yield simulator
        assert live(simulator) == [], "every instance is returned"


def test_a_job_runs_on_the_cheapest_instance_and_its_price_is_the_cost(
    db: Database, tmp_path: Path, cloud: Simulator
) -> None:
    job = submit(db, "echo hello")
    (ended,) = drive(db, tmp_path, job)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    (row,) = instances.list_of_attempt(db, f"{job.id}.1")
    assert (row.kind, row.price_cents_per_hour, row.state) == ("gpu_1x_a10", 75.0, "gone")
    (one,) = cloud.instances()
    assert one["id"] == row.provider_id and one["name"] == row.nonce
    with db.read() as conn:
        (charge,) = costs.list_charges(conn, jobs=[job.id])
    assert charge.spans[0].cents_per_hour == 75.0 and charge.spans[0].end is not None


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
@pytest.mark.parametrize("fault", ["launch-500", "launch-timeout", "launch-cut", "garbled-json"])
def test_a_launch_of_unknown_outcome_is_found_in_the_listing_and_never_repeated(
    db: Database, tmp_path: Path, cloud: Simulator, fault: str
) -> None:
    cloud.inject(fault, times=8 if fault == "garbled-json" else 1)  # the launch is about the fifth request
    job = submit(db, "true")
    (ended,) = drive(db, tmp_path, job)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    rows = instances.list_of_attempt(db, f"{job.id}.1")
    assert len(cloud.instances()) == 1, "launched once"
    assert [row.provider_id for row in rows if row.provider_id] == [cloud.instances()[0]["id"]]


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
def test_refused_capacity_takes_the_next_offer(db: Database, tmp_path: Path, cloud: Simulator) -> None:
    cloud.inject("capacity-flicker", times=2)
    job = submit(db, "true")
    (ended,) = drive(db, tmp_path, job)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    tried = [(row.kind, row.region) for row in instances.list_of_attempt(db, f"{job.id}.1")]
    assert tried == [
        ("gpu_1x_a10", "us-east-1"), ("gpu_1x_a10", "us-west-1"), ("gpu_1x_a100_sxm4", "us-east-1"),
    ]  # fmt: skip
    assert len(cloud.instances()) == 1


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
def test_a_late_or_busy_cloud_is_waited_for(db: Database, tmp_path: Path, cloud: Simulator) -> None:
    for fault in ("late-ip", "ssh-late", "ip-reuse", "slow-answer", "rate-limit", "rate-limit-empty", "link-cut"):
        cloud.inject(fault)
    ended = drive(db, tmp_path, submit(db, "true"), submit(db, "sleep 1"))
    assert [job.status for job in ended] == [Status.COMPLETED] * 2, [(job.reason, job.message) for job in ended]
    assert len(cloud.instances()) == 2


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
def test_a_listing_that_leaves_a_machine_out_ends_no_attempt(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt ended as `node_lost`, another machine was rented, and the first one was paid for beside it."""
    show, empty = operations._OPERATIONS["listInstances"], list[float]()

    def hide(*args: Any) -> Any:
        found, begun = show(*args), min((one.launched_at for one in args[0].instances.values()), default=None)
        settled_s = LambdaCloud().timing.settle_s * PACE + 60
        if found and begun is not None and args[0].clock.now_s() - begun > settled_s and len(empty) < 5:
            empty.append(time.monotonic())
            return []
        return found

    monkeypatch.setattr(operations, "_OPERATIONS", {**operations._OPERATIONS, "listInstances": hide})
    with lambda_cloud(tmp_path / "lambda", monkeypatch, boot_s=300.0) as cloud:
        (ended,) = drive(db, tmp_path, submit(db, "true"))
        assert (ended.status, ended.attempts) == (Status.COMPLETED, 1), (ended.reason, ended.message)
        assert len(empty) == 5 and len(cloud.instances()) == 1 and live(cloud) == []


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
@pytest.mark.parametrize("fault", ["unhealthy", "stuck-booting"])
def test_a_bad_machine_is_returned_and_another_taken(
    db: Database, tmp_path: Path, cloud: Simulator, fault: str
) -> None:
    cloud.inject(fault)
    job = submit(db, "true", rent={"boot_minutes": 0.1})
    (ended,) = drive(db, tmp_path, job)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    first, second = attempts.list_attempts(db, job.id)
    assert first.reason is Reason.BAD_MACHINE and second.reason is None, "limits.attempts is 1: the box did not count"
    assert len(cloud.instances()) == 2


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
def test_machines_that_stay_bad_end_the_job_after_three_more(db: Database, tmp_path: Path, cloud: Simulator) -> None:
    cloud.inject("unhealthy", times=10)
    job = submit(db, "true")
    (ended,) = drive(db, tmp_path, job)
    assert (ended.status, ended.reason) == (Status.FAILED, Reason.BAD_MACHINE)
    assert len(attempts.list_attempts(db, job.id)) == 4


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
def test_an_instance_of_somebody_else_with_our_name_is_left_alone(
    db: Database, tmp_path: Path, cloud: Simulator
) -> None:
    cloud.inject("duplicate-name")
    cloud.inject("launch-500")
    (ended,) = drive(db, tmp_path, submit(db, "true"))
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    assert [one["status"] for one in cloud.instances() if one["foreign"]] == ["active"]


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
@pytest.mark.parametrize(("fault", "reason"), [("preempted", Reason.PREEMPTED), ("terminated", Reason.NODE_LOST)])
def test_a_lost_machine_is_replaced_and_the_attempt_has_the_reason(
    db: Database, tmp_path: Path, cloud: Simulator, fault: str, reason: Reason
) -> None:
    job = submit(db, "sleep 1", limits={"attempts": 2, "retry": {reason.value: True}})
    struck: list[str] = []

    def strike() -> None:
        now = find_job(db, job.id)
        if not struck and now is not None and now.stage == "running":
            struck.append(cloud.instances()[0]["id"])
            cloud.inject(fault, instance_id=struck[0])

    (ended,) = drive(db, tmp_path, job, also=strike)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    first, second = attempts.list_attempts(db, job.id)
    assert (first.reason, second.reason) == (reason, None)


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
@pytest.mark.parametrize(("fault", "reason"), [("preempted", Reason.PREEMPTED), ("terminated", Reason.NODE_LOST)])
def test_a_machine_that_is_lost_before_the_submit_is_replaced_at_once(
    db: Database, tmp_path: Path, cloud: Simulator, monkeypatch: pytest.MonkeyPatch, fault: str, reason: Reason
) -> None:
    job = submit(db, "true", limits={"attempts": 1})
    struck: list[str] = []

    def strike(what: str, _: object = "") -> None:
        if what == "call submit" and not struck:
            struck.append(cloud.instances()[0]["id"])
            cloud.inject(fault, instance_id=struck[0])
            while cloud.instances()[0]["status"] not in ("terminated", "preempted"):
                time.sleep(0.05)

    monkeypatch.setattr(failpoints, "before", strike)
    until = time.monotonic() + 120  # the deadline of staging is an hour

    def is_over() -> bool:
        found = find_job(db, job.id)
        return time.monotonic() > until or (found is not None and found.status.final)

    (ended,) = drive(db, tmp_path, job, until=is_over)
    assert ended.status is Status.COMPLETED, (ended.stage, ended.reason, ended.message)
    assert [one.reason for one in attempts.list_attempts(db, job.id)] == [reason, None]


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
@pytest.mark.parametrize("python", ["/nonexistent/python3", "old"])
def test_an_image_without_a_python_that_will_do_is_returned_at_once(
    db: Database, tmp_path: Path, cloud: Simulator, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\necho trainmaster-needs-3.10 3.9 >&2; exit 1\n")  # as its version test ends on 3.9
    old.chmod(0o755)
    monkeypatch.setenv("LAMBDA_PYTHON", str(old) if python == "old" else python)
    until = time.monotonic() + 60  # rent.boot_minutes is 40

    def is_over() -> bool:
        found = find_job(db, job.id)
        return time.monotonic() > until or (found is not None and found.status.final)

    job = submit(db, "true")
    (ended,) = drive(db, tmp_path, job, until=is_over)
    assert (ended.status, ended.reason) == (Status.FAILED, Reason.TARGET_ERROR), (ended.stage, ended.message)
    assert "Python" in ended.message and "LAMBDA_PYTHON" in ended.message and "rent.image" in ended.message
    assert len(cloud.instances()) == 1, "the same image again would have the same Python"


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
def test_a_machine_whose_gpus_were_returned_as_bad_is_not_trusted_again(
    db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rent = {"types": ["gpu_2x_h100_sxm5"]}  # one region, one machine: it comes back
    with lambda_cloud(tmp_path / "lambda", monkeypatch, capacity=1) as cloud:
        first = submit(db, "true", rent=rent)
        drive(db, tmp_path, first)
        (row,) = instances.list_of_attempt(db, f"{first.id}.1")
        assert row.detail is not None and len(row.detail["gpus"]) == 2, "serial numbers"
        with db.write() as conn:
            instances.set_detail(conn, row.nonce, bad="check_failed: gpu_ecc")
        (ended,) = drive(db, tmp_path, submit(db, "true", rent=rent, limits={"retry": {"bad_machine": False}}))
        assert (ended.status, ended.reason) == (Status.FAILED, Reason.BAD_MACHINE)
        assert row.detail["gpus"][0] in ended.message and "check_failed: gpu_ecc" in ended.message
        assert live(cloud) == []


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
def test_a_machine_with_broken_cuda_fails_the_checks_and_another_one_is_taken(
    db: Database, tmp_path: Path, cloud: Simulator
) -> None:
    cloud.inject("cuda-broken")
    preflight = {"level": 1, "expect": {"gpus": 1}, "allow_incomplete": True}
    job = submit(db, "true", preflight=preflight, rent={"types": ["gpu_1x_h100_pcie"]})
    (ended,) = drive(db, tmp_path, job)
    first, *others = attempts.list_attempts(db, job.id)
    assert first.reason is Reason.CHECK_FAILED, first.message
    assert ended.status is Status.COMPLETED and len(others) == 1, (ended.reason, ended.message)


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
def test_a_cancel_while_it_boots_leaves_no_instance(db: Database, tmp_path: Path, cloud: Simulator) -> None:
    job = submit(db, "true", rent={"boot_minutes": 60})
    cloud.inject("stuck-booting")

    def cancel() -> None:
        now = find_job(db, job.id)
        if cloud.instances() and now is not None and not now.cancel_requested:
            submitting.cancel(db, job.id)

    (ended,) = drive(db, tmp_path, job, also=cancel)
    assert ended.status is Status.CANCELLED


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
def test_an_instance_is_terminated_while_the_listing_fails(
    db: Database, tmp_path: Path, cloud: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(db, "sleep 60", limits={"grace_s": 1})

    answer = cloud._answering._run

    def fail(operation: Operation, request: Request) -> Answer:
        return Answer(status=500, body=b"") if operation.name == "listInstances" else answer(operation, request)

    def is_running() -> bool:
        found = find_job(db, job.id)
        return found is not None and found.stage == "running"

    drive(db, tmp_path, job, until=is_running)
    until = time.monotonic() + 60
    with monkeypatch.context() as broken:
        broken.setattr(cloud._answering, "_run", fail)
        submitting.cancel(db, job.id)
        drive(db, tmp_path, job, until=lambda: live(cloud) == [] or time.monotonic() > until)
        assert live(cloud) == [], "it is known by its id"
        found = find_job(db, job.id)
        assert found is not None and not found.status.final, "gone is what the listing shows"
    (ended,) = drive(db, tmp_path, job)
    assert ended.status is Status.CANCELLED, (ended.reason, ended.message)


@pytest.mark.matrix(one_in=10, of="faults of Lambda Cloud")
def test_a_control_plane_that_was_away_returns_the_instance_of_its_job(
    db: Database, tmp_path: Path, cloud: Simulator
) -> None:
    job = submit(db, "echo up; sleep 600")
    drive(db, tmp_path, job, until=lambda: _is_running(db, job.id))
    submitting.cancel(db, job.id)  # while nobody drives it
    assert len(live(cloud)) == 1
    (ended,) = drive(db, tmp_path, job)
    assert ended.status is Status.CANCELLED and live(cloud) == []


def _is_running(db: Database, job_id: str) -> bool:
    now = find_job(db, job_id)
    return now is not None and now.stage == "running"


@pytest.mark.proof
def test_an_instance_that_outlives_its_job_is_terminated_and_notified(
    db: Database, tmp_path: Path, cloud: Simulator
) -> None:
    job = submit(db, "true")
    drive(db, tmp_path, job)
    name = targets.Label(attempt=f"{job.id}.1", home=targets.home_mark(tmp_path)).name
    leaked = ask(LambdaCloud().launch(LaunchRequest(name=name, kind="gpu_1x_a10", region="us-east-1")))
    foreign = cloud.cloud.add_foreign("of somebody").id
    time.sleep(2.5)  # longer than a listing may lag behind the end of a job

    def is_told() -> bool:
        with db.read() as conn:
            return is_known(conn, f"instance.leaked {job.id} {leaked}") and not live(cloud)

    drive(db, tmp_path, until=is_told)
    assert [one["status"] for one in cloud.instances() if one["id"] == foreign] == ["active"]


def test_reap_works_with_the_api_key_alone(tmp_path: Path, cloud: Simulator) -> None:
    attempt = "0b6c5c4e-53ad-4f0e-9c57-6a4f1f3c2d10.1"
    name = targets.Label(attempt=attempt, home="0a0b0c0d").name
    ask(LambdaCloud().launch(LaunchRequest(name=name, kind="gpu_1x_a10", region="us-east-1")))
    cloud.cloud.add_foreign("of somebody")
    words = ["reap", "--no-database", "--on", "lambda", "--home", str(tmp_path / "empty")]
    shown = CliRunner().invoke(build(), [*words, "--json"])
    rows = json.loads(shown.stdout)["leftovers"]
    assert [(row["attempt"], row["ours"]) for row in rows] == [(attempt, False), ("of somebody", False)]
    assert "gpu_1x_a10 in us-east-1" in rows[0]["what"] and "$0.75 an hour" in rows[0]["what"]
    ended = CliRunner().invoke(build(), [*words, "--any-home", "--yes", "--json"])
    results = {row["attempt"]: row["result"] for row in json.loads(ended.stdout)["leftovers"]}
    assert (ended.exit_code, results) == (0, {attempt: "ended", "of somebody": None}), ended.output


def test_a_dry_run_prints_the_choice_and_the_request_and_rents_nothing(tmp_path: Path, cloud: Simulator) -> None:
    spec = tmp_path / "job.yaml"
    spec.write_text('name: a\ncommand: ["true"]\n')
    words = ["submit", str(spec), "--on", "lambda", "--dry-run", "rent.gpu=H100", "--home", str(tmp_path / "h")]
    shown = CliRunner().invoke(build(), words)
    assert shown.exit_code == 0, shown.output
    assert "choice: 1 × gpu_1x_h100_pcie in us-south-1, $2.49 an hour each" in shown.stdout
    price = next(line for line in shown.stdout.splitlines() if line.startswith("price "))
    assert "$2.49 an hour each" in price and "not known" not in price
    assert "then gpu_1x_h100_pcie in us-west-1, $2.49" in shown.stdout
    assert '"instance_type_name": "gpu_1x_h100_pcie"' in shown.stdout and cloud.instances() == []
    assert cloud.api_key_file.read_text().strip() not in shown.output
