"""Rate limits and money of the simulator: both in simulated time, both counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.sim.lambda_cloud.catalog import load_catalog
from trainmaster.sim.lambda_cloud.clock import Clock
from trainmaster.sim.lambda_cloud.cloud import Cloud
from trainmaster.sim.lambda_cloud.faults import Faults
from trainmaster.sim.lambda_cloud.limits import Limit, Limits
from trainmaster.sim.lambda_cloud.settings import Settings


class Hands(Clock):
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


def test_a_client_that_keeps_the_limit_is_never_refused() -> None:
    limit = Limit(1.0, factor=1.0)
    jitter = (0.0, 0.05, -0.05, 0.09, -0.04)
    assert all(limit.allows(number + jitter[number % 5]) for number in range(200))
    assert limit.violations == 0


def test_a_client_that_is_a_tenth_too_fast_is_refused_in_the_long_run() -> None:
    limit = Limit(1.0, factor=1.0)
    allowed = sum(limit.allows(number * 0.9) for number in range(200))
    assert allowed < 190 and limit.violations == 200 - allowed


def test_launches_have_their_own_limit() -> None:
    limits = Limits(factor=1.0)
    assert limits.allows(launch=True, now_s=0)
    assert not limits.allows(launch=True, now_s=2)
    assert limits.allows(launch=False, now_s=4)
    assert limits.allows(launch=True, now_s=12)
    assert (limits.requests.violations, limits.launches.violations) == (0, 1)


@pytest.mark.spawns
def test_requests_over_the_limit_answer_429_and_are_counted(simulate) -> None:
    account = simulate(time_factor=0.01)  # one request per 100 s
    assert account.raw("GET", "/api/v1/regions")[0] == 200
    assert account.raw("GET", "/api/v1/regions")[0] == 429
    assert account.call("GET", "/sim/summary")[0] == 200  # the simulator's own paths have no limit
    summary = account.simulator.summary()
    assert summary["rate_limit_violations"] == {"requests": 1, "launches": 0}
    assert summary["requests_by_status"] == {"200": 1, "429": 1}


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    settings = Settings(folder=tmp_path)
    made = Cloud(settings, clock=Hands(), catalog=load_catalog(), faults=Faults(seed=0, rates={}))
    made.ssh_keys.add("key", "ssh-ed25519 AAAA")
    return made


LAUNCH = {"region_name": "us-south-1", "instance_type_name": "gpu_8x_h100_sxm5", "ssh_key_names": ["key"]}


def test_minutes_begun_are_billed_from_launch_to_end(cloud: Cloud) -> None:
    clock = cloud.clock
    assert isinstance(clock, Hands)
    one = cloud.launch(LAUNCH)
    clock.at_s = 61.0
    assert one.billed_s(61.0) == 61 and one.billed_minutes(61.0) == 2
    assert one.cost_usd(61.0) == pytest.approx(2 * 23.92 / 60)
    cloud.terminate([one.id])
    one.terminated_at = 121.0  # what the fleet sets once the processes are gone
    assert one.billed_minutes(10_000.0) == 3
    assert one.status(10_000.0) == "terminated"


def test_a_preempted_instance_costs_nothing_more(cloud: Cloud) -> None:
    clock = cloud.clock
    assert isinstance(clock, Hands)
    one = cloud.launch(LAUNCH)
    clock.at_s = 30.0
    cloud.preempt(one)
    assert one.status(31.0) == "preempted" and one.billed_minutes(10_000.0) == 1


@pytest.mark.spawns
def test_a_nonce_that_is_used_twice_is_counted(simulate) -> None:
    account = simulate(boot_s=1e6)
    for value in ("n-1", "n-2", "n-1"):
        account.launch(tags=[{"key": "nonce", "value": value}])
    account.launch()
    account.launch()
    assert account.simulator.summary()["launches_with_equal_tags"] == 1


@pytest.mark.spawns
def test_the_summary_names_what_was_not_terminated(simulate) -> None:
    account = simulate()
    kept, ended = account.launch(), account.launch()
    account.terminate(ended)
    account.wait(ended, "terminated")
    account.call("POST", "/sim/foreign", {"name": "theirs"})
    status, summary = account.call("GET", "/sim/summary")
    assert status == 200
    assert summary["launches"] == 2 and summary["not_terminated"] == [kept]
    assert 0 < summary["cost_usd_not_terminated"] < summary["cost_usd"]
    assert summary["billed_minutes"] >= summary["instance_minutes"] > 0
    ours = [one for one in account.simulator.instances() if not one["foreign"]]
    assert sum(one["cost_usd"] for one in ours) >= summary["cost_usd"] - 0.001
