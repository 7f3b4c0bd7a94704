"""Checkpoints in the memory of the nodes: files in a folder of tmpfs, which outlives the ranks. Plain files; no ranks.

    /dev/shm/trainmaster-UID/RUN/            0700, one on each node; RUN follows from the checkpoint folder's path
        node                                 a word of its own: two ranks that read the same one share this memory
        step-00000050/__0_0.distcp …         files of this node's ranks, and copies of those of the node before it
        step-00000050/manifest.json          names the files of all nodes; written when each of them is on two nodes
        room/                                files of a step that is no longer kept: the next one is written over them

A folder without manifest is a save under way or one that was cut off. Its files count where they match a manifest that
another node has: a run killed between two nodes' commits has the whole step.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path

from trainmaster.core.errors import CheckpointError, HostError
from trainmaster.core.files import write_whole
from trainmaster.node.cgroup import free_bytes
from trainmaster.node.host import Host
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.manifest import MANIFEST, Manifest

FOLDER_VARIABLE = "TRAINMASTER_MEMORY"  # instead of /dev/shm/trainmaster-UID; nodes on one machine need one each
KEEP = 2  # complete steps: while the newest is being written, and while it is being copied, one is left
_RESERVE_BYTES = 1 << 30  # never taken: a node without a page to spare kills what asks for the next
_WORD = "node"
_ROOM = "room"  # new pages take the kernel longer than the bytes that go into them: 0.8 s and 0.3 s for 8 GB
_STEP = re.compile(r"step-(\d{8,})")


def folder_of(checkpoints: Path, *, config: str | None, environ: Mapping[str, str]) -> Path:
    """Where this run's steps lie on each node. Runs that save to other folders have other ones."""
    shared = f"/dev/shm/trainmaster-{os.getuid()}"  # noqa: S108 (`open_folder` trusts only what is our own)
    base = config or environ.get(FOLDER_VARIABLE) or shared
    path = str(checkpoints.absolute())
    return Path(base).absolute() / hashlib.sha256(path.encode()).hexdigest()[:16]


def open_folder(folder: Path) -> str:
    """Make it if need be; the word that names this memory. Others may not look into it, nor have made it for us."""
    for path in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True, mode=0o700)
        made = path.lstat()
        # Anybody may make a folder in /dev/shm, and put a checkpoint into it: its index is a pickle.
        if not stat.S_ISDIR(made.st_mode) or made.st_uid != os.geteuid():
            raise CheckpointError(f"{path} is not a folder of this user's own; remove it, or name another one")
    folder.chmod(0o700)
    word = folder / _WORD
    part = folder / f"{_WORD}.{uuid.uuid4().hex}"
    part.write_text(uuid.uuid4().hex)
    with contextlib.suppress(FileExistsError):  # a rank beside this one was first
        word.hardlink_to(part)
    part.unlink()
    return word.read_text()


def list_steps(folder: Path) -> dict[int, Manifest | str]:
    """What is committed here, or what is wrong with its manifest."""
    steps: dict[int, Manifest | str] = {}
    for step in _steps(folder):
        path = manifests.path_of(folder, step)
        if not (path / MANIFEST).exists():
            continue
        try:
            steps[step] = manifests.read(path)
        except CheckpointError as error:
            steps[step] = str(error)
    return steps


def begin(folder: Path, step: int) -> None:
    """A folder for this step, without a manifest. One that is there was rejected, or cut off."""
    discard(folder, step)
    path = manifests.path_of(folder, step)
    try:
        (folder / _ROOM).rename(path)  # make_room has looked at it
    except FileNotFoundError:
        path.mkdir(mode=0o700)


def discard(folder: Path, step: int) -> None:
    """Give back what this step takes."""
    path = manifests.path_of(folder, step)
    if path.is_dir() and not path.is_symlink():
        # Its manifest first: killed in the middle, what is left must not look like a damaged checkpoint.
        (path / MANIFEST).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        manifests.remove(path)


def commit(folder: Path, manifest: Manifest) -> None:
    """Now this step counts. Memory needs no fsync: it is gone with the power anyway."""
    write_whole(manifests.path_of(folder, manifest.step) / MANIFEST, manifests.render(manifest), durable=False)


def prune(folder: Path, *, newest: int, keep: int = KEEP, spare: Collection[int] = ()) -> None:
    """Give back all but the `keep` newest committed steps up to `newest`, those in `spare`, and what is above it."""
    past = [step for step in _steps(folder) if step <= newest]
    committed = [step for step in past if (manifests.path_of(folder, step) / MANIFEST).exists()]
    for step in past:
        if step in committed[:keep] or step in spare:
            continue
        if step in committed:
            _retire(folder, step)
        else:
            # Never room: a run that was stopped in its save and has lost the lock has these files open, and goes on.
            discard(folder, step)


def _retire(folder: Path, step: int) -> None:
    """A step counts no more; its files are the room of the next one, or are given back where there is such room."""
    path = manifests.path_of(folder, step)
    if not path.is_symlink():
        (path / MANIFEST).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # there is one
            path.rename(folder / _ROOM)
            return
    discard(folder, step)


def give_back_room(folder: Path) -> None:
    """Free what no step needs."""
    with contextlib.suppress(OSError):
        manifests.remove(folder / _ROOM)


def make_room(
    folder: Path, size_bytes: int, *, files: Collection[str], newest: int, spare: Collection[int] = ()
) -> None:
    """Free `size_bytes` for these files by deleting older steps; CheckpointError where there is not enough room."""
    prune(folder, newest=newest, spare=spare)
    if _free(folder) + _room_bytes(folder, files) < size_bytes:
        prune(folder, newest=newest, keep=1, spare=spare)
    must_have(folder, size_bytes - _room_bytes(folder, files))


def must_have(folder: Path, size_bytes: int) -> None:
    """CheckpointError where so much cannot be written here without danger."""
    free = _free(folder)
    if size_bytes <= 0 or free >= size_bytes:
        return
    others = [path.name for path in folder.parent.iterdir() if path != folder]
    held = f"; {folder.parent} also holds {', '.join(others)}: remove what no run needs any more" if others else ""
    raise CheckpointError(
        f"{_gib(size_bytes)} are needed in {folder}, and {_gib(max(0, free))} can be taken there beside a reserve of "
        f"{_gib(_RESERVE_BYTES)}{held}"
    )


def drop(folder: Path) -> None:
    """Free all memory at the end of a completed run."""
    for step in _steps(folder):
        discard(folder, step)
    shutil.rmtree(folder, ignore_errors=True)


def _steps(folder: Path) -> list[int]:
    """Newest first."""
    names = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(match[1]) for name in names if (match := _STEP.fullmatch(name))), reverse=True)


def _room_bytes(folder: Path, files: Collection[str]) -> int:
    """What the next step has already, if the room is of the same files; any other room is given back.

    After a change of ranks the old files would lie there beside the new ones until these are written.
    """
    try:
        held = [] if (folder / _ROOM).is_symlink() else list(os.scandir(folder / _ROOM))
        if {entry.name for entry in held} == set(files) and all(entry.is_file(follow_symlinks=False) for entry in held):
            return sum(entry.stat().st_size for entry in held)
    except NotADirectoryError:
        pass
    except FileNotFoundError:
        return 0
    give_back_room(folder)
    return 0


def _free(folder: Path) -> int:
    room = shutil.disk_usage(folder).free
    with contextlib.suppress(HostError):  # the machine does not say: the folder's own limit is left
        room = min(room, free_bytes(Host()))
    return room - _RESERVE_BYTES


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
