"""Copy of an attempt's files on standard output, line by line with their offsets, for places that only have a log."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainmaster.core.files import list_tree
from trainmaster.core.plan import AGENT_LOG, EVENTS_FILE, EXIT_FILE, MEMBERS_LOG, OUTPUTS_FOLDER, UNCOPIED_FILE
from trainmaster.remote.framed_lines import FRAME_BYTES, Frame, encode

_LIVE = re.compile(rf"{'|'.join(map(re.escape, (EVENTS_FILE, AGENT_LOG, MEMBERS_LOG)))}|rank-[0-9]{{1,6}}\.log")
_AT_ONCE = 1 << 16
_REPEAT_S = 10.0  # who has which place is said again so often: a log that is rotated has forgotten it
_PARTIAL_S = 1.0  # after this a line without its newline is sent as it is: a progress bar
MAX_OUTPUT_BYTES = 16 << 20  # of one attempt on one node; a log is no way for weights
_UNCOPIED = 1000  # outputs that are named as not copied; the rest is counted


class Mirror:
    """Position in every file, and the descriptor to write to."""

    def __init__(self, folder: Path, out_fd: int = 1) -> None:
        self._folder, self._out_fd = folder, out_fd
        self._sent: dict[str, int] = {}
        self._since: dict[str, float] = {}  # when a line without its newline was seen first
        self._repeat_at = time.monotonic() + _REPEAT_S

    def copy(self, *, last: bool = False) -> None:
        """Write what is new. With `last` also lines without their newline, the exit record and the outputs."""
        for name in self._names(last=last):
            self._copy_file(name, last=last)
        if last or time.monotonic() >= self._repeat_at:
            self._repeat_at = time.monotonic() + _REPEAT_S
            self.resend(MEMBERS_LOG, 0)
            self._copy_file(MEMBERS_LOG, last=False)
        if last:
            self._copy_file(EXIT_FILE, last=True)  # after everything before it

    def resend(self, stream: str, offset: int) -> None:
        """Write a stream again from an offset on."""
        if 0 <= offset < self._sent.get(stream, 0):
            self._sent[stream] = offset

    def _names(self, *, last: bool) -> Iterator[str]:
        for entry in sorted(os.scandir(self._folder), key=lambda item: item.name):
            if _LIVE.fullmatch(entry.name):
                yield entry.name
        if last:
            yield from self._outputs()

    def _outputs(self) -> Iterator[str]:
        """Files below the outputs folder, smallest first, as long as they fit; the others are named."""
        files = sorted(list_tree(self._folder, OUTPUTS_FOLDER), key=lambda file: (file.size_bytes, file.name))
        left, uncopied = MAX_OUTPUT_BYTES, [(file.name, file.fault) for file in files if file.fault]
        for file in files:
            if file.fault:
                continue
            left -= file.size_bytes
            if left >= 0:
                yield file.name
            else:
                fault = f"{file.size_bytes:,} bytes: a log holds {MAX_OUTPUT_BYTES >> 20} MiB of outputs"
                uncopied.append((file.name, fault))
        if uncopied:
            self._write(b"".join(encode(Frame(stream=UNCOPIED_FILE, offset=0, data=_render(uncopied)))))

    def _copy_file(self, name: str, *, last: bool) -> None:
        try:
            fd = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return
            if last and os.fstat(fd).st_size == 0:
                self._write(b"".join(encode(Frame(stream=name, offset=0, data=b""))))  # its name is all there is
            while chunk := os.pread(fd, _AT_ONCE, self._sent.get(name, 0)):
                ready = chunk if last else self._ready(name, chunk)
                if not ready:
                    return
                offset = self._sent.get(name, 0)
                self._write(b"".join(encode(Frame(stream=name, offset=offset, data=ready))))
                self._sent[name] = offset + len(ready)
        finally:
            os.close(fd)

    def _ready(self, name: str, chunk: bytes) -> bytes:
        """Whole lines; a long or old beginning of a line too."""
        whole = chunk[: chunk.rfind(b"\n") + 1]
        if whole:
            self._since.pop(name, None)
            return whole
        since = self._since.setdefault(name, time.monotonic())
        return chunk if len(chunk) > FRAME_BYTES or time.monotonic() - since > _PARTIAL_S else b""

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._out_fd, left) :]


def _render(uncopied: Sequence[tuple[str, str]]) -> bytes:
    shown = list(uncopied[:_UNCOPIED])
    if len(uncopied) > _UNCOPIED:
        shown.append((OUTPUTS_FOLDER, f"{len(uncopied) - _UNCOPIED} more were not copied"))
    return "".join(json.dumps(row) + "\n" for row in shown).encode()
