"""What is traded for memory or speed changes nothing that is computed: each option beside the plain run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import SpecError
from trainmaster.models.decoder import Decoder
from trainmaster.train.compute import build_model, forward_backward
from trainmaster.train.feed import Batch
from trainmaster.train.optimizer import build_optimizer, update
from trainmaster.train.parallel import blocks, shard
from trainmaster.train.parallel.float8 import Float8Linear

from .runs import ALONE, tiny

Gradients = dict[str, torch.Tensor]
Build = Callable[[TrainConfig], Decoder]


@pytest.fixture
def build() -> Iterator[Build]:
    """A model on one rank, as the loop builds it."""

    def make(config: TrainConfig) -> Decoder:
        if dist.is_initialized():
            dist.destroy_process_group()
        world = shard.join(ALONE, torch.device("cpu"), timeout_s=60)
        return build_model(config, world, shard.pick_precision(config, world.device))

    yield make
    dist.destroy_process_group()


def passes(rows: int = 8) -> list[Batch]:
    """The same eight sequences in passes of so many; some targets count for nothing, unevenly."""
    tokens = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[0, :20] = -100
    targets[5, 3:] = -100
    return [
        Batch(tokens=tokens[start : start + rows, :-1], targets=targets[start : start + rows])
        for start in range(0, 8, rows)
    ]


def step(model: Decoder, batches: list[Batch]) -> tuple[float, Gradients]:
    loss = forward_backward(model, batches)
    whole = {name: _local(weight.grad) for name, weight in model.named_parameters()}
    model.zero_grad()
    return float(loss), whole


def _local(gradient: Any) -> torch.Tensor:
    found: torch.Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found.clone()


def same(one: tuple[float, Gradients], other: tuple[float, Gradients], *, tolerance: float = 1e-5) -> None:
    assert one[0] == pytest.approx(other[0], abs=tolerance)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], atol=tolerance, rtol=1e-3, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("preset", [{}, {"preset": "tiny-mixtral"}])
def test_passes_of_any_size_have_one_gradient(build: Build, preset: dict[str, Any]) -> None:
    """Over the counted tokens of the whole batch: a mean of the passes' means would weigh a token of a half-empty pass
    more. Experts' balance is a mean over sequences, and must not grow with the passes either."""
    model = build(tiny(model=preset))
    whole = step(model, passes(8))
    for rows in (4, 2, 1):
        same(step(model, passes(rows)), whole)


@pytest.mark.parametrize("recompute", ["full", "layers", "ops"])
def test_computing_again_gives_the_same_gradients_and_more_products(build: Build, recompute: str) -> None:
    """And really computes again what it says: every product, half of them, none."""
    counted = {}
    for kind in ("none", recompute):
        model = build(tiny(parallel={"recompute": kind}))
        with _Products() as products:
            counted[kind] = (step(model, passes()), products.count)
    same(counted[recompute][0], counted["none"][0], tolerance=1e-7)
    forward = 2 * 7  # matrices of two blocks
    again = {"full": forward, "layers": forward // 2, "ops": 0}[recompute]
    # Where a block's last product is not needed for its gradient, torch stops before it.
    assert again - 2 <= counted[recompute][1] - counted["none"][1] <= again


@contextmanager
def quiet() -> Iterator[None]:
    """torch warns itself while it traces, and where a CPU multiplies bfloat16 without its library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Products(TorchDispatchMode):
    """Counts matrix products while it is entered."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "ops"])
def test_compiled_blocks_share_one_graph_and_the_gradients(
    build: Build, monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    """Traced and differentiated as ever, but without a C++ compiler at the end: that takes half a minute."""
    monkeypatch.setattr(blocks, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = step(build(tiny(parallel={"compile": "off"})), passes())
    model = build(tiny(parallel={"compile": "on", "recompute": recompute}))
    with quiet():
        same(step(model, passes()), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one for both blocks, one for the loss
    assert sorted(model.state_dict()) == sorted(build(tiny()).state_dict())


def test_weights_in_host_memory_have_the_same_gradients(build: Build) -> None:
    plain = step(build(tiny()), passes())
    model = build(tiny(parallel={"cpu_offload": True}))
    assert isinstance(model, FSDPModule)
    same(step(model, passes()), plain)


def test_a_lone_rank_needs_no_fsdp_but_for_casting(build: Build) -> None:
    with quiet():
        assert not isinstance(build(tiny()), FSDPModule)
        model = build(tiny(precision="bf16"))
        assert isinstance(model, FSDPModule)
        _, gradients = step(model, passes())
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}


def test_bf16_masters_keep_everything_in_bf16_but_the_rotary_tables(build: Build) -> None:
    config = tiny(master="bf16")
    model = build(config)
    optimizer = build_optimizer(model, config.optimizer)
    with quiet():
        loss = forward_backward(model, passes())
    norm, sick = update(model, optimizer, loss=loss, lr=0.01, grad_clip=1.0)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    moments = {state[key].dtype for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")}
    assert moments == {torch.bfloat16}
    assert model.rope_cos.dtype == norm.dtype == torch.float32
    assert not sick


@pytest.mark.slow
def test_float8_keeps_the_names_and_nearly_the_loss(build: Build) -> None:
    with quiet():
        loss, plain = step(build(tiny(precision="bf16")), passes())
        close, gradients = step(build(tiny(precision="bf16", parallel={"float8": True})), passes())
    assert close == pytest.approx(loss, rel=0.01)
    assert gradients.keys() == plain.keys()
    changed = "blocks.0.feed.up.weight"
    assert not torch.equal(gradients[changed], plain[changed])


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_a_float8_product_is_right_to_its_bits_at_any_size(size: float) -> None:
    """e4m3 has three bits of mantissa and e5m2 two: an element is off by at most 1/16 and 1/8, a long sum by less."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 48)
    eight = Float8Linear(64, 48)
    eight.load_state_dict(plain.state_dict())
    x = (torch.randn(2, 32, 64) * size).requires_grad_()
    again = x.detach().clone().requires_grad_()
    gradient = torch.randn(2, 32, 48)
    one, other = eight(x), plain(again)
    one.backward(gradient)
    other.backward(gradient)
    for close, exact, most in (
        (one, other, 0.06),
        (x.grad, again.grad, 0.1),
        (eight.weight.grad, plain.weight.grad, 0.1),
        (eight.bias.grad, plain.bias.grad, 1e-6),
    ):
        assert close is not None
        assert exact is not None
        assert float(((close - exact).norm() / exact.norm()).detach()) < most


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"master": "bf16", "precision": "fp32"}, "master: bf16 is less than what precision"),
        ({"parallel": {"float8": True}, "model": {"preset": "tiny-mixtral"}}, "parallel.float8: is for dense models"),
        ({"parallel": {"float8": True}, "precision": "fp32"}, "parallel.float8: goes with precision: bf16"),
        ({"parallel": {"shard_ranks": 2}}, "parallel.shard_ranks: is for sharding: hybrid"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        tiny(**changes)


def test_ranks_that_do_not_divide_are_refused() -> None:
    config = tiny(parallel={"sharding": "hybrid", "shard_ranks": 3})
    assert [str(fault) for fault in config.faults_on(4)] == ["parallel.shard_ranks: 3 does not divide 4 ranks; use 2"]


@pytest.mark.parametrize(
    ("loss", "limits"),
    [(float("nan"), {}), (float("inf"), {}), (5.0, {"most_loss": 4.9}), (5.0, {"most_norm": 1e-6})],
)
def test_a_sick_step_moves_nothing_not_even_the_count(build: Build, loss: float, limits: dict[str, float]) -> None:
    config = tiny()
    model = build(config)
    optimizer = build_optimizer(model, config.optimizer)
    healthy = forward_backward(model, passes())
    update(model, optimizer, loss=healthy, lr=0.01, grad_clip=1.0)
    before = [weight.detach().clone() for weight in model.parameters()]
    moments = [{key: value.clone() for key, value in state.items()} for state in optimizer.state.values()]
    forward_backward(model, passes())
    _, sick = update(model, optimizer, loss=torch.tensor(loss), lr=0.01, grad_clip=1.0, **limits)
    assert sick
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    for old, state in zip(moments, optimizer.state.values(), strict=True):
        assert all(torch.equal(value, state[key]) for key, value in old.items())
    assert all(weight.grad is None for weight in model.parameters())
