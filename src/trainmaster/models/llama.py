"""A Llama-style decoder: RMSNorm, rotary embedding, grouped-query attention, SwiGLU; head tied or not.

Given targets it returns their loss and never holds the logits; without them it returns the logits.

ModelConfig's options make it the decoder of Llama 2 and 3, Mistral, Qwen2, Qwen3 (dense) and Mixtral.

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
from trainmaster.models import loss, rope
from trainmaster.models.attend import Mask, attend, look_back
from trainmaster.models.moe import MixtureOfExperts


class Llama(nn.Module):
    """Tokens in, logits or loss out. `max_tokens` is the longest sequence it will see (it sizes the rotary tables)."""

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
        self.judge = loss.judge  # a compiled one may take its place
        self.reduce_once = False  # with several micro-batches, gradients are summed over the ranks after the last
        self.block_masks = False  # masks in blocks, for kernels that skip what is hidden: compiled ones on a GPU
        shape = (max_tokens, config.head_size // 2)
        # Not saved: they follow from the config, and a longer sequence after a resume must not find old tables.
        self.register_buffer("rope_cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("rope_sin", torch.empty(shape, dtype=torch.float32), persistent=False)

    def forward(self, tokens: Tensor, *, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Logits of `tokens` (rows, length); with targets of that shape, the sum of their losses.

        A target of -100 is not counted. `documents` numbers the document of each token: it sees its own document
        alone. Positions count on through a row: the rotary embedding only tells distances, and those inside a document
        are what they would be without its neighbours.
        """
        length = tokens.shape[-1]
        cos, sin = self.rope_cos[:length], self.rope_sin[:length]
        mask = look_back(tokens, documents, window=self.config.sliding_window, in_blocks=self.block_masks)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        x = self.norm(x)
        # Through the module's weight, not through the module: the loss needs the matrix itself.
        head = self.embedding.weight if self.head is None else self.head.weight
        if targets is None:
            return F.linear(x, head)
        return loss.sum_of_losses(x, head, targets, judge=self.judge)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every weight and buffer; the same values for a seed on any number of ranks."""
        for name, weight in self.named_parameters():
            _fill(weight, _first_values(name, weight, self.config, seed=seed))
        cos, sin = rope.tables(self.config, self.max_tokens)
        self.rope_cos.copy_(cos)
        self.rope_sin.copy_(sin)


class Block(nn.Module):
    """One decoder block: attention, then feed-forward, each on the normed stream and added back to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.feed = FeedForward(config) if config.experts is None else MixtureOfExperts(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        added: Tensor = x + self.feed(self.feed_norm(x))
        return added


class Attention(nn.Module):
    """Causal attention; `heads / kv_heads` query heads share each key and value head.

    A mask takes the place of plain causality.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.query = nn.Linear(config.width, self.heads * self.head_size, bias=config.qkv_bias)
        self.key = nn.Linear(config.width, self.kv_heads * self.head_size, bias=config.qkv_bias)
        self.value = nn.Linear(config.width, self.kv_heads * self.head_size, bias=config.qkv_bias)
        self.output = nn.Linear(self.heads * self.head_size, config.width, bias=False)
        self.query_norm = nn.RMSNorm(self.head_size, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = nn.RMSNorm(self.head_size, eps=config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        batch, length, _ = x.shape

        def split(projected: Tensor, heads: int) -> Tensor:
            return projected.view(batch, length, heads, self.head_size).transpose(1, 2)

        query, key = split(self.query(x), self.heads), split(self.key(x), self.kv_heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rope.rotate(query, cos, sin), rope.rotate(key, cos, sin)
        value = split(self.value(x), self.kv_heads)
        projected: Tensor = self.output(attend(query, key, value, mask).transpose(1, 2).flatten(2))
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
    """Total number of parameters; a sharded weight counts whole."""
    return sum(weight.numel() for weight in model.parameters())


def active_parameters(config: ModelConfig, parameters: int) -> int:
    """Active parameters per token (MoE: only the chosen experts)."""
    if config.experts is None:
        return parameters
    idle = config.experts - min(config.experts, config.experts_per_token)
    return parameters - config.layers * idle * 3 * config.width * config.ffn_width


def flops_per_token(config: ModelConfig, *, parameters: int, sequence_tokens: int) -> int:
    """Floating-point operations of one training step per token.

    The convention of published MFU figures: 6 per weight that multiplies (forward 2, backward 4; an untied embedding
    only looks up, an expert that was not chosen does nothing), plus 12·layers·width·sequence for attention, with
    nothing taken off for causality. Width is that of all heads together, which Qwen3's smaller models have wider than
    the stream; a sliding window shorter than the sequence takes its place.
    """
    lookup = 0 if config.tied else config.vocab * config.width
    seen = min(sequence_tokens, config.sliding_window or sequence_tokens)
    attention = 12 * config.layers * config.heads * config.head_size * seen
    return 6 * (active_parameters(config, parameters) - lookup) + attention


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight, without allocating memory."""
    with torch.device("meta"):
        model = Llama(config, max_tokens=1)
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


# Widest model whose head starts at width^-0.5; sqrt(160) / width is 12.6 / width. On an H200, 0.3 times width^-0.5 made
# the loss of a 1B model fall from the first step on, and 0.1 to 0.3 that of an 8B (docs/LOG.md).
_WIDEST_FULL_HEAD = 160


def head_std(width: int) -> float:
    """Standard deviation of the head's initial values, or of the embedding's where it is also the head.

    width^-0.5 gives logits of variance one. The hidden state has the norm width^0.5, and in the first steps all layers
    turn it into the same direction: the logits could grow to width^0.5, and the loss rises before it falls. From
    `_WIDEST_FULL_HEAD` on the values shrink with 1 / width, so that this bound is the same at every width.
    """
    return float(min(width**-0.5, _WIDEST_FULL_HEAD**0.5 / width))


# The last matrix of each residual branch; there are two branches a layer.
_RESIDUAL = ("attention.output.weight", "feed.down.weight", "feed.down")


def _first_values(name: str, weight: Tensor, config: ModelConfig, *, seed: int) -> Tensor:
    """Initial values of the whole weight, on its device; drawn from the seed and the name alone."""
    shape, device = weight.shape, weight.device
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    if name.endswith(".bias"):
        return torch.zeros(shape, device=device)
    # Unit variance through a matrix of any width, stacked experts included; the residual stream's variance stays flat
    # over any depth.
    std = shape[1] ** -0.5
    if name.endswith(_RESIDUAL):
        std /= (2 * config.layers) ** 0.5
    if name == "head.weight" or (name == "embedding.weight" and config.tied):
        std = head_std(config.width)
    elif name == "embedding.weight":
        std = 1.0  # or the first norm would multiply its gradient by 1 / std
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
