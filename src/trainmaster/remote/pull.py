"""Objects pulled by the node itself from signed addresses: resumed, checked by size and checksum, whole or not at all.

A signed address is a secret while it is valid: it comes in a request, is kept in memory alone, and no message holds it.
Standard library only.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from trainmaster.core.errors import DiskFull, TargetError, Unreachable
from trainmaster.remote.transfer import Changed, DamagedUnit

_CHUNK_BYTES = 1 << 20
_TRIES = 5  # in a row without a byte
_REST_S = 0.5
_TIMEOUT_S = 30.0  # without a byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """An object to pull, as the control plane describes it."""

    name: str  # for messages
    url: str
    place: str
    size_bytes: int
    version: str  # entity tag
    md5: str | None
    sha256: str | None
    mode: int
    machine: str = ""  # that pulls: several may share the folder, and each writes a draft of its own


def pull(wanted: Object, *, source: Path | None = None) -> bool:
    """Put the object at its place, from its address or from a file here; False where it is there already."""
    place = Path(wanted.place).expanduser()
    if place.is_file() and place.stat().st_size == wanted.size_bytes:
        return False
    place.parent.mkdir(parents=True, exist_ok=True)
    free = os.statvfs(place.parent)
    if free.f_bavail * free.f_frsize < wanted.size_bytes:
        raise DiskFull(f"{place.parent} has no room for the {wanted.size_bytes:,} bytes of {wanted.name}")
    key = hashlib.sha256(f"{wanted.version} {wanted.machine}".encode()).hexdigest()[:16]
    part = place.with_name(f".{place.name}.{key}.part")
    try:
        if source is None:
            _fetch(wanted, part)
        else:
            shutil.copyfile(source, part)
        _check(wanted, part)
        part.chmod(wanted.mode)
        part.replace(place)
    except Unreachable:
        raise  # what has come stays for the next try
    except Exception:
        part.unlink(missing_ok=True)
        raise
    return True


def _fetch(wanted: Object, part: Path) -> None:
    failures = 0
    with part.open("ab") as out:
        while (have := out.tell()) < wanted.size_bytes or wanted.size_bytes == 0:
            try:
                _read_on(wanted, out.fileno(), have)
            except (OSError, http.client.HTTPException) as error:
                _explain(error, wanted)
                out.seek(0, os.SEEK_END)
                failures = 1 if out.tell() > have else failures + 1
                if failures >= _TRIES:
                    raise Unreachable(f"{wanted.name}: the storage cannot be reached from this machine") from None
                time.sleep(_REST_S * failures)
            if wanted.size_bytes == 0:
                return
            out.seek(0, os.SEEK_END)


def _read_on(wanted: Object, out: int, have: int) -> None:
    headers = {"Range": f"bytes={have}-"} if have else {}
    request = urllib.request.Request(wanted.url, headers=headers)  # noqa: S310 (made by our own storage)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
        if have and answer.status != http.client.PARTIAL_CONTENT:
            raise Changed(f"{wanted.name}: the storage does not send a part of it")
        if (tag := answer.headers.get("ETag")) and tag.strip('"') != wanted.version.strip('"'):
            raise Changed(f"{wanted.name} was replaced while it was pulled")
        while piece := answer.read(_CHUNK_BYTES):
            os.write(out, piece)
            have += len(piece)
            if have > wanted.size_bytes:
                raise Changed(f"{wanted.name} is longer than its {wanted.size_bytes:,} bytes")


def _explain(error: Exception, wanted: Object) -> None:
    """Raise what trying again cannot change."""
    code = error.code if isinstance(error, urllib.error.HTTPError) else None
    if code == http.client.NOT_FOUND:
        raise FileNotFoundError(f"there is no {wanted.name}") from None
    if code in (http.client.FORBIDDEN, http.client.UNAUTHORIZED):
        raise PermissionError(f"{wanted.name}: the storage refuses the signed address; it may have expired") from None
    if code is not None and code < http.client.INTERNAL_SERVER_ERROR:
        raise TargetError(f"{wanted.name}: the storage answered {code}") from None
    if isinstance(error, OSError) and error.errno in (28, 122):  # ENOSPC, EDQUOT
        raise error


def _check(wanted: Object, part: Path) -> None:
    if part.stat().st_size != wanted.size_bytes:
        raise DamagedUnit(f"{wanted.name} has {part.stat().st_size:,} bytes here, {wanted.size_bytes:,} in the storage")
    for kind, expected in (("md5", wanted.md5), ("sha256", wanted.sha256)):
        if expected is not None:
            digest = hashlib.new(kind, usedforsecurity=False)  # of accidents; the connection authenticates the storage
            with part.open("rb") as file:
                while piece := file.read(_CHUNK_BYTES):
                    digest.update(piece)
            if digest.hexdigest() != expected:
                raise DamagedUnit(f"{wanted.name} has another {kind} than in the storage")
