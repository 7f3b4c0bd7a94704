"""Hourly price of each node: the user's own figure, else the list price of the instance type it was judged as."""

from __future__ import annotations

from trainmaster.checks import profiles
from trainmaster.core.health import ClusterHealth
from trainmaster.core.money.prices import Prices, Rate


def find(health: ClusterHealth, usd_per_hour: float | None = None) -> Prices:
    """Prices for the cost section of a report. A profile without an instance type or a price gets none."""
    if usd_per_hour is not None:
        return Prices(every=Rate(usd_per_hour=usd_per_hour, source="as you stated it"))
    rates = {}
    for node in health.nodes:
        instance = profiles.find_instance(node.profile) if node.profile else None
        if node.profile and instance is not None and instance.usd_per_hour is not None:
            rates[node.profile] = Rate(usd_per_hour=instance.usd_per_hour, source=instance.source)
    return Prices(by_profile=rates)
