"""`trainmaster check` and `python -m trainmaster.checks`: one verdict, one exit code, evidence that replays."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from machines import H200, Machine
from trainmaster.checks import __main__ as plain
from trainmaster.checks import plan
from trainmaster.cli import _console
from trainmaster.cli.main import build
from trainmaster.core.errors import UsageError


def invoke(*words: str) -> tuple[int, str]:
    ran = CliRunner().invoke(build(), ["check", *words])
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return ran.exit_code, ran.stdout


def invoke_json(*words: str) -> dict[str, Any]:
    code, text = invoke("--json", *words)
    document: dict[str, Any] = json.loads(text)
    assert document["exit_code"] == code
    return document


def findings(document: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(result["check"], result["findings"]) for result in document["results"]]


def test_a_healthy_node_passes_with_0() -> None:
    document = invoke_json("--replay", str(H200), "--expect", "gpus=1", "--expect", "gpu_model=H200")
    assert {"overall", "exit_code", "host", "level", "expect", "planned", "results", "took_s"} <= set(document)
    assert (document["overall"], document["exit_code"], document["host"]) == ("PASS", 0, "h200")
    assert document["expect"] == {"gpus": 1, "gpu_model": "H200"}
    assert document["planned"] == [result["check"] for result in document["results"]] == plan(1)


def test_the_table_names_the_check_the_device_and_what_to_do(machine: Machine) -> None:
    code, text = invoke("--replay", str(H200), "--expect", "gpu_model=H100")
    words = " ".join(text.split())
    assert code == 1
    assert "NVIDIA H200, not H100" in words
    assert re.search(r"FAIL 1 fail, \d+ pass, \d+ skip on h200", words)
    assert "gpu0" in words


def test_warn_is_0_and_1_when_strict_and_1_for_nagios(machine: Machine) -> None:
    machine.answer("disk", "/dev/shm", {"free_bytes": 1 << 26, "total_bytes": 1 << 26, "free_files": 9})
    folder = str(machine.folder)
    assert invoke("--replay", folder)[0] == 0
    assert invoke("--replay", folder, "--strict")[0] == 1
    assert invoke("--replay", folder, "--nagios")[0] == 1


def test_fail_is_1_and_2_for_nagios() -> None:
    assert invoke("--replay", str(H200), "--expect", "gpus=8")[0] == 1
    assert invoke("--replay", str(H200), "--expect", "gpus=8", "--nagios")[0] == 2


def test_what_was_not_measured_is_3(tmp_path: Path) -> None:
    (tmp_path / "answers.json").write_text('{"v": 1}')
    document = invoke_json("--replay", str(tmp_path))
    assert (document["overall"], document["exit_code"], document["host"]) == ("INCOMPLETE", 3, None)


def test_only_skips_is_no_pass(machine: Machine) -> None:
    machine.no_gpus()
    assert invoke_json("--replay", str(machine.folder), "--only", "gpu_count,gpu_driver")["overall"] == "INCOMPLETE"


WRONG = [["--only", "gpu_cont"], ["--skip", "nothing"], ["--expect", "gpu=8"], ["--expect", "gpus"],
         ["--replay", "/no/such/folder"], ["--out", "x", "--capture", "y"]]  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_wrong_usage_is_2_and_leaves_nothing_behind(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        invoke(*words)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_this_machine_captured_and_replayed_gives_the_same_findings(tmp_path: Path) -> None:
    live = invoke_json("--out", str(tmp_path / "out"))
    (folder,) = (tmp_path / "out" / "nodes").iterdir()
    replayed = invoke_json("--replay", str(folder))
    assert findings(replayed) == findings(live)
    assert (replayed["overall"], replayed["host"]) == (live["overall"], live["host"])


def test_a_capture_of_a_replay_replays(tmp_path: Path) -> None:
    first = invoke_json("--replay", str(H200), "--capture", str(tmp_path / "copy"))
    again = invoke_json("--replay", str(tmp_path / "copy"))
    assert findings(first) == findings(again)


def test_the_plain_entry_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    code = plain.main(["--json", "--replay", str(H200), "--expect", "gpus=2"])
    document = json.loads(capsys.readouterr().out)
    same = invoke_json("--replay", str(H200), "--expect", "gpus=2")
    assert code == 1
    assert findings(document) == findings(same)
    assert plain.main(["--replay", str(H200)]) == 0
    assert re.search(r"^PASS: \d+ pass, \d+ skip on h200", capsys.readouterr().out, flags=re.MULTILINE)
    assert plain.main(["--only", "x"]) == 2


def test_the_plain_entry_needs_python_and_nothing_else(tmp_path: Path) -> None:
    """As on a node without our dependencies: no site-packages, only the node half of the package."""
    import trainmaster

    source = Path(trainmaster.__file__).parent
    for name in ("core", "node", "checks"):
        shutil.copytree(source / name, tmp_path / "trainmaster" / name)
    shutil.copy(source / "__init__.py", tmp_path / "trainmaster")
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import sys; sys.path.insert(0, sys.argv.pop(1));"
         "from trainmaster.checks.__main__ import main; sys.exit(main())",
         str(tmp_path), "--json", "--replay", str(H200), "--capture", str(tmp_path / "capture")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["overall"] == "PASS"
    assert (tmp_path / "capture" / "answers.json").exists()


def test_a_bundle_is_sent_whole_and_needs_a_folder(tmp_path: Path) -> None:
    bundle, store = tmp_path / "bundle", tmp_path / "store"
    replay = ("--replay", str(H200), "--expect", "gpus=1")
    code, _ = invoke(*replay, "--out", str(bundle), "--upload", str(store), "--node-price", "98.32")
    assert code == 0
    here = sorted(path.relative_to(bundle) for path in bundle.rglob("*") if path.is_file())
    assert here == sorted(path.relative_to(store) for path in store.rglob("*") if path.is_file())
    assert Path("health_check_metrics.json") in here
    assert "98.32" in (bundle / "report.md").read_text()
    with pytest.raises(UsageError, match="--out"):
        invoke(*replay, "--upload", str(store))


@pytest.mark.parametrize(("columns", "beside"), [(80, False), (160, True)])
def test_on_a_narrow_terminal_the_action_stands_below_its_reason(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, columns: int, beside: bool
) -> None:
    machine.gpus(1)
    machine.edit(0, {"gpu_power_readings/current_power_limit": "400.00 W"})
    monkeypatch.setattr(_console.out, "_width", columns)
    _, text = invoke("--replay", str(machine.folder))
    (line,) = [line for line in text.splitlines() if "lowered to 400 W from" in line]
    assert ("raise the limit again: nvidia-smi -pl 700" in line) is beside
    assert ("what to do: raise the limit again:" in text) is not beside


def test_a_second_bundle_in_one_folder_is_refused(tmp_path: Path) -> None:
    words = ("--replay", str(H200), "--out", str(tmp_path / "bundle"), "--only", "ram")
    assert invoke(*words)[0] == 0
    (tmp_path / "bundle-2").mkdir()
    with pytest.raises(UsageError) as refused:
        invoke(*words)
    free = f"{tmp_path}/bundle-3"
    assert str(refused.value).endswith(f"/bundle already holds a run; use another folder: --out {free}")
    assert invoke(*words[:3], free, *words[4:])[0] == 0
