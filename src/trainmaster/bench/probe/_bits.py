"""Bit-exact work: settings under which a right GPU gives the same bits every time, the data for it, and digests.

Two GPUs of one model with the same torch and CUDA must agree bit by bit; two of different models need not, since their
kernels add in another order. The exception is data whose sums are exact in any order: see `draw`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os

import torch

FULL = 1 << 16


def settle() -> dict[str, str]:
    """Make every choice that could change bits, before CUDA starts a library; says which were made."""
    # cuBLAS may split a sum differently when its workspace is in use by another stream; a fixed one forbids it.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # An operation that cannot be deterministic raises. Not `use_deterministic_algorithms`, which does the same and also
    # loads the compiler: seconds, for nothing that runs here.
    torch.set_deterministic_debug_mode("error")
    torch.backends.cudnn.benchmark = False  # autotuning picks by time, and time is noise
    torch.backends.cudnn.deterministic = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # partial sums stay in float32
    torch.set_float32_matmul_precision("highest")
    return {
        "cublas_workspace": os.environ["CUBLAS_WORKSPACE_CONFIG"],
        "deterministic_algorithms": "on",
        "cudnn_benchmark": "off",
        "bf16_reduced_precision_reduction": "off",
        "float32_matmul": "highest",
    }


def draw(shape: tuple[int, ...], *, seed: int, levels: int, device: torch.device) -> torch.Tensor:
    """Random bfloat16 numbers in [-1, 1), the same on every machine: whole numbers over a power of two.

    Made of whole numbers, because a CPU's random floats depend on its vector width. With 8 levels a product of two is a
    multiple of 1/16 and a sum of 8192 of them below 2**13: 17 bits, exact in float32 whatever the order of adding. So
    such a product of matrices has the same bits on every chip that computes rightly. Many levels (`FULL`) use every bit
    of bfloat16, whose sums are then rounded.
    """
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-(levels // 2), levels // 2, shape, generator=generator, dtype=torch.int32)
    return (whole.to(torch.float32) / (levels // 2)).to(torch.bfloat16).to(device)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as whole numbers: NaN equals NaN, and 0 differs from -0."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def count_different(tensor: torch.Tensor, other: torch.Tensor) -> int:
    """How many elements differ in any bit; counted on the device."""
    return int((bits(tensor) != bits(other)).sum().item())


def digest(*tensors: torch.Tensor) -> str:
    """SHA-256 over the bytes of the tensors, computed by the CPU: the suspect does not vouch for itself."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        here = tensor.detach().contiguous().cpu()
        size = here.numel() * here.element_size()
        hasher.update((ctypes.c_char * size).from_address(here.data_ptr()) if size else b"")
    return hasher.hexdigest()[:32]
