"""Checkboxes of seed 004, 2.1: the Lambda client against the simulator, whose instances are real SSH servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lambda_sim import ask, lambda_cloud, live
from sshd import needs_sshd
from trainmaster import targets
from trainmaster.core.errors import NoCapacity
from trainmaster.core.spec import parse_spec
from trainmaster.sim.lambda_cloud.simulator import Simulator
from trainmaster.targets import Instance, InstanceState, LaunchRequest
from trainmaster.targets.lambda_cloud.errors import InvalidKey
from trainmaster.targets.lambda_cloud.provider import LambdaCloud

pytestmark = [pytest.mark.spawns, needs_sshd, pytest.mark.timeout(120)]

ATTEMPT = "0b6c5c4e-53ad-4f0e-9c57-6a4f1f3c2d10.1"
REQUEST = LaunchRequest(
    name=targets.Label(attempt=ATTEMPT, home="0a0b0c0d").name, kind="gpu_1x_a10", region="us-west-1"
)


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    with lambda_cloud(tmp_path / "lambda", monkeypatch) as simulator:
        yield simulator


async def until(provider: LambdaCloud, fits: Callable[[Instance], bool]) -> Instance:
    """The instance in the listing, once it fits."""
    while True:
        found = [one for one in await provider.list_instances() if fits(one)]
        if found:
            return found[0]
        await asyncio.sleep(0.05)


def rent(more: Callable[[LambdaCloud, str], Awaitable[Any]]) -> Any:
    """Launch an instance, do more with it, and terminate it."""

    async def go() -> Any:
        provider = LambdaCloud()
        made = await provider.launch(REQUEST)
        try:
            return await more(provider, made)
        finally:
            await provider.terminate([made])
            await until(provider, lambda one: one.id == made and one.state is InstanceState.GONE)

    return ask(go())


def test_can_authenticate_with_lambda_api(cloud: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(LambdaCloud().list_instances()) == []
    monkeypatch.setenv("LAMBDA_API_KEY", "wrong")
    with pytest.raises(InvalidKey, match="global/invalid-api-key"):
        ask(LambdaCloud().list_instances())


def test_can_list_available_gpu_instances(cloud: Simulator) -> None:
    offers = ask(LambdaCloud().list_offers())
    found = [one for one in offers if one.kind == "gpu_2x_h100_sxm5" and one.available]
    assert [(one.region, one.gpus, one.price_cents_per_hour, one.memory_gib) for one in found] == [
        ("us-south-1", 2, 638.0, 450.0)
    ]
    assert found[0].gpu_memory_gib == 80.0 and "H100" in found[0].gpu


def test_can_select_cheapest_available_instance(cloud: Simulator) -> None:
    spec = parse_spec({"name": "a", "target": "lambda", "command": ["true"], "rent": {"gpu": "H100", "gpus": 2}})
    target = targets.load("lambda")
    assert isinstance(target, targets.Rents)
    chosen = ask(target.choose(spec, refused=()))
    assert [one.kind for one in chosen][:2] == ["gpu_2x_h100_sxm5", "gpu_4x_h100_sxm5"]


def test_can_launch_a_gpu_instance(cloud: Simulator) -> None:
    async def look(_: LambdaCloud, made: str) -> str:
        return made

    made = rent(look)
    (one,) = cloud.instances()
    assert (one["id"], one["name"], one["type"], one["region"]) == (made, REQUEST.name, "gpu_1x_a10", "us-west-1")


def test_instance_reaches_active_state(cloud: Simulator) -> None:
    async def look(provider: LambdaCloud, made: str) -> Instance:
        return await until(provider, lambda one: one.id == made and one.state is InstanceState.ACTIVE)

    assert rent(look).state is InstanceState.ACTIVE


def test_can_get_instance_details(cloud: Simulator) -> None:
    async def look(provider: LambdaCloud, made: str) -> tuple[Instance, str]:
        return await until(provider, lambda one: one.address is not None), made

    one, made = rent(look)
    assert (one.id, one.kind, one.region, one.price_cents_per_hour) == (made, "gpu_1x_a10", "us-west-1", 75.0)
    assert one.address.startswith("127.77.") and one.label.attempt == ATTEMPT


def test_can_check_instance_status(cloud: Simulator) -> None:
    async def look(provider: LambdaCloud, made: str) -> list[InstanceState]:
        seen = []
        for state in (InstanceState.BOOTING, InstanceState.ACTIVE):
            seen.append((await until(provider, lambda one, state=state: one.state is state)).state)  # type: ignore[misc]
        return seen

    assert rent(look) == [InstanceState.BOOTING, InstanceState.ACTIVE]


def test_can_terminate_instance(cloud: Simulator) -> None:
    async def look(provider: LambdaCloud, made: str) -> None:
        await provider.terminate([made])
        await until(provider, lambda one: one.state is InstanceState.GONE)
        await provider.terminate([made])  # once more: no error

    rent(look)
    assert live(cloud) == []


def test_cleanup_works_properly(cloud: Simulator) -> None:
    """Releasing an attempt terminates every instance with its name, and no other."""

    async def go() -> None:
        provider, other = LambdaCloud(), targets.Label(attempt=ATTEMPT.replace("0b6c", "1b6c"), home="0a0b0c0d").name
        second = targets.Label(attempt=ATTEMPT, home="0a0b0c0d").name
        for name in (REQUEST.name, second, other):
            while not provider.may_launch():  # noqa: ASYNC110 (one launch in twelve simulated seconds)
                await asyncio.sleep(0.02)
            await provider.launch(LaunchRequest(name=name, kind="gpu_1x_a10", region="us-west-1"))
        await targets.load("lambda").release({"attempt": ATTEMPT, "nodes": [], "instances": []})

    ask(go())
    assert [one["name"][:8] for one in live(cloud)] == ["tm-1b6c5"]


def test_handles_no_available_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lambda_cloud(tmp_path / "lambda", monkeypatch, capacity=1) as cloud:
        spec = parse_spec({"name": "a", "command": ["true"], "rent": {"types": ["gpu_2x_h100_sxm5"]}})
        target = targets.load("lambda")
        assert isinstance(target, targets.Rents)
        ask(LambdaCloud().launch(LaunchRequest(name="x", kind="gpu_2x_h100_sxm5", region="us-south-1")))
        with pytest.raises(NoCapacity, match=r"sold out"):
            ask(target.choose(spec, refused=()))
        with pytest.raises(NoCapacity, match="insufficient-capacity"):
            ask(LambdaCloud().launch(LaunchRequest(name="y", kind="gpu_2x_h100_sxm5", region="us-south-1")))
        assert len(cloud.instances()) == 1
