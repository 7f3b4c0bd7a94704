"""How many weights a model has, and where. Its family lists them, without torch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from trainmaster.core.config.train import ModelConfig
from trainmaster.models import family


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
    own = family.of(model)
    sizes = {name: math.prod(shape) for name, shape in own.weight_shapes(model).items()}
    return Counts(
        all=sum(sizes.values()),
        active=own.active_parameters(model),
        block=sum(size for name, size in sizes.items() if name.startswith("blocks.0.")),
        root=sum(size for name, size in sizes.items() if not name.startswith("blocks.")),
        tensors=len(sizes),
    )
