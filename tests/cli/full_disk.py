"""A disk without a free byte, seen by one process alone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

NO_MOUNT = 99  # exit code where this process may not mount
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 16384, 1 << 18


def fill_disk(folder: str) -> None:
    """Mount a full file system over the folder in a mount namespace of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = b"size=64k,nr_inodes=64"
    if (
        libc.unshare(_CLONE_NEWNS)
        or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        or libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, options)
    ):
        sys.stderr.write(f"{os.strerror(ctypes.get_errno())}\n")
        sys.exit(NO_MOUNT)
    with contextlib.suppress(OSError), (Path(folder) / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
