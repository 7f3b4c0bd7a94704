"""Options of AWS's FSDP sample, as its users type them, are answered with our names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainmaster.cli.main import build
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import SpecError
from trainmaster.documents.yaml_file import join_options
from trainmaster.train.__main__ import read_config


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--max_steps", "3", "--lr=1e-3", "steps=4"], ["max_steps=3", "lr=1e-3", "steps=4"]),
        (["--cpu_offload", "--bf16", "1"], ["cpu_offload=true", "bf16=1"]),
        (["--cpu_offload"], ["cpu_offload=true"]),
        (["--steps", "-3"], ["steps=-3"]),
        (["--log-level", "DEBUG", "--optimizer.grad-clip=a-b"], ["log_level=DEBUG", "optimizer.grad_clip=a-b"]),
        ([], []),
    ],
)
def test_options_become_values(words: list[str], values: list[str]) -> None:
    assert join_options(words) == values


def test_each_option_is_answered_with_our_name(tmp_path: Path) -> None:
    config = tmp_path / "t.yaml"
    config.write_text("steps: 3\n")
    words = ["train", str(config), "--max_steps", "3", "--train_batch_size=4", "--processes", "1"]
    done = CliRunner().invoke(build(), words)
    assert isinstance(done.exception, SpecError), done.output
    faults = {re.split(r"[ :]", fault.path)[-1]: fault.message for fault in done.exception.faults}
    assert faults.keys() == {"max_steps", "train_batch_size"}
    assert "`steps`" in faults["max_steps"] and "`batch_sequences`" in faults["train_batch_size"]


# All of the sample's arguments.py but `seed`, which has the same name here.
SAMPLE = """
train_batch_size val_batch_size max_steps bf16 grad_clip weight_decay beta1 beta2 activation_checkpointing
intermediate_size num_key_value_heads logging_freq tensorboard_dir max_context_width vocab_size hidden_width num_layers
num_heads initializer_range model_type rotary_pct rotary_emb_base offload_activations activation_loading_horizon
limit_all_gathers sharding_strategy cpu_offload lr lr_decay_style lr_decay_iters min_lr warmup plateau dataset
dataset_config_name local_dataset_path tokenizer resume_from_checkpoint checkpoint_dir epochs checkpoint_freq
validation_freq validation_batches
""".split()


def test_every_option_of_the_sample_is_answered_under_torchrun_without_a_guess(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"steps": 3}')
    with pytest.raises(SpecError) as caught:
        read_config([str(tmp_path / "t.json"), *(f"--{name}=1" for name in SAMPLE)])
    answers = {re.split(r"[ :]", fault.path)[-1]: fault.message for fault in caught.value.faults}
    assert answers.keys() == set(SAMPLE) and len(SAMPLE) == 43
    for name, text in answers.items():
        assert "here it is `" in text or text == f"unknown field; {TrainConfig.HINTS[name]}", text


@pytest.mark.parametrize("name", ["t.yaml", "t.json"])
def test_a_rank_under_torchrun_takes_values_and_answers_options_too(tmp_path: Path, name: str) -> None:
    config = tmp_path / name
    config.write_text('{"steps": 3}')
    taken = read_config([str(config), "steps=16", "--optimizer.lr", "1e-3", "--log-level", "DEBUG"])
    assert (taken.steps, taken.optimizer.lr, taken.log_level) == (16, 1e-3, "DEBUG")
    with pytest.raises(SpecError, match="`steps`"):
        read_config([str(config), "--max_steps", "3"])
