"""There is room where checkpoints go. A full disk loses the very checkpoint that was to save the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from trainmaster.core.errors import FileMissing
from trainmaster.core.expect import Expect
from trainmaster.core.plan import CHECKPOINTS_VARIABLE
from trainmaster.core.results import Finding, fail, ok, warn
from trainmaster.node.host import Disk, Host

LEVEL = 1
GPU = False
EXPECTS = ("disk_free_gib",)
COMPARES = ()
METRICS = {"system.disk.total_gb": "total_gib", "system.disk.free_gb": "free_gib"}
GIB = 1 << 30
FAIL_GIB = 1.0  # logs and one small checkpoint no longer fit
WARN_GIB = 10.0  # one checkpoint of a 1-billion-parameter model with its optimizer, in fp32, is 12 GB
# File systems slow down and quotas bite when nearly full; on a very large one 5 % is still plenty.
WARN_SHARE = 0.05
WARN_SHARE_MOST_GIB = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    path: str
    disk: Disk


def read(host: Host) -> Place:
    """The folder of the checkpoints where it is told, else the folder we work in."""
    path = host.env(CHECKPOINTS_VARIABLE) or "."
    # It may not have been made yet; then it will be made on its parent's disk.
    for folder in (PurePosixPath(path), *PurePosixPath(path).parents):
        try:
            return Place(path=path, disk=host.disk(str(folder)))
        except FileMissing:
            continue
    raise FileMissing(f"{path} is not there, nor any folder above it")


def judge(place: Place, expect: Expect) -> Finding:
    total, free = place.disk.total_bytes / GIB, place.disk.free_bytes / GIB
    where = "the working folder" if place.path == "." else place.path
    summary = f"{free:.1f} of {total:.1f} GiB free for {where}"
    action = "free space there, or put checkpoints on a larger disk"
    values: dict[str, Any] = {"path": place.path, "free_gib": round(free, 2), "total_gib": round(total, 2)}
    if place.disk.free_files == 0:
        return fail(f"no file can be made for {where}: the disk is out of inodes", action=action, **values)
    if free < (FAIL_GIB if expect.disk_free_gib is None else expect.disk_free_gib):
        wanted = "" if expect.disk_free_gib is None else f", not {expect.disk_free_gib:g}"
        return fail(summary + wanted, action=action, **values)
    if expect.disk_free_gib is None and free < max(WARN_GIB, min(total * WARN_SHARE, WARN_SHARE_MOST_GIB)):
        return warn(summary, action=action, **values)
    return ok(summary, **values)
