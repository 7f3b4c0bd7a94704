"""The training section of a spec, and what `trainmaster train CONFIG` reads.

It lives in core, not in train, because a bad one must be refused by the control plane before anything is created,
and the control plane never imports the trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainmaster.core.errors import Fault
from trainmaster.core.schema import field


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Llama-style decoder. The defaults are a third of a million parameters: a minute's work for two cores."""

    layers: int = field(default=3, ge=1, doc="decoder blocks")
    width: int = field(default=96, ge=8, doc="hidden size")
    heads: int = field(default=4, ge=1, doc="attention heads")
    kv_heads: int = field(default=2, ge=1, doc="key and value heads (grouped-query attention)")
    ffn_width: int = field(default=256, ge=8, doc="hidden size of the SwiGLU feed-forward")
    vocab: int = field(default=256, ge=2, doc="tokens; 256 with the built-in byte tokenizer")
    rope_theta: float = field(default=10_000.0, gt=0, doc="base of the rotary embedding")
    norm_eps: float = field(default=1e-5, gt=0, doc="epsilon of RMSNorm")
    tied: bool = field(default=True, doc="the output head shares the embedding's weights")

    def faults(self) -> Iterator[Fault]:
        if self.width % self.heads or (self.width // self.heads) % 2:
            fit = [n for n in range(1, self.width // 2 + 1) if self.width % n == 0 and (self.width // n) % 2 == 0]
            near = min(fit, key=lambda n: abs(n - self.heads), default=1)
            yield Fault(path="heads", message=f"{self.heads} does not divide width {self.width} evenly; use {near}")
        elif self.heads % self.kv_heads:
            near = max(n for n in range(1, self.kv_heads + 1) if self.heads % n == 0)
            yield Fault(path="kv_heads", message=f"{self.kv_heads} does not divide heads {self.heads}; use {near}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where samples come from. One global cursor numbers them, whatever the number of ranks."""

    source: str = field(default="tales", pattern=r"[a-z][a-z0-9_]*", example="tales", doc="a name in datasets/")
    seed: int = field(default=0, ge=0, doc="which stream of a generated or shuffled source")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up and cosine decay."""

    lr: float = field(default=3e-3, gt=0, le=1, doc="peak learning rate")
    min_lr_ratio: float = field(default=0.1, ge=0, le=1, doc="last learning rate over the peak")
    warmup_steps: int = field(default=10, ge=0, doc="steps from zero to the peak")
    weight_decay: float = field(default=0.1, ge=0, doc="of matrices; never of norms")
    beta1: float = field(default=0.9, ge=0, le=0.9999, doc="first moment")
    beta2: float = field(default=0.95, ge=0, le=0.99999, doc="second moment")
    grad_clip: float = field(default=1.0, gt=0, doc="largest global gradient norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save and how much to keep. A run always saves at its end and when it is told to stop."""

    folder: str | None = field(default=None, doc="where; not stated: the job's own folder")
    every_steps: int = field(default=50, ge=1, doc="steps between saves")
    keep: int = field(default=2, ge=1, doc="newest good checkpoints kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run. Its result does not depend on how many ranks share the work."""

    model: ModelConfig = field(factory=ModelConfig, doc="the model's shape")
    data: DataConfig = field(factory=DataConfig, doc="where samples come from")
    optimizer: OptimizerConfig = field(factory=OptimizerConfig, doc="how weights move")
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig, doc="what survives a crash")
    steps: int = field(default=200, ge=1, doc="optimizer steps in all")
    epoch_steps: int = field(default=50, ge=1, doc="steps that make one epoch: an evaluation and an epoch_complete")
    batch_sequences: int = field(default=16, ge=1, doc="sequences per step over all ranks")
    sequence_tokens: int = field(default=128, ge=2, doc="tokens per sequence")
    eval_sequences: int = field(default=32, ge=0, doc="held-out sequences per evaluation; 0 for none")
    seed: int = field(default=0, ge=0, doc="of the weights; data has its own")
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", doc="auto takes a GPU where there is one")
    precision: Literal["auto", "fp32", "bf16"] = field(default="auto", doc="of the computation; auto: bf16 on a GPU")
    log_every_steps: int = field(default=1, ge=1, doc="steps between STEP metrics events")

    def faults(self) -> Iterator[Fault]:
        if self.optimizer.warmup_steps >= self.steps:
            yield Fault(
                path="optimizer.warmup_steps",
                message=f"{self.optimizer.warmup_steps} does not end before steps {self.steps}; use {self.steps // 10}",
            )

    def faults_on(self, ranks: int) -> Iterator[Fault]:
        """What is wrong with this run on that many ranks."""
        for name in ("batch_sequences", "eval_sequences"):
            value = getattr(self, name)
            if value % ranks:
                near = max(ranks, round(value / ranks) * ranks)
                yield Fault(path=name, message=f"{value} does not divide by {ranks} ranks; use {near}")
