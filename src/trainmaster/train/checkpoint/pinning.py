"""Memory of the host that the GPU reads and writes by itself: pages that are there, made known to the driver.

Not torch's pinned memory. That comes in powers of two, and a GB of it takes 0.6 s, for which the driver does nothing
else for this process; large pages that are there already take 0.02 s (docs/LOG.md).
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

PAGE_BYTES = 4096
_PORTABLE = 1  # cudaHostRegisterPortable


def take(size: int) -> Tensor:
    """New memory, in large pages where there are such; they come with the first write."""
    # Private: shared memory has no large pages by default, and the kernel takes seconds to free 48 GB of small ones.
    memory = mmap.mmap(-1, max(size, PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def pin(memory: Tensor, gpu: torch.device) -> bool:
    """False where the system refuses it: copies are then slower and as good."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)) == 0:  # type: ignore[no-untyped-call]
        return True
    with contextlib.suppress(RuntimeError):  # CUDA keeps the refusal, and raises it at this thread's next kernel
        torch.zeros(1, device=gpu)
    return False


def unpin(memory: Tensor) -> None:
    """Before the memory is given back; nothing may be copied from it or to it any more."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
