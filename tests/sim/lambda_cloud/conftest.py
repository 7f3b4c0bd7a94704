"""A simulator per test, and an account that calls it: each answer is held to the digest and to the vendor's OpenAPI."""

from __future__ import annotations

import functools
import http.client
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sshd import SSHD
from trainmaster.core.vendors.lambda_api import LAUNCH_INTERVAL_S, REQUEST_INTERVAL_S, find_operation
from trainmaster.sim.lambda_cloud.settings import Settings
from trainmaster.sim.lambda_cloud.simulator import Simulator

OPENAPI = os.environ.get("TRAINMASTER_LAMBDA_OPENAPI")
LAUNCH = {"region_name": "us-south-1", "instance_type_name": "gpu_1x_h100_sxm5", "ssh_key_names": ["key"]}


class Account:
    """One API key, one SSH key, and calls as a client makes them."""

    def __init__(self, simulator: Simulator, key: Path) -> None:
        self.simulator, self.key = simulator, key
        self._next_s = self._next_launch_s = 0.0
        self.authorization = f"Bearer {simulator.api_key_file.read_text().strip()}"

    def call(self, method: str, path: str, body: Any = None, *, headers: Any = None, timeout_s: float = 20) -> Any:
        """Status and parsed body (bytes where it is no JSON); OSError where the connection is cut."""
        if path.startswith("/api/"):
            self.pace(launch=path.endswith("/launch"))
        status, data = self.raw(method, path, body, headers=headers, timeout_s=timeout_s)
        try:
            answer = json.loads(data)
        except ValueError:
            return status, data
        if path.startswith("/api/"):
            validate(method, path, status, answer, request=body)
        return status, answer

    def pace(self, *, launch: bool) -> None:
        """Wait as the vendor's limits require."""
        clock = self.simulator.cloud.clock
        while (left_s := max(self._next_s, self._next_launch_s if launch else 0.0) - clock.now_s()) > 0:
            time.sleep(clock.real_s(left_s))
        self._next_s = clock.now_s() + REQUEST_INTERVAL_S
        if launch:
            self._next_launch_s = clock.now_s() + LAUNCH_INTERVAL_S

    def raw(self, method: str, path: str, body: Any = None, *, headers: Any = None, timeout_s: float = 20) -> Any:
        connection = http.client.HTTPConnection(
            "127.0.0.1", int(self.simulator.url.rpartition(":")[2]), timeout=timeout_s
        )
        try:
            data = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
            given = {"Authorization": self.authorization, "User-Agent": "test", **(headers or {})}
            connection.request(method, path, data, given)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, answer = self.call("GET", f"/api/v1{path}")
        assert status == 200, answer
        return answer["data"]

    def post(self, path: str, body: Any) -> Any:
        status, answer = self.call("POST", f"/api/v1{path}", body)
        assert status == 200, answer
        return answer["data"]

    def launch(self, **change: Any) -> str:
        (found,) = self.post("/instance-operations/launch", LAUNCH | change)["instance_ids"]
        return str(found)

    def wait(self, instance_id: str, status: str = "active") -> dict[str, Any]:
        return self.until(
            lambda: found if (found := self.get(f"/instances/{instance_id}"))["status"] == status else None
        )

    def until(self, found: Callable[[], Any], *, timeout_s: float = 90) -> Any:
        end = time.monotonic() + timeout_s
        while not (answer := found()):
            assert time.monotonic() < end, self.simulator.instances()
            time.sleep(0.02)
        return answer

    def terminate(self, *ids: str) -> None:
        self.post("/instance-operations/terminate", {"instance_ids": list(ids)})

    def ssh(self, address: str, command: str, *, key: Path | None = None) -> subprocess.CompletedProcess[str]:
        words = ["ssh", *self.ssh_options(key), "-p", str(self.simulator.ssh_port)]
        words += [f"{self.simulator.environment()['LAMBDA_SSH_USER']}@{address}", command]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)

    def ssh_options(self, key: Path | None = None) -> list[str]:
        options = (
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "LogLevel=ERROR",
            "BatchMode=yes",
            "IdentitiesOnly=yes",
        )
        return ["-i", str(key or self.key), *(word for option in options for word in ("-o", option))]


@functools.cache
def openapi() -> Any:
    return json.loads(Path(str(OPENAPI)).read_text())


def validate(method: str, path: str, status: int, answer: Any, *, request: Any) -> None:
    """Hold a documented answer, and a request that was accepted, to the vendor's own file where it is given."""
    operation = find_operation(method, path)
    if not OPENAPI or operation is None:
        return

    def check(schema: Any, value: Any) -> None:
        document = {**schema, "components": openapi()["components"]}
        jsonschema.Draft202012Validator(document, format_checker=jsonschema.FormatChecker()).validate(value)

    stated = openapi()["paths"][operation.path][method.lower()]
    if str(status) in stated["responses"]:
        check(stated["responses"][str(status)]["content"]["application/json"]["schema"], answer)
    if status == 200 and request is not None:
        check(stated["requestBody"]["content"]["application/json"]["schema"], request)


@pytest.fixture(scope="session")
def ssh_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def open_account(ssh_key: Path, **settings: Any) -> Account:
    """A simulator with these settings, 1000 times as fast as real time, in which the account has an SSH key."""
    if SSHD is None:
        pytest.skip("no OpenSSH server here: apt-get install openssh-server (or make system-packages)")
    simulator = Simulator(Settings(**{"time_factor": 1000.0, "listed_s": 1e6, **settings})).start()
    simulator.cloud.ssh_keys.add("key", Path(f"{ssh_key}.pub").read_text())
    return Account(simulator, ssh_key)


def close_account(account: Account) -> None:
    account.simulator.close()
    # Of every answer of every test: the simulator itself found no fault in it.
    assert account.simulator.summary()["schema_faults"] == []


@pytest.fixture
def simulate(tmp_path: Path, ssh_key: Path) -> Iterator[Callable[..., Account]]:
    """Start a simulator; it ends with the test."""
    started: list[Account] = []

    def start(**settings: Any) -> Account:
        started.append(open_account(ssh_key, **{"folder": tmp_path / f"sim{len(started)}", **settings}))
        return started[-1]

    yield start
    for account in started:
        close_account(account)


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory, ssh_key: Path) -> Iterator[Account]:
    """One account for all requests that change nothing, with a file system in another region."""
    account = open_account(ssh_key, folder=tmp_path_factory.mktemp("refusing"))
    account.post("/filesystems", {"name": "far", "region": "us-east-1"})
    yield account
    close_account(account)
