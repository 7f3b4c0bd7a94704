"""Every GPU multiplies matrices as fast as its model does, and rightly. One slow GPU slows the whole job to its pace.

All GPUs at once: they share the server's power and air, and train at once too.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from trainmaster.checks import profiles
from trainmaster.checks.active import _probe, _rates
from trainmaster.checks.active._rates import Judged, Yardstick
from trainmaster.checks.comparison import Peer, rate
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict
from trainmaster.node.host import Host

LEVEL = 2
GPU = True
EXPECTS = ("gemm_tflops",)
COMPARES = (
    rate("tflops", "TFLOPS"),
    Peer(
        name="bf16_gflops_per_w",
        words="of bf16 work",
        unit="GFLOPS/W",
        bad="low",
        least_far=0.10,
        action="check cooling; see gpu_power and gemm",
        everywhere=True,
    ),
)
METRICS: dict[str, str] = {}
TIMEOUT_S = _probe.CHECK_TIMEOUT_S
# Of the best measured, which is a burst.
WARN_BELOW, FAIL_BELOW = 0.90, 0.82
# Held for seconds, at the power limit: an H100 keeps 92 % of its best (gpu-fryer), an H200 84 % (docs/LOG.md).
HELD_WARN_BELOW, HELD_FAIL_BELOW = 0.78, 0.70
# Of a datasheet's peak. A chip with a low power limit (L4) is healthy at half of it.
DATASHEET_BELOW = 0.40
# ‖product − exact‖ / ‖exact‖: the rounding of the result, some times over. Hopper adds 8-bit products with 14 bits,
# which costs up to 2 % (DeepSeek-V3 report, §3.3.2); one wrong tile of 64 costs 12 %.
TOLERANCE = {"bf16": 1e-2, "fp16": 2e-3, "tf32": 2e-3, "fp8": 8e-2}
# Of the median of equal GPUs: at one power limit chips differ by some 3 %, and a sample of the power by as much again.
EFFICIENCY_WARN_BELOW = 0.85
SLOW = "see its throttle reasons, power limit and clocks, and what else runs on it; replace it if it stays slow"


def read(host: Host) -> _probe.Probed:
    return _probe.read(host, "gemm")


def judge(probed: _probe.Probed, expect: Expect) -> list[Finding]:
    return _probe.judge_all(
        probed, "gemm", expect, lambda device, report, every: _judge_one(device, report, every, expect.gemm_tflops)
    )


def _judge_one(device: str, report: _probe.Report, every: Mapping[str, _probe.Report], stated: float | None) -> Finding:
    judgements: list[Judged] = []
    values: dict[str, Any] = {**report.software, "size": _probe.count(report.results, "size")}
    if not _measured(report, "bf16"):
        raise ValueError("bf16 was not measured")
    for name, tolerance in TOLERANCE.items():
        if not _measured(report, name):
            values[f"{name}_tflops"] = None
            continue
        precision = report.results["precisions"][name]
        held = _rates.rounds_of(precision)
        rounds = _rates.rounds_of(report.results["burst"]) if name == "bf16" else held
        relative_error = _probe.number(precision, "relative_error")
        values |= {f"{name}_tflops": max(rounds), f"{name}_rounds": list(rounds), f"{name}_error": relative_error}
        if relative_error > tolerance:
            words = (
                f"its {name} products are wrong: relative error {relative_error:g}, at most {tolerance:g} is rounding"
            )
            judgements.append(Judged(verdict=Verdict.FAIL, words=words, action="drain the node and replace the GPU"))
        judged = _rates.judge(
            rounds,
            f"TFLOPS {name}",
            stated=stated if name == "bf16" else None,
            state_as="gemm_tflops",
            known=_yardstick(report.name, name),
            peers=_rates.peers_of(report, every, _burst if name == "bf16" else partial(_best, name)),
            slow=SLOW,
        )
        # Only bf16 is trained in everywhere; for the others a number without a comparison is told and not judged.
        if judged.compared or name == "bf16":
            judgements.append(judged)
        if name == "bf16":
            values |= {"bf16_held_tflops": max(held), "bf16_held_rounds": list(held)}
            judgements += _judge_held(held, report, every)
    for moment in ("before", "after"):
        values[f"clocks_{moment}"] = report.results.get(moment)
    values["bf16_gflops_per_w"] = _efficiency(report.results)
    judgements += _judge_efficiency(report, every)
    return _rates.combine(device, judgements, note=_probe.foreign(report), **values)


def _judge_held(held: tuple[float, ...], report: _probe.Report, every: Mapping[str, _probe.Report]) -> list[Judged]:
    """What it holds under its power limit; told only where there is something to compare it with."""
    known = _yardstick(report.name, "bf16")
    if known is not None and known.warn_below:
        known = replace(known, words="best measured in a burst", warn_below=HELD_WARN_BELOW, fail_below=HELD_FAIL_BELOW)
    judged = _rates.judge(
        held,
        "TFLOPS bf16 held",
        stated=None,
        state_as="gemm_tflops",
        known=known,
        peers=_rates.peers_of(report, every, partial(_best, "bf16")),
        slow=SLOW,
    )
    return [judged] if judged.compared else []


def _judge_efficiency(report: _probe.Report, every: Mapping[str, _probe.Report]) -> list[Judged]:
    """Work for each watt under load, among the equal GPUs here. A hot or leaking chip draws more for the same work."""
    own = _efficiency(report.results)
    peers = [value for other in every.values() if other.name == report.name and (value := _efficiency(other.results))]
    if len(peers) < _rates.LEAST_PEERS:
        return []
    if own is None:
        words = f"its power under load was not read; {len(peers)} equal GPUs here report theirs"
        return [Judged(verdict=Verdict.ERROR, words=words, action="see `nvidia-smi -q -d POWER` of it")]
    share = own / statistics.median(peers)
    words = f"{own:.3g} GFLOPS of bf16 for each watt, {share:.0%} of the median of the {len(peers)} equal GPUs here"
    if share < EFFICIENCY_WARN_BELOW:
        return [
            Judged(verdict=Verdict.WARN, words=words, action="see its temperature, fans and power; clean its cooler")
        ]
    return [Judged(verdict=Verdict.PASS, words=words)]


def _efficiency(results: Mapping[str, Any]) -> float | None:
    """GFLOPS of bf16 held for each watt that the GPU drew at the end; None where its sensor gave no power."""
    after = results.get("after")
    power = after.get("power_w") if isinstance(after, Mapping) else None
    if isinstance(power, bool) or not isinstance(power, (int, float)) or not power > 0:
        return None
    try:
        return round(1000 * _best("bf16", results) / power, 1)
    except (KeyError, TypeError, ValueError):
        return None


def _measured(report: _probe.Report, name: str) -> bool:
    return report.results["precisions"].get(name, {}).get("available") is True


def _yardstick(gpu: str, name: str) -> Yardstick | None:
    model = profiles.of_gpu(gpu)
    if model is None:
        return None
    peak = {"bf16": model.bf16_tflops, "tf32": model.tf32_tflops, "fp8": model.fp8_tflops}.get(name)
    if name == "bf16" and model.bf16_measured_tflops is not None:
        return Yardstick(
            rate=model.bf16_measured_tflops,
            words="best measured",
            fail_below=FAIL_BELOW,
            warn_below=WARN_BELOW,
            peak=peak,
        )
    return (
        None if peak is None else Yardstick(rate=peak, words="of its datasheet", fail_below=DATASHEET_BELOW, peak=peak)
    )


def _burst(results: Mapping[str, Any]) -> float:
    return max(_rates.rounds_of(results["burst"]))


def _best(name: str, results: Mapping[str, Any]) -> float:
    precision = results["precisions"][name]
    if precision["available"] is not True:
        raise ValueError(f"{name} was not measured")
    return max(_rates.rounds_of(precision))
