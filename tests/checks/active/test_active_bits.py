"""Silent corruption and memory: a GPU whose bits differ is named, by its own repeats, by its equals and by the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from probe_answers import Report, answer, only

from machines import Machine
from trainmaster.core.results import Verdict

OTHER = "f" * 32


def work(name: str, **changes: Any) -> Any:
    return lambda told: told["results"]["work"][name].update(changes)


@pytest.mark.parametrize("name", ["gemm", "gemm_exact", "attention", "training"])
def test_the_gpu_whose_digest_differs_is_named(machine: Machine, name: str) -> None:
    answer(machine, "corruption", 8, only(6, work(name, digest=OTHER)))
    found = {finding.device: finding for finding in machine.judge("corruption")}
    assert {device for device, finding in found.items() if finding.verdict is Verdict.FAIL} == {"gpu6"}
    assert f"{name}_4096" in found["gpu6"].reason
    assert "7 of 8" in found["gpu6"].reason
    assert found["gpu6"].action


def test_of_two_that_differ_both_are_named(machine: Machine) -> None:
    answer(machine, "corruption", 2, only(1, work("gemm", digest=OTHER)))
    findings = machine.judge("corruption")
    assert [finding.verdict for finding in findings] == [Verdict.FAIL, Verdict.FAIL]
    assert "gpu1" in findings[0].reason
    assert "no majority" in findings[0].reason


def test_every_gpu_is_named_when_all_differ(machine: Machine) -> None:
    answer(machine, "corruption", 4, lambda number, told: work("gemm", digest=f"{number:032x}")(told))
    assert set(machine.verdicts("corruption").values()) == {"fail"}


def test_gpus_under_other_software_are_not_compared(machine: Machine) -> None:
    def change(told: Report) -> None:
        told["device"]["torch"] = "2.13.0+cu130"
        work("gemm", digest=OTHER)(told)

    answer(machine, "corruption", 3, only(2, change))
    findings = machine.judge("corruption")
    assert {finding.verdict for finding in findings} == {Verdict.PASS}
    assert "no equal GPU" in findings[2].reason


def test_another_kernel_may_give_other_bits(machine: Machine) -> None:
    answer(machine, "corruption", 3, only(2, work("attention", backend="math", digest=OTHER)))
    assert set(machine.verdicts("corruption").values()) == {"pass"}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemm", {"different_repeats": 1, "different": 4}, "1 of 20 repeats of gemm differ in 4"),
        ("training", {"different_repeats": 20, "different": 9000}, "20 of 20"),
        ("gemm_exact", {"wrong": 2}, "differ from the CPU's"),
        ("attention", {"finite": False}, "NaN"),
    ],
)
def test_a_gpu_alone_shows_it_too(machine: Machine, name: str, changes: dict[str, Any], words: str) -> None:
    answer(machine, "corruption", 1, only(0, work(name, **changes)))
    (finding,) = machine.judge("corruption")
    assert finding.verdict is Verdict.FAIL
    assert words in finding.reason


@pytest.mark.parametrize("changes", [{"repeats": 0}, {"digest": None}, {"digest": ""}, {"different": "nan"}])
def test_what_was_not_repeated_is_no_pass(machine: Machine, changes: dict[str, Any]) -> None:
    answer(machine, "corruption", 3, only(1, work("gemm", **changes)))
    assert machine.verdicts("corruption") == {"gpu0": "pass", "gpu1": "error", "gpu2": "pass"}


def test_digests_are_kept_for_the_comparison_between_nodes(machine: Machine) -> None:
    answer(machine, "corruption", 1)
    (finding,) = machine.judge("corruption")
    assert set(finding.values["digests"]) == {
        "gemm_4096",
        "gemm_exact_4096",
        "attention_4096_flash_attention",
        "training_4096",
    }
    assert finding.values["torch"] == "2.11.0+cu130"


WRONG = {"pattern": "0x55", "chunk": 3, "words": 2, "again": 2}
SHOWN = [{"word": 17, "expected": "0x5555555555555555", "read": "0x5555555555555554"}]


@pytest.mark.parametrize("check", ["memory_pattern", "memory_whole"])
def test_a_changed_word_fails_with_what_was_read(machine: Machine, check: str) -> None:
    wrong = [{**WRONG, "shown": SHOWN}]
    answer(machine, check, 2, only(1, lambda told: told["results"].update(wrong_words=2, wrong=wrong)))
    good, bad = machine.judge(check)
    assert good.verdict is Verdict.PASS
    assert bad.verdict is Verdict.FAIL
    assert "0x5555555555555554 for 0x5555555555555555" in bad.reason
    assert "still wrong" in bad.reason


@pytest.mark.parametrize(("kind", "verdict"), [("corrected", "warn"), ("uncorrected", "fail")])
def test_memory_errors_that_were_counted_meanwhile_are_told(machine: Machine, kind: str, verdict: str) -> None:
    after = {"corrected": 0, "uncorrected": 0, kind: 3}
    answer(machine, "memory_pattern", 2, only(0, lambda told: told["results"].update(ecc_after=after)))
    assert machine.verdicts("memory_pattern") == {"gpu0": verdict, "gpu1": "pass"}


def test_old_memory_errors_are_not_held_against_it(machine: Machine) -> None:
    ecc = {"corrected": 7, "uncorrected": 1}
    answer(machine, "memory_pattern", 1, lambda _, told: told["results"].update(ecc_before=ecc, ecc_after=ecc))
    assert machine.verdicts("memory_pattern") == {"gpu0": "pass"}


@pytest.mark.parametrize("changes", [{"bytes": 0}, {"patterns": []}, {"wrong_words": None}])
def test_memory_that_was_not_tested_is_an_error(machine: Machine, changes: dict[str, Any]) -> None:
    answer(machine, "memory_pattern", 1, lambda _, told: told["results"].update(changes))
    assert machine.verdicts("memory_pattern") == {"gpu0": "error"}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"tflops_end": 500.0}, "fail"),  # sags, and is slow
        ({"tflops_cold": 850.0}, "warn"),  # sags
        ({"throttle": {"hw_thermal": 4}}, "fail"),
        ({"throttle": {"sw_thermal": 4}}, "warn"),
        ({"throttle": {"power_cap": 300}}, "pass"),
        ({"different": 1}, "fail"),
        ({"tflops_end": "nan"}, "error"),
        ({"throttle": None}, "error"),
        ({"samples": []}, "error"),
    ],
)
def test_burning(machine: Machine, changes: dict[str, Any], verdict: str) -> None:
    answer(machine, "burn", 2, only(1, lambda told: told["results"].update(changes)))
    assert machine.verdicts("burn") == {"gpu0": "pass", "gpu1": verdict}


def test_a_burning_gpu_slower_than_its_peers_is_told(machine: Machine) -> None:
    slow = {"tflops_cold": 660.0, "tflops_end": 650.0}
    answer(machine, "burn", 8, only(4, lambda told: told["results"].update(slow)))
    assert machine.verdicts("burn")["gpu4"] == "warn"


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"sum": 8}, "fail"),
        ({"copied_back": False}, "fail"),
        ({"allocation_s": 45.0}, "warn"),
        ({"sum": None}, "error"),
    ],
)
def test_starting(machine: Machine, changes: dict[str, Any], verdict: str) -> None:
    answer(machine, "cuda_init", 2, only(0, lambda told: told["results"].update(changes)))
    assert machine.verdicts("cuda_init") == {"gpu0": verdict, "gpu1": "pass"}
