"""Fields of a protocol buffer message without its schema: number and value, in order."""

from __future__ import annotations

from collections.abc import Iterator


class NotOne(ValueError):
    """These bytes are no message."""


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value): a whole number, or the bytes of a string, a message or a fixed number."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == 0:
            value, at = _varint(data, at)
        else:
            if kind == 2:
                size, at = _varint(data, at)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            else:
                raise NotOne(f"wire type {kind}")
            if size > len(data) - at:
                raise NotOne("cut off")
            value, at = data[at : at + size], at + size
        yield number, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise NotOne("cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise NotOne("a number without end")
