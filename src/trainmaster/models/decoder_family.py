"""What the decoders of all families have in common, counted without torch: weights, operations, the cost of a block.

A family says what is different by the methods that it overrides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from trainmaster.core.config.train import ModelConfig
from trainmaster.models import hf_config, hf_names
from trainmaster.models.family import BlockCost, Count, Product, Shape
from trainmaster.models.hf_config import HfType


class DecoderFamily:
    """Embedding, blocks of attention and SwiGLU with two norms each, last norm, head; modules as in decoder.py."""

    name: str
    hf_types: tuple[HfType, ...]
    hf_modules: Mapping[str, str] = hf_names.BLOCK  # of a block, ours: HF's

    def weight_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {"embedding.weight": (config.vocab, config.width)}
        block = list(self._block_shapes(config))
        for layer in range(config.layers):
            shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block}
        shapes["norm.weight"] = (config.width,)
        if not config.tied:
            shapes["head.weight"] = (config.vocab, config.width)
        return shapes

    def active_parameters(self, config: ModelConfig) -> int:
        return sum(map(math.prod, self.weight_shapes(config).values()))

    def flops_per_token(self, config: ModelConfig, *, sequence_tokens: int) -> int:
        """6 for each weight that multiplies (forward 2, backward 4; an untied embedding only looks up, an expert that
        was not chosen does nothing), plus 12·layers·width·sequence for attention, with nothing taken off for causality.
        Width is that of all heads together, which Qwen3's smaller models have wider than the stream; a sliding window
        shorter than the sequence takes its place.
        """
        lookup = 0 if config.tied else config.vocab * config.width
        seen = min(sequence_tokens, config.sliding_window or sequence_tokens)
        attention = 12 * config.layers * config.heads * config.head_size * seen
        return 6 * (self.active_parameters(config) - lookup) + attention

    def block_cost(self, config: ModelConfig) -> BlockCost:
        width, ffn = config.width, config.ffn_width * self._experts_per_token(config)
        query, key = config.heads * config.head_size, config.kv_heads * config.head_size
        normed = query + key if self._query_key_norms(config) is not None else 0
        # The stream before each norm, and after it as the input of a product. What attention was given, and what it
        # gave: by heads for its own backward, by tokens for the output's product. Then gate, up and their product as
        # the input of down.
        kept = 4 * width + 3 * query + 2 * key + normed + 3 * ffn
        ops = 2 * query + 2 * key + 2 * ffn
        return BlockCost(
            products=tuple(self._products(config)),
            kept=Count(compiled=kept, eager=kept + ffn),  # eager code keeps the activated gate too
            # The scale of each norm, and attention's sum of each head.
            kept_float32=2 + config.heads + (config.heads + config.kv_heads if normed else 0),
            kept_ops=Count(compiled=2 * width + ops, eager=3 * width + ops),
            kept_ops_float32=config.heads,
            # Of gate, up and their product at once, and of the stream.
            gradients=Count(compiled=3 * ffn + 2 * width, eager=4 * ffn + 2 * width),
            # Norm (2), turn (read and write), by tokens (2), sum and norm (4), gate (3), sum (3).
            moved_forward=9 * width + 2 * (query + key) + 2 * query + 3 * ffn + 2 * normed,
            # Each norm reads three and writes two; turns; three gradients of the stream are added; gate (5).
            moved_backward=14 * width + 2 * (query + key) + 2 * query + 5 * ffn + 4 * normed,
            # Each product's two inputs and its gradient are searched for their largest value, cast, and turned round.
            cast_forward=2 * (3 * width + query + ffn),
            cast_backward=4 * (4 * width + 3 * ffn),
        )

    def model_type(self, config: ModelConfig) -> str:
        return self._hf_type(config).model_type

    def model_types(self) -> tuple[str, ...]:
        return tuple(kind.model_type for kind in self.hf_types)

    def to_hf(self, config: ModelConfig) -> dict[str, Any]:
        return hf_config.write(config, self._hf_type(config))

    def from_hf(self, plain: Mapping[str, Any]) -> ModelConfig:
        kind = next(kind for kind in self.hf_types if kind.model_type == plain["model_type"])
        return hf_config.read(plain, kind)

    def hf_names(self, name: str, config: ModelConfig) -> tuple[str, ...]:  # noqa: ARG002 (experts need it)
        return (hf_names.plain_name(name, self.hf_modules),)

    def _hf_type(self, config: ModelConfig) -> HfType:  # noqa: ARG002 (a family of several needs it)
        (kind,) = self.hf_types
        return kind

    def _query_key_norms(self, config: ModelConfig) -> tuple[int, int] | None:  # noqa: ARG002
        """Sizes of the norms of query and key."""
        return None

    def _experts_per_token(self, config: ModelConfig) -> int:  # noqa: ARG002
        return 1

    def _block_shapes(self, config: ModelConfig) -> Iterator[tuple[str, Shape]]:
        yield "attention_norm.weight", (config.width,)
        yield from self._attention_shapes(config)
        yield "feed_norm.weight", (config.width,)
        yield from self._feed_shapes(config)

    def _attention_shapes(self, config: ModelConfig) -> Iterator[tuple[str, Shape]]:
        query, key = config.heads * config.head_size, config.kv_heads * config.head_size
        for name, size in (("query", query), ("key", key), ("value", key)):
            yield f"attention.{name}.weight", (size, config.width)
            if config.qkv_bias:
                yield f"attention.{name}.bias", (size,)
        yield "attention.output.weight", (config.width, query)
        for name, size in zip(("query", "key"), self._query_key_norms(config) or (), strict=False):
            yield f"attention.{name}_norm.weight", (size,)

    def _feed_shapes(self, config: ModelConfig) -> Iterator[tuple[str, Shape]]:
        yield "feed.gate.weight", (config.ffn_width, config.width)
        yield "feed.up.weight", (config.ffn_width, config.width)
        yield "feed.down.weight", (config.width, config.ffn_width)

    def _products(self, config: ModelConfig) -> Iterator[Product]:
        query, key = config.heads * config.head_size, config.kv_heads * config.head_size
        yield from (Product(size, config.width) for size in (query, key, key))
        yield Product(config.width, query)
        rows = float(self._experts_per_token(config))
        yield Product(config.ffn_width, config.width, rows)
        yield Product(config.ffn_width, config.width, rows)
        yield Product(config.width, config.ffn_width, rows)
