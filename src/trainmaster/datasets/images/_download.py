"""Download of data files: checked by its published checksum, whole or not at all, once per folder.

All ranks of a node may ask at the same time: the first holds a lock and downloads, the others wait for it.
TRAINMASTER_DATASETS_URL is the address of a mirror, for networks without a way out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainmaster.core.errors import DataError

MIRROR_VARIABLE = "TRAINMASTER_DATASETS_URL"
_BLOCK = 1 << 20
_TIMEOUT_S = 30.0  # without a byte
_MOST_BYTES = 1 << 30  # the largest published file has 170 MB


class _Endless(Exception):
    """An answer without an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A published file and its checksum (the publishers state MD5)."""

    name: str
    url: str
    md5: str


def fetch(remote: Remote, folder: Path, *, show: Callable[[str], None]) -> Path:
    """The file in the folder, downloaded if it is not there. DataError states how to bring it by hand."""
    path = folder / remote.name
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{remote.name}.lock"):
            if not path.exists():
                _download(remote, path, show)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path


def _download(remote: Remote, path: Path, show: Callable[[str], None]) -> None:
    mirror = os.environ.get(MIRROR_VARIABLE)
    url = f"{mirror.rstrip('/')}/{remote.name}" if mirror else remote.url
    show(f"downloading {url}")
    part, digest = path.with_name(f"{path.name}.part"), hashlib.md5(usedforsecurity=False)
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "trainmaster"})  # noqa: S310 (ours, or a mirror)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer, part.open("wb") as file:  # noqa: S310
            while block := answer.read(_BLOCK):
                digest.update(block)
                file.write(block)
                if file.tell() > _MOST_BYTES:
                    raise _Endless
    except _Endless:
        part.unlink(missing_ok=True)
        raise DataError(f"{url}: more than {_MOST_BYTES:,} bytes; nothing was kept") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError, ValueError, http.client.HTTPException) as error:
        part.unlink(missing_ok=True)
        reason = getattr(error, "reason", error)
        raise DataError(
            f"{path}: not there, and {url} cannot be reached ({reason}); copy {remote.name} to {path.parent}, set "
            f"{MIRROR_VARIABLE} to a mirror, or use --data-mode synthetic"
        ) from None
    if digest.hexdigest() != remote.md5:
        part.unlink(missing_ok=True)
        raise DataError(f"{url}: MD5 is {digest.hexdigest()}, not {remote.md5}; nothing was kept")
    part.replace(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
