"""Jobs that nothing drives: `jobs` and `show` say so and since when, `cancel` stops the job by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fork_server import ForkServer
from trainmaster.control.liveness import Liveness

SPEC = "name: long\npreflight: { level: 0 }\ncommand: [sleep, '300']\nlimits: { grace_s: 2 }\n"


Verb = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def trainmaster(programs: ForkServer) -> Verb:
    """A verb on a home, forked."""
    return lambda home, *words: programs.run("trainmaster", *words, env=environment(home))


@pytest.fixture
def left(trainmaster: Verb, tmp_path: Path) -> Path:
    """A home whose only job runs, and whose `submit --follow` was ended by Ctrl-C."""
    (tmp_path / "job.yaml").write_text(SPEC)
    home = tmp_path / "home"
    home.mkdir()
    (home / "server.json").write_text('{"pid": 1, "url": "http://127.0.0.1:1"}')  # left behind by a killed server
    command = [sys.executable, "-m", "trainmaster", "submit", str(tmp_path / "job.yaml"), "--follow"]
    with subprocess.Popen(command, env=environment(home), stderr=subprocess.PIPE, text=True) as follower:
        while status(trainmaster, home) != "running":
            assert follower.poll() is None
            time.sleep(0.2)
        assert "not driven" not in trainmaster(home, "jobs").stdout
        follower.send_signal(signal.SIGINT)
        _, stderr = follower.communicate(timeout=60)
    assert "nothing drives it until a server runs" in stderr
    return home


@pytest.mark.proof
def test_an_undriven_job_is_shown_as_such_and_cancel_ends_it(trainmaster: Verb, left: Path) -> None:
    ranks = processes(left)
    assert ranks, "the job goes on without its follower"
    listed = trainmaster(left, "jobs")
    assert "running (not driven)" in listed.stdout
    assert "no server or worker runs on this home folder: open jobs are shown as of 20" in listed.stderr
    assert "no server or worker runs" in trainmaster(left, "show", "long").stderr
    done = trainmaster(left, "cancel", "long")
    assert done.returncode == 0 and "cancelled" in done.stdout, done.stderr
    assert status(trainmaster, left) == "cancelled" and not processes(left)
    assert "not driven" not in trainmaster(left, "jobs").stdout, "nothing is open any more"


def test_no_database_is_created_beside_a_server_that_uses_another(trainmaster: Verb, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SPEC)
    server = Liveness(tmp_path)
    try:
        for verb in (("jobs",), ("submit", str(tmp_path / "job.yaml"))):
            refused = trainmaster(tmp_path, *verb)
            assert refused.returncode == 2, refused.stdout
            assert "a server runs on it, and there is no trainmaster.db" in " ".join(refused.stderr.split())
    finally:
        server.end()
    assert not (tmp_path / "trainmaster.db").exists()
    assert trainmaster(tmp_path, "jobs").returncode == 0, "no server: a new home folder"


def test_a_read_only_home_is_told_as_such(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    script = 'mount -t tmpfs -o ro none "$1" || exit 99; exec "$0" -m trainmaster jobs'
    command = ["unshare", "--mount", "sh", "-c", script, sys.executable, str(home)]
    try:
        done = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if done.returncode == 99 or "unshare failed" in done.stderr:
        pytest.skip(f"no mount of our own here: {done.stderr.strip()[:100]}")
    assert done.returncode == 2, done.stderr
    stderr = " ".join(done.stderr.split())
    assert "(Read-only file system); mount it writable again" in stderr and "its owner" not in stderr


def status(trainmaster: Verb, home: Path) -> str | None:
    jobs = json.loads(trainmaster(home, "jobs", "--json").stdout)["jobs"]
    return jobs[0]["status"] if jobs else None


def processes(home: Path) -> list[int]:
    """Processes whose environment names this home: the agent's and the ranks'."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
            folder = str((entry / "cwd").readlink())
        except OSError:
            continue
        if words.startswith(b"sleep\x00300") and (str(home) in (entry / "environ").read_bytes().decode() + folder):
            pids.append(int(entry.name))
    return pids


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "TRAINMASTER_HOME": str(home), "NO_COLOR": "1", "COLUMNS": "300"}
