"""Files and commands of a node: the requests that transfers and staging make. Part of the node's server.

Paths are absolute or begin with `~/`; the user of the SSH login may read and write them, no other right is added.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainmaster.core.compat import waiting
from trainmaster.core.errors import TargetError
from trainmaster.remote.transfer import Incoming, Manifest, Slice, read_unit, scan, sha256

Answer = tuple[Mapping[str, Any], bytes]
_MAX_OUTPUT_BYTES = 1 << 20  # kept of each stream of a command


class NodeFiles:
    """Requests about files of this machine. Methods without an underscore are the protocol."""

    def __init__(self) -> None:
        self._incoming: dict[tuple[str, str], Incoming] = {}

    async def files_begin(self, into: str, draft: str, body: bytes) -> Answer:
        """Begin to receive a tree, or go on; the units that are here."""
        done = await asyncio.to_thread(self._at(into, draft).begin, Manifest.unpack(body))
        return {"done": sorted(done)}, b""

    async def files_put(self, into: str, draft: str, unit: int, sha256: str, body: bytes = b"") -> Answer:
        await asyncio.to_thread(self._at(into, draft).write, unit, sha256, body)
        return {}, b""

    async def files_end(self, into: str, draft: str, durable: bool = False) -> Answer:
        await asyncio.to_thread(self._at(into, draft).finish, durable=durable)
        self._incoming.pop((into, draft), None)
        return {}, b""

    async def files_drop(self, into: str, draft: str) -> Answer:
        await asyncio.to_thread(self._at(into, draft).drop)
        self._incoming.pop((into, draft), None)
        return {}, b""

    async def files_list(self, path: str, name: str | None = None) -> Answer:
        """The tree of a folder or file, and the folder that its paths start from."""
        place = _path(path)
        manifest = await asyncio.to_thread(scan, place, name=name)
        return {"root": str(place if place.is_dir() else place.parent)}, manifest.pack()

    async def files_get(self, root: str, slices: Sequence[tuple[str, int, int]]) -> Answer:
        """The bytes of one unit, with their SHA-256."""
        unit = tuple(Slice(path=path, start=start, length=length) for path, start, length in slices)
        data = await asyncio.to_thread(read_unit, Path(root), unit)
        return {"sha256": await asyncio.to_thread(sha256, data)}, data

    async def make_folder(self, path: str) -> Answer:
        """Make a folder with those above it, or find it."""
        _path(path).mkdir(parents=True, exist_ok=True)
        return {}, b""

    async def exists(self, path: str) -> Answer:
        """Kind and size of what is there; kind null where nothing is. A path that may not be read is an error."""
        try:
            facts = _path(path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return {"kind": None, "size_bytes": 0}, b""
        kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder"}
        return {"kind": kinds.get(stat.S_IFMT(facts.st_mode), "other"), "size_bytes": facts.st_size}, b""

    async def remove(self, path: str) -> Answer:
        """Remove a file; an absent one is no error."""
        _path(path).unlink(missing_ok=True)
        return {}, b""

    async def run(self, words: Sequence[str], timeout_s: float) -> Answer:
        """Run a program to its end; its exit code and the first MiB of its output. Killed at the timeout."""
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with waiting.timeout(timeout_s):
                out, err = await process.communicate()
        except TimeoutError:
            os.killpg(process.pid, 9)
            await process.wait()
            return {"code": None, "error": f"it did not end in {timeout_s:g} s"}, b""
        result = {"code": process.returncode, "error": err[:_MAX_OUTPUT_BYTES].decode(errors="replace")}
        return result, out[:_MAX_OUTPUT_BYTES]

    def _at(self, into: str, draft: str) -> Incoming:
        if not draft.isalnum():
            raise TargetError("no name of a draft")
        key = (into, draft)
        if key not in self._incoming:
            self._incoming[key] = Incoming(_path(into), draft)
        return self._incoming[key]


def _path(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_absolute() or "\0" in text:
        raise TargetError(f"{text!r:.200} is no absolute path; write /… or ~/…")
    return path
