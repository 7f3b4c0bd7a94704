"""TensorBoard's event files: records of a length, its checksum, a message, its checksum; the message is an `Event`.

Field numbers: tensorflow/core/util/event.proto, framework/summary.proto, framework/tensor.proto.
"""

from __future__ import annotations

import struct
from pathlib import Path

from trainmaster.node.curves import Point, Tail, canonical
from trainmaster.node.curves.protobuf import NotOne, fields

PATTERN = "events.out.tfevents.*"
_HEAD = 12  # length, and its checksum
_LARGEST = 8 << 20  # an image or a graph may be larger: from there on the file is not read


class EventFile:
    """Scalars of one event file, by step."""

    name = "tensorboard"

    def __init__(self, path: Path) -> None:
        self._tail, self._held, self._lost = Tail(path), b"", False

    def read(self) -> list[Point]:
        data, anew = self._tail.read()
        if anew:
            self._held, self._lost = b"", False
        if self._lost:
            return []
        self._held += data
        steps: dict[int, dict[str, float]] = {}
        at = 0
        while len(self._held) - at >= _HEAD:
            (size,) = struct.unpack_from("<Q", self._held, at)
            if size > _LARGEST:
                self._lost = True
                break
            end = at + _HEAD + size + 4
            if end > len(self._held):
                break
            try:
                step, figures = _scalars(self._held[at + _HEAD : end - 4])
            except (NotOne, struct.error):
                self._lost = True
                break
            if figures:
                steps.setdefault(step, {}).update(figures)
            at = end
        self._held = b"" if self._lost else self._held[at:]
        return [Point(step=step, figures=figures) for step, figures in steps.items()]


def _scalars(event: bytes) -> tuple[int, dict[str, float]]:
    step, figures = 0, {}
    for number, value in fields(event):
        if number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            for part, content in fields(value):
                if part == 1 and isinstance(content, bytes):
                    tag, figure = _value(content)
                    name = canonical(tag)
                    if name is not None and figure is not None:
                        figures[name] = figure
    return step, figures


def _value(message: bytes) -> tuple[str, float | None]:
    """Tag and number of a `Summary.Value`: `simple_value`, or a tensor that holds one float."""
    tag, figure = "", None
    for number, value in fields(message):
        if not isinstance(value, bytes):
            continue
        if number == 1:
            tag = value[:200].decode(errors="replace")
        elif number == 2:
            (figure,) = struct.unpack("<f", value)
        elif number == 8:
            figure = _tensor(value)
    return tag, figure


def _tensor(message: bytes) -> float | None:
    kind, content = 0, b""
    for number, value in fields(message):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number in (4, 5, 6) and isinstance(value, bytes):  # raw bytes, floats, doubles
            content = value
    if kind == 1 and len(content) == 4:
        return float(struct.unpack("<f", content)[0])
    if kind == 2 and len(content) == 8:
        return float(struct.unpack("<d", content)[0])
    return None
