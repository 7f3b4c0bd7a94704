"""Every GPU holds its rate under full load for minutes, stays cool enough, and computes rightly while hot.

All GPUs at once: a server's fans and power supplies must carry all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainmaster.checks import profiles
from trainmaster.checks.active import _memory, _probe, _rates
from trainmaster.checks.active._rates import Judged, Yardstick
from trainmaster.checks.comparison import rate
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict
from trainmaster.node.host import Host

LEVEL = 3
GPU = True
EXPECTS = ()
COMPARES = (rate("tflops", "TFLOPS"),)
METRICS: dict[str, str] = {}
PROBE_S = 420.0  # above the probe's own deadline
TIMEOUT_S = PROBE_S + _probe.CHECK_TIMEOUT_S - _probe.TIMEOUT_S
# The end against the first seconds. Power limits cost some per cent as leakage grows with heat.
SAG_WARN, SAG_FAIL = 0.90, 0.80
WARN_BELOW, FAIL_BELOW = 0.80, 0.72  # of the best measured in short: GB200 hold 85 % of it, H100 92 % (gpu-fryer)
BAD_THROTTLE = ("hw_slowdown", "hw_thermal", "power_brake")  # the hardware's emergency brakes
HEAT = "check fans, coolant and airflow of the node, and the GPU's heat sink"
SHOWN = 60  # samples that are kept in the finding


def read(host: Host) -> _probe.Probed:
    return _probe.read(host, "burn", timeout_s=PROBE_S)


def judge(probed: _probe.Probed, expect: Expect) -> list[Finding]:
    return _probe.judge_all(probed, "burn", expect, _judge_one)


def _judge_one(device: str, report: _probe.Report, every: Mapping[str, _probe.Report]) -> Finding:
    results = report.results
    cold, end = _probe.number(results, "tflops_cold"), _probe.number(results, "tflops_end")
    samples = results["samples"]
    if not (cold > 0 and end > 0 and isinstance(samples, list) and samples):
        raise ValueError(f"{cold:g} TFLOPS when cold, {end:g} at the end")
    seconds, ecc = _probe.number(results, "seconds"), _memory.ecc_new(results)
    rate = _rates.judge(
        [end],
        f"TFLOPS bf16 after {seconds:.0f} s",
        stated=None,
        state_as="gemm_tflops",
        known=_yardstick(report.name),
        peers=_rates.peers_of(report, every, lambda other: _probe.number(other, "tflops_end")),
        slow=HEAT,
    )
    judgements = [
        # Without a baseline it is still compared with its own beginning; gemm says that there is none.
        *([rate] if rate.compared else []),
        _sag(cold, end),
        *_computed(results, ecc),
        *_throttled(results.get("throttle"), len(samples)),
    ]
    values: dict[str, Any] = {
        **report.software,
        "burn_tflops": end,
        "cold_tflops": cold,
        "seconds": seconds,
        "celsius_max": results.get("temperature_max_c"),
        "power_max_w": results.get("power_max_w"),
        "sm_min_mhz": results.get("sm_min_mhz"),
        "throttle": results.get("throttle"),
        "ecc_new": ecc,
        "digests": {f"burn_{results.get('size')}": results.get("digest")},
        "samples": samples[:: max(1, len(samples) // SHOWN)],
    }
    return _rates.combine(device, judgements, note=_probe.foreign(report), **values)


def _sag(cold: float, end: float) -> Judged:
    words = f"{end / cold:.0%} of its first seconds' rate at the end"
    verdict = Verdict.FAIL if end < SAG_FAIL * cold else Verdict.WARN if end < SAG_WARN * cold else Verdict.PASS
    return Judged(verdict=verdict, words=words, action=None if verdict is Verdict.PASS else HEAT)


def _computed(results: Mapping[str, Any], ecc: Mapping[str, int | None]) -> list[Judged]:
    action = "take the node out now and replace the GPU"
    judgements = []
    if different := _probe.count(results, "different"):
        words = f"{different:,} numbers differed from the first product while it was hot"
        judgements.append(Judged(verdict=Verdict.FAIL, words=words, action=action))
    if ecc["uncorrected"]:
        words = f"{ecc['uncorrected']} uncorrectable memory errors under load"
        judgements.append(Judged(verdict=Verdict.FAIL, words=words, action=action))
    return judgements


def _throttled(counts: object, samples: int) -> list[Judged]:
    if not isinstance(counts, dict):
        raise ValueError(f"throttle is {counts!r:.40}")
    judgements = []
    for reason, times in counts.items():
        share = times / samples
        words = f"{reason.replace('_', ' ')} in {share:.0%} of the samples"
        if reason in BAD_THROTTLE:
            judgements.append(Judged(verdict=Verdict.FAIL, words=words, action=HEAT))
        elif reason == "sw_thermal":
            judgements.append(Judged(verdict=Verdict.WARN, words=words, action=HEAT))
    return judgements


def _yardstick(gpu: str) -> Yardstick | None:
    model = profiles.of_gpu(gpu)
    if model is None or model.bf16_measured_tflops is None:
        return None
    return Yardstick(
        rate=model.bf16_measured_tflops,
        words="best measured in short",
        warn_below=WARN_BELOW,
        fail_below=FAIL_BELOW,
        peak=model.bf16_tflops,
    )
