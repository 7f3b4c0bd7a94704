"""A copy of a run's tensors in host memory, taken while training goes on.

The weights and moments on a GPU change in the optimizer's step alone, so their copy may take the whole forward and
backward pass of the next step. It runs on a stream of its own, into memory that the GPU can write by itself (pinned).
That memory is taken once, in the background once the run is loaded: it takes seconds to come by, and a load would share
the driver and the memory's bandwidth with it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from trainmaster.node.cgroup import free_bytes
from trainmaster.node.host import Host
from trainmaster.train.checkpoint import pinning

_BLOCK_BYTES = 1 << 30  # pinned at one go: the driver does nothing else for this process meanwhile, about 0.1 s
_SPARE_BYTES = 1 << 28  # left for others


class HostCopy:
    """Room for one copy. `copy` begins it, `fence` orders the next update behind it, `wait` is until it has arrived."""

    def __init__(self, device: torch.device, sizes: Sequence[int]) -> None:
        """`sizes` in bytes of the tensors to come, as far as they are known."""
        self._device, self._sizes = device, sizes
        self._blocks: list[Tensor] = []
        self._last: tuple[Sequence[Tensor], list[Tensor]] | None = None  # what was copied, and its places
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None
        self._ready: torch.cuda.Event | None = None
        self._reserving: threading.Thread | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def reserve(self) -> None:
        """Begin to take the memory, in the background; without it the first copy does."""
        if self._stream is not None and self._reserving is None:
            blocks = _layout(self._sizes)[0]
            self._reserving = threading.Thread(target=self._reserve_ahead, args=(blocks,), daemon=True)
            self._reserving.start()

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Begin to copy; what is returned holds the tensors as they are now, once `wait` has returned.

        MemoryError where there is no room for it.
        """
        if self._reserving is not None:
            self._reserving.join()
        copies = self._place(tensors)
        if self._stream is None:
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for copy, tensor in zip(copies, tensors, strict=True):
                    copy.copy_(tensor, non_blocking=True)
            self._copied, self._ready = _event(), None
            self._copied.record(self._stream)
        return copies

    def fence(self) -> None:
        """What this thread's stream does from now on comes after the copy. Does not wait: the GPU keeps the order."""
        if self._copied is None or self._ready is not None:
            return
        current = torch.cuda.current_stream(self._device)
        self._ready = _event()
        self._ready.record(current)
        current.wait_event(self._copied)

    def wait(self) -> None:
        """Until the copy has arrived. From any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def held_s(self) -> float:
        """How long the GPU waited at the fence for the end of the last copy."""
        if self._copied is None or self._ready is None:
            return 0.0
        self._ready.synchronize()
        wait_ms: float = self._ready.elapsed_time(self._copied)
        return max(0.0, wait_ms / 1000)

    def forget(self) -> None:
        """Keep no tensor of the run."""
        self._last = None

    def _place(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The place of each tensor. Found once for a list: for 600 tensors it takes longer than to begin the copies."""
        if self._last is None or self._last[0] is not tensors:
            blocks, places = _layout([tensor.nbytes for tensor in tensors])
            self._reserve(blocks)
            copies = [
                self._blocks[block][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                for tensor, (block, start) in zip(tensors, places, strict=True)
            ]
            self._last = tensors, copies
        return self._last[1]

    def _reserve_ahead(self, sizes: Sequence[int]) -> None:
        torch.cuda.set_device(self._device)  # of this thread: it would open another rank's GPU
        with contextlib.suppress(MemoryError):  # raised again by `copy`
            self._reserve(sizes)

    def _reserve(self, sizes: Sequence[int]) -> None:
        """Have blocks of at least these sizes."""
        for number, size in enumerate(sizes):
            if number == len(self._blocks):
                self._blocks.append(_take(size, self._device))
            elif self._blocks[number].nbytes < size:
                self._blocks[number] = _take(size, self._device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _layout(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Blocks, and for each size its block and where it starts there. The order of the sizes does not change the blocks.

    No tensor spans two blocks: they are pinned one by one, and a copy over the border of two would fail.
    """
    blocks: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        room = -(-sizes[index] // pinning.PAGE_BYTES) * pinning.PAGE_BYTES
        number = next((n for n, used in enumerate(blocks) if used + room <= _BLOCK_BYTES), len(blocks))
        if number == len(blocks):
            blocks.append(0)
        places[index] = (number, blocks[number])
        blocks[number] += room
    return blocks, [places[index] for index in range(len(sizes))]


def _take(size: int, device: torch.device) -> Tensor:
    """Memory of its own; pinned for a GPU, as far as the system lets it."""
    free = free_bytes(Host())
    if size > free - _SPARE_BYTES:
        # Refused here, it costs a save. Taken, it costs whatever process the kernel picks.
        raise MemoryError(f"a copy of the run in host memory needs {size:,} bytes more, and {free:,} are free")
    block = pinning.take(size)
    if device.type == "cuda":
        block.zero_()  # makes the pages exist: quicker here, on several cores, than inside the driver
        pinning.pin(block, device)
    return block
