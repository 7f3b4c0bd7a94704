"""Choice of an offer: cheapest first, every requirement held, a typed error where nothing can be had."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.core.errors import NoCapacity, TargetError
from trainmaster.core.spec import JobSpec, parse_spec
from trainmaster.targets._choose import rank_offers
from trainmaster.targets._provider import Offer


def offer(kind: str, dollars: float, *regions: str, gpus: int = 1, gpu: str = "A10 (24 GB PCIe)") -> list[Offer]:
    memory = float(gpu.partition("(")[2].partition(" ")[0])
    return [
        Offer(kind=kind, region=region, price_cents_per_hour=dollars * 100, available=region != "", gpus=gpus, gpu=gpu,
              gpu_memory_gib=memory, memory_gib=200.0 * gpus)
        for region in (*regions, "")
    ]  # fmt: skip


OFFERS = [
    *offer("gpu_8x_h100_sxm5", 23.92, "us-east-1", gpus=8, gpu="H100 (80 GB SXM5)"),
    *offer("gpu_2x_h100_sxm5", 6.38, "us-south-2", gpus=2, gpu="H100 (80 GB SXM5)"),
    *offer("gpu_1x_a100", 1.29, "us-west-1", "us-east-1", gpu="A100 (40 GB PCIe)"),
    *offer("gpu_1x_a10", 0.75, "us-west-1", "us-east-1"),
    *offer("gpu_1x_rtx6000", 0.50),
]


def spec(**rent: Any) -> JobSpec:
    return parse_spec({"name": "a", "target": "lambda", "command": ["true"], "rent": rent})


def best(**rent: Any) -> tuple[str, str]:
    first = rank_offers(OFFERS, spec(**rent), provider="lambda")[0]
    return first.kind, first.region


def test_the_cheapest_available_offer_comes_first_and_the_others_follow_by_price() -> None:
    ranked = [(one.kind, one.region) for one in rank_offers(OFFERS, spec(), provider="lambda")]
    assert ranked == [
        ("gpu_1x_a10", "us-east-1"), ("gpu_1x_a10", "us-west-1"), ("gpu_1x_a100", "us-east-1"),
        ("gpu_1x_a100", "us-west-1"), ("gpu_2x_h100_sxm5", "us-south-2"), ("gpu_8x_h100_sxm5", "us-east-1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rent", "kind"),
    [
        ({"gpus": 2}, "gpu_2x_h100_sxm5"),
        ({"gpus": 3}, "gpu_8x_h100_sxm5"),
        ({"gpu": "a10"}, "gpu_1x_a10"),
        ({"gpu": "A100"}, "gpu_1x_a100"),
        ({"gpu_memory_gib": 40}, "gpu_1x_a100"),
        ({"memory_gib": 300}, "gpu_2x_h100_sxm5"),
        ({"types": ["gpu_8x_h100_sxm5", "gpu_2x_h100_sxm5"]}, "gpu_2x_h100_sxm5"),
        ({"gpu": "H100", "regions": ["us-east-1"]}, "gpu_8x_h100_sxm5"),
    ],
)
def test_each_requirement_is_held(rent: dict[str, Any], kind: str) -> None:
    assert best(**rent)[0] == kind


def test_of_equal_price_the_first_region_of_the_list_is_taken() -> None:
    assert best(gpu="A10", regions=["us-west-1", "us-east-1"]) == ("gpu_1x_a10", "us-west-1")
    assert best(gpu="A10", regions=["us-east-1", "us-west-1"]) == ("gpu_1x_a10", "us-east-1")


def test_processes_per_node_is_the_number_of_gpus_unless_stated() -> None:
    wanted = parse_spec({"name": "a", "command": ["true"], "resources": {"processes_per_node": 2}})
    assert rank_offers(OFFERS, wanted, provider="lambda")[0].gpus == 2


@pytest.mark.parametrize("rent", [{"gpu": "RTX"}, {"types": ["gpu_1x_rtx6000"]}, {"regions": ["asia-1"]}])
def test_sold_out_is_no_capacity_and_may_change(rent: dict[str, Any]) -> None:
    offers = [*OFFERS, *offer("gpu_1x_rtx", 0.4, gpu="RTX 6000 (24 GB)")]
    with pytest.raises(NoCapacity, match="sold out"):
        rank_offers(offers, spec(**rent), provider="lambda")


@pytest.mark.parametrize("rent", [{"gpus": 16}, {"gpu": "B200"}, {"max_price_per_hour": 0.1}, {"gpu": "A1"}])
def test_what_no_type_has_is_refused_with_the_types_there_are(rent: dict[str, Any]) -> None:
    with pytest.raises(TargetError, match=r"no type meets the spec .*gpu_1x_a10 \(\$0.75\)") as refused:
        rank_offers(OFFERS, spec(**rent), provider="lambda")
    assert not isinstance(refused.value, NoCapacity)


def test_refused_offers_are_left_out_and_the_next_is_taken() -> None:
    refused = {("gpu_1x_a10", "us-east-1"), ("gpu_1x_a10", "us-west-1")}
    first = rank_offers(OFFERS, spec(), provider="lambda", refused=refused)[0]
    assert first.kind == "gpu_1x_a100"
    everything = {(one.kind, one.region) for one in OFFERS}
    with pytest.raises(NoCapacity):
        rank_offers(OFFERS, spec(), provider="lambda", refused=everything)


def test_file_systems_decide_the_region() -> None:
    known = {"data": "us-east-1", "far": "us-south-2"}
    wanted = spec(gpu="A10", regions=["us-west-1", "us-east-1"], file_systems=["data"])
    assert rank_offers(OFFERS, wanted, provider="lambda", file_systems=known)[0].region == "us-east-1"
    with pytest.raises(TargetError, match="no file system lost; there are data, far"):
        rank_offers(OFFERS, spec(file_systems=["lost"]), provider="lambda", file_systems=known)
    with pytest.raises(TargetError, match="a machine is in one"):
        rank_offers(OFFERS, spec(file_systems=["data", "far"]), provider="lambda", file_systems=known)
    with pytest.raises(NoCapacity, match="where its file systems are"):
        rank_offers(OFFERS, spec(gpu="A10", file_systems=["far"]), provider="lambda", file_systems=known)
