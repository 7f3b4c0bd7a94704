"""Every GPU's memory is as fast as its model's, and copies rightly. Much of training waits for memory.

All GPUs at once, as they train. Bytes are counted read plus written.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainmaster.checks import profiles
from trainmaster.checks.active import _probe, _rates
from trainmaster.checks.active._rates import Judged, Yardstick
from trainmaster.checks.comparison import rate
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict
from trainmaster.node.host import Host

LEVEL = 2
GPU = True
EXPECTS = ("hbm_gbps",)
COMPARES = (rate("gbps", "GB/s"),)
METRICS: dict[str, str] = {}
TIMEOUT_S = _probe.CHECK_TIMEOUT_S
WARN_BELOW, FAIL_BELOW = 0.92, 0.82  # of the best measured; memory does not throttle, so healthy ones agree to 2 %
DATASHEET_WARN, DATASHEET_FAIL = 0.70, 0.60  # of the datasheet: HBM copies reach 88 % of it, GDDR6 with ECC 77 %
SLOW = "see its memory clock, ECC counters and what else runs on it; replace it if it stays slow"


def read(host: Host) -> _probe.Probed:
    return _probe.read(host, "hbm")


def judge(probed: _probe.Probed, expect: Expect) -> list[Finding]:
    return _probe.judge_all(
        probed, "hbm", expect, lambda device, report, every: _judge_one(device, report, every, expect.hbm_gbps)
    )


def _judge_one(device: str, report: _probe.Report, every: Mapping[str, _probe.Report], stated: float | None) -> Finding:
    copy, triad = (_rates.rounds_of(report.results[name]) for name in ("copy", "triad"))
    values = {
        **report.software,
        "hbm_copy_gbps": max(copy),
        "hbm_copy_rounds": list(copy),
        "hbm_triad_gbps": max(triad),
        "buffer_bytes": _probe.count(report.results, "buffer_bytes"),
    }
    judgements = [
        _rates.judge(
            copy,
            "GB/s copy",
            stated=stated,
            state_as="hbm_gbps",
            known=_yardstick(report.name),
            peers=_rates.peers_of(report, every, lambda other: max(_rates.rounds_of(other["copy"]))),
            slow=SLOW,
        )
    ]
    for name in ("copy", "triad"):
        wrong_numbers = _probe.count(report.results, f"{name}_wrong")
        if wrong_numbers:
            words = f"{wrong_numbers:,} numbers are wrong after a {name}"
            judgements.append(Judged(verdict=Verdict.FAIL, words=words, action="drain the node and replace the GPU"))
    return _rates.combine(device, judgements, note=_probe.foreign(report), **values)


def _yardstick(gpu: str) -> Yardstick | None:
    model = profiles.of_gpu(gpu)
    if model is None:
        return None
    if model.hbm_measured_gbps is not None:
        return Yardstick(
            rate=model.hbm_measured_gbps,
            words="best measured",
            warn_below=WARN_BELOW,
            fail_below=FAIL_BELOW,
            peak=model.hbm_gbps,
        )
    if model.hbm_gbps is None or not model.is_verified("hbm_gbps"):
        return None
    return Yardstick(
        rate=model.hbm_gbps,
        words="of its datasheet",
        warn_below=DATASHEET_WARN,
        fail_below=DATASHEET_FAIL,
        peak=model.hbm_gbps,
    )
