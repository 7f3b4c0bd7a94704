"""SageMaker on this machine: moto's server, and what it does not do: run containers, write their logs, stop a job."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import botocore.session
from moto.core import DEFAULT_ACCOUNT_ID
from moto.sagemaker.models import sagemaker_backends

from trainmaster.targets.sagemaker.logs import GROUP

BUCKET = "bucket"
# Sessions share what they read: a client takes 0.02 s of a processor, and 0.2 s where it parses its model again.
botocore.session.create_loader = functools.cache(botocore.session.create_loader)


def run_container(
    client: Callable[[str], Any],
    endpoint: str,
    name: str,
    root: Path,
    *,
    hosts: tuple[str, ...] = ("algo-1",),
    here: int = 0,
    lay_out: Callable[[Path], None] = lambda _: None,
    env: Mapping[str, str] | None = None,
    fails: bool | None = False,
) -> list[str]:
    """What SageMaker does with a request on one of its hosts; the lines of the container. `lay_out`: its files.

    `fails`: whether its program must fail; None: it may, by a verdict on this machine's speed.
    """
    job = client("sagemaker").describe_training_job(TrainingJobName=name)
    prefix = job["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"].removeprefix(f"s3://{BUCKET}/")
    given = root / "input" / "data" / "trainmaster"
    given.mkdir(parents=True)
    for one in client("s3").list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
        client("s3").download_file(BUCKET, one["Key"], str(given / one["Key"].removeprefix(prefix)))
    (root / "input" / "config").mkdir()
    (root / "input" / "config" / "resourceconfig.json").write_text(
        json.dumps({"current_host": hosts[here], "hosts": sorted(hosts), "current_instance_type": "ml.m5.large"})
    )
    lay_out(given)
    command = [sys.executable, str(given / "start.py"), str(root)]
    own = {**os.environ, **job.get("Environment", {}), "AWS_ENDPOINT_URL": endpoint, **(env or {})}
    ran = subprocess.run(command, env=own, capture_output=True, text=True, timeout=150, check=False)
    assert fails is None or (ran.returncode != 0) is fails, ran.stderr
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


class Relay:
    """moto's server behind an address that counts requests, can lose an answer, and knows how to stop a job."""

    def __init__(self, endpoint: str) -> None:
        self.seen: Counter[str] = Counter()
        self.lose = ""
        self.refuse = ""
        self.on_create: Callable[[str], None] = lambda _: None  # after the request, before its answer
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                name = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                relay.seen[name] += 1
                if name and name == relay.refuse:
                    status, answer = 503, b'{"__type": "ServiceUnavailable"}'
                elif name == "StopTrainingJob":  # the one request that moto does not know
                    relay.stop(json.loads(body)["TrainingJobName"])
                    status, answer = 200, b"{}"
                else:
                    status, answer = forward(endpoint + self.path, dict(self.headers), body, self.command)
                if name == "CreateTrainingJob":
                    relay.on_create(json.loads(body)["TrainingJobName"])
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

    def end(self, name: str, status: str, *, reason: str | None = None, billable_s: int = 0) -> None:
        job = self.job(name)
        job.failure_reason, job.billable_time_in_seconds = reason, billable_s
        self.set(name, status, status)


def interrupt_on_create(relay: Relay, number: signal.Signals, *, during: bool) -> list[str]:
    """Signal this thread in the middle of CreateTrainingJob, or half a second after it; the names of the jobs."""
    main, made = threading.get_ident(), list[str]()

    def interrupt() -> None:
        signal.pthread_kill(main, number)

    def create(name: str) -> None:
        made.append(name)
        relay.set(name, "InProgress", "Training")
        if during:
            interrupt()
            threading.Event().wait(0.3)  # its answer comes after the signal
        else:
            threading.Timer(0.5, interrupt).start()

    relay.on_create = create
    return made


def forward(url: str, headers: dict[str, str], body: bytes, method: str) -> tuple[int, bytes]:
    # Without a type urllib calls the body a form, and moto keeps nothing of it.
    headers = {"Content-Type": "application/octet-stream", **headers}
    request = urllib.request.Request(url, data=body or None, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status), bytes(answer.read())
    except urllib.error.HTTPError as wrong:
        return wrong.code, wrong.read()
