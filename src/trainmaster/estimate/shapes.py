"""A model's weights by name and shape, counted without torch. A test holds them to the real model."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from trainmaster.core.train_config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Weights of a model. The root is what belongs to no block: embedding, last norm, head."""

    all: int
    active: int  # that one token passes through; less than all in a mixture of experts
    block: int
    root: int
    tensors: int


@functools.cache
def count(model: ModelConfig) -> Counts:
    """How many weights there are, and where."""
    root = sum(math.prod(shape) for _, shape in _root(model))
    block = sum(math.prod(shape) for _, shape in _block(model))
    every = root + model.layers * block
    experts = model.experts or 1
    idle = experts - min(experts, model.experts_per_token) if model.experts else 0
    active = every - model.layers * idle * 3 * model.width * model.ffn_width
    tensors = len(list(_root(model))) + model.layers * len(list(_block(model)))
    return Counts(all=every, active=active, block=block, root=root, tensors=tensors)


def weight_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Every weight, named as the model names it."""
    shapes = dict(_root(model))
    for layer in range(model.layers):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in _block(model)}
    return shapes


def flops_per_token(model: ModelConfig, *, sequence_tokens: int) -> int:
    """Of forward and backward, by the convention of published MFU figures (models/llama.py has the definition)."""
    lookup = 0 if model.tied else model.vocab * model.width
    seen = min(sequence_tokens, model.sliding_window or sequence_tokens)
    return 6 * (count(model).active - lookup) + 12 * model.layers * model.heads * model.head_size * seen


def _root(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield "embedding.weight", (model.vocab, model.width)
    yield "norm.weight", (model.width,)
    if not model.tied:
        yield "head.weight", (model.vocab, model.width)


def _block(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    width, query, key = model.width, model.heads * model.head_size, model.kv_heads * model.head_size
    yield "attention_norm.weight", (width,)
    for name, size in (("query", query), ("key", key), ("value", key)):
        yield f"attention.{name}.weight", (size, width)
        if model.qkv_bias:
            yield f"attention.{name}.bias", (size,)
    yield "attention.output.weight", (width, query)
    if model.qk_norm:
        yield "attention.query_norm.weight", (model.head_size,)
        yield "attention.key_norm.weight", (model.head_size,)
    yield "feed_norm.weight", (width,)
    if model.experts is None:
        yield "feed.gate.weight", (model.ffn_width, width)
        yield "feed.up.weight", (model.ffn_width, width)
        yield "feed.down.weight", (width, model.ffn_width)
    else:
        yield "feed.router.weight", (model.experts, width)
        yield "feed.gate", (model.experts * model.ffn_width, width)
        yield "feed.up", (model.experts * model.ffn_width, width)
        yield "feed.down", (model.experts * width, model.ffn_width)
