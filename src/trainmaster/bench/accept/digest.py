"""Digests of tensors, computed where the tensors are: equal bits have equal digests, one flipped bit changes them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x9E3779B1  # odd, so that no bit of a word is lost by the product (Knuth, multiplicative hashing)


def digest(tensors: Iterable[Tensor]) -> str:
    """One number for the bits of all tensors in their order, as hex."""
    total = 0
    for number, tensor in enumerate(tensors, start=1):
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)) if _dense(tensor) else tensor.detach().flatten()
        words = flat.view(_WORDS[flat.element_size()]).to(torch.int64)
        places = torch.arange(1, 2 * words.numel(), 2, device=words.device, dtype=torch.int64)  # odd as well
        mixed = int((words * places * _MULTIPLIER).sum().item()) & 0xFFFFFFFFFFFFFFFF
        total = (total * 0x100000001B3 + mixed + number) & 0xFFFFFFFFFFFFFFFF
    return f"{total:016x}"


def flip_bit(tensor: Tensor) -> None:
    """Flip a bit of the middle element, as a faulty memory cell would."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    words = flat.view(_WORDS[flat.element_size()])
    words[words.numel() // 2] ^= 1 << (8 * flat.element_size() - 10)


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill their storage in some order, as in channels-last tensors."""
    return (
        bool(tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last))
        if tensor.dim() == 4
        else bool(tensor.is_contiguous())
    )
