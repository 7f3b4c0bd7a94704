"""Removal of a folder of large files: several at once, for the kernel frees 17 GB/s of memory with one thread.

On a host of 16 cores 7.8 GB in tmpfs are gone after 0.10 s in place of 0.43 (docs/LOG.md).
"""

from __future__ import annotations

import contextlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_THREADS = 16


def remove_folder(folder: Path) -> None:
    """As shutil.rmtree. Files that cannot be removed by themselves are left to it, which says why."""
    files = [entry for entry in folder.iterdir() if entry.is_symlink() or not entry.is_dir()]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint-remove") as pool:
        list(pool.map(_unlink, files))
    shutil.rmtree(folder)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
