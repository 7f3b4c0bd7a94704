"""Offline files of Weights & Biases: the log format of LevelDB, each record a message of its `wandb_internal.proto`."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from trainmaster.node.curves import Point, Tail, canonical, to_number, to_step
from trainmaster.node.curves.protobuf import NotOne, fields

PATTERN = "run-*.wandb"
_BLOCK, _HEAD = 32 << 10, 7  # a record's header: checksum, size, kind
_FILE_HEAD = 7  # ":W&B", a magic number, a version
_FULL, _FIRST, _LAST = 1, 2, 4
_LARGEST = 8 << 20


class OfflineRun:
    """History of one run."""

    name = "wandb"

    def __init__(self, path: Path) -> None:
        self._tail, self._held, self._at, self._lost = Tail(path), b"", 0, False
        self._record = b""

    def read(self) -> list[Point]:
        data, anew = self._tail.read()
        if anew:
            self._held, self._at, self._record, self._lost = b"", 0, b"", False
        if self._lost:
            return []
        self._held += data
        points = []
        for record in self._records():
            try:
                point = _history(record)
            except NotOne:
                self._lost = True
                break
            if point is not None:
                points.append(point)
        return points

    def _records(self) -> list[bytes]:
        """Whole records of what is held. `_at` is the place in the file of its first byte."""
        if self._at == 0:
            if len(self._held) < _FILE_HEAD:
                return []
            if not self._held.startswith(b":W&B"):
                self._lost = True
                return []
            self._held, self._at = self._held[_FILE_HEAD:], _FILE_HEAD
        whole, at = [], 0
        while True:
            left = _BLOCK - (self._at + at) % _BLOCK
            if left < _HEAD:  # the rest of a block that has no room for a header
                at += left
                continue
            if len(self._held) - at < _HEAD:
                break
            size, kind = struct.unpack_from("<HB", self._held, at + 4)
            if kind == 0 or size > left - _HEAD:
                self._lost = True
                break
            if len(self._held) - at < _HEAD + size:
                break
            part = self._held[at + _HEAD : at + _HEAD + size]
            at += _HEAD + size
            self._record = part if kind in (_FULL, _FIRST) else self._record + part
            if kind in (_FULL, _LAST):
                whole.append(self._record)
                self._record = b""
            elif len(self._record) > _LARGEST:
                self._lost = True
                break
        at = min(at, len(self._held))
        self._held, self._at = self._held[at:], self._at + at
        return whole


def _history(record: bytes) -> Point | None:
    step: int | None = None
    figures: dict[str, float] = {}
    for number, value in fields(record):
        if number != 2 or not isinstance(value, bytes):  # history
            continue
        for part, content in fields(value):
            if not isinstance(content, bytes):
                continue
            if part == 2:
                step = next((num for field, num in fields(content) if field == 1 and isinstance(num, int)), 0)
            elif part == 1:
                name, figure = _item(content)
                if name == "_step":
                    step = to_step(figure)
                elif (ours := canonical(name)) is not None and (given := to_number(figure)) is not None:
                    figures[ours] = given
    return Point(step=step, figures=figures) if step is not None and figures else None


def _item(message: bytes) -> tuple[str, object]:
    names: list[str] = []
    value: object = None
    for number, content in fields(message):
        if number in (1, 2) and isinstance(content, bytes):
            names.append(content[:200].decode(errors="replace"))
        elif number == 5 and isinstance(content, int):
            value = content
        elif number == 6 and isinstance(content, bytes) and len(content) == 8:
            (value,) = struct.unpack("<d", content)
        elif number == 16 and isinstance(content, bytes) and len(content) < 100:
            try:
                value = json.loads(content)
            except ValueError:
                value = None
    return "/".join(names), value
