"""Lines of files that leave a machine by its standard output: each carries its file and byte offset.

A container's log repeats, rotates and drops. With the offset in each line a reader stores every byte once and sees a
gap as a gap:

    @tm rank-0.log 1234 a whole line, its newline counts as a byte
    @tm- rank-0.log 1250 a piece of a line
    @tm64 outputs/model.bin 0 AAECAw==

Every other line of the log is no frame.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote_from_bytes, unquote_to_bytes

# Below 16 KiB, where container runtimes cut a line in two.
FRAME_BYTES = 8192
_FRAME = re.compile(rb"@tm(64|-)? ([!-~]{1,4096}) ([0-9]{1,18}) (.*)", re.DOTALL)
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_PLAIN = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ufeff]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Bytes of a file from an offset on."""

    stream: str  # file name; bytes that are not UTF-8 are surrogate escapes
    offset: int
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


def encode(frame: Frame) -> Iterator[bytes]:
    """Lines, with their newlines, that hold these bytes."""
    name = quote_from_bytes(frame.stream.encode("utf-8", "surrogateescape"), safe="/").encode()
    offset = frame.offset
    for line in _LINE.findall(frame.data) or [b""]:
        for start in range(0, max(1, len(line)), FRAME_BYTES):
            piece = line[start : start + FRAME_BYTES]
            yield _encode_piece(name, offset, piece)
            offset += len(piece)


def _encode_piece(name: bytes, offset: int, piece: bytes) -> bytes:
    body = piece.removesuffix(b"\n")
    try:
        plain = _PLAIN.fullmatch(body.decode()) is not None
    except UnicodeDecodeError:
        plain = False
    if not plain:
        return b"@tm64 %s %d %s\n" % (name, offset, base64.b64encode(piece))
    mark = b"@tm" if piece.endswith(b"\n") else b"@tm-"
    return b"%s %s %d %s\n" % (mark, name, offset, body)


def decode(line: bytes) -> Frame | None:
    """The frame in a line without its newline; None where it is none."""
    match = _FRAME.fullmatch(line)
    if match is None:
        return None
    kind, name, offset, body = match.groups()
    if kind == b"64":
        try:
            data = base64.b64decode(body, validate=True)
        except binascii.Error:
            return None
    else:
        data = body + b"\n" if kind is None else body
    stream = unquote_to_bytes(name).decode("utf-8", "surrogateescape")
    return Frame(stream=stream, offset=int(offset), data=data)
