"""The decoder that every family fills with its own blocks: embedding, blocks, last norm, head; rotary positions.

Given targets it returns their loss and never holds the logits; without them it returns the logits.

Built for one device. It may be built on the meta device, sharded, and then given memory with `to_empty`: nothing holds
a value until `init_weights` has run, which fills every weight and every buffer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from trainmaster.core.config.train import ModelConfig
from trainmaster.models import loss, rope
from trainmaster.models.attend import Mask, look_back


class Block(nn.Module):
    """One decoder block: what is sharded, compiled and computed again as one. A family gives it its forward pass."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask = None) -> Tensor:
        raise NotImplementedError

    def static_part(self) -> nn.Module:
        """The part whose shapes follow from the input's alone, so that one graph holds it."""
        return self


class Blocks(nn.ModuleList):
    """A ModuleList that says what it holds."""

    def __iter__(self) -> Iterator[Block]:
        return cast(Iterator[Block], super().__iter__())


class Decoder(nn.Module):
    """Tokens in, logits or loss out. `max_tokens` is the longest sequence it will see (it sizes the rotary tables)."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: ModelConfig, block: Callable[[ModelConfig], Block], *, max_tokens: int) -> None:
        super().__init__()
        self.config = config
        self.max_tokens = max_tokens
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = Blocks(block(config) for _ in range(config.layers))
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


def count_parameters(model: nn.Module) -> int:
    """Total number of parameters; a sharded weight counts whole."""
    return sum(weight.numel() for weight in model.parameters())


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
