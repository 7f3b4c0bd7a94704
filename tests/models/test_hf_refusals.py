"""A folder that is not whole, or not a model of ours, is refused with its reason; an export appears whole or not."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from trainmaster.core.config.train import ModelConfig
from trainmaster.core.errors import SpecError, UsageError
from trainmaster.core.schema import build
from trainmaster.models import hf
from trainmaster.models.family import weight_shapes
from trainmaster.models.hf_config import from_hf, model_type, to_hf

LLAMA = build(ModelConfig, {"preset": "tiny-llama"})
SMALL = 60_000  # bytes a file: several of them


def export(folder: Path, config: ModelConfig = LLAMA, *, shard_bytes: int = SMALL, dtype: str = "fp32") -> Path:
    shapes = weight_shapes(config)
    hf.write(folder, config, lambda name: torch.ones(shapes[name]), dtype=dtype, shard_bytes=shard_bytes)
    return folder


def open_folder(folder: Path) -> ModelConfig:
    with hf.HfFolder(folder) as found:
        return found.config


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain))


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tensors = load_file(folder / hf.SINGLE)
    change(tensors)
    save_file(tensors, folder / hf.SINGLE, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "gpt2"}, "'gpt2' is not one of llama, mistral"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported"),
        ({"attention_bias": True}, "attention_bias: True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type: 'linear' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type: 'yarn' is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of different attention"),
        ({"num_hidden_layers": "two"}, "layers: expected a whole number"),
    ],
)
def test_a_config_that_ours_cannot_be_is_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_hf({**to_hf(LLAMA, dtype="float32"), **change})
    assert says in str(caught.value)


def test_a_number_that_transformers_would_guess_is_asked_for() -> None:
    plain = to_hf(build(ModelConfig, {"preset": "tiny-qwen3"}), dtype="float32")
    del plain["head_dim"], plain["rope_theta"]
    with pytest.raises(SpecError) as caught:
        from_hf(plain)
    assert [fault.path for fault in caught.value.faults] == ["config.json: head_dim", "config.json: rope_theta"]


def test_an_early_llama_file_is_read_with_its_defaults() -> None:
    plain = to_hf(build(ModelConfig, {"preset": "llama2-7b"}), dtype="float16")
    for key in ("num_key_value_heads", "rope_theta", "head_dim"):
        del plain[key]
    assert from_hf(plain).name == "llama2-7b"


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ({"preset": "tiny-qwen3", "sliding_window": 8}, "qwen3, which does not know sliding_window"),
        ({"preset": "tiny-mixtral", "qk_norm": True}, "mixtral, which does not know qk_norm"),
        ({"preset": "tiny-qwen2", "head_width": 32}, "qwen2, which does not know head_width"),
    ],
)
def test_a_shape_that_no_family_has_is_not_exported(shape: dict[str, object], says: str, tmp_path: Path) -> None:
    config = build(ModelConfig, shape)
    with pytest.raises(UsageError, match=says):
        model_type(config)
    with pytest.raises(UsageError, match=says):
        export(tmp_path / "out", config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda held: held.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda held: held.update({"model.norm.weight": torch.ones(63)}), r"is \[63\], and the config makes it \[64\]"),
        (lambda held: held.update({"model.norm.weight": torch.ones(64).to(torch.int8)}), "only unquantised"),
        (lambda held: held.update({"model.layers.2.mlp.up_proj.weight": torch.ones(4)}), "no weight of such a model"),
    ],
)
def test_weights_that_are_not_all_and_only_the_model_are_refused(
    change: Callable[[dict[str, Any]], object], says: str, tmp_path: Path
) -> None:
    folder = export(tmp_path / "out", shard_bytes=1 << 30)
    change_tensors(folder, change)
    with pytest.raises(SpecError, match=says):
        open_folder(folder)


def test_a_tied_head_and_old_rotary_tables_beside_the_weights_are_passed_over(tmp_path: Path) -> None:
    folder = export(tmp_path / "out", shard_bytes=1 << 30)
    spare = {"lm_head.weight": torch.ones(256, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    change_tensors(folder, lambda held: held.update(spare))
    assert open_folder(folder) == LLAMA


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    folder = export(tmp_path / "out")
    file = next(folder.glob("model-00002-*"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(UsageError, match=r"model-00002.* cannot be read"):
        open_folder(folder)
    file.unlink()
    with pytest.raises(UsageError, match=r"model-00002.* cannot be read"):
        open_folder(folder)
    file.write_bytes(whole)
    assert open_folder(folder) == LLAMA
    edit(folder / hf.INDEX, lambda plain: plain["weight_map"].update({"model.norm.weight": "../else.safetensors"}))
    with pytest.raises(UsageError, match="does not name files of this folder"):
        open_folder(folder)
    (folder / hf.INDEX).unlink()
    with pytest.raises(UsageError, match=r"neither model\.safetensors nor"):
        open_folder(folder)


def test_no_file_holds_more_than_it_may(tmp_path: Path) -> None:
    folder = export(tmp_path / "out", dtype="bf16")
    sizes = hf.weight_bytes(LLAMA, dtype="bf16")
    for names in hf.plan_shards(LLAMA, dtype="bf16", shard_bytes=SMALL):
        assert sum(sizes[name] for name in names) <= max(SMALL, *(sizes[name] for name in names))
    index = json.loads((folder / hf.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert set(index["weight_map"].values()) == {file.name for file in folder.glob("*.safetensors")}


def test_an_export_that_is_cut_off_leaves_nothing_that_looks_whole(tmp_path: Path) -> None:
    def breaks(name: str) -> torch.Tensor:
        if name == "norm.weight":
            raise OSError("the disk is gone")
        return torch.ones(weight_shapes(LLAMA)[name])

    with pytest.raises(OSError, match="the disk is gone"):
        hf.write(tmp_path / "out", LLAMA, breaks, dtype="fp32", shard_bytes=SMALL)
    assert not (tmp_path / "out").exists()
    export(tmp_path / "out")  # what it left is no obstacle
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    with pytest.raises(UsageError, match="exists; choose another folder"):
        export(tmp_path / "out")


def test_an_export_holds_one_file_of_weights_at_most(tmp_path: Path) -> None:
    shapes, sizes = weight_shapes(LLAMA), hf.weight_bytes(LLAMA, dtype="fp32")
    given: list[weakref.ref[Any]] = []
    most = 0

    def read(name: str) -> torch.Tensor:
        nonlocal most
        memory = np.ones(shapes[name], dtype=np.float32)  # lives as long as any tensor over it
        given.append(weakref.ref(memory))
        most = max(most, sum(held.nbytes for held in (ref() for ref in given) if held is not None))
        return torch.from_numpy(memory)

    hf.write(tmp_path / "out", LLAMA, read, dtype="fp32", shard_bytes=SMALL)
    assert max(sizes.values()) <= most <= max(SMALL, *sizes.values()) < sum(sizes.values())
