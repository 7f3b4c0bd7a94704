"""The plan's arithmetic is that of the real thing: weights, optimizer states, checkpoints and kept activations."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainmaster.core.config import presets
from trainmaster.core.config.train import ModelConfig, TrainConfig
from trainmaster.core.schema import build
from trainmaster.estimate import memory, shapes
from trainmaster.estimate.layout import setting_of
from trainmaster.models import family, rope
from trainmaster.models.decoder import count_parameters
from trainmaster.train.optimizer import build_optimizer
from trainmaster.train.parallel import blocks

from .runs import RunHere, tiny

ODD = [
    {},
    {"tied": False, "qkv_bias": True},
    {"qk_norm": True, "head_width": 32},
    {"experts": 4, "experts_per_token": 2, "tied": False},
    {"family": "olmo2", "tied": False},
]


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_has_the_parameters_it_is_published_with(name: str) -> None:
    model, known = build(ModelConfig, {"preset": name}), presets.find(name)
    counts = shapes.count(model)
    assert (counts.all, counts.active) == (known.parameters, known.active_parameters)
    assert counts.all == counts.root + model.layers * counts.block


@pytest.mark.parametrize("changes", ODD, ids=str)
def test_every_weight_has_the_name_and_shape_of_the_model(changes: dict[str, object]) -> None:
    model = build(ModelConfig, changes)
    with torch.device("meta"):
        real = family.build(model, max_tokens=1)
    assert family.weight_shapes(model) == {name: tuple(weight.shape) for name, weight in real.named_parameters()}
    counts = shapes.count(model)
    assert (counts.all, counts.tensors) == (count_parameters(real), len(list(real.parameters())))
    # Per token: every weight that multiplies, the chosen experts' share of theirs.
    chosen = model.experts_per_token / (model.experts or 1) if model.experts else 1
    stacked = sum(weight.numel() for name, weight in real.named_parameters() if name.endswith(("gate", "up", "down")))
    assert counts.active == counts.all - round(stacked * (1 - chosen))
    looked_up = 0 if model.tied else real.embedding.weight.numel()
    attention = 12 * model.layers * model.heads * model.head_size * 77
    flops = family.of(model).flops_per_token(model, sequence_tokens=77)
    assert flops == 6 * (counts.active - looked_up) + attention


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("changes", ODD, ids=str)
@pytest.mark.parametrize(("master", "kind"), [(4, torch.float32), (2, torch.bfloat16)])
def test_optimizer_states_have_the_bytes_that_are_planned(
    changes: dict[str, object], master: int, kind: torch.dtype
) -> None:
    config = tiny(model=changes)
    model = family.build(config.model, max_tokens=8).to(kind)
    optimizer = build_optimizer(model, config.optimizer)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    weights = sum(weight.nbytes for weight in model.parameters())
    assert weights + states == memory.checkpoint_bytes(config.model, master)


def test_a_checkpoint_holds_the_bytes_that_are_planned(run_here: RunHere, tmp_path: Path) -> None:
    config = tiny(steps=4, eval_sequences=0)
    ran = run_here(tmp_path, config)
    saved = tmp_path / "checkpoints" / "step-00000004"
    held = FileSystemReader(saved).read_metadata().state_dict_metadata.values()
    tensors = [item for item in held if isinstance(item, TensorStorageMetadata)]
    size = sum(math.prod(item.size) * item.properties.dtype.itemsize for item in tensors)
    planned = memory.checkpoint_bytes(config.model, 4)
    assert size == planned
    on_disk = sum(path.stat().st_size for path in saved.glob("*.distcp"))
    assert planned <= on_disk <= planned + 4096 * len(tensors)  # each tensor is a zip file of its own
    assert ran.named("CHECKPOINT", "saved")[-1]["data"]["bytes"] >= planned


@pytest.mark.matrix(one_in=6)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, when it first compiles
@pytest.mark.parametrize(
    ("compiled", "again", "changes"),
    [
        ("off", "none", {}),
        ("off", "none", {"qk_norm": True}),
        ("off", "none", {"family": "olmo2"}),
        ("on", "none", {}),
        ("on", "none", {"qk_norm": True}),
        ("on", "none", {"family": "olmo2"}),
        ("on", "ops", {"family": "olmo2"}),
        ("on", "ops", {}),
        ("on", "full", {}),
    ],
)
def test_a_block_keeps_the_activations_that_are_planned(compiled: str, again: str, changes: dict[str, object]) -> None:
    """Byte for byte, with what torch saves for the backward pass: by autograd, or cut by compile's partitioner."""
    shape = {"layers": 1, "width": 64, "heads": 8, "kv_heads": 2, "ffn_width": 176, **changes}
    parallel = {"compile": compiled, "recompute": again}
    config = build(
        TrainConfig,
        {"model": shape, "batch_sequences": 2, "sequence_tokens": 48, "precision": "fp32", "parallel": parallel},
    )
    model = family.build(config.model, max_tokens=48)
    blocks.recompute(model, config.parallel)
    forward = model.blocks[0].forward
    if compiled == "on":  # inductor's way of cutting, without its code generation
        forward = torch.compile(forward, backend="aot_eager_decomp_partition", fullgraph=True)
    cos, sin = rope.tables(config.model, 48)
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():  # a generator's state is kept too, as bytes
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward(torch.randn(2, 48, 64, requires_grad=True), cos, sin, None)
    for own in (*model.parameters(), cos, sin):
        kept.pop(own.untyped_storage().data_ptr(), None)
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    if compiled == "off":
        # A GPU's norm is one kernel that keeps its input; the CPU's keeps the input without its scale as well.
        over_heads = config.model.qk_norm or config.model.family == "olmo2"
        normed = 64 * 2 + (64 + 16 if over_heads else 0)
        size -= 4 * normed * 2 * 48
    assert size == memory.kept_bytes(config.model, setting_of(config, ranks=1, ranks_per_node=1))
