"""Attention and its masks.

Plain causal attention is one call of torch's, on a GPU by cuDNN where it can. Windows and documents need a mask: blocks
of it for flex_attention, which skips what is hidden, or a whole one of true and false, which works everywhere.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Mask = Tensor | BlockMask | None  # None: every token sees itself and all before it

# On an H200 cuDNN's kernel is the fastest, torch's own choice is not always it; see docs/LOG.md.
_ORDER = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_CHOSEN = ExitStack()


def choose_kernels() -> None:
    """Set the order of the kernels for the whole process, which compiled blocks need.

    Inside of a block the choice would be a part of its graph, one that torch's cache of compiled graphs does not know:
    every start would trace and optimise the block again.
    """
    _CHOSEN.close()
    _CHOSEN.enter_context(sdpa_kernel(_ORDER, set_priority=True))


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask) -> Tensor:
    """(batch, heads, tokens, head size) each; fewer key and value heads are shared by neighbouring query heads."""
    grouped = query.shape[1] != key.shape[1]
    if isinstance(mask, BlockMask):
        mixed = flex_attention(query, key, value, block_mask=mask, enable_gqa=grouped)
        assert isinstance(mixed, Tensor)
        return mixed
    # Here and not around the model: a block that is computed again in the backward pass must choose the same kernel.
    with nullcontext() if torch.compiler.is_compiling() else sdpa_kernel(_ORDER, set_priority=True):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )


def look_back(tokens: Tensor, documents: Tensor | None, *, window: int | None, in_blocks: bool) -> Mask:
    """Mask of these rows: a token attends to itself and to earlier tokens of its document, at most `window`."""
    rows, length = tokens.shape
    if window is not None and length <= window:
        window = None
    if window is None and documents is None:
        return None

    def may_look(row: Tensor, _: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        seen = query_index >= key_index
        if window is not None:
            seen = seen & (query_index - key_index < window)
        if documents is not None:
            seen = seen & (documents[row, query_index] == documents[row, key_index])
        return seen

    separate = rows if documents is not None else None  # one mask for all rows where they do not differ
    if in_blocks:
        return create_block_mask(may_look, separate, None, length, length, device=tokens.device)
    place = torch.arange(length, device=tokens.device)
    row = torch.arange(separate or 1, device=tokens.device).view(-1, 1, 1, 1)
    return may_look(row, row, place.view(-1, 1), place)
