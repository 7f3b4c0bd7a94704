"""`python -m trainmaster.node.probe_disk FOLDER`: write, flush, read back and compare a file; one JSON object.

The file is unlinked as soon as it is open, so nothing is left on the disk however the process ends. It has at most
256 MiB, less where little is free, and writing stops after ten seconds: enough to tell 50 MiB/s from 5,000 without
loading a shared disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

MIB = 1 << 20
MOST_MIB = 256
LEAST_MIB = 16  # below this the rate is that of the caches
CHUNK_MIB = 4
STOP_AFTER_S = 10.0
SHARE_OF_FREE = 0.1  # the probe must not fill the disk


def probe(folder: Path, most_mib: int = MOST_MIB) -> dict[str, Any]:
    """Rates of the disk of `folder`, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    stat = os.statvfs(folder)
    room_mib = int(stat.f_bavail * stat.f_frsize * SHARE_OF_FREE) // MIB
    size_mib = min(most_mib, room_mib) // CHUNK_MIB * CHUNK_MIB
    if size_mib < min(LEAST_MIB, most_mib):
        raise OSError(f"too little room for a file of {LEAST_MIB} MiB")
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        return _measure(file, size_mib)


def _measure(file: IO[bytes], size_mib: int) -> dict[str, Any]:
    # Random, so that no file system compresses or deduplicates it; numbered, so that no two chunks are alike.
    noise = bytearray(os.urandom(CHUNK_MIB * MIB))
    written, wrote = hashlib.blake2b(), 0
    spent = 0.0
    for number in range(size_mib // CHUNK_MIB):
        noise[:8] = number.to_bytes(8, "big")
        written.update(noise)
        started = time.monotonic()
        _write_all(file, noise)
        spent += time.monotonic() - started
        wrote += CHUNK_MIB
        if spent > STOP_AFTER_S:
            break
    started = time.monotonic()
    os.fsync(file.fileno())
    write_s = spent + time.monotonic() - started
    with contextlib.suppress(OSError):
        # Otherwise the page cache answers, and the rate is that of the memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    back, read, read_s = hashlib.blake2b(), 0, 0.0
    while True:
        started = time.monotonic()
        chunk = file.read(CHUNK_MIB * MIB)
        read_s += time.monotonic() - started
        if not chunk:
            break
        back.update(chunk)
        read += len(chunk)
        if read_s > STOP_AFTER_S and read < wrote * MIB:
            raise OSError(f"reading {read / MIB:.0f} MiB back took {read_s:.0f} s")
    return {
        "mib": wrote,
        "intact": back.digest() == written.digest(),
        "write_mib_s": round(wrote / max(write_s, 1e-6), 1),
        "read_mib_s": round(wrote / max(read_s, 1e-6), 1),
    }


def _write_all(file: IO[bytes], data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def main(words: list[str]) -> int:
    if len(words) != 1:
        sys.stderr.write("usage: python -m trainmaster.node.probe_disk FOLDER\n")
        return 2
    try:
        answer = probe(Path(words[0]))
    except OSError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
