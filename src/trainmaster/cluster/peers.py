"""Performance outliers among equal machines: each device is compared with the median of its peers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trainmaster.cluster.compared_values import Peer, peer
from trainmaster.cluster.facts import Fact, group, is_number
from trainmaster.core.results import Finding, Verdict, fail, ok, skip, warn

LEAST_PEERS = 5  # nodes: among four, two outliers are half, and the median lies between right and wrong
# Scaled MADs from the median. 64 nodes × 8 GPUs × 10 measures are 5,000 samples, of which normal noise puts 0.003
# beyond 5; the tails of real measurements are longer, hence the least difference that each measure asks for as well.
OUTLIER_Z = 5.0
NOISE_FLOOR = 0.005  # share of the median: among machines that agree to the last digit, rounding must not be an outlier


def peers(facts: Sequence[Fact]) -> list[Finding]:
    """Each device far from the median of its peers, by median and MAD, which a few outliers cannot move."""
    found, compared = [], []
    for (name, check, kind), told in group(facts, lambda fact: (fact.name, fact.check, fact.kind)).items():
        rule = peer(check, name)
        numbers = [fact for fact in told if is_number(fact.value)] if rule else []
        if rule is None or len({fact.node for fact in numbers}) < LEAST_PEERS:
            continue
        compared.append(rule.words)
        median = statistics.median(float(fact.value) for fact in numbers)
        spread = 1.4826 * statistics.median(abs(float(fact.value) - median) for fact in numbers)
        scale = max(spread, NOISE_FLOOR * abs(median))
        for fact in numbers:
            far = float(fact.value) - median
            if scale and abs(far) / scale > OUTLIER_Z and abs(far) >= rule.least(median) and rule.matters(far):
                found.append(
                    _outlier(fact, rule, median=median, z=far / scale, count=len(numbers), among=f"{kind}, {check}")
                )
    if found:
        return sorted(found, key=lambda finding: (finding.verdict is not Verdict.FAIL, -abs(finding.values["z"])))
    if not compared:
        return [skip("too few peers to compare", proof=f"fewer than {LEAST_PEERS} nodes reported a number")]
    return [ok(f"no outlier in {', '.join(sorted(set(compared)))}", compared=sorted(set(compared)))]


def _outlier(fact: Fact, rule: Peer, *, median: float, z: float, count: int, among: str) -> Finding:
    far = float(fact.value) - median
    share = f" ({abs(far) / abs(median):.0%} {'above' if far > 0 else 'below'})" if median and rule.share else ""
    at = f"{fact.device}: " if fact.device else ""
    reason = f"{at}{fact.value:g} {rule.unit} {rule.words}, the median of {count} ({among}) is {median:g}{share}"
    say = fail if rule.fails(far, median) else warn
    return say(
        reason,
        action=rule.action,
        device=fact.node,
        what=fact.name,
        on=fact.device,
        value=fact.value,
        median=round(median, 4),
        z=round(z, 1),
        peers=count,
    )
