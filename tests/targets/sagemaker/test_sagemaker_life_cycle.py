"""Life of a training job against moto's server: S3, CloudWatch Logs, Secrets Manager and SageMaker on this machine.

The server runs no containers. The test does: it lays the input channel out as SageMaker does, runs start.py, and writes
its output to CloudWatch and S3.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto.server import ThreadedMotoServer

from trainmaster import targets
from trainmaster.core.plan import EVENTS_FILE, rank_log
from trainmaster.core.states import Reason, TargetState
from trainmaster.targets.sagemaker.logs import GROUP

pytestmark = pytest.mark.spawns
BUCKET = "bucket"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def client(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    made = lambda service: boto3.client(service, region_name="us-east-1", endpoint_url=endpoint)  # noqa: E731
    made("s3").create_bucket(Bucket=BUCKET)
    return made


@pytest.fixture
def account(endpoint: str, tmp_path: Path) -> Path:
    path = tmp_path / "account.yaml"
    document = {
        "region": "us-east-1", "role": "arn:aws:iam::123456789012:role/SageMakerRole", "storage": f"s3://{BUCKET}/tm",
        "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1", "instance_type": "ml.g5.xlarge",
        "endpoint": endpoint, "poll_s": 0.001, "log_settle_s": 3600,
        "package": "image", "secrets": {"MY_TOKEN": "team/token"},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(document))
    return path


def run_container(client: Callable[[str], Any], endpoint: str, name: str, root: Path) -> list[str]:
    """What SageMaker does with a request; the lines of the container."""
    job = client("sagemaker").describe_training_job(TrainingJobName=name)
    prefix = job["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"].removeprefix(f"s3://{BUCKET}/")
    given = root / "input" / "data" / "trainmaster"
    given.mkdir(parents=True)
    for one in client("s3").list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
        client("s3").download_file(BUCKET, one["Key"], str(given / one["Key"].removeprefix(prefix)))
    (root / "input" / "config").mkdir()
    (root / "input" / "config" / "resourceconfig.json").write_text(
        json.dumps({"current_host": "algo-1", "hosts": ["algo-1"]})
    )
    command = [sys.executable, str(given / "start.py"), str(root)]
    env = {**os.environ, **job.get("Environment", {}), "AWS_ENDPOINT_URL": endpoint}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr
    out = job["OutputDataConfig"]["S3OutputPath"].removeprefix(f"s3://{BUCKET}/")
    for path in (root / "output").rglob("*"):
        if path.is_file():
            client("s3").upload_file(str(path), BUCKET, f"{out}/{name}/output/{path.relative_to(root / 'output')}")
    return ran.stdout.splitlines()


def write_log(client: Callable[[str], Any], stream: str, lines: list[str]) -> None:
    logs = client("logs")
    if not logs.describe_log_groups(logGroupNamePrefix=GROUP)["logGroups"]:
        logs.create_log_group(logGroupName=GROUP)
    if not logs.describe_log_streams(logGroupName=GROUP, logStreamNamePrefix=stream)["logStreams"]:
        logs.create_log_stream(logGroupName=GROUP, logStreamName=stream)
    start = int(time.time() * 1000) - 60_000
    events = [{"timestamp": start + number, "message": line} for number, line in enumerate(lines)]
    logs.put_log_events(logGroupName=GROUP, logStreamName=stream, logEvents=events)


def test_a_job_runs_and_its_bytes_arrive_once(
    client: Any, endpoint: str, account: Path, place: Any, run: Any, tmp_path: Path
) -> None:
    if not client("secretsmanager").list_secrets()["SecretList"]:
        client("secretsmanager").create_secret(Name="team/token", SecretString="very-secret-value")
    script = 'echo "${#MY_TOKEN} letters"; seq 1 50; printf 12345 > "$TRAINMASTER_OUTPUTS/b"'
    target = targets.load(f"sagemaker:{account}")
    submission = target.plan(place(script))
    name = submission.handle["name"]

    async def go() -> None:
        assert (await target.poll(submission.handle)).state is TargetState.WAITING
        handles = [await target.submit(submission) for _ in range(3)]
        assert handles[0] == handles[1] == handles[2]
        jobs = client("sagemaker").list_training_jobs(NameContains=name)["TrainingJobSummaries"]
        assert len(jobs) == 1
        lines = await asyncio.to_thread(run_container, client, endpoint, name, tmp_path / "ml")
        assert "very-secret-value" not in "\n".join(lines)
        # The stand-in has ended the job at once; its lines come in two parts, mixed and some of them twice.
        half = len(lines) // 2
        write_log(client, f"{name}/algo-1-1", ["not a frame", *lines[:half]])
        assert (await target.poll(handles[0])).state is TargetState.RUNNING, "the last lines are on their way"
        write_log(client, f"{name}/algo-1-1", lines[half - 2 :])
        poll = await target.poll(handles[0])
        assert poll.state is TargetState.SUCCEEDED and poll.exit is not None and poll.exit.ok
        whole = "17 letters\n" + "".join(f"{number}\n" for number in range(1, 51))
        assert await target.read(handles[0], rank_log(0), offset=0, limit=1 << 20) == whole.encode()
        assert await target.read(handles[0], rank_log(0), offset=3, limit=4) == whole.encode()[3:7]
        events = await target.read(handles[0], EVENTS_FILE, offset=0, limit=1 << 20)
        written = next((tmp_path / "ml").glob("trainmaster/attempts/*/events.jsonl")).read_bytes()
        assert events == written
        await target.release(handles[0])
        keys = [one["Key"] for one in client("s3").list_objects_v2(Bucket=BUCKET)["Contents"]]
        assert keys and not any("/input/" in key for key in keys)
        listed = {file.name: file.size_bytes for file in await target.list_files(handles[0])}
        assert listed["outputs/b"] == 5 and listed[rank_log(0)] == len(whole)
        assert await target.read(handles[0], "outputs/b", offset=1, limit=3) == b"234"
        assert await target.submit(submission) == handles[0]
        assert (await target.poll(handles[0])).state is TargetState.SUCCEEDED

    run(go())


def test_stopped_before_the_start_it_creates_nothing(client: Any, account: Path, place: Any, run: Any) -> None:
    target = targets.load(f"sagemaker:{account}")
    submission = target.plan(place())

    async def go() -> None:
        await target.cancel(submission.handle, reason="over_budget: enough")
        handle = await target.submit(submission)
        poll = await target.poll(handle)
        assert poll.state is TargetState.FAILED
        assert poll.exit is not None and poll.exit.reason is Reason.OVER_BUDGET
        name = submission.handle["name"]
        assert client("sagemaker").list_training_jobs(NameContains=name)["TrainingJobSummaries"] == []

    run(go())


def test_released_before_the_start_it_creates_nothing(client: Any, account: Path, place: Any, run: Any) -> None:
    target = targets.load(f"sagemaker:{account}")
    submission = target.plan(place())

    async def go() -> None:
        await target.release(submission.handle)
        handle = await target.submit(submission)
        assert (await target.poll(handle)).state is TargetState.LOST
        name = submission.handle["name"]
        assert client("sagemaker").list_training_jobs(NameContains=name)["TrainingJobSummaries"] == []

    run(go())


def test_without_an_answer_the_state_is_unknown(client: Any, account: Path, place: Any, run: Any) -> None:
    document = yaml.safe_load(account.read_text())
    account.write_text(yaml.safe_dump({**document, "endpoint": "http://127.0.0.1:9"}))
    target = targets.load(f"sagemaker:{account}")
    handle = target.plan(place()).handle
    assert run(target.poll({**handle, "submitted": True})).state is TargetState.UNKNOWN
