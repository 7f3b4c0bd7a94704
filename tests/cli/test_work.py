"""`work` drives jobs without serving, and ends on SIGTERM while they go on; `serve` speaks https with a certificate."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

import trainmaster
from trainmaster.cli.server.serve import _listen
from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.store import jobs
from trainmaster.store.migrate import open_database


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRAINMASTER_")}
    source = str(Path(trainmaster.__file__).parents[1])
    return {**kept, "PYTHONPATH": source, "TRAINMASTER_HOME": str(tmp_path / "home")}


def start(*words: str, env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "trainmaster", *words], env=env, stderr=subprocess.PIPE, text=True)


def test_work_drives_jobs_and_stops_when_told(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    db = open_database(tmp_path / "home" / "trainmaster.db")
    job = submitting.submit(db, parse_spec({"name": "a", "preflight": {"level": 0}, "command": ["true"]}))
    with start("work", "--tick-s", "0.1", env=environment) as worker:
        end = time.monotonic() + 120
        while not (row := jobs.find_job(db, job.id)) or not row.status.final:
            assert worker.poll() is None and time.monotonic() < end, row
            time.sleep(0.1)
        worker.send_signal(signal.SIGTERM)
        _, stderr = worker.communicate(timeout=60)
    assert row.status == "completed" and worker.returncode == 0, stderr
    db.close()


@pytest.mark.proof
def test_serve_speaks_https(environment: dict[str, str], tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    words = ("serve", "--port", "0", "--no-reconcile", "--tls-cert", str(cert), "--tls-key", str(key))
    with start(*words, env=environment) as server:
        note, end = tmp_path / "home" / "server.json", time.monotonic() + 60
        while not note.exists():
            assert server.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        url = json.loads(note.read_text())["url"]
        assert url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(cert))
        answer = httpx.get(f"{url}/api/hello", verify=trust, trust_env=False, timeout=30)
        assert answer.json()["message"] == "Hello World"
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode == 0 and not note.exists()


@pytest.mark.proof
def test_commands_use_the_storage_of_the_server_that_runs_on_the_home(
    environment: dict[str, str], tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "words.txt").write_text("from the folder of the spec")
    command = "[sh, -c, cat words.txt; cp words.txt $TRAINMASTER_OUTPUTS]"
    (project / "job.yaml").write_text(f"name: trial\ncommand: {command}\npreflight: {{level: 0}}\n")

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "trainmaster", *words], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    with start("serve", "--port", "0", "--storage", str(tmp_path / "kept"), env=environment) as server:
        note, end = tmp_path / "home" / "server.json", time.monotonic() + 60
        while not note.exists():
            assert server.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        run("submit", str(project / "job.yaml"), "--follow")
        assert "from the folder of the spec" in run("logs", "trial")
        run("fetch", "trial", str(tmp_path / "results"))
        server.terminate()
        server.communicate(timeout=60)
    assert [path.read_text() for path in (tmp_path / "results").rglob("words.txt")] == ["from the folder of the spec"]
    assert not [path for path in (tmp_path / "home" / "storage").rglob("*") if path.is_file()]


def test_a_caller_waits_from_the_moment_that_the_address_is_known() -> None:
    """`server.json` and the first line are written before the application is there."""
    with _listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname(), timeout=5):
        pass
