"""Prices come from the table of instances or from the user, and from nowhere else."""

from __future__ import annotations

import pytest

from trainmaster.checks import profiles as _profiles
from trainmaster.cluster.health import prices
from trainmaster.core.health import ClusterHealth, NodeHealth


def run_on(*profiles: str | None) -> ClusterHealth:
    nodes = [
        NodeHealth(node=f"n{place}", level=1, planned=(), results=(), profile=profile)
        for place, profile in enumerate(profiles)
    ]
    return ClusterHealth(asked=tuple(node.node for node in nodes), nodes=tuple(nodes))


def test_an_instance_type_has_its_list_price_with_its_source() -> None:
    found = prices.find(run_on("ml.p5.48xlarge", "g5.12xlarge"))
    instance = _profiles.find_instance("p5.48xlarge")
    assert instance is not None
    assert found.by_profile["ml.p5.48xlarge"].usd_per_hour == instance.usd_per_hour
    assert "price list" in found.by_profile["ml.p5.48xlarge"].source
    assert "EC2's price of the same machine, SageMaker's own is higher" in found.by_profile["ml.p5.48xlarge"].source
    assert found.by_profile["g5.12xlarge"].source == instance.source
    assert len(found.by_profile) == 2


def test_a_job_on_one_instance_type_has_its_list_price_and_nobody_is_said_to_have_stated_it() -> None:
    found = prices.find(run_on(None, "H200"), instance="ml.p5.48xlarge")
    assert found.every is not None and found.every.usd_per_hour == 55.04
    assert "price list" in found.every.source and "stated" not in found.every.source
    assert prices.find(run_on("p5.48xlarge"), instance="ml.unknown").every is None


@pytest.mark.parametrize("profile", [None, "H200", "p5e.48xlarge", "no-such-type", ""])
def test_what_has_no_price_gets_none(profile: str | None) -> None:
    assert prices.find(run_on(profile)).by_profile == {}


def test_the_users_price_wins() -> None:
    found = prices.find(run_on("p5.48xlarge"), 30.0)
    assert (found.every and found.every.usd_per_hour, found.by_profile) == (30.0, {})
    assert found.every is not None and found.every.source == "as you stated it"
