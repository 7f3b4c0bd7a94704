"""The training section of a spec, and what `trainmaster train CONFIG` reads.

It lives in core, not in train, because a bad one must be refused by the control plane before anything is created,
and the control plane never imports the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from trainmaster.core.config import presets
from trainmaster.core.config.checkpoint import CheckpointConfig
from trainmaster.core.config.data import DataConfig
from trainmaster.core.config.default_lr import with_rates
from trainmaster.core.config.optimizer import OptimizerConfig
from trainmaster.core.config.parallel import ParallelConfig, largest_divisor
from trainmaster.core.config.recovery import RecoveryConfig
from trainmaster.core.config.watch import WatchConfig
from trainmaster.core.errors import Fault, SpecError
from trainmaster.core.schema import YEAR_S, build, field

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RopeScaling",
    "TrainConfig",
    "WatchConfig",
]

_WIDTH, _STEPS = 96, 200  # defaults that other defaults depend on
# Far above any model. A slip of the keyboard is then named at once, and not found out by an allocator.
_MOST_LAYERS, _MOST_WIDTH, _MOST_TOKENS = 100_000, 1 << 20, 1 << 31

# Options of the AWS FSDP sample, which users of SageMaker know. Differences in meaning: docs/reference/fsdp-options.md.
_SAMPLE_OPTIONS = {
    "train_batch_size": "batch_sequences",
    "val_batch_size": "eval_sequences",
    "validation_batches": "eval_sequences",
    "validation_freq": "epoch_steps",
    "max_steps": "steps",
    "bf16": "precision: bf16",
    "grad_clip": "optimizer.grad_clip",
    "weight_decay": "optimizer.weight_decay",
    "beta1": "optimizer.beta1",
    "beta2": "optimizer.beta2",
    "lr": "optimizer.lr",
    "lr_decay_style": "optimizer.schedule",
    "lr_decay_iters": "optimizer.decay_steps",
    "min_lr": "optimizer.min_lr_ratio",
    "warmup": "optimizer.warmup_steps",
    "plateau": "optimizer.plateau_patience",
    "activation_checkpointing": "parallel.recompute",
    "sharding_strategy": "parallel.sharding",
    "cpu_offload": "parallel.cpu_offload",
    "model_type": "model.preset",
    "hidden_width": "model.width",
    "num_layers": "model.layers",
    "num_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "intermediate_size": "model.ffn_width",
    "vocab_size": "model.vocab",
    "max_context_width": "sequence_tokens",
    "rotary_emb_base": "model.rope_theta",
    "dataset": "data.dataset",
    "dataset_config_name": "data.subset",
    "local_dataset_path": "data.path",
    "tokenizer": "data.tokenizer",
    "checkpoint_dir": "checkpoint.folder",
    "checkpoint_freq": "checkpoint.every_steps",
    "logging_freq": "log_every_steps",
    "tensorboard_dir": "watch.tensorboard",
}
# Those of its options that have no field here.
_SAMPLE_HINTS = {
    "epochs": "steps alone decide: write `steps`; an epoch is `epoch_steps` of them",
    "offload_activations": "they are computed again, not moved: write `parallel.recompute`",
    "activation_loading_horizon": "nothing is moved to the host: leave it out; see `parallel.recompute`",
    "limit_all_gathers": "FSDP2 limits them by itself: leave it out",
    "initializer_range": "first weights follow from each matrix's width: leave it out",
    "rotary_pct": "the models here turn whole heads: leave it out",
    "resume_from_checkpoint": "a run resumes by itself from the newest good checkpoint of `checkpoint.folder`; "
    "`init_from` starts a new run with the weights of another",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretching of the rotary embedding: slow waves are slowed further, fast ones stay."""

    factor: float = field(ge=1, example=8.0, doc="how much longer the context becomes")
    low_freq_factor: float = field(default=1.0, gt=0, doc="waves longer than original_tokens over this are stretched")
    high_freq_factor: float = field(default=4.0, gt=0, doc="waves shorter than original_tokens over this stay")
    original_tokens: int = field(default=8192, ge=1, doc="context before the stretching")

    def faults(self) -> Iterator[Fault]:
        if self.low_freq_factor >= self.high_freq_factor:
            message = (
                f"{self.low_freq_factor} is not below high_freq_factor {self.high_freq_factor}; Llama 3 has 1 and 4"
            )
            yield Fault(path="low_freq_factor", message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of any family. The defaults are a third of a million parameters: a minute's work for two cores."""

    # Read by `expand` and gone after it: a built config states its dimensions and carries no label, because an
    # override could make a label a lie. `name` is the one that its dimensions deserve.
    preset: str | None = field(default=None, doc="dimensions of a known model; what is written beside it wins")
    family: str | None = field(
        default=None,
        example="olmo2",
        doc="a folder of models/; not stated: the preset's, else moe where experts are stated, else llama",
    )
    layers: int = field(default=3, ge=1, le=_MOST_LAYERS, doc="decoder blocks")
    width: int = field(default=_WIDTH, ge=8, le=_MOST_WIDTH, doc="hidden size")
    heads: int = field(default=4, ge=1, le=_MOST_WIDTH, doc="attention heads")
    kv_heads: int = field(default=2, ge=1, le=_MOST_WIDTH, doc="key and value heads (grouped-query attention)")
    head_width: int | None = field(
        default=None, ge=2, le=_MOST_WIDTH, doc="size of one head; not stated: width over heads"
    )
    ffn_width: int = field(
        default=256, ge=8, le=_MOST_WIDTH, doc="hidden size of the SwiGLU feed-forward, or of each expert"
    )
    vocab: int = field(default=256, ge=2, le=_MOST_TOKENS, doc="tokens; 256 with the built-in byte tokenizer")
    rope_theta: float = field(default=10_000.0, gt=0, doc="base of the rotary embedding")
    rope_scaling: RopeScaling | None = field(default=None, doc="Llama 3's stretching of it")
    norm_eps: float = field(default=1e-5, gt=0, doc="epsilon of RMSNorm")
    tied: bool = field(default=True, doc="the output head shares the embedding's weights")
    qkv_bias: bool = field(default=False, doc="biases on query, key and value (Qwen2)")
    qk_norm: bool = field(default=False, doc="RMSNorm over each query and key head (Qwen3)")
    sliding_window: int | None = field(
        default=None, ge=1, doc="attention window in tokens, the current one included; not stated: unlimited"
    )
    experts: int | None = field(
        default=None, ge=1, le=_MOST_WIDTH, doc="number of experts (Mixtral); not stated: a dense model"
    )
    experts_per_token: int = field(default=2, ge=1, doc="experts each token passes through")
    balance: float = field(default=0.02, ge=0, doc="weight of the load-balancing loss of the experts; 0 for none")
    context_tokens: int | None = field(default=None, ge=1, doc="maximum sequence length, written into exports")

    def __post_init__(self) -> None:
        assert self.preset is None, "a preset is expanded by schema.build; constructed directly it would be ignored"

    @classmethod
    def expand(cls, mapping: Mapping[str, object]) -> Mapping[str, object]:
        """Put a preset's dimensions under what is written; called by schema.build before it reads the fields."""
        name = mapping.get("preset")
        if isinstance(name, str):
            written = {key: value for key, value in mapping.items() if key != "preset"}
            mapping = {**presets.find(name).model, **written}
        if mapping.get("family") == presets.family_of(mapping):
            # As if it were not stated: the same shape is the same model, to a checkpoint too.
            mapping = {key: value for key, value in mapping.items() if key != "family"}
        return mapping

    @property
    def name(self) -> str | None:
        """The preset that has exactly these dimensions, or None."""
        return next((name for name in presets.names() if build(ModelConfig, {"preset": name}) == self), None)

    @property
    def family_name(self) -> str:
        """The family, stated or not."""
        return self.family or presets.family_of({"experts": self.experts})

    @property
    def head_size(self) -> int:
        """Size of one head, stated or not."""
        return self.head_width if self.head_width is not None else self.width // self.heads

    def faults(self) -> Iterator[Fault]:
        yield from self._family_faults()
        if self.head_width is not None and self.head_width % 2:
            message = f"{self.head_width} is odd; the rotary embedding turns pairs: use {self.head_width + 1}"
            yield Fault(path="head_width", message=message)
        if self.head_width is None and (self.width % self.heads or (self.width // self.heads) % 2):
            fit = [n for n in range(1, self.width // 2 + 1) if self.width % n == 0 and (self.width // n) % 2 == 0]
            near = min(fit, key=lambda n: abs(n - self.heads), default=1)
            yield Fault(path="heads", message=f"{self.heads} does not divide width {self.width} evenly; use {near}")
        elif self.heads % self.kv_heads:
            near = largest_divisor(self.heads, most=self.kv_heads)
            yield Fault(path="kv_heads", message=f"{self.kv_heads} does not divide heads {self.heads}; use {near}")
        if self.experts is not None and self.experts_per_token > self.experts:
            message = f"{self.experts_per_token} of {self.experts} experts cannot be chosen; use at most {self.experts}"
            yield Fault(path="experts_per_token", message=message)

    def _family_faults(self) -> Iterator[Fault]:
        known, name = presets.families(), self.family_name
        if name not in known:
            yield Fault(path="family", message=f"there is no model family {name[:60]!r}; known: {', '.join(known)}")
            return
        for option in sorted({option for facts in known.values() for option in facts.options}):
            stated = getattr(self, option) not in (None, False)
            if stated and option not in known[name].options:
                others = ", ".join(other for other, facts in known.items() if option in facts.options)
                message = f"is not an option of the family {name} but of {others}; leave it out"
                yield Fault(path=option, message=message)
            elif not stated and option in known[name].needs:
                yield Fault(path=option, message=f"the family {name} needs it")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutConfig:
    """A rank that is silent for longer ends the run. TRAINMASTER_COLLECTIVE_TIMEOUT_S overrides the first two."""

    first_step_s: float = field(
        default=1800.0, gt=0, le=YEAR_S, doc="from the start to the end of the first step: meeting, building, compiling"
    )
    # Long enough for the slowest evaluation batch of one rank, short enough that a dead peer costs two minutes.
    step_s: float = field(default=120.0, gt=0, le=YEAR_S, doc="one step, one evaluation batch")
    load_s: float = field(default=3600.0, gt=0, le=YEAR_S, doc="loading a checkpoint, or the weights of init_from")
    save_s: float = field(default=3600.0, gt=0, le=YEAR_S, doc="saving to memory and to the disk, in the background")
    upload_s: float = field(default=21600.0, gt=0, le=YEAR_S, doc="copying a save to a farther tier, in the background")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run. Its result does not depend on how many ranks share the work."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = _SAMPLE_OPTIONS
    HINTS: ClassVar[Mapping[str, str]] = _SAMPLE_HINTS

    model: ModelConfig = field(factory=ModelConfig, doc="the model's shape")
    data: DataConfig = field(factory=DataConfig, doc="data source")
    optimizer: OptimizerConfig = field(factory=OptimizerConfig, doc="optimizer and learning-rate schedule")
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig, doc="checkpoints")
    parallel: ParallelConfig = field(factory=ParallelConfig, doc="sharding, compilation, activation checkpointing")
    watch: WatchConfig = field(factory=WatchConfig, doc="detection of bad steps and stragglers; experiment trackers")
    timeouts: TimeoutConfig = field(factory=TimeoutConfig, doc="time limits, by activity")
    recovery: RecoveryConfig = field(factory=RecoveryConfig, doc="what follows the death of a rank")
    init_from: str | None = field(default=None, doc="checkpoint whose weights a new run starts with, at step 0")
    steps: int = field(default=_STEPS, ge=1, doc="optimizer steps in all")
    epoch_steps: int = field(
        default=50, ge=1, doc="steps per epoch; each ends with an evaluation and an epoch_complete event"
    )
    batch_sequences: int = field(default=16, ge=1, le=_MOST_TOKENS, doc="sequences per step over all ranks")
    batch_tokens: int | None = field(
        default=None, ge=1, doc="tokens per step over all ranks, instead of batch_sequences"
    )
    micro_sequences: int | None = field(
        default=None, ge=1, doc="sequences one rank computes at once; a step has as many such passes as it needs"
    )
    sequence_tokens: int = field(default=128, ge=2, le=_MOST_TOKENS, doc="tokens per sequence")
    eval_sequences: int = field(default=32, ge=0, le=_MOST_TOKENS, doc="held-out sequences per evaluation; 0 for none")
    seed: int = field(default=0, ge=0, doc="seed of the initial weights; data has its own")
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", doc="auto takes a GPU where there is one")
    precision: Literal["auto", "fp32", "bf16"] = field(default="auto", doc="of the computation; auto: bf16 on a GPU")
    deterministic: bool = field(
        default=False,
        doc="the same bits from every run on the same kind and number of GPUs: only kernels that add in one order, "
        "which are slower. On a CPU it is so anyway",
    )
    master: Literal["fp32", "bf16"] = field(default="fp32", doc="type of weights and optimizer states")
    log_every_steps: int = field(default=1, ge=1, doc="steps between STEP metrics events")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = field(
        default="INFO",
        doc="least level of lines that ranks print; DEBUG: every event too. Heartbeats and the last line come always",
    )

    @classmethod
    def expand(cls, mapping: Mapping[str, object]) -> Mapping[str, object]:
        """Fill in rates that depend on other fields, and turn a batch in tokens into sequences; for schema.build."""
        mapping = with_rates(mapping, width=_WIDTH, steps=_STEPS)
        tokens, length = mapping.get("batch_tokens"), mapping.get("sequence_tokens", 128)
        if not isinstance(tokens, int) or not isinstance(length, int) or length < 1 or tokens < 1:
            return mapping
        if "batch_sequences" in mapping:
            raise SpecError([Fault(path="batch_tokens", message="stands beside batch_sequences; write one of them")])
        if tokens % length:
            near = max(1, round(tokens / length)) * length
            message = f"{tokens} is no multiple of sequence_tokens {length}; use {near}"
            raise SpecError([Fault(path="batch_tokens", message=message)])
        rest = {key: value for key, value in mapping.items() if key != "batch_tokens"}
        return {**rest, "batch_sequences": tokens // length}

    def faults(self) -> Iterator[Fault]:
        for fault in self.optimizer.faults_over(self.steps, evaluates=self.eval_sequences > 0):
            yield Fault(path=f"optimizer.{fault.path}", message=fault.message)
        if self.master == "bf16" and self.precision == "fp32":
            yield Fault(
                path="master", message="bf16 is less than what precision: fp32 computes in; leave one of them out"
            )
        if self.parallel.float8 and self.model.experts is not None:
            yield Fault(path="parallel.float8", message="is for dense models; experts are multiplied in precision")
        if self.parallel.float8 and self.precision == "fp32":
            yield Fault(path="parallel.float8", message="goes with precision: bf16; leave precision: fp32 out")
        if self.recovery.groups > 1:
            yield from self._group_faults()

    def _group_faults(self) -> Iterator[Fault]:
        """What cannot be had together with replica groups."""
        path = "recovery.groups"
        if self.parallel.sharding == "hybrid":
            message = "each group has a copy of its own already; leave out this, or parallel.sharding: hybrid"
            yield Fault(path=path, message=message)
        if self.checkpoint.managed is not None or self.checkpoint.memory.use == "on":
            message = "groups save to disk and remote only; leave out this, or checkpoint.managed and checkpoint.memory"
            yield Fault(path=path, message=message)

    def faults_on(self, ranks: int) -> Iterator[Fault]:
        """What is wrong with this run on that many ranks."""
        for name in ("batch_sequences", "eval_sequences"):
            value = getattr(self, name)
            if value % ranks:
                near = max(ranks, round(value / ranks) * ranks)
                yield Fault(path=name, message=f"{value} does not divide by {ranks} ranks; use {near}")
        each = self.batch_sequences // ranks
        if self.micro_sequences is not None and self.batch_sequences % ranks == 0 and each % self.micro_sequences:
            near = largest_divisor(each, most=self.micro_sequences)
            message = f"{self.micro_sequences} does not divide the {each} sequences of each rank; use {near}"
            yield Fault(path="micro_sequences", message=message)
        for fault in self.parallel.faults_on(ranks):
            yield Fault(path=f"parallel.{fault.path}", message=fault.message)
        for fault in self.recovery.faults_on(ranks):
            yield Fault(path=f"recovery.{fault.path}", message=fault.message)
