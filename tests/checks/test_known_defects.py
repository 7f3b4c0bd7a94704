"""The mistakes that health checks in the field make, each as the very input on which ours must be right.

One test per row of the list: a parser that knows one key only, a dropped continuation row, results[0], exit code 205,
a substring that is its own opposite, a WARN that a PASS overwrites, a column index off by one, "no rows", seven of
eight, an error that ends with 0. What concerns training throughput and NCCL floors is tested where those are measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from machines import H200, Machine
from trainmaster.checks import __main__ as plain
from trainmaster.checks import nvidia
from trainmaster.core.results import CheckResult, Overall, exit_code, judge_overall, ok, warn
from trainmaster.node.parse import xid_catalog

SAMPLES = Path(__file__).parents[1] / "node" / "parse" / "samples"
SHORT, LONG = "dcgmi diag -r 1 -j", "dcgmi diag -r 3 -j"


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


def power(drawn: float, wanted: float, code: int) -> dict[str, object]:
    """DCGM's warning of a missed power target (DCGM_FR_TARGET_POWER, severity triage)."""
    words = f"Max power of {drawn} did not reach desired power minimum target_power_min_ratio of {wanted} for GPU 1"
    return {"warning": words, "error_id": code, "error_severity": 4}


# ── "knows only the 3.x key; on 4.x JSON with a failed memory test it reports PASS with 0 tests" ──


@pytest.mark.parametrize(
    ("name", "device"), [("dcgm-4.2-memory-fails.json", "gpu2"), ("dcgm-3.3.9-memory-fails.json", "gpu1")]
)
@pytest.mark.parametrize("code", [0, 226])  # and whatever dcgmi ends with
def test_a_failed_memory_test_fails_in_both_formats(machine: Machine, name: str, device: str, code: int) -> None:
    machine.gpus(4)
    machine.command(SHORT, sample(name), exit_code=code)
    found = {finding.device: finding for finding in machine.judge("dcgm")}
    assert found[device].verdict == "fail"
    assert "memory" in found[device].reason.lower()
    assert found[device].action


@pytest.mark.parametrize("name", ["dcgm-4.2-healthy.json", "dcgm-3.3.9-healthy.json"])
def test_the_healthy_run_of_both_formats_passes(machine: Machine, name: str) -> None:
    machine.gpus(4)
    machine.command(SHORT, sample(name))
    assert machine.verdicts("dcgm") == {f"gpu{n}": "pass" for n in range(4)}


@pytest.mark.parametrize("key", ["DCGM Diagnostic 5", "diagnostic", ""])
def test_a_key_that_nobody_knows_is_never_a_pass(machine: Machine, key: str) -> None:
    machine.gpus(4)
    machine.command(SHORT, sample("dcgm-4.2-healthy.json").replace('"DCGM Diagnostic"', json.dumps(key), 1))
    assert "pass" not in machine.verdicts("dcgm").values()


def test_a_run_of_no_tests_is_never_a_pass(machine: Machine) -> None:
    machine.gpus(4)
    machine.command(SHORT, '{"DCGM Diagnostic": {"test_categories": []}}')
    assert machine.verdicts("dcgm") == {None: "error"}


# ── "drops the continuation row (Targeted Power … Fail - GPU: 1) and reports ready for training; always exits 0" ──


def test_the_continuation_row_names_gpu_1(machine: Machine) -> None:
    machine.gpus(4)
    machine.command(LONG, sample("dcgm-3.3.9-targeted-power.txt"), exit_code=226)
    found = {finding.device: finding for finding in machine.judge("dcgm_stress")}
    assert found["gpu1"].verdict == "warn"  # 224.1 W of 224 W; DCGM's next step is to look at clocks and utilisation
    assert "Targeted Power" in found["gpu1"].reason
    assert [finding.device for finding in found.values() if finding.verdict not in ("pass", "error")] == ["gpu1"]


@pytest.mark.parametrize(
    ("test", "problem", "verdict", "action"),
    [
        ("targeted_power", power(410.2, 525.0, 63), "warn", "utilisation"),
        ("targeted_power", power(80.0, 525.0, 63), "fail", "field diagnostic"),
        ("targeted_power", {"warning": "GPU 1 ECC", "error_id": 5, "error_severity": 2}, "fail", "out of service"),
        ("memory", power(410.2, 525.0, 63), "fail", "field diagnostic"),
        ("memory", {"warning": "GPU 1 has fallen off the bus", "error_id": 120, "error_severity": 2}, "fail", "power-"),
        ("memory", {"warning": "a CUDA error", "error_id": 47, "error_severity": 4}, "fail", "field diagnostic"),
    ],
)  # fmt: skip
def test_the_action_is_dcgms_own_next_step(
    machine: Machine, test: str, problem: dict[str, object], verdict: str, action: str
) -> None:
    machine.gpus(4)
    document = json.loads(sample("dcgm-4.2-healthy.json"))
    rows = document["DCGM Diagnostic"]["test_categories"][0]["tests"]
    row = json.loads(json.dumps(rows[0])) | {"name": test}
    rows.append(row)
    row["results"][1] |= {"status": "Fail", "warnings": [problem]}
    row["test_summary"] = {"status": "Fail"}
    machine.command(LONG, json.dumps(document), exit_code=226)
    bad = [finding for finding in machine.judge("dcgm_stress") if finding.verdict in ("warn", "fail")]
    assert [(finding.device, str(finding.verdict)) for finding in bad] == [("gpu1", verdict)]
    assert action in (bad[0].action or "")
    assert "--level 3" not in (bad[0].action or "")


def test_a_gpu_off_the_bus_has_one_action_everywhere() -> None:
    assert xid_catalog.load().xids[79].action == nvidia.POWER_CYCLE


def test_the_verdict_is_the_exit_code_of_the_process(machine: Machine) -> None:
    machine.gpus(4)
    machine.command(SHORT, sample("dcgm-4.2-memory-fails.json"))
    words = ["--level", "2", "--only", "dcgm", "--only", "gpu_count", "--replay", str(machine.folder)]
    ran = subprocess.run(
        [sys.executable, "-m", "trainmaster.checks", *words], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    assert "FAIL" in ran.stdout


# ── "looks only at results[0], so a failing GPU 1 is OK; whitelists exit code 205, which is DCGM's isolate" ──


@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("test", [0, 1, 2])
def test_every_result_of_every_test_counts(machine: Machine, number: int, test: int) -> None:
    machine.gpus(4)
    document = json.loads(sample("dcgm-4.2-healthy.json"))
    tests = [test for part in document["DCGM Diagnostic"]["test_categories"] for test in part["tests"]]
    tests[test]["results"][number]["status"] = "Fail"
    machine.command(SHORT, json.dumps(document))
    verdicts = machine.verdicts("dcgm")
    assert verdicts.pop(f"gpu{number}") == "fail"
    assert set(verdicts.values()) == {"pass"}


@pytest.mark.parametrize(("code", "verdict"), [(205, "fail"), (226, "error"), (1, "error"), (-9, "error"), (0, None)])
def test_an_exit_code_is_not_outvoted_by_rows_that_pass(machine: Machine, code: int, verdict: str | None) -> None:
    machine.gpus(4)
    machine.command(SHORT, sample("dcgm-4.2-healthy.json"), exit_code=code)
    assert machine.verdicts("dcgm").get(None) == verdict


def test_exit_code_205_fails_without_any_output(machine: Machine) -> None:
    machine.gpus(4)
    machine.command(SHORT, "", exit_code=205)
    (found,) = machine.judge("dcgm")
    assert found.verdict == "fail"
    assert "isolation" in found.reason


# ── "'Ready' in line is true for NotReady": words that hold their own opposite ──


@pytest.mark.parametrize(
    ("check", "path", "bad"),
    [
        ("gpu_fabric", "fabric/health/summary", "Unhealthy"),
        ("gpu_fabric", "fabric/state", "Not Completed"),
        ("gpu_fabric", "fabric/status", "Unsuccessful Success"),
        ("gpu_recovery", "gpu_recovery_action", "None, Reset"),
        ("gpu_remap", "remapped_rows/remapped_row_pending", "No, Yes"),
        ("gpu_modes", "compute_mode", "Default Prohibited"),
        ("gpu_ecc", "ecc_mode/current_ecc", "Not Enabled"),
        ("gpu_throttle", "clocks_event_reasons/clocks_event_reason_hw_slowdown", "Not Not Active"),
    ],
)
def test_a_word_that_holds_the_good_word_is_not_good(machine: Machine, check: str, path: str, bad: str) -> None:
    machine.gpus(2)
    good: dict[str, str | None] = {"fabric/state": "Completed", "fabric/status": "Success"}
    machine.edit(None, good)
    assert machine.verdicts(check)["gpu1"] == "pass"
    machine.edit(1, {path: bad})
    assert machine.verdicts(check)["gpu0"] == "pass"
    assert machine.verdicts(check)["gpu1"] in ("fail", "error")


def test_inactive_is_not_active(machine: Machine) -> None:
    machine.gpus(2)
    machine.replace("nvidia-smi nvlink -s", "Link 0: 26.562 GB/s", "Link 0: <inactive>")
    assert machine.verdicts("gpu_nvlink") == {"gpu0": "fail", "gpu1": "pass"}


def test_not_active_is_not_active(machine: Machine) -> None:
    """Every reason of the healthy node reads "Not Active", which holds the word Active."""
    assert machine.verdicts("gpu_throttle") == {"gpu0": "pass"}


# ── "WARN is written, then overwritten by PASS" ──


def test_a_warning_survives_what_passes_after_it(machine: Machine) -> None:
    warned = CheckResult(check="a", findings=(warn("slow", action="look"), ok("fine")), took_s=0)
    passed = CheckResult(check="b", findings=(ok("fine"),), took_s=0)
    assert warned.verdict == "warn"
    assert judge_overall([warned, passed, passed], planned=["a", "b"]) is Overall.WARN
    machine.gpus(8)
    machine.edit(0, {"persistence_mode": "Disabled"})  # the first warns, seven pass behind it
    assert plain.main(["--replay", str(machine.folder), "--only", "gpu_modes", "--strict"]) == 1


# ── "queries 3 columns and tests index 3" ──


@pytest.mark.parametrize("field", ["pending", "failure"])
@pytest.mark.parametrize("gpu", [0, 7])
def test_each_field_of_the_row_remapper_is_read_by_its_name(machine: Machine, field: str, gpu: int) -> None:
    machine.gpus(8)
    machine.edit(gpu, {f"remapped_rows/remapped_row_{field}": "Yes"})
    verdicts = machine.verdicts("gpu_remap")
    assert verdicts.pop(f"gpu{gpu}") == "fail"
    assert set(verdicts.values()) == {"pass"}


def test_a_field_of_the_row_remapper_that_is_gone_is_never_a_no(machine: Machine) -> None:
    machine.gpus(1)
    machine.edit(0, {"remapped_rows/remapped_row_failure": None})
    assert machine.verdicts("gpu_remap") == {"gpu0": "error"}


# ── "'no rows' and '7 of 8 GPUs' are healthy; an error exits 0" ──


@pytest.mark.parametrize("stated", [(), ("--expect", "gpus=8")])
@pytest.mark.parametrize("trouble", ["no rows", "no devices", "7 of 8", "hung", "refused"])
def test_what_is_missing_never_ends_with_0(
    machine: Machine, capsys: pytest.CaptureFixture[str], trouble: str, stated: tuple[str, ...]
) -> None:
    line, real = "nvidia-smi -q -x", (H200 / "commands" / "nvidia-smi_-q_-x.out").read_text()
    start, end = real.index("\t<gpu id="), real.index("</gpu>\n") + len("</gpu>\n")
    machine.gpus(8, drop=3)
    if trouble == "no rows":
        machine.smi((real[:start] + real[end:]).replace("<attached_gpus>1<", "<attached_gpus>0<"))
    elif trouble == "no devices":
        machine.command(line, "No devices were found\n", exit_code=6)
    elif trouble == "hung":
        machine.refuses(line, "CommandTimedOut", "nvidia-smi gave no answer in 90 s and was killed")
    elif trouble == "refused":
        machine.refuses(line, "HostError", "nvidia-smi could not be started: Permission denied")
    code = plain.main(["--json", "--replay", str(machine.folder), "--only", "gpu_count", *stated])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    wanted = ("FAIL", 1) if trouble in ("no rows", "7 of 8") else ("INCOMPLETE", 3)
    assert (document["overall"], code) == wanted


def test_an_error_has_an_exit_code_of_its_own() -> None:
    assert {overall: exit_code(overall) for overall in Overall} == {"PASS": 0, "WARN": 0, "FAIL": 1, "INCOMPLETE": 3}
