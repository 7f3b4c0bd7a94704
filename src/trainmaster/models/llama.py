"""A Llama-style decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU; head tied or not.

Built for one device. It may be built on the meta device, sharded, and then given memory with `to_empty`: nothing holds
a value until `init_weights` has run, which fills every weight and every buffer.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainmaster.core.train_config import ModelConfig


class Llama(nn.Module):
    """Tokens in, logits out. `max_tokens` is the longest sequence it will see (it sizes the rotary tables)."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: ModelConfig, *, max_tokens: int) -> None:
        super().__init__()
        self.config = config
        self.max_tokens = max_tokens
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.width, config.vocab, bias=False)
        shape = (max_tokens, config.width // config.heads // 2)
        # Not saved: they follow from the config, and a longer sequence after a resume must not find old tables.
        self.register_buffer("rope_cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("rope_sin", torch.empty(shape, dtype=torch.float32), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[-1]
        cos, sin = self.rope_cos[:length], self.rope_sin[:length]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every weight and buffer; the same values for a seed on any number of ranks."""
        for name, weight in self.named_parameters():
            _fill(weight, _first_values(name, weight, self.config, seed=seed))
        cos, sin = _rope_tables(self.config, self.max_tokens)
        self.rope_cos.copy_(cos)
        self.rope_sin.copy_(sin)


class Block(nn.Module):
    """One decoder block: attention, then feed-forward, each on the normed stream and added back to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.feed = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        added: Tensor = x + self.feed(self.feed_norm(x))
        return added


class Attention(nn.Module):
    """Causal attention; `heads / kv_heads` query heads share each key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, self.kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(config.width, self.kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape

        def split(projected: Tensor, heads: int) -> Tensor:
            return projected.view(batch, length, heads, self.head_width).transpose(1, 2)

        query = _rotate(split(self.query(x), self.heads), cos, sin)
        key = _rotate(split(self.key(x), self.kv_heads), cos, sin)
        value = split(self.value(x), self.kv_heads)
        shared = self.heads != self.kv_heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        projected: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return projected


def count_parameters(model: nn.Module) -> int:
    """Weights in all, over all ranks: a sharded weight counts whole."""
    return sum(weight.numel() for weight in model.parameters())


def flops_per_token(config: ModelConfig, *, parameters: int, sequence_tokens: int) -> int:
    """Floating-point operations of one training step per token.

    The convention of published MFU figures: 6 per weight that multiplies (forward 2, backward 4; an untied embedding
    only looks up), plus 12·layers·width·sequence for attention, with nothing taken off for causality.
    """
    lookup = 0 if config.tied else config.vocab * config.width
    return 6 * (parameters - lookup) + 12 * config.layers * config.width * sequence_tokens


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # In float32: bfloat16 has 8 bits of mantissa and cannot tell neighbouring positions of a long sequence apart.
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).type_as(x)


def _rope_tables(config: ModelConfig, max_tokens: int) -> tuple[Tensor, Tensor]:
    half = config.width // config.heads // 2
    rate = config.rope_theta ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)
    angle = torch.outer(torch.arange(max_tokens, dtype=torch.float64, device="cpu"), rate)
    return angle.cos().float(), angle.sin().float()


# The last matrix of each residual branch; there are two branches a layer.
_RESIDUAL = ("attention.output.weight", "feed.down.weight")


def _first_values(name: str, weight: Tensor, config: ModelConfig, *, seed: int) -> Tensor:
    """The whole weight's first values, on its device; drawn from the seed and the name alone."""
    shape, device = weight.shape, weight.device
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    # Unit variance through a matrix of any width; the residual stream's variance stays flat over any depth.
    std = shape[1] ** -0.5
    if name.endswith(_RESIDUAL):
        std /= (2 * config.layers) ** 0.5
    if name == "embedding.weight":
        # GPT-2's 0.02 where it is also the head, so that the first prediction is close to uniform; else one, or the
        # first norm multiplies its gradient by fifty.
        std = 0.02 if config.tied else 1.0
    generator = torch.Generator(device=device).manual_seed(_mix(seed, name))
    values: Tensor = torch.randn(shape, generator=generator, device=device) * std
    return values


def _mix(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1


def _fill(weight: Tensor, values: Tensor) -> None:
    if isinstance(weight, DTensor):
        # Every rank drew the same values, so each cuts out its own shard and none has to send it.
        values = distribute_tensor(values, weight.device_mesh, weight.placements, src_data_rank=None)
    weight.copy_(values)
