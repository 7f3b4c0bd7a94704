"""A model family: what the trainer, the plan, exports and benchmarks ask of one. README.md has the recipe for another.

The folder is the registry: a folder of models/ with a presets.toml is a family, and its module `family` has FAMILY.
Neither this module nor those import torch, for a plan is made where there is none; only `build` does, when it runs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from trainmaster.core.config import presets
from trainmaster.core.config.train import ModelConfig

if TYPE_CHECKING:
    from trainmaster.models.decoder import Decoder

Shape = tuple[int, ...]


class Product(NamedTuple):
    """A matrix product of one block."""

    outputs: int
    inputs: int
    rows: float = 1.0  # for each token: more than one where a token passes through several experts


class Count(NamedTuple):
    """Numbers for each token, in compiled and in eager code."""

    compiled: int
    eager: int

    def of(self, *, compiled: bool) -> int:
        return self.compiled if compiled else self.eager


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """What one block computes, keeps and moves for each token: numbers of the compute type, but for `…_float32`.

    tests/train/test_plan_arithmetic.py holds `kept` and `kept_ops` to what torch saves, byte for byte.
    """

    products: tuple[Product, ...]
    kept: Count  # for the backward pass
    kept_float32: int
    kept_ops: Count  # with recompute: ops, the outputs of products and of attention alone
    kept_ops_float32: int
    gradients: Count  # alive at once inside the backward pass
    moved_forward: int  # read and written by element-wise work that is fused
    moved_backward: int
    cast_forward: int  # further, where products are in float8
    cast_backward: int


class Family(Protocol):
    """One family. A test runs over every one and holds these to its module and to transformers."""

    name: str  # of its folder

    def weight_shapes(self, config: ModelConfig) -> dict[str, Shape]:
        """Every weight by name, in the module's own order. Those of layer n begin with `blocks.n.`."""

    def active_parameters(self, config: ModelConfig) -> int:
        """Parameters that one token passes through; less than all where experts are chosen."""

    def flops_per_token(self, config: ModelConfig, *, sequence_tokens: int) -> int:
        """Operations of one training step for each token, by the convention of published MFU figures."""

    def block_cost(self, config: ModelConfig) -> BlockCost:
        """What the plan needs to know of a block beside its weights."""

    def build(self, config: ModelConfig, *, max_tokens: int) -> Decoder:
        """The module, for sequences of at most so many tokens; its `blocks` are what is sharded and compiled."""

    def model_type(self, config: ModelConfig) -> str:
        """HF's `model_type` for this shape; UsageError if none has these features together."""

    def model_types(self) -> tuple[str, ...]:
        """Every `model_type` of HF's that `from_hf` reads."""

    def to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """The keys of HF's config.json that say what is computed."""

    def from_hf(self, plain: Mapping[str, Any]) -> ModelConfig:
        """The shape that a config.json states; SpecError with everything that ours cannot be."""

    def hf_names(self, name: str, config: ModelConfig) -> tuple[str, ...]:
        """HF's names of our weight `name`; several where ours is those tensors stacked."""


def names() -> list[str]:
    """Every family, sorted."""
    return sorted(presets.families())


@functools.cache
def find(name: str) -> Family:
    """The family of that name, which must be one of `names()`."""
    return cast(Family, importlib.import_module(f"trainmaster.models.{name}.family").FAMILY)


def of(config: ModelConfig) -> Family:
    """The family of this shape."""
    return find(config.family_name)


def build(config: ModelConfig, *, max_tokens: int) -> Decoder:
    """The module of this shape, by its family."""
    return of(config).build(config, max_tokens=max_tokens)


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every weight of this shape, by its family."""
    return of(config).weight_shapes(config)
