"""Limit on the memory of a local job that runs as a user of its own: a cgroup for each attempt, made by root.

Where there is no memory controller, or this process may make no group (an unprivileged container), there is no limit,
and `find_fault` says why. A group without processes is removed when the next one is made.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

LIMIT = "TRAINMASTER_JOB_MEMORY_GIB"
_SHARE = 0.9  # of the machine's memory, where the operator states nothing: the server and sshd go on
_GROUPS = Path("/sys/fs/cgroup")
_NAME = "trainmaster"
_UNUSED_S = 60.0  # a group is made before its first process enters it
# Enters the group, or goes on without: a limit that fails must not keep every job from starting.
_ENTER = 'echo $$ > "$1/cgroup.procs"; shift; exec "$@"'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Controller:
    above: Path  # folder in which groups are made
    limit: str  # file with the most bytes
    swap: str  # file with the most bytes of swap, so that a limit is one


def find_fault(root: Path = _GROUPS) -> str:
    """Why local jobs have no limit on memory here; "" where they have."""
    controller = _find(root)
    if controller is None:
        return "no memory controller of cgroups on this machine"
    try:
        _prepare(controller)
    except OSError as error:
        return f"no cgroup can be made: {error.strerror}"
    return ""


def limit(words: list[str], root: Path = _GROUPS) -> list[str]:
    """The command that runs these words in a group of their own; the words as they are where there can be none."""
    controller = _find(root)
    if controller is None:
        return words
    try:
        above = _prepare(controller)
        _remove_unused(above)
        group = above / uuid.uuid4().hex
        group.mkdir()
        most = find_limit_bytes()
        (group / controller.limit).write_text(str(most))
        with contextlib.suppress(OSError):  # a kernel without swap accounting
            (group / controller.swap).write_text(str(most) if "memsw" in controller.swap else "0")
    except OSError:
        return words
    return ["sh", "-c", _ENTER, "sh", str(group), *words]


def find_limit_bytes() -> int:
    """What the operator states, else a share of the machine's memory."""
    with contextlib.suppress(ValueError):
        if (stated := float(os.environ.get(LIMIT, ""))) > 0:
            return int(stated * (1 << 30))
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _SHARE)


def _find(root: Path) -> _Controller | None:
    with contextlib.suppress(OSError):
        if "memory" in (root / "cgroup.controllers").read_text().split():
            # A group with processes can have no groups in version 2: beside our own, below the same limits.
            own = _find_own(root, "0::")
            return _Controller(above=own if own == root else own.parent, limit="memory.max", swap="memory.swap.max")
    if (root / "memory" / "memory.limit_in_bytes").exists():  # version 1, or both
        above = _find_own(root / "memory", ":memory:")
        return _Controller(above=above, limit="memory.limit_in_bytes", swap="memory.memsw.limit_in_bytes")
    return None


def _find_own(root: Path, mark: str) -> Path:
    """The group of this process; the root of all where it is not seen from here."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            before, found, path = line.partition(mark)
            if found and not before.strip("0123456789") and (root / path.strip("/")).is_dir():
                return root / path.strip("/")
    return root


def _prepare(controller: _Controller) -> Path:
    """The folder of our groups, with the controller passed on to them."""
    folder = controller.above / _NAME
    if controller.limit == "memory.max":
        _pass_on(controller.above)
    folder.mkdir(exist_ok=True)
    if controller.limit == "memory.max":
        _pass_on(folder)
    return folder


def _pass_on(folder: Path) -> None:
    switch = folder / "cgroup.subtree_control"
    if not switch.exists() or "memory" not in switch.read_text().split():
        switch.write_text("+memory")


def _remove_unused(above: Path) -> None:
    for group in above.iterdir():
        with contextlib.suppress(OSError):  # in use
            if group.is_dir() and time.time() - group.stat().st_mtime > _UNUSED_S:
                group.rmdir()
