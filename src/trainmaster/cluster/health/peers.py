"""Performance outliers among equal machines: each device is compared with its peers on all nodes.

By median and MAD, which a few outliers cannot move and which show small differences among many; and by the best
quarter of the same device on each node, because the MAD grows with the outliers: where half are slow it hides them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trainmaster.checks.comparison import Peer
from trainmaster.cluster.health.compared_values import peer
from trainmaster.cluster.health.reported_values import Fact, group, is_number
from trainmaster.core.results import Finding, Verdict, fail, ok, skip, warn

LEAST_PEERS = 5  # nodes for the MAD: among four, two outliers are half, and the median lies between right and wrong
# Scaled MADs from the median. 64 nodes × 8 GPUs × 10 measures are 5,000 samples, of which normal noise puts 0.003
# beyond 5; the tails of real measurements are longer, hence the least difference that each measure asks for as well.
OUTLIER_Z = 5.0
NOISE_FLOOR = 0.005  # share of the median: among machines that agree to the last digit, rounding must not be an outlier
_SHOWN = 4  # slowest devices named where no node is blamed


def peers(facts: Sequence[Fact]) -> list[Finding]:
    """Each device far from its peers, the worst first."""
    findings: list[Finding] = []
    compared: set[str] = set()
    for (name, check, kind), alike in group(facts, lambda fact: (fact.name, fact.check, fact.kind)).items():
        rule = peer(check, name)
        numbers = [fact for fact in alike if is_number(fact.value)] if rule else []
        if rule is None or len({fact.node for fact in numbers}) < 2:
            continue
        compared.add(rule.words)
        findings += _outliers(numbers, rule, f"{kind}, {check}")
    if findings:
        return sorted(findings, key=lambda finding: (finding.verdict is not Verdict.FAIL, -abs(finding.values["z"])))
    if not compared:
        return [skip("too few peers to compare", proof="no two nodes with equal GPUs reported a number")]
    return [ok(f"no outlier in {', '.join(sorted(compared))}", compared=sorted(compared))]


def _outliers(numbers: Sequence[Fact], rule: Peer, among: str) -> list[Finding]:
    """Findings of both comparisons, one for each device: a failure before a warning."""
    findings: dict[tuple[str | None, str | None], Finding] = {}
    undecided: list[Finding] = []
    best = [
        finding
        for device_facts in group(numbers, lambda fact: fact.device).values()
        for finding in _far_from_best(device_facts, rule, among)
    ]
    for finding in [*_far_from_median(numbers, rule, among), *best]:
        key = (finding.device, finding.values["on"])
        if finding.device is None:
            undecided.append(finding)
        elif key not in findings or finding.verdict is Verdict.FAIL is not findings[key].verdict:
            findings[key] = finding
    return [*findings.values(), *undecided]


def _far_from_median(numbers: Sequence[Fact], rule: Peer, among: str) -> list[Finding]:
    if len({fact.node for fact in numbers}) < LEAST_PEERS:
        return []
    median, scale = _scale(numbers)
    words = f"the median of {len(numbers)} ({among}) is"
    return [
        _outlier(fact, rule, middle=median, of=words, scale=scale, peers=len(numbers))
        for fact in numbers
        if scale
        and abs(far := float(fact.value) - median) / scale > OUTLIER_Z
        and abs(far) >= rule.least(median)
        and rule.matters(far)
    ]


def _far_from_best(numbers: Sequence[Fact], rule: Peer, among: str) -> list[Finding]:
    """Devices that miss what the best quarter of the nodes reaches, by more than scatter.

    All are the same device of their node: a GPU behind a longer path is slower on each of them.
    """
    if len(numbers) < 2 or rule.bad == "both":
        return []
    best = sorted((float(fact.value) for fact in numbers), reverse=rule.bad == "low")[len(numbers) // 4]
    bad = [fact for fact in numbers if rule.beyond(float(fact.value) - best, best)]
    alone = len(numbers) < 4  # the best quarter is one node
    if bad and alone and len(bad) * 2 >= len(numbers):
        return [_undecided(numbers, rule, among)]
    scale = _scale(numbers)[1] or 1.0
    words = f"the best quarter of {len(numbers)} ({among}) reaches"
    findings = [_outlier(fact, rule, middle=best, of=words, scale=scale, peers=len(numbers)) for fact in bad]
    return findings or ([_undecided(numbers, rule, among)] if _hides(numbers, rule, best) else [])


def _hides(numbers: Sequence[Fact], rule: Peer, best: float) -> bool:
    """Whether the values scatter so far that the MAD could not show a failure, and some are worth a warning."""
    if rule.fail_far is None or len(numbers) < LEAST_PEERS:
        return False
    median, scale = _scale(numbers)
    worst = max((best - float(fact.value)) * (1 if rule.bad == "low" else -1) for fact in numbers)
    return OUTLIER_Z * scale >= rule.fail_far * abs(median) and worst >= rule.least(best)


def _scale(numbers: Sequence[Fact]) -> tuple[float, float]:
    """Median, and the scaled MAD, which is never below the noise of rounding."""
    median = statistics.median(float(fact.value) for fact in numbers)
    spread = 1.4826 * statistics.median(abs(float(fact.value) - median) for fact in numbers)
    return median, max(spread, NOISE_FLOOR * abs(median))


def _outlier(fact: Fact, rule: Peer, *, middle: float, of: str, scale: float, peers: int) -> Finding:
    far = float(fact.value) - middle
    share = f" ({abs(far) / abs(middle):.0%} {'above' if far > 0 else 'below'})" if middle and rule.share else ""
    at = f"{fact.device}: " if fact.device else ""
    reason = f"{at}{fact.value:g} {rule.unit} {rule.words}, {of} {middle:g}{share}"
    say = fail if rule.fails(far, middle) else warn
    return say(
        reason,
        action=rule.action,
        device=fact.node,
        what=fact.name,
        on=fact.device,
        value=fact.value,
        median=round(middle, 4),
        z=round(far / scale, 1),
        peers=peers,
    )


def _undecided(numbers: Sequence[Fact], rule: Peer, among: str) -> Finding:
    """Warning about values that scatter without a majority: no node is blamed."""
    ordered = sorted(numbers, key=lambda fact: (float(fact.value), fact.node), reverse=rule.bad == "high")
    device = f"{ordered[0].device}: " if ordered[0].device else ""
    shown = ", ".join(f"{fact.value:g} on {fact.node}" for fact in ordered[:_SHOWN])
    reason = f"{device}{rule.unit} {rule.words} scatter over {len(numbers)} nodes ({among}) and none has a majority: "
    reason += f"{shown}; {ordered[-1].value:g} on {ordered[-1].node}"
    return warn(reason, action=rule.action, what=ordered[0].name, on=ordered[0].device, z=0.0, peers=len(numbers))
