"""Another Unix account of the machine: no API, no database, no job folder, no token; and jobs of another Unix user."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import trainmaster
from trainmaster.client import Client
from trainmaster.core.errors import TrainmasterError

SOURCE = str(Path(trainmaster.__file__).parents[1])
NOBODY = pwd.getpwnam("nobody")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
PYTHON = "/usr/bin/python3"  # one that another account may execute
PACKAGES = os.pathsep.join([SOURCE, *(entry for entry in sys.path if entry.endswith("site-packages"))])
PREFLIGHT = {"level": 1, "allow_incomplete": True}
ATTEMPT = """
import json, os, sys, urllib.error, urllib.request
home, url = sys.argv[1:]
found = {}
for path in ("/v1/training/jobs", "/v1/me", "/", "/metrics"):
    try:
        with urllib.request.urlopen(url + path, timeout=20) as answer:
            found[path] = "sign in" if "/login" in answer.url else answer.status
    except urllib.error.HTTPError as wrong:
        found[path] = wrong.code
for name in ("trainmaster.db", "local.token", "server.json", "secret.key"):
    try:
        open(f"{home}/{name}").read()
        found[name] = "read"
    except OSError as wrong:
        found[name] = type(wrong).__name__
for name in ("jobs", "storage", "reconcilers"):
    try:
        found[name] = os.listdir(f"{home}/{name}")
    except OSError as wrong:
        found[name] = type(wrong).__name__
found["sockets"] = [name for name in os.listdir(home) if name.endswith(".sock")]
print(json.dumps(found))
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A home that others may enter and list: only its content is closed."""
    folder = Path(tempfile.mkdtemp(prefix="trainmaster-", dir="/tmp"))
    folder.chmod(0o755)
    (folder / "home").mkdir(mode=0o755)
    yield folder / "home"
    shutil.rmtree(folder)


@contextlib.contextmanager
def serving(home: Path, *options: str, python: str = sys.executable) -> Iterator[str]:
    env = {**os.environ, "PYTHONPATH": PACKAGES, "TRAINMASTER_HOME": str(home)}
    command = [python, "-m", "trainmaster", "serve", "--port", "0", *options]
    with (home.parent / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not (home / "server.json").exists():
            assert process.poll() is None and time.monotonic() < deadline, (home.parent / "server.log").read_text()
            time.sleep(0.05)
        yield json.loads((home / "server.json").read_text())["url"]
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.mark.proof
def test_another_account_gets_nothing(home: Path) -> None:
    with serving(home) as url:
        with Client(url, (home / "local.token").read_text().strip()) as mine:
            job = mine.submit({"name": "mine", "preflight": PREFLIGHT, "command": ["true"]})
            mine.wait(job.id)
        command = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", PYTHON, "-c", ATTEMPT]
        done = subprocess.run([*command, str(home), url], check=True, capture_output=True, text=True, timeout=120)
        found = json.loads(done.stdout)
        cli = subprocess.run(
            [sys.executable, "-m", "trainmaster", "jobs", "--server", url],
            check=False, capture_output=True, text=True, timeout=120,
            env={**os.environ, "PYTHONPATH": SOURCE, "TRAINMASTER_HOME": str(home), "COLUMNS": "200"},
        )  # fmt: skip
    assert cli.returncode == 0 and "mine" in cli.stdout, "the own command line finds its token by itself"
    assert {found[path] for path in ("/v1/training/jobs", "/v1/me", "/metrics")} == {401}
    assert found["/"] == "sign in"
    assert {found[name] for name in ("trainmaster.db", "local.token", "server.json")} == {"PermissionError"}
    assert {found[name] for name in ("jobs", "storage", "reconcilers")} == {"PermissionError"}
    assert found["sockets"] == []
    said = " ".join((home.parent / "server.log").read_text().split())
    assert "jobs on `local` run as this user and can read this home folder: give --job-user USER" in said


@pytest.mark.proof
def test_jobs_run_as_another_user_and_reach_nothing_of_the_server(home: Path) -> None:
    script = (
        "import json, os\n"
        "def reads(path):\n"
        "    try:\n        open(path).read(); return True\n    except OSError:\n        return False\n"
        f"home = {str(home)!r}\n"
        "print(json.dumps({'uid': os.getuid(), 'groups': os.getgroups(),\n"
        "  'reads': [name for name in ('trainmaster.db', 'local.token') if reads(f'{home}/{name}')],\n"
        "  'env': sorted(name for name in os.environ if name.startswith('TRAINMASTER_')\n"
        "    and name.removeprefix('TRAINMASTER_') in ('HOME', 'DATABASE', 'TOKEN', 'TOKEN_FILE', 'JOB_USER'))}))\n"
    )
    _require_readable_checkout()
    with (
        serving(home, "--job-user", "nobody", python=PYTHON) as url,
        Client(url, (home / "local.token").read_text().strip()) as client,
    ):
        job = client.submit(
            {"name": "theirs", "preflight": {"level": 1, "allow_incomplete": True}, "command": [PYTHON, "-c", script]}
        )
        ended = client.wait(job.id)
        assert ended.status == "completed", (ended.message, ended.attempts)
        said = json.loads(client.logs(job.id).splitlines()[-1])
    assert said == {"uid": NOBODY.pw_uid, "groups": said["groups"], "reads": [], "env": []}
    assert 0 not in said["groups"]


@pytest.mark.proof
def test_root_follows_no_link_of_a_job_and_its_stop_is_heard(home: Path) -> None:
    """A job that puts links where its next attempt and its lock will be gains nothing; one that saves is let to."""
    _require_readable_checkout()
    victim = home.parent / "of-root"
    victim.mkdir(mode=0o755)
    (victim / "file").write_text("root")
    steal = (
        f"ln -s {victim} ../attempts/2; mv ../attempts ../was && ln -s {victim} ../attempts; "
        f"cd $(dirname $TRAINMASTER_EVENTS); rm agent.lock; ln -s {victim}/made agent.lock; exit 3"
    )
    save = "trap 'touch $TRAINMASTER_CHECKPOINTS/saved; echo saved; exit 75' TERM; echo up; while :; do sleep 0.1; done"
    with (
        serving(home, "--job-user", "nobody", python=PYTHON) as url,
        Client(url, (home / "local.token").read_text().strip()) as client,
    ):
        limits = {"attempts": 2, "retry": {"script_failed": True, "node_lost": False}, "grace_s": 60}
        spec = {"preflight": {"level": 0}, "limits": limits}
        thief = client.submit({"name": "thief", "command": ["sh", "-c", steal], **spec})
        saver = client.submit({"name": "saver", "command": ["sh", "-c", save], **spec})
        deadline = time.monotonic() + 120
        while b"up" not in _said(client, saver.id):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        client.cancel(saver.id)
        assert client.wait(saver.id).status == "cancelled" and b"saved" in client.logs(saver.id)
        client.wait(thief.id)
    assert {path.lstat().st_uid for path in (victim, victim / "file")} == {0}
    assert [path.name for path in victim.iterdir()] == ["file"] and victim.stat().st_mode & 0o777 == 0o755


def _said(client: Client, job: str) -> bytes:
    try:
        return client.logs(job)
    except TrainmasterError:
        return b""  # not begun


def _require_readable_checkout() -> None:
    reach = subprocess.run(
        ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", PYTHON, "-c", "import trainmaster.agent"],
        check=False, env={"PYTHONPATH": SOURCE}, capture_output=True,
    )  # fmt: skip
    if reach.returncode != 0:
        pytest.skip("this checkout cannot be read by another account")
