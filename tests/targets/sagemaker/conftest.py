"""moto's server, clients of it, a settings file for it, and an address that loses answers."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto.server import ThreadedMotoServer

from sagemaker_server import BUCKET, Relay


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
    # The server's state is the process's: without this a test would find the objects and jobs of those before it.
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST"), timeout=30).close()
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


@pytest.fixture
def relay(endpoint: str, client: Any, account: Path) -> Iterator[Relay]:
    made = Relay(endpoint)
    changes = {"endpoint": made.endpoint, "secrets": {}, "log_settle_s": 0}
    account.write_text(yaml.safe_dump({**yaml.safe_load(account.read_text()), **changes}))
    yield made
    made.server.shutdown()
    made.server.server_close()
