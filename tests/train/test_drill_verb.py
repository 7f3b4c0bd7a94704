"""`trainmaster drill` on real ranks: the proof and its files, and Ctrl-C, which leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fork_server import ForkServer

from .runs import TINY

WORDS = ("steps=12", "checkpoint.every_steps=2", "eval_sequences=0", "sequence_tokens=16", "model.layers=1")


def start(folder: Path, *words: str, temporary: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainmaster", "drill", write_config(folder), *words],
        env=environment(folder, temporary), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
    )  # fmt: skip


def write_config(folder: Path) -> str:
    config = folder / "tiny.yaml"
    config.write_text(json.dumps(TINY))  # JSON is YAML
    return str(config)


def environment(folder: Path, temporary: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(temporary), "TRAINMASTER_CHECKPOINTS": str(folder / "mine")}


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    made = tmp_path / "tmp"
    made.mkdir()
    return made


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_a_killed_damaged_and_moved_run_is_proved_the_same(tmp_path: Path, temporary: Path) -> None:
    # Sync: what is in flight when it dies does not hang on what else this machine is doing.
    words = (*WORDS, "checkpoint.mode=sync", "--kills", "2", "-n", "1", "--other", "2", "--json", "--out", "proof")
    drill = start(tmp_path, *words, temporary=temporary)
    text, errors = drill.communicate()
    assert drill.returncode == 0, (text, errors)
    found = json.loads(text)
    assert found["overall"] == "PASS"
    assert {one["claim"]: one["verdict"] for one in found["claims"]} == dict.fromkeys(
        [
            *("strikes", "start", "acknowledged", "bound", "losses", "other ranks", "samples", "damage", "end"),
            *("in place", "processes"),
        ],
        "pass",
    )
    first, second = found["kills"]
    assert (first["place"].partition(":")[0], second["place"].partition(":")[0]) == ("save", "step")
    assert [kill["newest_damaged"] for kill in (first, second)] == [True, False]
    assert second["lost_steps"] <= second["bound_steps"]
    assert [attempt["ranks"] for attempt in found["losses"]["struck"]] == [1, 1, 2]
    proof = tmp_path / "proof"
    assert json.loads((proof / "drill.json").read_text()) == found
    table = (proof / "drill.md").read_text()
    assert table.startswith("# Drill: PASS\n")
    allowed = 2 * 2  # what the drill allows beyond the stated bound where it damaged the newest checkpoint
    assert f"| {first['lost_steps']} | {first['bound_steps']} + {allowed} | " in table
    page = (proof / "drill.html").read_text()
    assert "killed and resumed" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert not (tmp_path / "mine").exists()  # the user's own checkpoints are not touched
    assert not list(temporary.glob("trainmaster-*"))


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_process_and_no_file(tmp_path: Path, temporary: Path, number: signal.Signals) -> None:
    drill = start(tmp_path, "-n", "1", temporary=temporary)
    while not (events := list(temporary.glob("*/reference/attempt-1/events.jsonl"))):
        assert drill.poll() is None, drill.communicate()
        time.sleep(0.02)
    while '"STEP"' not in events[0].read_text():
        assert drill.poll() is None, drill.communicate()
        time.sleep(0.02)
    plan: dict[str, Any] = json.loads((events[0].parent / "plan.json").read_text())
    drill.send_signal(number)
    told, errors = drill.communicate()
    assert drill.returncode == 130, errors
    assert "interrupted: 0 of 4 kills" in told and "not judged: the drill was interrupted" in told
    assert not list(temporary.glob("trainmaster-*"))
    memory = Path(plan["spec"]["train"]["checkpoint"]["memory"]["folder"]).parent
    assert memory.name.startswith("trainmaster-drill-")
    assert not memory.exists()
    mark = f"TRAINMASTER_ATTEMPT={plan['attempt']}".encode()
    assert not [path for path in Path("/proc").glob("[0-9]*/environ") if mark in read(path)]


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-n", "3"), "batch_sequences: 8 does not divide by 3 ranks"),
        (("steps=4", "checkpoint.every_steps=4"), "use 16"),
        (("--out", "."), "not empty"),
    ],
)
def test_wrong_usage_starts_nothing(
    programs: ForkServer, tmp_path: Path, temporary: Path, words: tuple[str, ...], says: str
) -> None:
    argv = ("drill", write_config(tmp_path), *words)
    drill = programs.run("trainmaster", *argv, env=environment(tmp_path, temporary), cwd=tmp_path)
    assert drill.returncode == 2
    assert says in " ".join(drill.stderr.split())
    assert not list(temporary.glob("trainmaster-*"))
