"""`drill`, `demo`, `accept` and `bandwidth` are killed when their ranks have started: within 10 s nothing of them runs,
and no lock is held. For `train` see test_owner_kills.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2e.test_killed_ranks import CONFIG, SOURCE

LIMIT_S = 10.0
# Words of the command, and a word that only its ranks, or what forks them, have on their command line.
COMMANDS = {
    "drill": ("{folder}/config.yaml -n 2 --out {folder}/proof", "-m trainmaster.train"),
    "demo": ("--home {folder}/home", "-m trainmaster.train"),
    "accept": ("--processes 2 --image-size 32 --batch-size 2 --out {folder}/results.json", "--rank-of"),
    "bandwidth": ("--processes 2 --backend gloo --max 64M --out {folder}/out", "trainmaster.bench.collectives.rank"),
}


def find(folder: Path) -> dict[int, str]:
    """Live processes that have the folder in their environment or on their command line, and their commands."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if state not in "ZX" and str(folder).encode() in command + environment:
            found[int(entry.name)] = command.replace(b"\0", b" ").decode()
    return found


def is_held(lock: Path) -> bool:
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.spawns
@pytest.mark.matrix(one_in=4, of="killed commands")
@pytest.mark.parametrize("verb", COMMANDS)
def test_nothing_of_a_killed_command_runs_on(tmp_path: Path, verb: str) -> None:
    words, rank = COMMANDS[verb]
    (tmp_path / "tmp").mkdir()
    (tmp_path / "config.yaml").write_text(json.dumps({**CONFIG, "steps": 1_000_000, "epoch_steps": 1_000_000}))
    env = {**os.environ, "PYTHONPATH": SOURCE, "TMPDIR": str(tmp_path / "tmp")}
    argv = [sys.executable, "-m", "trainmaster", verb, *words.format(folder=tmp_path).split()]
    with (tmp_path / "log").open("wb") as log:
        command = subprocess.Popen(argv, env=env, cwd=tmp_path, stdout=log, stderr=log)
    try:
        while not any(rank in words for words in find(tmp_path).values()):
            assert command.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
    finally:
        command.kill()
        command.wait()
    end = time.monotonic() + LIMIT_S
    while left := find(tmp_path):
        assert time.monotonic() < end, left
        time.sleep(0.1)
    assert [lock for lock in tmp_path.rglob("agent.lock") if is_held(lock)] == []
