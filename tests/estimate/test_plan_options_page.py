"""docs/reference/fsdp-options.md maps every option of the FSDP sample, to fields that exist."""

from __future__ import annotations

import re
from pathlib import Path

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.schema import describe

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "fsdp-options.md"
# As the sample's arguments.py names them.
SAMPLE = """
train_batch_size val_batch_size max_steps seed bf16 grad_clip weight_decay beta1 beta2 activation_checkpointing
intermediate_size num_key_value_heads logging_freq tensorboard_dir max_context_width vocab_size hidden_width
num_layers num_heads initializer_range model_type rotary_pct rotary_emb_base offload_activations
activation_loading_horizon limit_all_gathers sharding_strategy cpu_offload lr lr_decay_style lr_decay_iters min_lr
warmup plateau dataset dataset_config_name local_dataset_path tokenizer resume_from_checkpoint checkpoint_dir
epochs checkpoint_freq validation_freq validation_batches
""".split()


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_every_option_of_the_sample_has_its_row() -> None:
    named = [word for row in rows() for word in re.findall(r"`([a-z0-9_]+)`", row[0])]
    assert sorted(named) == sorted(SAMPLE)


def test_every_field_it_is_mapped_to_exists_and_what_has_none_says_why() -> None:
    known = {item.path for item in describe(TrainConfig)}
    for theirs, ours, note in rows():
        if ours == "–":
            assert note, theirs
            continue
        paths = re.findall(r"`([a-z0-9_.]+)(?:: [a-z0-9]+)?`", ours)
        assert paths, ours
        for path in paths:
            whole = path if not path.startswith(".") else f"{paths[0].split('.')[0]}{path}"
            assert any(item == whole or item.startswith(f"{whole}.") for item in known), path
