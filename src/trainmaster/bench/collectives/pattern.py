"""Test data and its verification: every element depends on its rank, its index and the round.

Element i of rank r in round s is A·i + B·r + C·s modulo 2³², as int32, because:
- a sum over ranks is the same kind of line (n·A·i + …), so what must arrive is known in closed form, exactly; floats
  would round a flipped low bit away;
- A is odd: no two elements of a buffer are alike, all 32 bits are in use, so a shifted or swapped block shows;
- it contains the round: data left by an earlier round does not pass as new.
NCCL moves and adds int32 as it does float32, in the NVSwitch too (ncclNvlsSupported in src/include/device.h).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_A, _B, _C = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35  # odd, well mixed: the golden ratio, and two of MurmurHash3
_CHUNK = 1 << 20  # elements compared at a time: 4 MiB of temporary memory, small enough to stay in a cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Expected content of a part of a buffer: element i is slope·i + start, modulo 2³²."""

    offset: int  # in the buffer
    count: int
    slope: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    index: int  # of the first one, in the buffer
    expected: int
    got: int
    count: int


def sent(*, rank: int, salt: int, first: int, count: int, offset: int = 0) -> Line:
    """Elements of a rank's input, from `first` on."""
    return Line(offset=offset, count=count, slope=_A, start=_A * first + _B * rank + _C * salt)


def summed(*, world: int, salt: int, first: int, count: int) -> Line:
    """The sum of the inputs over all ranks."""
    start = world * _A * first + _B * (world * (world - 1) // 2) + world * _C * salt
    return Line(offset=0, count=count, slope=world * _A, start=start)


class Ruler:
    """The sequence 0, 1, 2, … on a device, from which lines are computed a chunk at a time."""

    def __init__(self, device: torch.device, longest: int) -> None:
        self._steps = torch.arange(min(_CHUNK, max(longest, 1)), dtype=torch.int32, device=device)

    def draw(self, buffer: Tensor, line: Line) -> None:
        for place, value in self._values(line):
            buffer[place : place + value.numel()] = value

    def compare(self, buffer: Tensor, lines: list[Line]) -> Mismatch | None:
        """None: every element is right."""
        count, first = 0, None
        for line in lines:
            for place, value in self._values(line):
                got = buffer[place : place + value.numel()]
                if torch.equal(got, value):
                    continue
                places = (got != value).nonzero()
                count += places.numel()
                if first is None:
                    at = int(places[0].item())
                    first = (place + at, int(value[at].item()), int(got[at].item()))
        if first is None:
            return None
        index, expected, seen = first
        return Mismatch(index=index, expected=expected & 0xFFFFFFFF, got=seen & 0xFFFFFFFF, count=count)

    def _values(self, line: Line) -> Iterator[tuple[int, Tensor]]:
        ramp = self._steps[: line.count] * _signed(line.slope)
        for begin in range(0, line.count, max(ramp.numel(), 1)):
            length = min(ramp.numel(), line.count - begin)
            yield line.offset + begin, ramp[:length] + _signed(line.slope * begin + line.start)


def _signed(value: int) -> int:
    """A number modulo 2³², as an int32 holds it."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
