"""A small disk and a read-only one for a drill's copy of a run: mounts that only the drill and its programs see.

They need root, and are in a mount namespace of the drill's own: the kernel removes them with its last process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainmaster.core.errors import HostError
from trainmaster.node import cgroup
from trainmaster.node.host import Host

_CLONE_NEWNS = 0x00020000  # linux/sched.h
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18  # linux/mount.h
_DETACH = 2
_MOST_OF_MEMORY = 0.25  # a small disk is in memory


def enter() -> bool:
    """Give this thread, and what it starts from now on, mounts of its own; False where they are not to be had."""
    if os.geteuid() or not Path("/proc/self/ns/mnt").exists():
        return False
    try:
        _call("unshare", _CLONE_NEWNS)
        _mount("none", Path("/"), _REC | _PRIVATE)
    except OSError:  # a container without CAP_SYS_ADMIN
        return False
    return True


@contextlib.contextmanager
def small_disk(folder: Path, room: int) -> Iterator[bool]:
    """Have a folder on a disk with so many bytes left; False where there is none. What was left on it stays."""
    size = room + sum(path.lstat().st_size for path in folder.rglob("*"))
    if size > _MOST_OF_MEMORY * _free_memory():
        yield False
        return
    disk = Path(tempfile.mkdtemp(prefix="disk-", dir=folder.parent))
    try:
        _call("mount", b"tmpfs", os.fsencode(disk), b"tmpfs", 0, None)
    except OSError:
        disk.rmdir()
        yield False
        return
    try:
        _copy(folder, disk)
        blocks = os.statvfs(disk)
        used = (blocks.f_blocks - blocks.f_bfree) * blocks.f_frsize
        _call("mount", b"tmpfs", os.fsencode(disk), b"tmpfs", _REMOUNT, f"size={used + room}".encode())
        with own_mount(folder, of=disk) as is_there:
            yield is_there
        _copy(disk, folder)
    finally:
        _call("umount2", os.fsencode(disk), _DETACH)
        disk.rmdir()


@contextlib.contextmanager
def own_mount(folder: Path, *, of: Path | None = None) -> Iterator[bool]:
    """Make a folder a mount of itself, which `forbid` can make read-only, or of another; False where it cannot be."""
    try:
        _mount(str(of or folder), folder, _BIND)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        _call("umount2", os.fsencode(folder), _DETACH)


def forbid(folder: Path) -> bool:
    """Make such a folder read-only; False where a file in it is open for writing."""
    try:
        _mount("none", folder, _REMOUNT | _BIND | _RDONLY)
    except OSError:
        return False
    return True


def _copy(source: Path, to: Path) -> None:
    """Make a folder the same as another, itself excepted: it may be a mount."""
    for path in to.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    shutil.copytree(source, to, symlinks=True, dirs_exist_ok=True, ignore=_pipes)


def _pipes(folder: str, names: list[str]) -> set[str]:
    """Pipes, sockets and devices: they hold nothing."""
    modes = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}  # noqa: PTH118
    return {
        name for name, mode in modes.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))
    }


def _free_memory() -> int:
    """Bytes of memory that this process may take: of the machine, and of its control group."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = cgroup.read_memory(Host())
    except HostError:
        return 0  # not known
    return free if limit is None else min(free, limit[1])


def _mount(source: str, folder: Path, flags: int) -> None:
    _call("mount", os.fsencode(source), os.fsencode(folder), None, flags, None)


def _call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*[ctypes.c_ulong(item) if isinstance(item, int) else item for item in args]):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
