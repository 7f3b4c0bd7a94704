"""Numbers of a simulation: instance-minutes, cost, launches, requests, and what the client did wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from trainmaster.sim.lambda_cloud.cloud import Cloud
from trainmaster.sim.lambda_cloud.instance import Instance
from trainmaster.sim.lambda_cloud.limits import Limits


@dataclass(slots=True, kw_only=True)
class Requests:
    """Counts of requests. The server locks them."""

    by_status: Counter[str] = field(default_factory=Counter)  # `cut` where the connection ended without an answer
    by_operation: Counter[str] = field(default_factory=Counter)
    unknown_fields: Counter[str] = field(default_factory=Counter)  # sent by the client, ignored by the vendor
    schema_faults: list[str] = field(default_factory=list)  # of our own answers: mistakes of the simulator


def summarise(cloud: Cloud, requests: Requests, limits: Limits) -> dict[str, Any]:
    """All numbers, for the admin path, `--json` and the last lines of the command."""
    with cloud.lock:
        now = cloud.clock.now_s()
        ours = [instance for instance in cloud.instances.values() if not instance.foreign]
        left = [instance for instance in ours if instance.terminated_at is None and instance.preempted_at is None]
        return {
            "simulated_s": round(now, 3),
            "launches": len(ours),
            "by_status": dict(Counter(instance.status(now) for instance in ours)),
            "instance_minutes": round(sum(instance.billed_s(now) for instance in ours) / 60, 3),
            "billed_minutes": sum(instance.billed_minutes(now) for instance in ours),
            "cost_usd": round(sum(instance.cost_usd(now) for instance in ours), 4),
            "not_terminated": [instance.id for instance in left],
            "cost_usd_not_terminated": round(sum(instance.cost_usd(now) for instance in left), 4),
            "launches_with_equal_tags": _count_equal_tags(ours),
            "foreign_touched": list(cloud.foreign_touched),
            "requests": sum(requests.by_status.values()),
            "requests_by_status": dict(sorted(requests.by_status.items())),
            "requests_by_operation": dict(sorted(requests.by_operation.items())),
            "rate_limit_violations": {"requests": limits.requests.violations, "launches": limits.launches.violations},
            "unknown_fields": dict(requests.unknown_fields),
            "faults_injected": {name: count for name, count in sorted(cloud.faults.injected.items()) if count},
            "schema_faults": list(requests.schema_faults),
        }


def _count_equal_tags(ours: list[Instance]) -> int:
    """Launches whose tags an earlier launch had: a client that tags each launch with a nonce launched twice."""
    seen = [sorted((tag["key"], tag["value"]) for tag in instance.tags) for instance in ours if instance.tags]
    return sum(tags in seen[:number] for number, tags in enumerate(seen))


def describe(cloud: Cloud, instance: Instance) -> dict[str, Any]:
    """One instance with what the vendor's API does not show."""
    with cloud.lock:
        now = cloud.clock.now_s()
        return {
            "id": instance.id,
            "name": instance.name,
            "status": instance.status(now),
            "type": instance.type.name,
            "region": instance.region,
            "address": instance.address,
            "hardware": instance.hardware,
            "tags": [dict(tag) for tag in instance.tags],
            "foreign": instance.foreign,
            "ended_by": instance.ended_by,
            "processes": instance.processes,
            "home": str(instance.machine.home) if instance.machine else None,
            "launched_at_s": round(instance.launched_at, 3),
            "terminated_at_s": instance.terminated_at,
            "billed_minutes": instance.billed_minutes(now),
            "cost_usd": round(instance.cost_usd(now), 4),
            "faults": list(instance.injected),
            "wrong": instance.wrong,
        }
