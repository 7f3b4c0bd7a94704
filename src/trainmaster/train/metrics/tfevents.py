"""TensorBoard event files with scalars, written without its package.

A record is 16 bytes around one small message. Format: tensorflow/core/lib/io/record_writer.h (length, its checksum,
data, its checksum) and tensorflow/core/util/event.proto (Event, Summary.Value).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path


class TensorBoard:
    """Tracker that writes an event file for TensorBoard."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # A new file for every start; TensorBoard joins those of one folder and drops what a resumed run repeats.
        self._file = (folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}").open("wb")
        self._write(_text(3, b"brain.Event:2"))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        values = b"".join(_text(1, _text(1, name.encode()) + _float(2, value)) for name, value in numbers.items())
        self._write(_whole(2, step) + _text(5, values))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, message: bytes) -> None:
        message = _double(1, time.time()) + message
        length = struct.pack("<Q", len(message))
        parts = (length, struct.pack("<I", masked_crc(length)), message, struct.pack("<I", masked_crc(message)))
        self._file.write(b"".join(parts))


# Protocol buffers' wire format: a key is the field's number and how its value is written.


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _whole(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        packed = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _varint(field << 3 | 5) + packed


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)  # Castagnoli's polynomial, reversed
        table.append(crc)
    return tuple(table)


_TABLE = _crc_table()


def masked_crc(data: bytes) -> int:
    """CRC-32C, turned and shifted as the record format wants it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
