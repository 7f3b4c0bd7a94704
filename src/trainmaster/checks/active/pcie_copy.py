"""Data reaches every GPU and leaves it at its link's rate, unchanged. A slow link starves the GPU of its batches.

Judged by what each GPU reaches alone, in turn, since that is what a link can do and what published figures say. The
rate with all GPUs copying at once is told beside it: GPUs behind one switch share its link, which is no fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from trainmaster.checks import profiles
from trainmaster.checks.active import _probe, _rates
from trainmaster.checks.active._rates import Judged, Yardstick
from trainmaster.checks.comparison import rate
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict
from trainmaster.node.host import Host

LEVEL = 2
GPU = True
EXPECTS = ("h2d_gbps", "d2h_gbps")
COMPARES = (rate("gbps", "GB/s"),)
METRICS: dict[str, str] = {}
TIMEOUT_S = _probe.CHECK_TIMEOUT_S
WARN_BELOW, FAIL_BELOW = 0.85, 0.75  # of the best measured; a copy across sockets loses some
LINK_WARN, LINK_FAIL = 0.60, 0.45  # of the link's arithmetic rate, of which a good copy reaches 85 %
LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # PCI-SIG: one lane, one way, after encoding
DIRECTIONS = {"h2d": "into it", "d2h": "out of it"}
SLOW = "see its PCIe generation and width under load; reseat the GPU or its riser, then replace it"


def read(host: Host) -> _probe.Probed:
    return _probe.read(host, "pcie_copy")


def judge(probed: _probe.Probed, expect: Expect) -> list[Finding]:
    return _probe.judge_all(
        probed,
        "pcie_copy",
        expect,
        lambda device, report, every: _judge_one(
            device, report, every, {"h2d": expect.h2d_gbps, "d2h": expect.d2h_gbps}
        ),
    )


def _judge_one(
    device: str, report: _probe.Report, every: Mapping[str, _probe.Report], stated: Mapping[str, float | None]
) -> Finding:
    judgements: list[Judged] = []
    values: dict[str, Any] = {**report.software, "cpus": report.results.get("cpus")}
    for direction, words in DIRECTIONS.items():
        rounds = _rates.rounds_of(report.results[direction])
        values |= {f"{direction}_gbps": max(rounds), f"{direction}_rounds": list(rounds)}
        judgements.append(
            _rates.judge(
                rounds,
                f"GB/s {words}",
                stated=stated[direction],
                state_as=f"{direction}_gbps",
                known=_yardstick(report.name, direction),
                peers=_rates.peers_of(report, every, partial(_best, direction)),
                slow=SLOW,
            )
        )
    values["duplex_gbps"] = max(_rates.rounds_of(report.results["both"]))
    values["together"] = _together(report, every)
    wrong_bytes = _probe.count(report.results, "wrong")
    if wrong_bytes:
        words = f"{wrong_bytes:,} bytes changed on their way into the GPU and back"
        judgements.append(
            Judged(verdict=Verdict.FAIL, words=words, action="reseat the GPU or its riser, then replace it")
        )
    return _rates.combine(device, judgements, note=_probe.foreign(report), **values)


def _best(direction: str, results: Mapping[str, Any]) -> float:
    return max(_rates.rounds_of(results[direction]))


def _yardstick(gpu: str, direction: str) -> Yardstick | None:
    model = profiles.of_gpu(gpu)
    if model is None:
        return None
    link = LANE_GBPS.get(model.pcie_gen or 0, 0.0) * (model.pcie_width or 0) or None
    measured = model.h2d_gbps if direction == "h2d" else model.d2h_gbps
    if measured is not None:
        return Yardstick(rate=measured, words="best measured", warn_below=WARN_BELOW, fail_below=FAIL_BELOW, peak=link)
    if link is None:
        return None
    return Yardstick(rate=link, words="of its link", warn_below=LINK_WARN, fail_below=LINK_FAIL, peak=link)


def _together(report: _probe.Report, every: Mapping[str, _probe.Report]) -> dict[str, Any] | None:
    """The rates with other GPUs at work, and how many of them were for at least half of the time."""
    mine, times = report.results.get("together"), _times(report)
    if times is None or not isinstance(mine, dict):
        return None
    began, ended = times
    spans = [span for other in every.values() if other is not report and (span := _times(other))]
    beside = sum(min(ended, end) - max(began, start) >= (ended - began) / 2 for start, end in spans)
    return {"with_gpus": beside, **{direction: mine.get(direction) for direction in ("h2d", "d2h", "both")}}


def _times(report: _probe.Report) -> tuple[float, float] | None:
    together = report.results.get("together")
    if not isinstance(together, dict):
        return None
    try:
        return _probe.number(together, "began"), _probe.number(together, "ended")
    except ValueError:
        return None
