"""What the nodes of a run cost: the user's own price, else the list price of the instance type each was judged as."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmaster.core.health import ClusterHealth
    from trainmaster.report.health import Prices


def find(health: ClusterHealth, usd_per_hour: float | None = None) -> Prices:
    """Prices for `report.health.write_bundle`. A profile that is no instance type, or has no price, gets none."""
    from trainmaster.checks import profiles
    from trainmaster.report.health import Prices, Rate

    if usd_per_hour is not None:
        return Prices(every=Rate(usd_per_hour=usd_per_hour, source="as you stated it"))
    found = {}
    for node in health.nodes:
        instance = profiles.find_instance(node.profile) if node.profile else None
        if node.profile and instance is not None and instance.usd_per_hour is not None:
            found[node.profile] = Rate(usd_per_hour=instance.usd_per_hour, source=instance.source)
    return Prices(by_profile=found)
