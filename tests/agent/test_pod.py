"""The agent of a pod: its node rank from the cluster's environment, and its files on standard output, byte for byte."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainmaster.agent import mirror
from trainmaster.agent.mirror import Mirror
from trainmaster.agent.pod import _note_members, locate
from trainmaster.core.errors import UsageError
from trainmaster.core.plan import EXIT_FILE, MEMBERS_FILE, MEMBERS_LOG, Plan
from trainmaster.core.spec import parse_spec
from trainmaster.remote.framed_lines import decode

ATTEMPT = "0b6c5c4e-53ad-4f0e-9c57-6a4f1f3c2d10.1"


def plan(tmp_path: Path, *command: str, nodes: int = 1, **spec: Any) -> Plan:
    mapping = {"name": "a", "preflight": {"level": 0}, "command": list(command or ("true",)), **spec}
    made = parse_spec({**mapping, "resources": {"nodes": nodes}})
    places = {"folder": str(tmp_path / "run" / "attempts" / "1"), "checkpoints": str(tmp_path / "checkpoints")}
    return Plan(attempt=ATTEMPT, spec=made, master_addr="pod-0.pod", master_port=29500, **places)


def run(tmp_path: Path, made: Plan, *launcher: str) -> tuple[int, dict[str, bytes]]:
    """Run the pod's program; its exit code, and the files that its output holds."""
    path = tmp_path / "plan.json"
    path.write_text(made.to_json())
    words = [sys.executable, "-m", "trainmaster.agent.pod", str(path), *(("--", *launcher) if launcher else ())]
    done = subprocess.run(words, capture_output=True, check=False, timeout=60)
    files: dict[str, bytes] = {}
    for line in done.stdout.splitlines():
        frame = decode(line)
        assert frame is not None, line
        assert frame.offset == len(files.get(frame.stream, b"")), "each byte once, in order"
        files[frame.stream] = files.get(frame.stream, b"") + frame.data
    return done.returncode, files


def test_every_file_of_the_attempt_is_in_its_output(tmp_path: Path) -> None:
    script = (
        'echo "{}" > /dev/null; printf "a\\rb\\n\\377\\0end"; cd "$TRAINMASTER_OUTPUTS"; mkdir d; printf 12345 > d/f; '
        ": > empty; ln -s /etc/passwd link; exit 3"
    )
    code, files = run(tmp_path, plan(tmp_path, "sh", "-c", script))
    folder = tmp_path / "run" / "attempts" / "1"
    assert code == 1
    assert files["rank-0.log"] == b"a\rb\n\xff\x00end"
    assert (files["outputs/d/f"], files["outputs/empty"]) == (b"12345", b"")
    assert not [name for name in files if "link" in name]
    assert json.loads(files["uncopied.jsonl"]) == ["outputs/link", "symbolic link, not a plain file"]
    for name in ("events.jsonl", "agent.log", "exit.json"):
        assert files[name] == (folder / name).read_bytes(), name
    assert json.loads(files["exit.json"])["reason"] == "script_failed"
    again, files = run(tmp_path, plan(tmp_path, "true"))
    assert again == 0 and (folder.parent / "2" / "exit.json").exists(), "a second start has a folder of its own"
    assert "uncopied.jsonl" not in files


def test_outputs_that_a_log_cannot_hold_are_named(tmp_path: Path) -> None:
    script = 'cd "$TRAINMASTER_OUTPUTS"; printf 1 > small; truncate -s 17M weights; mkfifo $(seq 1100)'
    code, files = run(tmp_path, plan(tmp_path, "sh", "-c", script))
    named = dict(json.loads(line) for line in files["uncopied.jsonl"].splitlines())
    assert code == 0 and files["outputs/small"] == b"1" and not [name for name in files if "weights" in name]
    assert len(named) == 1001 and named["outputs"] == "101 more were not copied"
    assert named["outputs/1"] == "named pipe, not a plain file"


def test_another_launcher_gets_the_variables_and_its_end_is_a_record(tmp_path: Path) -> None:
    made = plan(tmp_path, "true")
    script = (
        'echo "$TRAINMASTER_CHECKPOINTS"; echo \'{"v":1,"phase":"STEP","event":"x"}\' >> "$TRAINMASTER_EVENTS"; exit 9'
    )
    code, files = run(tmp_path, made, "sh", "-c", script)
    assert (code, files["agent.log"]) == (9, f"{made.checkpoints}\n".encode())
    assert files["events.jsonl"].startswith(b'{"v":1,"phase":"STEP"')
    record = json.loads(files["exit.json"])
    assert (record["ok"], record["reason"]) == (False, "script_failed")


@pytest.mark.parametrize(
    ("env", "node", "address"),
    [
        ({"JOB_COMPLETION_INDEX": "1"}, 1, "pod-0.pod:29500"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "23456"}, 1, "m:23456"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "m",
          "PET_MASTER_PORT": "29400"}, 0, "m:29400"),
    ],
)  # fmt: skip
def test_the_node_rank_comes_from_the_cluster(env: dict[str, str], node: int, address: str, tmp_path: Path) -> None:
    found = locate(plan(tmp_path, nodes=2), env)
    assert (found.node_rank, f"{found.master_addr}:{found.master_port}") == (node, address)


def test_who_has_which_place_is_said_from_the_start_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log is rotated: what was said once may be gone when somebody reads it."""
    train = {"steps": 8, "batch_sequences": 8}
    spec = parse_spec({"name": "a", "train": train, "resources": {"nodes": 2, "spares": 1}})
    first = Plan(attempt=ATTEMPT, spec=spec, folder=str(tmp_path), checkpoints="/none", node_rank=0)
    _note_members(replace(first, node_rank=1))
    assert not (tmp_path / MEMBERS_LOG).exists(), "node 0 decides"
    output = tmp_path / "output"
    said = []
    with output.open("wb") as log:
        copied = Mirror(tmp_path, log.fileno())
        for told in (None, "[0, 2]", None):
            if told:
                (tmp_path / MEMBERS_FILE).write_text(told)
            _note_members(first)
            copied.copy()
        monkeypatch.setattr(mirror, "_REPEAT_S", -1.0)
        copied._repeat_at = 0.0
        copied.copy()
        (tmp_path / EXIT_FILE).write_text("{}\n")
        copied.copy(last=True)
    for raw in output.read_bytes().splitlines():
        frame = decode(raw)
        assert frame is not None
        said.append((frame.stream, frame.offset, frame.data))
    lines = [(MEMBERS_LOG, 0, b"[0, 1]\n"), (MEMBERS_LOG, 7, b"[0, 2]\n")]
    assert said == [*lines * 3, (EXIT_FILE, 0, b"{}\n")], "at the end once more, after all that it may be rotated for"


def test_pods_that_do_not_know_each_other_do_not_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2 nodes, the pod's environment 1"):
        locate(plan(tmp_path, nodes=2), {})
    assert locate(plan(tmp_path), {"RANK": "0"}).master_port is None
