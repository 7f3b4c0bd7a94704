"""`trainmaster train` prints each step once, with a bar on a terminal; a spec and a config are told apart."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fork_server import ForkServer

CONFIG = "device: cpu\nsteps: 6\nbatch_sequences: 2\noptimizer: { warmup_steps: 1 }\neval_sequences: 0\n"
SPEC = "name: a\nresources: { nodes: 1 }\ntrain:\n  steps: 20\n"


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_each_step_is_printed_once(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    done = subprocess.run(command("train", "c.yaml"), cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"step (\d)/6 ", done.stdout) == list("123456")
    assert "heartbeat" not in done.stdout
    (log,) = tmp_path.glob("checkpoints/attempts/*/rank-0.log")
    assert log.read_text().count("heartbeat step=") == 6, "the log keeps them: programs watch for them"


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_a_terminal_has_a_bar_instead_of_step_lines(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    shown = on_terminal("train", "c.yaml", folder=tmp_path)
    assert "6/6" in shown and "tokens/s" in shown
    assert "Loss:" not in shown and "heartbeat" not in shown
    assert "done at step 6/6" in shown


@pytest.mark.parametrize("verb", ["train", "drill", "plan"])
def test_a_spec_given_for_a_config_is_explained(programs: ForkServer, verb: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SPEC)
    done = programs.run("trainmaster", verb, "job.yaml", env=os.environ, cwd=tmp_path)
    assert done.returncode == 2
    assert "job.yaml is a job spec" in done.stderr and "trainmaster submit job.yaml" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_config_given_for_a_spec_is_explained(programs: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    done = programs.run("trainmaster", "submit", "c.yaml", env=os.environ, cwd=tmp_path)
    assert done.returncode == 2
    assert "c.yaml is a training config" in done.stderr and "trainmaster train c.yaml" in done.stderr


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "trainmaster", *words]


def on_terminal(*words: str, folder: Path) -> str:
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": "160", "TERM": "xterm"}
    with subprocess.Popen(command(*words), cwd=folder, env=env, stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not piece:
                break
            shown += piece
        process.communicate()
    os.close(ours)
    assert process.returncode == 0
    return shown.decode()
