"""A DCGM diagnostic is read whole: every test, every GPU, in every format DCGM prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainmaster.node.parse import ParseError, dcgm
from trainmaster.node.parse.dcgm import Status, worst

SAMPLES = Path(__file__).parent / "samples"


def read(name: str) -> dcgm.Diag:
    return dcgm.parse((SAMPLES / name).read_text())


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SAMPLES / name).read_text())
    return found


def status(diag: dcgm.Diag, test: str, gpu: int) -> Status:
    (found,) = [
        result.status for item in diag.tests if item.key == test for result in item.results if result.gpu == gpu
    ]
    return found


def test_the_continuation_row_of_a_table_is_not_lost() -> None:
    diag = read("dcgm-3.3.9-targeted-power.txt")
    assert [status(diag, "targeted_power", gpu) for gpu in range(4)] == ["Pass", "Fail", "Pass", "Pass"]
    assert worst(diag, 1) is Status.FAIL
    (row,) = [r for test in diag.tests for r in test.results if r.status is Status.FAIL]
    assert row.problems[0].text == (
        "GPU 1 Max power of 224.1 did not reach desired power minimum target_power_min_ratio of 224"
    )
    assert (diag.dcgm_version, diag.driver_version, diag.gpu_count) == ("3.3.9", "570.195.03", 4)


def test_a_table_without_its_last_line_passes_nobody() -> None:
    diag = read("dcgm-3.3.9-targeted-power.txt")
    assert [worst(diag, gpu) for gpu in (0, 2, 3)] == [Status.UNKNOWN] * 3


@pytest.mark.parametrize(
    ("name", "form", "gpus"),
    [
        ("dcgm-3.3.9-healthy.txt", "text-3", 8),
        ("dcgm-3.3.9-healthy.json", "json-3", 4),
        ("dcgm-4.2-healthy.txt", "text-4", 4),
        ("dcgm-4.2-healthy.json", "json-4", 4),
    ],
)
def test_a_healthy_run_passes_on_every_gpu(name: str, form: str, gpus: int) -> None:
    diag = read(name)
    assert (diag.format, diag.faults, diag.missing(), diag.gpus) == (form, (), (), tuple(range(gpus)))
    assert {worst(diag, gpu) for gpu in diag.gpus} == {Status.PASS}
    assert dcgm.missing_tests(diag, 3 if form.endswith("3") else 2) == ()


@pytest.mark.parametrize(
    ("name", "gpu"),
    [("dcgm-3.3.9-memory-fails.json", 1), ("dcgm-4.2-memory-fails.json", 2), ("dcgm-4.2-memory-fails.txt", 1)],
)
def test_a_failed_memory_test_is_the_failure_of_its_gpu_alone(name: str, gpu: int) -> None:
    diag = read(name)
    assert status(diag, "memory", gpu) is Status.FAIL
    assert {worst(diag, other) for other in diag.gpus if other != gpu} == {Status.PASS}
    (failed,) = [r for test in diag.tests for r in test.results if r.status is Status.FAIL]
    assert "memory" in failed.problems[0].text
    assert failed.problems[0].severity in (2, None)


def test_a_gpu_that_a_test_does_not_mention_is_missing_not_healthy() -> None:
    run = document("dcgm-4.2-healthy.json")
    del run["DCGM Diagnostic"]["test_categories"][1]["tests"][0]["results"][3]
    diag = dcgm.parse(json.dumps(run))
    assert diag.missing() == (("memory", 3),)
    assert worst(diag, 3) is Status.UNKNOWN


def test_a_summary_that_no_row_explains_concerns_every_gpu() -> None:
    run = document("dcgm-4.2-healthy.json")
    run["DCGM Diagnostic"]["test_categories"][1]["tests"][0]["test_summary"]["status"] = "Fail"
    assert worst(dcgm.parse(json.dumps(run)), 0) is Status.FAIL


def test_the_error_below_a_row_of_the_node_is_kept_with_it() -> None:
    table = (SAMPLES / "dcgm-3.3.9-healthy.txt").read_text()
    bad = table.replace(
        "| Persistence Mode          | Pass                                           |",
        "| Persistence Mode          | Fail                                           |\n"
        "| Error                     | Persistence mode for GPU 0 is currently disab  |\n"
        "|                           | led.                                           |",
    )
    diag = dcgm.parse(bad)
    (test,) = [test for test in diag.tests if test.name == "Persistence Mode"]
    assert [problem.text for result in test.results for problem in result.problems] == [
        "Persistence mode for GPU 0 is currently disabled."
    ]
    assert (diag.faults, worst(diag, 5)) == ((), Status.FAIL)


def test_a_test_that_failed_without_a_gpu_fails_them_all() -> None:
    """As DCGM 4.4.1 prints it when the helper program of a test is not installed."""
    table = (SAMPLES / "dcgm-4.2-healthy.txt").read_text()
    at = table.index("| pcie")
    note = "| pcie                      | Fail                                           |\n"
    note += "| Warning                   | There was an internal error during the test:   |\n"
    diag = dcgm.parse(table[:at] + note + table[table.rindex("\n+--") + 1 :])
    assert {worst(diag, gpu) for gpu in range(4)} == {Status.FAIL}


def test_an_unknown_status_is_kept_and_never_passes() -> None:
    run = document("dcgm-3.3.9-healthy.json")
    run["DCGM GPU Diagnostic"]["test_categories"][2]["tests"][0]["results"][0]["status"] = "Degraded"
    diag = dcgm.parse(json.dumps(run))
    assert worst(diag, 0) is Status.UNKNOWN
    assert any("Degraded" in fault for fault in diag.faults)


def test_a_test_that_the_level_always_runs_is_missed() -> None:
    run = document("dcgm-3.3.9-healthy.json")
    del run["DCGM GPU Diagnostic"]["test_categories"][3]["tests"][1]
    assert dcgm.missing_tests(dcgm.parse(json.dumps(run)), 3) == ("targeted_power",)


def test_a_test_that_is_skipped_on_every_gpu_is_missed() -> None:
    run = document("dcgm-3.3.9-healthy.json")
    results = run["DCGM GPU Diagnostic"]["test_categories"][3]["tests"][1]["results"]
    for result in results[1:]:
        result["status"] = "Skip"
    assert dcgm.missing_tests(dcgm.parse(json.dumps(run)), 3) == (() if len(results) > 1 else ("targeted_power",))
    results[0]["status"] = "Skip"
    assert dcgm.missing_tests(dcgm.parse(json.dumps(run)), 3) == ("targeted_power",)


def test_a_diagnostic_that_could_not_run_says_why() -> None:
    diag = dcgm.parse('{"DCGM Diagnostic": {"runtime_error": "DCGM is paused", "version": "4.2.3"}}')
    assert diag.runtime_error == "DCGM is paused"
    assert worst(diag) is Status.UNKNOWN
    said = dcgm.parse("Error: Diagnostic can only be performed on a homogeneous group of GPUs.")
    assert said.runtime_error is not None and "homogeneous" in said.runtime_error


def test_every_iteration_counts() -> None:
    good, bad = document("dcgm-3.3.9-healthy.json"), document("dcgm-3.3.9-memory-fails.json")
    diag = dcgm.parse(json.dumps({"iterations": [good, bad], "Overall Result": "Fail"}))
    assert worst(diag, 1) is Status.FAIL


@pytest.mark.parametrize(
    "text",
    ["", "hello", "{}", "[]", '{"DCGM": {}}', '{"DCGM Diagnostic": 1', "{" * 100_000, '{"a": 1, "a": 2}', '{"a": NaN}'],
)
def test_what_is_no_diagnostic_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        dcgm.parse(text)


def test_exit_codes_are_dcgms_own_numbers() -> None:
    assert dcgm.read_exit(0).code == 0
    assert (dcgm.read_exit(226).code, dcgm.read_exit(226).isolate) == (-30, False)
    assert (dcgm.read_exit(205).code, dcgm.read_exit(205).isolate) == (-51, True)
    assert "signal 9" in dcgm.read_exit(-9).meaning
    assert dcgm.read_exit(1).code == 1
