"""GEMM, memory and PCIe rates: slow GPUs are named, healthy ones pass, and without a comparison nothing passes."""

from __future__ import annotations

from typing import Any

import pytest
from probe_answers import Report, answer, only, rates

from machines import Machine
from trainmaster.core.results import Verdict

RATES = ("gemm", "hbm", "pcie_copy")
# Where a check's main rate lies in its report.
PATH = {"gemm": ("burst",), "hbm": ("copy",), "pcie_copy": ("h2d",)}


def scale(check: str, *factors: float) -> Any:
    """Multiply the rounds of the check's main rate."""

    def change(told: Report) -> None:
        place = told["results"]
        for key in PATH[check]:
            place = place[key]
        place.update(rates(*(rate * factor for rate, factor in zip(place["rounds"], factors * 3, strict=False))))

    return change


@pytest.mark.parametrize("check", [*RATES, "cuda_init", "memory_pattern", "memory_whole", "corruption", "burn"])
def test_eight_healthy_gpus_pass(machine: Machine, check: str) -> None:
    answer(machine, check, 8)
    assert machine.verdicts(check) == {f"gpu{n}": "pass" for n in range(8)}


@pytest.mark.parametrize("check", RATES)
@pytest.mark.parametrize("count", [1, 8])
def test_a_slow_gpu_is_named_with_its_rounds_and_an_action(machine: Machine, check: str, count: int) -> None:
    answer(machine, check, count, only(0, scale(check, 0.7)))
    slow, *others = machine.judge(check)
    assert (slow.device, slow.verdict) == ("gpu0", Verdict.FAIL)
    assert any(f"{share}%" in slow.reason for share in (69, 70))
    assert slow.action
    assert any(isinstance(value, list) and len(value) == 3 for value in slow.values.values())  # every round is kept
    assert {finding.verdict for finding in others} <= {Verdict.PASS}


@pytest.mark.parametrize(("check", "factor"), [("gemm", 0.87), ("hbm", 0.88), ("pcie_copy", 0.8)])
def test_a_rate_between_good_and_bad_warns(machine: Machine, check: str, factor: float) -> None:
    answer(machine, check, 1, only(0, scale(check, factor)))
    assert machine.verdicts(check) == {"gpu0": "warn"}


@pytest.mark.parametrize("check", RATES)
def test_one_bad_round_of_three_does_not_fail(machine: Machine, check: str) -> None:
    answer(machine, check, 1, only(0, scale(check, 0.5, 1.0, 1.0)))
    assert machine.verdicts(check) == {"gpu0": "pass"}


@pytest.mark.parametrize("check", RATES)
def test_two_bad_rounds_of_three_are_unsteady(machine: Machine, check: str) -> None:
    answer(machine, check, 1, only(0, scale(check, 0.5, 0.5, 1.0)))
    (finding,) = machine.judge(check)
    assert finding.verdict is Verdict.WARN
    assert "unsteady" in finding.reason


@pytest.mark.parametrize("check", RATES)
@pytest.mark.parametrize("count", [1, 2])
def test_an_unknown_gpu_without_peers_warns_that_nothing_was_compared(machine: Machine, check: str, count: int) -> None:
    answer(machine, check, count, name="NVIDIA Mystery 9000")
    for finding in machine.judge(check):
        assert finding.verdict is Verdict.WARN
        assert "not compared" in finding.reason
        assert "--expect" in (finding.action or "")


@pytest.mark.parametrize("check", RATES)
def test_unknown_gpus_are_compared_with_each_other(machine: Machine, check: str) -> None:
    answer(machine, check, 4, only(2, scale(check, 0.7)), name="NVIDIA Mystery 9000")
    assert machine.verdicts(check) == {"gpu0": "pass", "gpu1": "pass", "gpu2": "fail", "gpu3": "pass"}


@pytest.mark.parametrize(("factor", "verdict"), [(0.95, "pass"), (0.90, "warn"), (0.80, "fail")])
def test_a_gpu_that_cannot_hold_what_it_reaches_is_named(machine: Machine, factor: float, verdict: str) -> None:
    def change(told: Report) -> None:
        held = told["results"]["precisions"]["bf16"]
        held.update(rates(*(rate * factor for rate in held["rounds"])))

    answer(machine, "gemm", 1, only(0, change))
    assert machine.verdicts("gemm") == {"gpu0": verdict}


def test_peers_of_a_known_gpu_show_a_straggler_that_the_baseline_lets_pass(machine: Machine) -> None:
    answer(machine, "gemm", 8, only(5, scale("gemm", 0.90)))
    assert machine.verdicts("gemm") == {f"gpu{n}": "warn" if n == 5 else "pass" for n in range(8)}


@pytest.mark.parametrize(("check", "expect"), [("gemm", "gemm_tflops"), ("hbm", "hbm_gbps"), ("pcie_copy", "h2d_gbps")])
def test_a_stated_floor_counts_instead_of_the_baseline(machine: Machine, check: str, expect: str) -> None:
    answer(machine, check, 1, only(0, scale(check, 0.5)))
    assert machine.verdicts(check, **{expect: 20.0}) == {"gpu0": "pass"}
    assert machine.verdicts(check, **{expect: 9e3}) == {"gpu0": "fail"}


@pytest.mark.parametrize("check", RATES)
@pytest.mark.parametrize("rubbish", ["nan", None, 0, -5.0, True, [], {}, "fast"])
def test_a_rate_that_is_no_number_is_an_error(machine: Machine, check: str, rubbish: object) -> None:
    def change(told: Report) -> None:
        place = told["results"]
        for key in PATH[check]:
            place = place[key]
        place["rounds"][1] = rubbish

    answer(machine, check, 3, only(1, change))
    assert machine.verdicts(check) == {"gpu0": "pass", "gpu1": "error", "gpu2": "pass"}


@pytest.mark.parametrize("check", RATES)
def test_a_rate_above_what_the_chip_can_do_is_an_error(machine: Machine, check: str) -> None:
    answer(machine, check, 1, only(0, scale(check, 3.0)))
    (finding,) = machine.judge(check)
    assert finding.verdict is Verdict.ERROR
    assert "timing is wrong" in finding.reason


def test_fast_but_wrong_products_fail(machine: Machine) -> None:
    def change(told: Report) -> None:
        told["results"]["precisions"]["tf32"]["relative_error"] = 0.2

    answer(machine, "gemm", 2, only(1, change))
    good, bad = machine.judge("gemm")
    assert good.verdict is Verdict.PASS
    assert bad.verdict is Verdict.FAIL
    assert "tf32 products are wrong" in bad.reason


@pytest.mark.parametrize(("check", "name"), [("hbm", "copy_wrong"), ("hbm", "triad_wrong"), ("pcie_copy", "wrong")])
def test_fast_but_changed_data_fails(machine: Machine, check: str, name: str) -> None:
    answer(machine, check, 2, only(1, lambda told: told["results"].update({name: 3})))
    assert machine.verdicts(check) == {"gpu0": "pass", "gpu1": "fail"}


def test_a_chip_without_fp8_passes_and_one_without_bf16_is_an_error(machine: Machine) -> None:
    gone = {"available": False, "why": "this chip has none"}
    answer(machine, "gemm", 1, lambda _, told: told["results"]["precisions"].update(fp8=gone))
    (finding,) = machine.judge("gemm")
    assert (finding.verdict, finding.values["fp8_tflops"]) == (Verdict.PASS, None)
    answer(machine, "gemm", 1, lambda _, told: told["results"]["precisions"].update(bf16=gone))
    assert machine.verdicts("gemm") == {"gpu0": "error"}


def test_what_else_was_on_a_slow_gpu_is_told(machine: Machine) -> None:
    def change(told: Report) -> None:
        scale("gemm", 0.6)(told)
        told["device"]["free_bytes"] = 60 << 30

    answer(machine, "gemm", 1, only(0, change))
    assert "held 80.0 GiB" in machine.judge("gemm")[0].reason


def test_gpus_behind_one_switch_share_it_and_pass(machine: Machine) -> None:
    def change(_: int, told: Report) -> None:
        told["results"]["together"].update(h2d=27.0, d2h=26.0)

    answer(machine, "pcie_copy", 8, change)
    findings = machine.judge("pcie_copy")
    assert {finding.verdict for finding in findings} == {Verdict.PASS}
    assert findings[0].values["together"] == {"with_gpus": 7, "h2d": 27.0, "d2h": 26.0, "both": 98.0}


def drawing(watts: float | None) -> dict[str, Any]:
    return {"sm_mhz": 1500, "memory_mhz": 3201, "temperature_c": 62, "power_w": watts, "throttle": ["power_cap"]}


@pytest.mark.parametrize(("watts", "verdict"), [(690.0, "pass"), (740.0, "pass"), (900.0, "warn"), (None, "error")])
def test_power_efficiency_is_compared_with_equal_gpus(machine: Machine, watts: float | None, verdict: str) -> None:
    def change(number: int, told: Report) -> None:
        told["results"]["after"] = drawing(watts if number == 2 else 690.0)

    answer(machine, "gemm", 8, change)
    assert machine.verdicts("gemm") == {f"gpu{n}": verdict if n == 2 else "pass" for n in range(8)}
    finding = machine.judge("gemm")[3]
    assert finding.values["bf16_gflops_per_w"] == pytest.approx(665.3 / 690 * 1000, abs=0.1)


def test_without_power_sensors_there_is_no_efficiency(machine: Machine) -> None:
    answer(machine, "gemm", 8)
    assert {finding.values["bf16_gflops_per_w"] for finding in machine.judge("gemm")} == {None}
    assert set(machine.verdicts("gemm").values()) == {"pass"}
