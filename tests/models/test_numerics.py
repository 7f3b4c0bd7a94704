"""The test that every family must pass, by its folder alone: what it computes, holds and counts is what it says.

Each runs over the tiny presets, and every `model_type` of every family needs one.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import FlopCounterMode

from trainmaster.core.config import presets
from trainmaster.core.config.train import ModelConfig
from trainmaster.core.schema import build
from trainmaster.models import family, hf
from trainmaster.models.decoder import Decoder, count_parameters
from trainmaster.models.hf_config import model_type, to_hf

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY = [name for name in presets.names() if name.startswith("tiny-")]
MODELS = Path(family.__file__).parent
TOLERANCE = 1e-4
# Longer than the tiny window.
TOKENS = torch.randint(0, 256, (2, 49), generator=torch.Generator().manual_seed(1))


def shape(name: str) -> ModelConfig:
    return build(ModelConfig, {"preset": name})


def theirs(config: ModelConfig) -> PreTrainedModel:
    """A random model of transformers whose every weight matters: norms and biases are no ones and zeros."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {key: value for key, value in to_hf(config, dtype="float32").items() if key != "architectures"}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(plain.pop("model_type"), **plain))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.2) if weight.ndim > 1 else weight.uniform_(0.5, 1.5)
    return model.train()


def ours(folder: Path) -> Decoder:
    with hf.HfFolder(folder) as found:
        # A balance loss of experts is ours alone; transformers leaves it to its caller.
        model = family.build(replace(found.config, balance=0.0), max_tokens=TOKENS.shape[1])
        model.init_weights(0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(found.read(name))
    return model.train()


def test_every_family_and_every_type_of_hf_has_a_tiny_preset() -> None:
    assert {presets.find(name).family for name in TINY} == set(family.names())
    every = {kind for name in family.names() for kind in family.find(name).model_types()}
    assert {model_type(shape(name)) for name in TINY} == every


@pytest.mark.matrix(one_in=3)
@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_logits_loss_and_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    other = theirs(shape(name))
    other.save_pretrained(tmp_path / "weights")
    model = ours(tmp_path / "weights")
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    with torch.no_grad():
        logits, expected = model(inputs), other(inputs).logits
    assert float(expected.std()) > 0.1, "logits near zero would agree with anything"
    assert float((logits - expected).abs().max()) <= TOLERANCE
    loss = model(inputs, targets=targets) / targets.numel()
    loss.backward()
    their_loss = torch.nn.functional.cross_entropy(other(inputs).logits.flatten(0, 1), targets.flatten())
    their_loss.backward()
    assert loss.item() == pytest.approx(their_loss.item(), abs=1e-5)
    with torch.no_grad():
        for weight in other.parameters():
            assert weight.grad is not None
            weight.copy_(weight.grad)
    other.save_pretrained(tmp_path / "gradients")  # named and stacked as weights are
    with hf.HfFolder(tmp_path / "gradients") as gradients:
        for key, weight in model.named_parameters():
            wanted = gradients.read(key)
            assert weight.grad is not None and float(wanted.abs().max()) > 0, key
            torch.testing.assert_close(weight.grad, wanted, atol=1e-5, rtol=1e-3, msg=key)


@pytest.mark.matrix(one_in=3)
@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_weights_from_hf_go_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    other = theirs(shape(name))
    other.save_pretrained(tmp_path / "theirs")
    with hf.HfFolder(tmp_path / "theirs") as found:
        assert found.config == shape(name)
        hf.write(tmp_path / "ours", found.config, found.read, dtype="fp32", shard_bytes=1 << 30)
    before, after = (load_file(tmp_path / folder / hf.SINGLE) for folder in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again.eval()(TOKENS).logits, other.eval()(TOKENS).logits)
    assert json.loads((tmp_path / "ours" / hf.CONFIG).read_text())["model_type"] == model_type(shape(name))


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("tied", [True, False])
def test_shapes_and_counts_are_those_of_the_module(name: str, tied: bool) -> None:
    config = replace(shape(name), tied=tied)
    own = family.of(config)
    model = own.build(config, max_tokens=TOKENS.shape[1])
    model.init_weights(0)
    real = [(key, tuple(weight.shape)) for key, weight in model.named_parameters()]
    assert list(own.weight_shapes(config).items()) == real  # in order: an export writes its files by it
    if tied == shape(name).tied:
        assert count_parameters(model) == presets.find(name).parameters
        assert own.active_parameters(config) == presets.find(name).active_parameters
    # Every operation of a matrix, as torch counts them while it computes forward and backward.
    with FlopCounterMode(display=False) as counter:
        model(TOKENS).sum().backward()
    done = counter.get_flop_counts()["Global"]
    counted = sum(count for operation, count in done.items() if operation in (torch.ops.aten.mm, torch.ops.aten.addmm))
    vectors = sum(weight.numel() for weight in model.parameters() if weight.ndim == 1)
    attention = 12 * config.layers * config.heads * config.head_size * min(49, config.sliding_window or 49)
    planned = own.flops_per_token(config, sequence_tokens=49) - attention - 6 * vectors
    assert counted == planned * TOKENS.numel()


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", TINY)
@pytest.mark.usefixtures("alone")
def test_the_trainer_shards_every_block_by_itself_and_nothing_changes(name: str) -> None:
    from trainmaster.core.config.train import TrainConfig
    from trainmaster.train.compute import build_model, sum_of_losses
    from trainmaster.train.feed import Batch
    from trainmaster.train.parallel.rank_info import RankInfo
    from trainmaster.train.parallel.shard import World

    ranks = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, nodes=1, master=None)
    world = World(rank_info=ranks, device=torch.device("cpu"))
    batch = Batch(tokens=TOKENS[:, :-1], targets=TOKENS[:, 1:])

    def built(**parallel: Any) -> Decoder:
        config = build(TrainConfig, {"model": {"preset": name}, "sequence_tokens": 49, "parallel": parallel})
        return build_model(config, world, "fp32")

    plain, sharded, again = built(), built(cpu_offload=True), built(recompute="full")
    assert not isinstance(plain, FSDPModule)
    assert isinstance(sharded, FSDPModule) and all(isinstance(block, FSDPModule) for block in sharded.blocks)
    losses = [float(sum_of_losses(model, batch)) for model in (plain, sharded, again)]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("name", family.names())
def test_a_family_is_described_without_torch(name: str) -> None:
    """`trainmaster plan` runs where there is no torch; `build` alone may import it."""
    tree = ast.parse((MODELS / name / "family.py").read_text())
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert not any("torch" in ast.unparse(node) or ".model " in ast.unparse(node) for node in top)


def test_no_family_needs_torch_for_a_plan() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from trainmaster.core.config import presets\n"
        "from trainmaster.core.schema import build\n"
        "from trainmaster.core.config.train import TrainConfig\n"
        "from trainmaster.estimate import Cluster, estimate\n"
        "for name in presets.names():\n"
        "    config = build(TrainConfig, {'model': {'preset': name}})\n"
        "    assert estimate(config, Cluster(gpu=None, gpus=1, gpus_per_node=1)).memory.peak > 0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_folder_of_models_with_presets_is_a_family() -> None:
    folders = {table.parent.name for table in MODELS.glob("*/presets.toml")}
    assert folders == set(family.names())
    for name in folders:
        assert family.find(name).name == name
        assert (MODELS / name / "model.py").is_file()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"family": "olmo"}, "model.family: there is no model family 'olmo'; known: llama, moe, olmo2"),
        ({"family": "olmo2", "qk_norm": True}, "model.qk_norm: is not an option of the family olmo2 but of llama, moe"),
        ({"family": "llama", "experts": 4}, "model.experts: is not an option of the family llama but of moe"),
        ({"family": "moe"}, "model.experts: the family moe needs it"),
        ({"preset": "olmo2-7b", "sliding_window": 64}, "model.sliding_window: is not an option of the family olmo2"),
    ],
)
def test_a_family_that_cannot_be_is_refused(model: dict[str, object], says: str) -> None:
    from trainmaster.core.config.train import TrainConfig
    from trainmaster.core.errors import SpecError

    with pytest.raises(SpecError) as caught:
        build(TrainConfig, {"model": model})
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, "llama"),
        ({"experts": 4}, "moe"),
        ({"family": "moe", "experts": 4}, "moe"),
        ({"preset": "mixtral-8x7b", "experts": None}, "llama"),
        ({"preset": "llama3.2-1b", "experts": 4}, "moe"),
        ({"preset": "olmo2-7b"}, "olmo2"),
        ({"preset": "olmo2-7b", "family": "llama"}, "llama"),
    ],
)
def test_the_family_follows_from_what_is_stated(model: dict[str, object], expected: str) -> None:
    config = build(ModelConfig, model)
    assert config.family_name == expected
    assert config.family == (expected if expected == "olmo2" else None)  # a family that goes without saying is not kept
