"""`trainmaster sim lambda` as a program: its lines, its end, and that nothing it started survives any kind of end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sshd import needs_sshd
from trainmaster.core.errors import UsageError
from trainmaster.sim.lambda_cloud import processes
from trainmaster.sim.lambda_cloud.settings import Settings
from trainmaster.sim.lambda_cloud.simulator import Simulator

pytestmark = [pytest.mark.spawns, needs_sshd]
SOURCE = str(Path(__file__).parents[3] / "src")


class Program:
    """The command in a process of its own, with --json."""

    def __init__(self, folder: Path, *options: str) -> None:
        words = [sys.executable, "-m", "trainmaster", "sim", "lambda", "--port", "0", "--folder", str(folder)]
        self.process = subprocess.Popen(
            [*words, "--time-factor", "1000", "--json", *options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCE, "TRAINMASTER_HOME": str(folder.parent / "home")},
        )
        assert self.process.stdout is not None
        self.first = json.loads(self.process.stdout.readline())
        self.key = Path(self.first["environment"]["LAMBDA_API_KEY_FILE"]).read_text().strip()

    def call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}", "User-Agent": "test"}
        with urllib.request.urlopen(
            urllib.request.Request(self.first["url"] + path, data, headers), timeout=20
        ) as answer:
            return json.load(answer)

    def launch(self, ssh_key: Path) -> str:
        """An active instance, in which a hidden daemon runs."""
        self.call("/api/v1/ssh-keys", {"name": "key", "public_key": Path(f"{ssh_key}.pub").read_text()})
        body = {"region_name": "us-east-1", "instance_type_name": "gpu_1x_a10", "ssh_key_names": ["key"]}
        (found,) = self.call("/api/v1/instance-operations/launch", body)["data"]["instance_ids"]
        wait(lambda: self.call(f"/api/v1/instances/{found}")["data"]["status"] == "active")
        return str(found)

    def end(self, number: int) -> dict[str, Any] | None:
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=90)
        return json.loads(out) if out else None


def wait(holds: Any, *, timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "sim"
    left = [path.name for path in (tmp_path / "sim" / "instances").glob("*")]
    processes.kill_marked(left)  # of a test that failed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_ends_all_and_prints_the_summary(folder: Path, ssh_key: Path, number: int) -> None:
    program = Program(folder)
    instance = program.launch(ssh_key)
    assert processes.marked([instance])
    summary = program.end(number)
    assert program.process.returncode == 0
    assert summary is not None and summary["launches"] == 1 and summary["not_terminated"] == [instance]
    assert summary["cost_usd"] > 0
    assert processes.marked([instance]) == set()
    assert sorted(path.name for path in folder.iterdir()) == ["api-key", "lock"]


def test_a_killed_simulator_takes_its_instances_along(folder: Path, ssh_key: Path) -> None:
    program = Program(folder)
    instance = program.launch(ssh_key)
    program.end(signal.SIGKILL)
    wait(lambda: processes.marked([instance]) == set())


def test_the_next_start_ends_what_a_killed_simulator_left(folder: Path, ssh_key: Path) -> None:
    """Also where the first process of an instance was killed with it, so that an sshd is left alone."""
    program = Program(folder)
    instance = program.launch(ssh_key)
    record = json.loads((folder / "instances" / instance / "process.json").read_text())
    os.kill(program.process.pid, signal.SIGSTOP)
    os.kill(record["pid"], signal.SIGKILL)
    program.end(signal.SIGKILL)
    wait(lambda: processes.start_time(record["pid"]) is None)
    assert processes.marked([instance])  # sshd
    again = Program(folder)
    assert processes.marked([instance]) == set() and not (folder / "instances" / instance).exists()
    assert again.key == program.key  # the variables of the user stay valid
    again.end(signal.SIGTERM)


def test_a_recorded_pid_of_another_process_is_left_alone(folder: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        place = folder / "instances" / ("0" * 32)
        place.mkdir(parents=True)
        started = processes.start_time(other.pid)
        assert started is not None
        (place / "process.json").write_text(json.dumps({"pid": other.pid, "start_time": started - 1}))
        with Simulator(Settings(folder=folder)) as simulator:
            assert simulator.leftovers == 1 and not place.exists()
        assert other.poll() is None
        other.kill()


def test_a_folder_has_one_simulator_at_a_time(folder: Path) -> None:
    with Simulator(Settings(folder=folder)):
        with pytest.raises(UsageError, match="another simulator uses"):
            Simulator(Settings(folder=folder)).start()
    with pytest.raises(UsageError, match="no spaces"):
        Simulator(Settings(folder=folder / "a b")).start()


def test_a_port_in_use_is_an_error_and_frees_the_folder(folder: Path) -> None:
    with Simulator(Settings(folder=folder)) as first:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(UsageError, match="--port"):
            Simulator(Settings(folder=folder.with_name("other"), port=port)).start()
    with Simulator(Settings(folder=folder.with_name("other"), port=port)):
        pass


def test_the_lines_for_a_user(folder: Path) -> None:
    words = [sys.executable, "-m", "trainmaster", "sim", "lambda", "--port", "0", "--folder", str(folder)]
    process = subprocess.Popen(
        [*words, "--time-factor", "60"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )  # fmt: skip
    assert process.stdout is not None
    lines = [process.stdout.readline().strip() for _ in range(5)]
    names = [line.partition("=")[0] for line in lines]
    assert names == [f"export LAMBDA_{name}" for name in ("API_URL", "API_KEY_FILE", "SSH_PORT", "SSH_USER", "PACE")]
    assert lines[1] == f"export LAMBDA_API_KEY_FILE={folder}/api-key" and lines[4].endswith("=60")
    assert (folder / "api-key").stat().st_mode & 0o777 == 0o600
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 0
    assert "0 launches, 0.0 instance-minutes, 0 billed: $0.00" in out and "not terminated: 0" in out
