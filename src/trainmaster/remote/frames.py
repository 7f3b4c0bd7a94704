"""Frames on the channel between control plane and node: a JSON head and, after it, plain bytes. Used at both ends."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from typing import Any

_SIZES = struct.Struct(">II")
SIZES_BYTES = _SIZES.size
MAX_HEAD_BYTES = 64 << 20  # a listing of a million files
MAX_BODY_BYTES = 64 << 20
_PART_BYTES = 256 << 10


class BadFrame(ValueError):
    """Bytes that are no frame; nothing after them can be read."""


def encode(head: Mapping[str, Any], body_bytes: int = 0) -> bytes:
    """A frame up to its body, which follows."""
    text = json.dumps(head).encode()  # ASCII: file names may hold surrogate escapes
    return _SIZES.pack(len(text), body_bytes) + text


def parts(body: bytes) -> Iterator[memoryview]:
    """A body in parts to write one after another: others get their turn in between."""
    view = memoryview(body)
    for start in range(0, len(view), _PART_BYTES):
        yield view[start : start + _PART_BYTES]


def write(descriptor: int, data: bytes) -> None:
    """Write all of it into a pipe, which may take a part at a time."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def sizes(raw: bytes) -> tuple[int, int]:
    """Sizes of the head and the body that follow."""
    head, body = _SIZES.unpack(raw)
    if head > MAX_HEAD_BYTES or body > MAX_BODY_BYTES:
        raise BadFrame(f"a frame of {head:,} and {body:,} bytes")
    return head, body


def decode(raw: bytes) -> dict[str, Any]:
    """The head of a frame."""
    try:
        head = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadFrame("its head is not JSON") from None
    if not isinstance(head, dict):
        raise BadFrame("its head is not an object")
    return head
