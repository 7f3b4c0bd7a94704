"""A run's checkpoint becomes an HF model that transformers computes alike; an HF model becomes the start of a run."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)
from typer.testing import CliRunner

from trainmaster import datasets
from trainmaster.cli.main import build as build_cli
from trainmaster.core.config import presets
from trainmaster.core.config.train import ModelConfig, TrainConfig
from trainmaster.core.errors import CheckpointError, UsageError
from trainmaster.core.schema import build
from trainmaster.models import family, hf
from trainmaster.models.family import weight_shapes
from trainmaster.models.hf_config import model_type
from trainmaster.train.checkpoint.weights import save_weights

from ..runs import RunHere, Start, tiny

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def export(*words: object) -> dict[str, Any]:
    result = CliRunner().invoke(build_cli(), ["export", *map(str, words), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    printed: dict[str, Any] = json.loads(result.stdout)
    return printed


@torch.no_grad()
def loss_of(model: PreTrainedModel, config: TrainConfig, *, held_out: bool) -> float:
    """As transformers computes it, on the samples of the run's first step or of its evaluation."""
    count = config.eval_sequences if held_out else config.batch_sequences
    shape = datasets.Shape(sequence_tokens=config.sequence_tokens, batch_sequences=config.batch_sequences)
    rows = datasets.load(config.data, shape).rows(range(count), held_out=held_out)
    logits = model.eval()(rows.tokens).logits
    return float(F.cross_entropy(logits.flatten(0, 1), rows.targets.flatten()))


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("name", family.names())
def test_a_model_trained_on_two_ranks_exports_what_it_learned_and_goes_on(
    tmp_path: Path, start: Start, run_here: RunHere, name: str
) -> None:
    """Of every family, by its first tiny preset: sharded is unsharded, to HF and back, resumed on another number."""
    from transformers import AutoModelForCausalLM

    preset = next(word for word in presets.names() if word.startswith("tiny-") and presets.find(word).family == name)
    config = tiny(model={"preset": preset})
    ran = start(tmp_path / "two", config, ranks=2).finish()
    assert ran.codes == [0, 0], ran.output
    alone = run_here(tmp_path / "one", config)
    for step, loss in alone.losses.items():
        assert ran.losses[step] == pytest.approx(loss, abs=1e-4), "the number of ranks changed the curve"
    done = export(tmp_path / "two" / "checkpoints", tmp_path / "out", "--file-gib", 0.001)
    assert (done["family"], done["step"]) == (model_type(config.model), config.steps)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    evaluated = ran.named("EVAL_MODEL", "metrics")[-1]["data"]["loss"]
    assert loss_of(model, config, held_out=True) == pytest.approx(evaluated, abs=1e-4)
    longer = run_here(tmp_path / "two", tiny(model={"preset": preset}, steps=config.steps + 2))
    assert longer.named("TRAINING", "start")[-1]["data"]["resumed_from"] == config.steps
    back = export("--from-hf", tmp_path / "out", tmp_path / "back")
    fresh = run_here(tmp_path / "new", tiny(model={"preset": preset}, steps=4, init_from=back["path"]))
    assert fresh.losses[1] == pytest.approx(loss_of(model, config, held_out=False), abs=1e-4)


def test_bf16_halves_the_bytes_and_keeps_the_numbers(tmp_path: Path, run_here: RunHere) -> None:
    run_here(tmp_path, tiny(steps=4, eval_sequences=0))
    checkpoint = tmp_path / "checkpoints" / "step-00000004"
    export(checkpoint, tmp_path / "whole")
    export(checkpoint, tmp_path / "half", "--dtype", "bf16")
    with hf.HfFolder(tmp_path / "whole") as whole, hf.HfFolder(tmp_path / "half") as half:
        for name in weight_shapes(whole.config):
            assert torch.equal(whole.read(name).bfloat16().float(), half.read(name))
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_run_starts_with_the_weights_of_an_hf_model(tmp_path: Path, run_here: RunHere) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    words = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 64, "vocab_size": 256, "tie_word_embeddings": True, "initializer_range": 0.2,
    }  # fmt: skip
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **words))
    theirs.save_pretrained(tmp_path / "hf")
    done = export("--from-hf", tmp_path / "hf", tmp_path / "start")
    assert done["path"] == str(tmp_path / "start" / "step-00000000")
    model = {"head_width": 16, "qk_norm": True, "norm_eps": 1e-6, "rope_theta": 10_000.0}
    config = tiny(model=model, steps=4, init_from=done["path"], eval_sequences=0)
    first = run_here(tmp_path / "run", config)
    assert first.losses[1] == pytest.approx(loss_of(theirs, config, held_out=False), abs=1e-4)
    assert first.named("TRAINING", "start")[0]["data"]["resumed_from"] is None
    # What the run has reached wins over what it started with.
    again = run_here(tmp_path / "run", tiny(model=model, steps=6, init_from=done["path"], eval_sequences=0))
    assert again.named("TRAINING", "start")[-1]["data"]["resumed_from"] == 4


def test_a_start_that_is_not_there_not_whole_or_of_another_shape_is_refused(tmp_path: Path, run_here: RunHere) -> None:
    config = build(ModelConfig, {"preset": "tiny-llama"})
    shapes = weight_shapes(config)
    path = save_weights(tmp_path / "start", config, lambda name: torch.ones(shapes[name]))
    with pytest.raises(CheckpointError, match="width"):
        run_here(tmp_path / "a", tiny(init_from=str(path)))
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        run_here(tmp_path / "b", tiny(init_from=str(tmp_path / "nothing")))
    shard = next(path.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    same = {"preset": "tiny-llama"}
    with pytest.raises(CheckpointError, match="bytes instead of"):
        run_here(tmp_path / "c", build(TrainConfig, {"model": same, "device": "cpu", "init_from": str(path)}))
    assert list((tmp_path / "c" / "checkpoints").glob("step-*")) == []


def test_a_damaged_checkpoint_is_never_exported(tmp_path: Path, run_here: RunHere) -> None:
    run_here(tmp_path, tiny(steps=8, eval_sequences=0))
    folder, out = tmp_path / "checkpoints", tmp_path / "out"
    newest = folder / "step-00000008"
    shard = next(newest.glob("*.distcp"))
    whole = bytearray(shard.read_bytes())
    whole[len(whole) // 2] ^= 1
    shard.write_bytes(whole)
    with pytest.raises(CheckpointError, match="does not match its SHA-256"):
        export(newest, out)
    with pytest.raises(CheckpointError, match="step-00000008 is damaged"):
        export(folder, out)  # nor an older one in its place
    (newest / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing; name an older one"):
        export(folder, out)
    with pytest.raises(UsageError, match="neither a checkpoint"):
        export(tmp_path, out)
    assert not out.exists()
    assert export(folder / "step-00000004", out)["step"] == 4


def test_an_import_spares_what_is_there_and_holds_two_weights_at_most(tmp_path: Path) -> None:
    config = build(ModelConfig, {"preset": "tiny-mixtral"})
    shapes = weight_shapes(config)
    given: list[weakref.ref[Any]] = []
    most = 0

    def read(name: str) -> torch.Tensor:
        nonlocal most
        memory = np.ones(shapes[name], dtype=np.float32)  # lives as long as any tensor over it
        given.append(weakref.ref(memory))
        most = max(most, sum(held() is not None for held in given))
        return torch.from_numpy(memory)

    save_weights(tmp_path, config, read)
    assert len(given) == len(shapes)
    assert most <= 2
    with pytest.raises(UsageError, match="holds checkpoints already"):
        save_weights(tmp_path, config, read)


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("name", [name for name in presets.names() if name.startswith("tiny-")])
def test_every_family_learns_under_fsdp(name: str, tmp_path: Path, run_here: RunHere) -> None:
    short = {"steps": 12, "sequence_tokens": 32, "batch_sequences": 8, "eval_sequences": 0, "device": "cpu"}
    config = {"model": {"preset": name}, "optimizer": {"warmup_steps": 2}, **short}
    losses = run_here(tmp_path, build(TrainConfig, config)).losses
    assert losses[12] < losses[1] - 0.5
