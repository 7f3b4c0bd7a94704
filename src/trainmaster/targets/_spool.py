"""Files of an attempt, put together here from the lines of its pods' logs; each byte once.

A line carries its file and offset. What is already here is skipped; a line beyond the end waits until the bytes before
it come. A pod that takes the place of another one writes after the end of the first: the offsets of a stream never go
back. Bytes that cannot be had any more are replaced by a note of the same length, so that later offsets hold.
"""

from __future__ import annotations

import heapq
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from trainmaster.core.clean_text import clean
from trainmaster.core.files import write_whole
from trainmaster.core.plan import MEMBERS_LOG, OUTPUTS_FOLDER, UNCOPIED_FILE
from trainmaster.remote.framed_lines import Frame
from trainmaster.targets import FileSize

_STARTS = "starts.json"
_MAX_WAITING_BYTES = 16 << 20
_FILL = "[{count} bytes of this file were lost on the way]"


@dataclass(slots=True)
class _Stream:
    size: int
    waiting: dict[int, bytes] = field(default_factory=dict)  # offset → bytes that came too early
    order: list[int] = field(default_factory=list)  # their offsets, as a heap
    waiting_bytes: int = 0


class NodeSpool:
    """Files of one node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._streams: dict[str, _Stream] = {}
        try:
            self._starts: list[dict[str, object]] = json.loads((folder / _STARTS).read_text())
        except (OSError, ValueError):
            self._starts = []

    def begin(self, start: str) -> None:
        """Note a start of the container, by its pod and restart count; it writes after the end of earlier ones."""
        if self.has_begun(start):
            return
        if self._starts:
            self.close_gaps()
        self._starts.append({"start": start, "base": self.sizes() if self._starts else {}})
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / _STARTS, json.dumps(self._starts), durable=True)

    def has_begun(self, start: str) -> bool:
        """Whether a container has written here, or was about to."""
        return any(record["start"] == start for record in self._starts)

    def is_first(self, start: str) -> bool:
        """Whether no other container has written here."""
        return not self._starts or self._starts[0]["start"] == start

    def newest_base(self, name: str) -> int:
        """Offset where the newest start began to write a file."""
        base = self._starts[-1]["base"] if self._starts else {}
        assert isinstance(base, dict)
        return int(base.get(name, 0))

    def put(self, start: str, frame: Frame) -> bool:
        """Store a frame of a start; False where bytes before it are missing."""
        name = _safe(frame.stream)
        if name is None:
            return True
        base = self._base(start, frame.stream)
        if base is None:
            return True  # of a container that was already followed by another
        stream = self._stream(name)
        at = frame.offset + base
        if at > stream.size:
            if at not in stream.waiting:
                stream.waiting[at] = frame.data
                stream.waiting_bytes += len(frame.data)
                heapq.heappush(stream.order, at)
            if stream.waiting_bytes > _MAX_WAITING_BYTES:
                self._close_gap(name, stream)
            return not stream.waiting
        self._append(name, stream, at, frame.data)
        return not stream.waiting

    def gaps(self) -> dict[str, int]:
        """Streams with missing bytes, and where they begin."""
        last = self._starts[-1]["start"] if self._starts else ""
        missing = {}
        for name, stream in self._streams.items():
            if stream.waiting:
                missing[name] = stream.size - (self._base(str(last), name) or 0)
        return missing

    def close_gaps(self) -> None:
        """Write notes in place of what will not come any more."""
        for name, stream in self._streams.items():
            while stream.waiting:
                self._close_gap(name, stream)

    def read(self, name: str, offset: int, limit: int) -> bytes:
        try:
            fd = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.pread(fd, limit, offset)
        finally:
            os.close(fd)

    def has(self, name: str) -> bool:
        """Whether a file came out of the pod."""
        return (self.folder / name).is_file()

    def sizes(self) -> dict[str, int]:
        """Every file with its size."""
        sizes = {}
        for above, _, files in os.walk(self.folder):
            for name in files:
                path = Path(above) / name
                relative = path.relative_to(self.folder).as_posix()
                if relative != _STARTS and not name.endswith(".tmp"):
                    sizes[relative] = path.stat().st_size
        return sizes

    def list_files(self) -> list[FileSize]:
        """Every file, and the outputs that the newest start could not copy, with the reason."""
        sizes = self.sizes()
        raw = self.read(UNCOPIED_FILE, self.newest_base(UNCOPIED_FILE), _MAX_WAITING_BYTES)
        for name in (UNCOPIED_FILE, MEMBERS_LOG):
            sizes.pop(name, None)
        uncopied = [file for line in raw.splitlines() if (file := _parse_uncopied(line)) and file.name not in sizes]
        return [FileSize(name=name, size_bytes=size) for name, size in sizes.items()] + uncopied

    def _base(self, start: str, name: str) -> int | None:
        """Offset where a start began to write a file; None for one that another start has followed."""
        return self.newest_base(name) if self._starts and self._starts[-1]["start"] == start else None

    def _stream(self, name: str) -> _Stream:
        if name not in self._streams:
            path = self.folder / name
            self._streams[name] = _Stream(size=path.stat().st_size if path.exists() else 0)
        return self._streams[name]

    def _append(self, name: str, stream: _Stream, at: int, data: bytes) -> None:
        """Write the part that is new, and then what waited for it."""
        path = self.folder / name
        if stream.size == 0 and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        new = [data[stream.size - at :] if at < stream.size else data]
        size = stream.size + len(new[0])
        while stream.order and stream.order[0] <= size:
            first = heapq.heappop(stream.order)
            kept = stream.waiting.pop(first)
            stream.waiting_bytes -= len(kept)
            new.append(kept[size - first :])
            size += len(new[-1])
        if size > stream.size:
            with path.open("ab") as file:
                file.write(b"".join(new))
            stream.size = size

    def _close_gap(self, name: str, stream: _Stream) -> None:
        count = stream.order[0] - stream.size
        text = _FILL.format(count=count).encode()
        fill = text[: count - 1].ljust(count - 1) + b"\n" if count > len(text) else b" " * (count - 1) + b"\n"
        self._append(name, stream, stream.size, fill)


def _safe(name: str) -> str | None:
    """A stream's name as a path below the folder; None where it leads elsewhere."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\x00" in part for part in parts):
        return None
    if len(parts) > 1 and parts[0] != OUTPUTS_FOLDER:
        return None
    return name if name != _STARTS else None


def _parse_uncopied(line: bytes) -> FileSize | None:
    """An output that stayed in the pod; None where the line is not ours: a workload can print such a line too."""
    try:
        name, fault = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(fault, str) or _safe(name) is None:
        return None
    if name.partition("/")[0] != OUTPUTS_FOLDER:
        return None
    return FileSize(name=name, size_bytes=0, fault=clean(fault)[:300] or "not copied")


class Spool:
    """Files of an attempt, and marks that outlive its objects in the cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._nodes: dict[int, NodeSpool] = {}

    def node(self, number: int) -> NodeSpool:
        if number not in self._nodes:
            self._nodes[number] = NodeSpool(self.folder / f"node-{number}")
        return self._nodes[number]

    def mark(self, name: str, text: str) -> str:
        """Write a mark once; its text, also where it was written before."""
        path = self.folder / name
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, text, durable=True)
        return path.read_text()

    def find(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            return None
