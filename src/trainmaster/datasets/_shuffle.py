"""Shuffled order of any length, computed per position: no table of all positions is built.

A Feistel network is a one-to-one map of the numbers below a power of four. Numbers it sends beyond the length are sent
on until they fall inside (cycle walking), which keeps it one-to-one below the length.
"""

from __future__ import annotations

import functools
import hashlib

_ROUNDS = 6
_WORD = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio: spreads small differences over all bits (Knuth, TAOCP 6.4)


def shuffled(place: int, size: int, *, seed: int, turn: int) -> int:
    """Which of `size` things stands at `place` in pass number `turn`. Over all places each thing comes once."""
    assert 0 <= place < size
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys, mask = _keys(seed, turn), (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for key in keys:
            mixed = ((right ^ key) * _ODD) & _WORD
            left, right = right, left ^ ((mixed ^ (mixed >> 29)) * _ODD & _WORD) >> (64 - half)
        place = (left << half) | right
        if place < size:
            return place


@functools.lru_cache(maxsize=64)
def _keys(seed: int, turn: int) -> tuple[int, ...]:
    def key(number: int) -> int:
        return int.from_bytes(hashlib.sha256(f"shuffle {seed} {turn} {number}".encode()).digest()[:8], "big")

    return tuple(key(number) for number in range(_ROUNDS))
