"""A pass beside the load compiles ahead, and leaves no trace in the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from trainmaster.core.config import presets
from trainmaster.core.config.train import ModelConfig, ParallelConfig
from trainmaster.core.schema import build
from trainmaster.models import family
from trainmaster.train import warm_up
from trainmaster.train.checkpoint import read
from trainmaster.train.compute import forward_backward
from trainmaster.train.feed import Batch
from trainmaster.train.parallel import blocks

from .runs import RunHere, StopAfter, tiny

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch's tracer looks at what is deprecated
COMPILED = tiny(steps=8, epoch_steps=100, parallel={"compile": "on"})


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of micro-batches of the passes beside a load. No C++ compiler: that takes half a minute."""
    monkeypatch.setattr(blocks, "BACKEND", "aot_eager")
    made: list[int] = []

    def counting(model: Any, batches: Sequence[Batch]) -> Tensor:
        made.append(len(batches))
        return forward_backward(model, batches)

    monkeypatch.setattr(warm_up, "forward_backward", counting)
    return made


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_a_run_that_compiles_beside_its_load_is_bit_equal(passes: list[int], run_here: RunHere, tmp_path: Path) -> None:
    unbroken = run_here(tmp_path / "unbroken", COMPILED)
    run_here(tmp_path / "broken", COMPILED, stop=StopAfter(5))
    assert passes == []  # nothing is loaded at a first start
    broken = run_here(tmp_path / "broken", COMPILED)
    assert passes == [1]
    assert broken.losses == unbroken.losses
    assert broken.named("TRAINING", "start")[1]["data"]["resumed_from"] == 5


def test_autograd_does_not_see_that_a_weight_is_filled() -> None:
    """A weight that changes between a forward and its backward pass is an error, and here it means nothing."""
    weight = nn.Parameter(torch.zeros(2, 2))

    class Planner(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Tensor:
            return weight.detach()

    loss = (weight * weight).sum()
    read._put(None, torch.ones(2, 2), Planner())  # type: ignore[arg-type]
    loss.backward()
    assert weight.sum() == 4


def test_a_damaged_checkpoint_is_left_out_as_ever(passes: list[int], run_here: RunHere, tmp_path: Path) -> None:
    unbroken = run_here(tmp_path / "unbroken", COMPILED)
    run_here(tmp_path / "broken", COMPILED, stop=StopAfter(5))
    (shard,) = (tmp_path / "broken" / "checkpoints" / "step-00000005").glob("*.distcp")
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    broken = run_here(tmp_path / "broken", COMPILED)
    assert broken.named("TRAINING", "start")[1]["data"]["resumed_from"] == 4
    assert passes == [1]
    assert broken.losses == unbroken.losses


def test_a_run_that_does_not_compile_has_no_pass_of_its_own(
    passes: list[int], run_here: RunHere, tmp_path: Path
) -> None:
    config = tiny(steps=4, epoch_steps=100)
    run_here(tmp_path, config, stop=StopAfter(2))
    run_here(tmp_path, config)
    assert passes == []


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("tiny-llama", "ops"), *((name, "none") for name in presets.names() if name.startswith("tiny-"))],
)
def test_the_compilers_cache_takes_every_graph(name: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph with a call that torch's cache does not know is traced and optimised again at every start."""
    # The compiler is imported here: no worker that has other tests needs it.
    from torch._functorch._aot_autograd.autograd_cache import check_cacheable

    seen: list[Any] = []

    def look(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        check_cacheable(graph)  # raises, with the call
        return graph

    monkeypatch.setattr(blocks, "BACKEND", look)
    torch._dynamo.reset()
    model = family.build(build(ModelConfig, {"preset": name}), max_tokens=32)
    model.init_weights(0)
    parallel = build(ParallelConfig, {"compile": "on", "recompute": recompute})
    blocks.recompute(model, parallel)
    blocks.compile_blocks(model, parallel, torch.device("cpu"))
    tokens = torch.arange(32).view(1, 32)
    model(tokens, targets=tokens).backward()
    assert seen
