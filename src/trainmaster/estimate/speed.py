"""How long a step takes on known GPUs: operations over the rate that kernels reach, bytes over that of the memory.

A matrix product takes the time of its operations or that of its bytes, whichever is longer. Element-wise work and the
update are bytes alone. Communication is hidden behind the computing of the same pass as far as there is any.
docs/how/plan.md describes the basis and the limits of each figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainmaster.core.config.train import ModelConfig
from trainmaster.core.gpus import GpuModel
from trainmaster.estimate.calibration import SpeedFacts
from trainmaster.estimate.layout import Setting
from trainmaster.estimate.shapes import count
from trainmaster.models import family
from trainmaster.models.family import BlockCost

_FLOAT32 = 4
_CHUNK_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of the whole run, all ranks together. `parts` are one rank's seconds of a step and add up to step_s."""

    step_s: float
    tokens_per_s: float
    mfu: float  # by the convention of published figures, against the datasheet's dense bf16
    parts: Mapping[str, float]


def missing(gpu: GpuModel, setting: Setting) -> str | None:
    """What would have to be known of this GPU to say how fast it is; None where enough is."""
    if setting.compute_bytes != 2:
        return "precision fp32: no rate of float32 matrices is known"
    if gpu.bf16_tflops is None:
        return f"no bf16 peak of {gpu.name} is known"
    if gpu.hbm_gbps is None:
        return f"no memory bandwidth of {gpu.name} is known"
    if setting.float8 and gpu.fp8_tflops is None:
        return f"no float8 peak of {gpu.name} is known"
    return None


def measure(
    model: ModelConfig,
    setting: Setting,
    gpu: GpuModel,
    facts: SpeedFacts,
    *,
    bus_gbps: float | None,
    nodes: int = 1,
    power_w: float | None = None,
) -> Speed:
    """One step of this model. `bus_gbps` is the bus bandwidth between its ranks; None: communication costs nothing.

    `power_w` is the power limit of the cards; None: that of the datasheet.
    """
    cost = family.of(model).block_cost(model)
    clock = _Clock(model=model, cost=cost, setting=setting, gpu=gpu, facts=facts, power_w=power_w)
    passes = setting.passes
    parts = {
        "matrices": passes * clock.matrices(),
        "attention": passes * clock.attention(),
        "element-wise": passes * clock.elementwise(),
        "loss": passes * clock.loss(),
        "gathering": passes * clock.gathering(),
        "update": clock.update(),
    }
    busy = sum(parts.values())
    if bus_gbps is not None and setting.ranks > 1:
        parts["communication"] = clock.exposed(busy - parts["update"], bus_gbps)
    # The host only shows where it is slower than the GPU it feeds.
    parts["host"] = facts.step_s + max(0.0, passes * model.layers * facts.block_s - busy)
    if nodes > 1:
        parts["scale"] = sum(parts.values()) * facts.scale_share * math.log2(nodes)
    step_s = sum(parts.values())
    tokens_per_s = setting.step_tokens / step_s
    peak = (gpu.bf16_tflops or 0.0) * 1e12 * setting.ranks
    flops = family.of(model).flops_per_token(model, sequence_tokens=setting.sequence_tokens)
    return Speed(step_s=step_s, tokens_per_s=tokens_per_s, mfu=tokens_per_s * flops / peak, parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clock:
    """Seconds of one rank: of one pass, but for `update`."""

    model: ModelConfig
    cost: BlockCost
    setting: Setting
    gpu: GpuModel
    facts: SpeedFacts
    power_w: float | None

    def matrices(self) -> float:
        """The products of all blocks: forward, twice that backward, and what is computed again."""
        forward = sum(self._product(self.setting.tokens * share, out, wide) for out, wide, share in self.cost.products)
        return self.model.layers * forward * (3 + self._again())

    def attention(self) -> float:
        """Half of all pairs are seen, causally; the backward pass has two and a half times the products."""
        model, setting = self.model, self.setting
        seen = min(setting.sequence_tokens, model.sliding_window or setting.sequence_tokens)
        # A window is cut off a triangle: what is left of it, not half of the square.
        pairs = seen * (1 - seen / (2 * setting.sequence_tokens))
        flops = 4 * pairs * model.heads * model.head_size * setting.tokens
        forward = flops / (self._peak() * _nearest(self.facts.attention_forward_share, model.head_size))
        backward = 2.5 * flops / (self._peak() * _nearest(self.facts.attention_backward_share, model.head_size))
        again = 0.0 if setting.recompute == "ops" else self._again()
        return model.layers * (forward * (1 + again) + backward)

    def elementwise(self) -> float:
        """Norms, turns, gates and sums, as many bytes as fused code moves."""
        forward, backward = self.cost.moved_forward, self.cost.moved_backward
        if self.setting.float8:
            forward, backward = forward + self.cost.cast_forward, backward + self.cost.cast_backward
        again = 1.0 if self.setting.recompute == "ops" else self._again()
        numbers = forward * (1 + again) + backward
        wasted = 1.0 if self.setting.compiled else self.facts.eager_memory_factor
        return self.model.layers * self._bytes(wasted * self.setting.compute_bytes * numbers * self.setting.tokens)

    def loss(self) -> float:
        """Logits, their gradients by hidden state and head, chunk by chunk; each chunk adds to the head's gradient."""
        model, size, tokens = self.model, self.setting.compute_bytes, self.setting.tokens
        products = 3 * self._product(tokens, model.vocab, model.width, in_blocks=False)
        wide = 3 * size if self.setting.compiled else 3 * size + 12 * _FLOAT32  # read twice, its gradient written
        chunks = -(-tokens * model.vocab * size // _CHUNK_BYTES)
        head = chunks * 2 * _FLOAT32 * model.vocab * model.width
        return products + self._bytes(wide * model.vocab * tokens + head)

    def gathering(self) -> float:
        """Shards are cast and laid together before each pass over a block, and gradients cast and cut up after it."""
        size, master, counts = self.setting.compute_bytes, self.setting.master_bytes, count(self.model)
        if self.setting.alone:
            return 0.0
        share = counts.all / self.setting.shard_ranks
        # For the forward and the backward pass: a cast where types differ, and a copy into place.
        weights = 2 * ((master + size) * share * (master != size) + 2 * size * counts.all)
        # Into the float32 buffer, out of it, into the weights' type; and added to those of the passes before.
        gradients = (size + _FLOAT32) * counts.all + 2 * _FLOAT32 * share
        gradients += (_FLOAT32 + master) * share * (master != _FLOAT32)
        gradients += 3 * master * share * (self.setting.passes > 1)
        return self._bytes(weights + gradients) + self.model.layers * self.facts.gather_block_s

    def update(self) -> float:
        """AdamW reads four and writes three, and the clipped gradient; the norm reads the gradient once before."""
        held = self.setting.master_bytes * count(self.model).all / self.setting.shard_ranks
        if self.setting.cpu_offload:
            # Over the bus, both ways, and the update on the host at a rate that was not measured here.
            return 2 * held / (1e9 * (self.gpu.d2h_gbps or 25.0)) + 7 * held / 50e9
        return self._bytes(9 * held)

    def exposed(self, busy: float, bus_gbps: float) -> float:
        """Seconds of a step in which ranks wait for each other: what does not fit beside the computing."""
        setting, counts = self.setting, count(self.model)
        rate = 1e9 * bus_gbps * self.facts.gather_share
        others = (setting.shard_ranks - 1) / setting.shard_ranks
        # Gathered for the forward and for the backward pass; gradients scattered in float32.
        sums = 1 if setting.reduce_once else setting.passes
        moved = (2 * setting.compute_bytes * setting.passes + _FLOAT32 * sums) * counts.all * others
        replicas = setting.ranks // setting.shard_ranks
        if replicas > 1:
            moved += 2 * _FLOAT32 * counts.all / setting.shard_ranks * (replicas - 1) / replicas
        # The first block's gathering and the last one's scattering have nothing to hide behind.
        bare = (setting.compute_bytes + _FLOAT32) * (counts.root + counts.block) * others / rate
        return max(bare, moved / rate - self.facts.overlap_share * busy)

    def _product(self, rows: float, out: int, wide: int, *, in_blocks: bool = True) -> float:
        size = self.setting.compute_bytes
        rate = self._peak() * self.facts.matrix_share
        if self.setting.float8 and in_blocks:
            rate, size = (self.gpu.fp8_tflops or 0.0) * 1e12 * self._power() * self.facts.float8_share, 1
        moved = size * (rows * wide + out * wide) + self.setting.compute_bytes * rows * out
        return max(2 * rows * out * wide / rate, self._bytes(moved))

    def _again(self) -> float:
        """Share of a forward pass over the blocks that the backward pass repeats; with `ops`, no products."""
        return {"full": 1.0, "layers": 1 / self.setting.recompute_every}.get(self.setting.recompute, 0.0)

    def _bytes(self, moved: float) -> float:
        return moved / (1e9 * (self.gpu.hbm_gbps or 0.0) * self.facts.memory_share)

    def _peak(self) -> float:
        return 1e12 * (self.gpu.bf16_tflops or 0.0) * self._power()

    def _power(self) -> float:
        """Share of the peak that a power limit below the datasheet's leaves."""
        if self.power_w is None or self.gpu.power_w is None:
            return 1.0
        return float(min(1.0, self.power_w / self.gpu.power_w) ** self.facts.power_exponent)


def _nearest(shares: Mapping[int, float], size: int) -> float:
    return shares[min(shares, key=lambda known: abs(known - size))]
