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
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto.core import DEFAULT_ACCOUNT_ID
from moto.sagemaker.models import sagemaker_backends
from moto.server import ThreadedMotoServer

from trainmaster import targets
from trainmaster.control.budget import price_of
from trainmaster.core.errors import Unreachable
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
    session = boto3.Session()  # its own: the default session would keep these keys for every later test
    made = lambda service: session.client(service, region_name="us-east-1", endpoint_url=endpoint)  # noqa: E731
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


def run_container(
    client: Callable[[str], Any],
    endpoint: str,
    name: str,
    root: Path,
    *,
    hosts: tuple[str, ...] = ("algo-1",),
    here: int = 0,
) -> list[str]:
    """What SageMaker does with a request on one of its hosts; the lines of the container."""
    job = client("sagemaker").describe_training_job(TrainingJobName=name)
    prefix = job["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"].removeprefix(f"s3://{BUCKET}/")
    given = root / "input" / "data" / "trainmaster"
    given.mkdir(parents=True)
    for one in client("s3").list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
        client("s3").download_file(BUCKET, one["Key"], str(given / one["Key"].removeprefix(prefix)))
    (root / "input" / "config").mkdir()
    (root / "input" / "config" / "resourceconfig.json").write_text(
        json.dumps({"current_host": hosts[here], "hosts": sorted(hosts)})
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
    script = 'echo "${#MY_TOKEN} letters"; seq 1 50; cd "$TRAINMASTER_OUTPUTS"; printf 12345 > b; '
    script += "mkfifo pipe; ln -s /etc/passwd link; truncate -s 17M large"
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
        found = await target.list_files(handles[0])
        listed = {file.name: file.size_bytes for file in found if not file.fault}
        assert listed["outputs/b"] == 5 and listed[rank_log(0)] == len(whole)
        assert listed["outputs/large"] == 17 << 20, "S3 has it, the log has not"
        assert {file.name: file.fault for file in found if file.fault} == {
            "outputs/link": "symbolic link, not a plain file",
            "outputs/pipe": "named pipe, not a plain file",
        }
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


# --- several hosts, and a package that is sent -----------------------------------------------------------------------


def test_two_hosts_run_the_package_that_was_sent_and_each_has_its_files(
    client: Any, endpoint: str, account: Path, place: Any, run: Any, tmp_path: Path
) -> None:
    document = {**yaml.safe_load(account.read_text()), "package": "send", "secrets": {}, "price_per_hour": 2.5}
    account.write_text(yaml.safe_dump(document))
    script = (
        'echo "$RANK $WORLD_SIZE $GROUP_RANK $MASTER_ADDR"; echo "$RANK" > "$TRAINMASTER_OUTPUTS/rank-$RANK"; '
        "tr '\\0' '\\n' < /proc/$PPID/environ | grep ^PYTHONPATH="
    )
    made = place(script, resources={"nodes": 2})
    target = targets.load(f"sagemaker:{account}")
    submission = target.plan(made)
    name = submission.handle["name"]

    async def go() -> None:
        handle = await target.submit(submission)
        assert client("sagemaker").describe_training_job(TrainingJobName=name)["ResourceConfig"]["InstanceCount"] == 2
        lines = await asyncio.gather(
            *(
                asyncio.to_thread(
                    run_container, client, endpoint, name, tmp_path / f"host-{here}", hosts=("algo-1", "algo-2"),
                    here=here,
                )
                for here in (0, 1)
            )
        )  # fmt: skip
        write_log(client, f"{name}/algo-1-1", lines[0])
        assert (await target.poll(handle)).state is TargetState.RUNNING, "the lines of the second host are missing"
        write_log(client, f"{name}/algo-2-1", lines[1])
        poll = await target.poll(handle)
        assert poll.state is TargetState.SUCCEEDED, poll
        for rank in (0, 1):
            words = (await target.read(handle, rank_log(rank), offset=0, limit=1 << 20)).decode().splitlines()
            assert words[0] == f"{rank} 2 {rank} algo-1"
            assert words[1].startswith(f"PYTHONPATH={tmp_path}/host-{rank}/trainmaster/package"), words
        listed = {file.name for file in await target.list_files(handle)}
        assert {"outputs/rank-0", "outputs/node-1/rank-1", rank_log(0), rank_log(1)} <= listed
        assert await target.read(handle, "outputs/node-1/rank-1", offset=0, limit=9) == b"1\n"
        await target.release(handle)

    run(go())
    assert price_of(made.spec, submission.handle) == 500.0, "two instances of 2.50 dollars"


def test_without_a_price_the_cost_is_unknown(account: Path, place: Any) -> None:
    target = targets.load(f"sagemaker:{account}")
    made = place(target=f"sagemaker:{account}")
    assert price_of(made.spec, target.plan(made).handle) is None


# --- answers that are lost -------------------------------------------------------------------------------------------


class Relay:
    """moto's server behind an address that counts requests, can lose an answer, and knows how to stop a job."""

    def __init__(self, endpoint: str) -> None:
        self.seen: Counter[str] = Counter()
        self.lose = ""
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                name = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                relay.seen[name] += 1
                if name == "StopTrainingJob":  # the one request that moto does not know
                    relay.stop(json.loads(body)["TrainingJobName"])
                    status, answer = 200, b"{}"
                else:
                    status, answer = forward(endpoint + self.path, dict(self.headers), body, self.command)
                if name and relay.lose == name:
                    relay.lose = ""
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_PUT = do_DELETE = do_HEAD = do_POST  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def job(self, name: str) -> Any:
        return sagemaker_backends[DEFAULT_ACCOUNT_ID]["us-east-1"].training_jobs[name]

    def set(self, name: str, status: str, secondary: str) -> None:
        self.job(name).training_job_status, self.job(name).secondary_status = status, secondary

    def stop(self, name: str) -> None:
        self.set(name, "Stopped", "Stopped")


def forward(url: str, headers: dict[str, str], body: bytes, method: str) -> tuple[int, bytes]:
    request = urllib.request.Request(url, data=body or None, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status), bytes(answer.read())
    except urllib.error.HTTPError as wrong:
        return wrong.code, wrong.read()


@pytest.fixture
def relay(endpoint: str, client: Any, account: Path) -> Iterator[Relay]:
    made = Relay(endpoint)
    changes = {"endpoint": made.endpoint, "secrets": {}, "log_settle_s": 0}
    account.write_text(yaml.safe_dump({**yaml.safe_load(account.read_text()), **changes}))
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_a_create_whose_answer_was_lost_is_found_by_its_name_and_not_sent_again(
    relay: Relay, account: Path, place: Any, run: Any
) -> None:
    target = targets.load(f"sagemaker:{account}")
    submission = target.plan(place())
    name = submission.handle["name"]

    async def go() -> None:
        relay.lose = "CreateTrainingJob"
        with pytest.raises(Unreachable, match="create_training_job: no answer"):
            await target.submit(submission)
        relay.set(name, "InProgress", "Training")
        handle = await target.submit(submission)
        assert handle["submitted"] and relay.seen["CreateTrainingJob"] == 1
        assert (await target.poll(handle)).state is TargetState.RUNNING
        (owned,) = [one for one in await target.list_owned() if one.attempt == handle["attempt"]]
        assert owned.what == f"training job {name}"
        await target.cancel(handle, reason="user_cancelled: not today")
        await target.cancel(handle, reason="over_budget: the first reason counts")
        assert relay.seen["StopTrainingJob"] == 1, "one that stops already is not asked again"
        poll = await target.poll(handle)
        assert poll.state is TargetState.FAILED and poll.exit is not None
        assert (poll.exit.reason, poll.exit.message) == (Reason.USER_CANCELLED, "not today")
        assert not [one for one in await target.list_owned() if one.attempt == handle["attempt"]]

    run(go())


def test_what_the_listing_owns_can_be_released_without_the_files_of_its_attempt(
    relay: Relay, account: Path, place: Any, run: Any
) -> None:
    target = targets.load(f"sagemaker:{account}")
    submission = target.plan(place(number=2))
    name = submission.handle["name"]

    async def go() -> None:
        await target.submit(submission)
        relay.set(name, "InProgress", "Training")
        (owned,) = [one for one in await target.list_owned() if one.attempt == submission.handle["attempt"]]
        relay.lose = "StopTrainingJob"
        await target.release(owned.handle)
        assert relay.job(name).training_job_status == "Stopped"
        assert not [one for one in await target.list_owned() if one.attempt == submission.handle["attempt"]]

    run(go())
