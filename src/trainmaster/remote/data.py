"""Data end of a transfer at a node: units in and out over standard input and output, one request at a time.

A plain loop, run by its path: the process starts in a tenth of the time of the node's server and copies no byte more
than needed. Units are those of remote/transfer.py. Standard library only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster.core.errors import DiskFull, TrainmasterError
from trainmaster.remote import frames
from trainmaster.remote.transfer import PIECE_BYTES, Changed, DamagedUnit, Incoming, Slice, read_unit, sha256

_buffer = bytearray(PIECE_BYTES)
_incoming: dict[tuple[str, str], Incoming] = {}


def main(requests: int = 0, answers: int = 1) -> None:
    """Answer requests until the connection closes."""
    while (raw := _read(requests, frames.SIZES_BYTES)) is not None:
        head_size, body_size = frames.sizes(bytes(raw))
        if (head := _read(requests, head_size)) is None:
            return
        body = _Body(requests, body_size)
        result, data = _answer(frames.decode(bytes(head)), body)
        body.skip()
        frames.write(answers, frames.encode(result, len(data)))
        frames.write(answers, data)


class _Body:
    """The body of a request, taken piece by piece while it arrives."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self.size, self._left = descriptor, size, size

    def take(self, most: int) -> memoryview:
        """The next bytes, in a buffer that the next call uses again."""
        piece = _read(self._descriptor, min(most, self._left), into=_buffer)
        if piece is None:
            raise SystemExit(0)  # the connection closed
        self._left -= len(piece)
        return piece

    def skip(self) -> None:
        """Read what a refused request left of its body: the next request begins behind it."""
        while self._left:
            self.take(PIECE_BYTES)


def _answer(head: Mapping[str, Any], body: _Body) -> tuple[dict[str, Any], bytes]:
    try:
        params = head["params"]
        if head["method"] == "files_put":
            key = (params["into"], params["draft"])
            if key not in _incoming:
                _incoming[key] = Incoming(Path(params["into"]).expanduser(), params["draft"])
            _incoming[key].receive(int(params["unit"]), params["sha256"], body.size, body.take)
            return {"id": head["id"], "result": {}}, b""
        if head["method"] == "files_get":
            unit = tuple(Slice(path=path, start=start, length=length) for path, start, length in params["slices"])
            data = read_unit(Path(params["root"]), unit)
            return {"id": head["id"], "result": {"sha256": sha256(data)}}, data
        return {"id": head["id"], "error": f"there is no request {head['method']!r:.80}", "kind": "refused"}, b""
    except Exception as error:
        known = isinstance(error, (TrainmasterError, OSError))
        text = str(error) if known else f"{type(error).__name__}: {error}"
        return {"id": head.get("id"), "error": text[:2000], "kind": kind_of(error)}, b""


def kind_of(error: Exception) -> str:
    """Kind of an error for the other end, which has an exception for each (session.py)."""
    number = error.errno if isinstance(error, OSError) else None
    kinds: list[tuple[bool, str]] = [
        (number in (errno.ENOSPC, errno.EDQUOT) or isinstance(error, DiskFull), "full"),
        (isinstance(error, PermissionError) or number == errno.EROFS, "denied"),
        (isinstance(error, FileNotFoundError), "missing"),
        (isinstance(error, Changed), "changed"),
        (isinstance(error, DamagedUnit), "damaged"),
    ]
    return next((kind for holds, kind in kinds if holds), "refused")


def _read(descriptor: int, size: int, *, into: bytearray | None = None) -> memoryview | None:
    """The next bytes, in the buffer given where they fit; None at the end."""
    view = memoryview(into if into is not None and size <= len(into) else bytearray(size))[:size]
    done = 0
    while done < size:
        got = os.readv(descriptor, [view[done:]])
        if not got:
            return None
        done += got
    return view


if __name__ == "__main__":
    main()
