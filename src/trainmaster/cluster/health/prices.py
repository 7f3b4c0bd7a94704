"""Hourly price of each node: the user's own figure, else the list price of the instance type it was judged as."""

from __future__ import annotations

from trainmaster.checks import profiles
from trainmaster.core.health import ClusterHealth
from trainmaster.core.money.prices import Prices, Rate

_SAGEMAKER = "ml."
_EC2_PRICE = "EC2's price of the same machine, SageMaker's own is higher"


def find(health: ClusterHealth, usd_per_hour: float | None = None, *, instance: str | None = None) -> Prices:
    """Prices for the cost section of a report. A profile without an instance type or a price gets none.

    `instance` is the type of all nodes, where one is known for the whole job.
    """
    if usd_per_hour is not None:
        return Prices(every=Rate(usd_per_hour=usd_per_hour, source="as you stated it"))
    if instance is not None:
        return Prices(every=find_rate(instance))
    rates = {node.profile: find_rate(node.profile) for node in health.nodes if node.profile}
    return Prices(by_profile={profile: rate for profile, rate in rates.items() if rate is not None})


def find_rate(name: str) -> Rate | None:
    """List price of an instance type; of SageMaker's (`ml.`) that of the machine, which is said in its source."""
    instance = profiles.find_instance(name)
    if instance is None or instance.usd_per_hour is None:
        return None
    is_sagemaker = name.strip().lower().startswith(_SAGEMAKER)
    source = f"{_EC2_PRICE}: {instance.source}" if is_sagemaker else instance.source
    return Rate(usd_per_hour=instance.usd_per_hour, source=source)
