"""Every GPU computes the same bits every time, and the same as its equals. One that does not ruins a run unseen.

Three comparisons: repeats on one GPU, equal GPUs of the node with each other, and a product that is exact in any order
with the CPU. The digests are kept, so that nodes can be compared with nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from trainmaster.checks.active import _probe
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok
from trainmaster.node.host import Host

LEVEL = 2
GPU = True
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
TIMEOUT_S = _probe.CHECK_TIMEOUT_S
WORK = ("gemm", "gemm_exact", "attention", "training")
REPLACE = "take the node out now: what it computed is not to be trusted; replace the GPU"


def read(host: Host) -> _probe.Probed:
    return _probe.read(host, "corruption")


def judge(probed: _probe.Probed, expect: Expect) -> list[Finding]:
    return _probe.judge_all(probed, "corruption", expect, _judge_one)


def _judge_one(device: str, report: _probe.Report, every: Mapping[str, _probe.Report]) -> Finding:
    digests = _digests(report)
    repeats = {name: _probe.count(report.results["work"][name], "repeats") for name in WORK}
    values = {**report.software, "digests": digests, "repeats": repeats}
    bad = [_alone(report, name) for name in WORK]
    bad += [_among_equals(device, key, every) for key in digests]
    reasons = [reason for reason in bad if reason]
    if reasons:
        return fail("; ".join(dict.fromkeys(reasons)), action=REPLACE, device=device, **values)
    others = len(_equals(report, every)) - 1
    beside = f"and the same bits as {others} equal GPUs here" if others else "with no equal GPU here to compare with"
    return ok(
        f"{sum(repeats.values())} repeats of {len(WORK)} kinds of work gave the same bits, {beside}",
        device=device,
        **values,
    )


def _digests(report: _probe.Report) -> dict[str, str]:
    """By what was computed: only the same size through the same kernel gives the same bits."""
    digests = {}
    for name in WORK:
        result = report.results["work"][name]
        digest = result["digest"]
        if not isinstance(digest, str) or len(digest) != 32:
            raise ValueError(f"the digest of {name} is {digest!r:.40}")
        if _probe.count(result, "repeats") < 1:
            raise ValueError(f"{name} was not repeated")
        digests["_".join(filter(None, (name, str(report.results["size"]), str(result.get("backend", "")))))] = digest
    return digests


def _alone(report: _probe.Report, name: str) -> str | None:
    """Fault that one GPU's own results show; None: none."""
    result = report.results["work"][name]
    different, repeats = _probe.count(result, "different_repeats"), _probe.count(result, "repeats")
    if different or _probe.count(result, "different"):
        return f"{different} of {repeats} repeats of {name} differ in {result['different']:,} numbers"
    if result.get("finite") is not True:
        return f"{name} gives NaN or infinity"
    if name == "gemm_exact" and _probe.count(result, "wrong"):
        return f"{result['wrong']:,} numbers of an exact product differ from the CPU's"
    return None


def _equals(report: _probe.Report, every: Mapping[str, _probe.Report]) -> dict[str, _probe.Report]:
    return {d: other for d, other in every.items() if (other.name, other.software) == (report.name, report.software)}


def _among_equals(device: str, key: str, every: Mapping[str, _probe.Report]) -> str | None:
    """Fault that the comparison with equal GPUs shows: the minority is named, or both of two that differ."""
    digests = {
        d: digest for d, o in _equals(every[device], every).items() if (digest := _quiet(o).get(key)) is not None
    }
    counts = Counter(digests.values())
    mine, (_, most) = counts[digests[device]], counts.most_common(1)[0]
    if len(counts) == 1 or mine * 2 > len(digests):
        return None
    if most * 2 > len(digests):
        return f"{key}: other bits than {most} of {len(digests)} equal GPUs"
    others = ", ".join(sorted(d for d, digest in digests.items() if digest != digests[device]))
    return f"{key}: other bits than {others}, and no majority says which is right"


def _quiet(report: _probe.Report) -> dict[str, str]:
    """Digests of another GPU; empty if its report is unreadable, which is that GPU's own finding."""
    try:
        return _digests(report)
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}
