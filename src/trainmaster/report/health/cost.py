"""Cost of a failed run of this size, and of this check. An unknown price is never guessed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from trainmaster.core.health import ClusterHealth
from trainmaster.core.money.prices import Prices
from trainmaster.report.formats import duration, trim
from trainmaster.report.health import sanitise


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Sums in US dollars. None: the price of no node is known."""

    lines: tuple[str, ...]
    nodes: int
    nodes_priced: int
    assumed_hours: float
    usd_per_hour: float | None
    wasted_usd: float | None
    check_usd: float | None


def estimate(health: ClusterHealth, prices: Prices | None) -> Cost:
    """Nodes × price × hours over the nodes with a known price; the others are counted, not guessed."""
    prices = prices or Prices()
    profiles = {node.node: node.profile for node in health.nodes}
    names = list(dict.fromkeys([*health.asked, *profiles, *(silent.node for silent in health.silent)]))
    priced: Counter[tuple[str, float]] = Counter()
    sources: dict[str, None] = {}
    for name in names:
        profile = profiles.get(name)
        rate = prices.every or (prices.by_profile.get(profile) if profile is not None else None)
        if rate is None:
            continue
        priced[(sanitise.line(profile or "node"), rate.usd_per_hour)] += 1
        if rate.source:
            sources[sanitise.line(rate.source)] = None
    known = sum(priced.values())
    common = {"nodes": len(names), "nodes_priced": known, "assumed_hours": prices.assumed_hours}
    if not known:
        sentence = (
            "The price of these nodes is not known, so nothing is said of what a failed run would waste. "
            f"This check took {duration(health.took_s)}."
        )
        return Cost(lines=(sentence,), usd_per_hour=None, wasted_usd=None, check_usd=None, **common)  # type: ignore[arg-type]
    per_hour = sum(rate * count for (_, rate), count in priced.items())
    wasted, spent = per_hour * prices.assumed_hours, per_hour * max(0.0, health.took_s) / 3600
    parts = " + ".join(f"{count} × {name} at {usd(rate)} per hour" for (name, rate), count in sorted(priced.items()))
    lines = [
        f"A run of this size that is lost after {trim(f'{prices.assumed_hours:.1f}')} h wastes about {usd(wasted)} "
        f"({parts}).",
        f"This check took {duration(health.took_s)} and cost about {usd(spent)}.",
    ]
    if known < len(names):
        lines.append(
            f"The price of {len(names) - known} of {len(names)} nodes is not known; they are not in these sums."
        )
    lines += [f"Price: {source}." for source in sources]
    return Cost(lines=tuple(lines), usd_per_hour=per_hour, wasted_usd=wasted, check_usd=spent, **common)  # type: ignore[arg-type]


def usd(amount: float) -> str:
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:,.2f}"
