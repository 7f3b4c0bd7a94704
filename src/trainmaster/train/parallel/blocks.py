"""Activation checkpointing and compilation of blocks, before sharding.

In that order, and both by replacing a block's `forward`: its weights keep their names, and FSDP's hooks stay outside,
so that a recomputed block finds its weights gathered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainmaster.core.config.parallel import ParallelConfig
from trainmaster.models.attend import choose_kernels
from trainmaster.models.decoder import Decoder

BACKEND = "inductor"
_aten = torch.ops.aten
# Kept by `recompute: ops`: what costs most to compute again. All the rest is element by element.
COSTLY = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
]


def recompute(model: Decoder, parallel: ParallelConfig) -> None:
    """Activation checkpointing: keep a block's input only (`full`, `layers`), or also costly results (`ops`)."""
    if parallel.recompute == "none":
        return
    every = parallel.recompute_every if parallel.recompute == "layers" else 1
    chosen: Sequence[nn.Module] = list(model.blocks)[::every]
    for block in chosen:
        block.forward = _again(block.forward, by_op=parallel.recompute == "ops")


def compile_blocks(model: Decoder, parallel: ParallelConfig, device: torch.device) -> None:
    """Compile each block: one graph serves all of them, so that it is made once."""
    if not compiles(parallel, device):
        return
    choose_kernels()
    model.judge = _compiled(model.judge)
    whole = True
    for block in model.blocks:
        part = block.static_part()
        if part is block or parallel.recompute == "none":
            part.forward = _compiled(part.forward)
        else:
            whole = False
    model.block_masks = whole and device.type == "cuda"


def compiles(parallel: ParallelConfig, device: torch.device) -> bool:
    """Whether a run compiles its blocks; `auto`: on a GPU."""
    return parallel.compile == "on" or (parallel.compile == "auto" and device.type == "cuda")


def count_compile_s() -> float:
    """Seconds that this process has compiled for so far; 0 where torch does not say."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    spent: dict[str, float] = getattr(dynamo, "calculate_time_spent", dict)()
    return float(spent.get("total_wall_time", 0.0))


def _again(forward: Callable[..., Tensor], *, by_op: bool) -> Callable[..., Tensor]:
    more: dict[str, Any] = {}
    if by_op:
        more["context_fn"] = partial(create_selective_checkpoint_contexts, COSTLY)

    def twice(*inputs: Any) -> Tensor:
        # There is no dropout, so no random state to bring back.
        result: Tensor = checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **more)
        return result

    return twice


def _compiled(function: Any) -> Any:
    # Shapes are those of the micro-batch, in every step the same: a graph for them alone is the fastest.
    return torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=False)
