"""A full and a read-only disk of a drill are mounts of its own: seen by what it starts, and by nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: it would have its own mounts to its end.
PROGRAM = """
import subprocess, sys
from pathlib import Path
from trainmaster.drill import mounts, storage
from trainmaster.drill.folders import Checkpoint

run = Path(sys.argv[1])
if not mounts.enter():
    sys.exit(77)
newest = Checkpoint(name="", files=(run / "checkpoints/a.pt", run / "checkpoints/b.pt"), at=0.0)

def write(name, size):
    text = f"open({name!r}, 'ab', buffering=0).write(b'x' * {size})"
    return subprocess.run([sys.executable, "-c", text], cwd=run / "checkpoints", capture_output=True, text=True)

def words(done):
    return done.stderr.strip().rpartition("] ")[2].partition(":")[0] or "written"

with storage.prepared("full", newest, run, own_mounts=True) as disk:
    print(disk, disk.limit)
    print(sorted(path.name for path in disk.folder.iterdir()))
    print([words(write(f"c-{number}.pt", 100_000)) for number in range(3)])
left = sum(path.stat().st_size for path in (run / "checkpoints").glob("c-*"))
print(sorted(path.name for path in (run / "checkpoints").iterdir()), words(write("d.pt", 10)), left <= disk.room)
with storage.prepared("readonly", newest, run, own_mounts=True) as disk:
    print(words(write("e.pt", 10)))
    disk.forbid()
    print(disk, "|", words(write("a.pt", 10)), "|", words(write("f.pt", 10)))
print(words(write("f.pt", 10)))
with storage.prepared("readonly", newest, run, own_mounts=True) as disk, (disk.folder / "log").open("w"):
    disk.forbid()
    print(disk)
print((run / "checkpoints/a.pt").stat().st_size, (run / "checkpoints").stat().st_mode & 0o200 > 0)
print(Path("/proc/self/mounts").read_text().count(str(run)))
"""


def test_a_disk_with_little_room_and_a_read_only_one(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("a.pt", "b.pt"):
        (folder / name).write_bytes(b"x" * 150_000)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    if done.returncode == 77:
        pytest.skip("mounts of its own need root")
    assert done.returncode == 0, done.stderr
    page = os.sysconf("SC_PAGE_SIZE")
    assert done.stdout.splitlines() == [
        f"a disk with {150_000 // page * page} bytes left: ENOSPC 0",
        "['a.pt', 'b.pt']",
        "['written', 'written', 'No space left on device']",
        "['a.pt', 'b.pt', 'c-0.pt', 'c-1.pt', 'c-2.pt'] written True",
        "written",
        "a read-only mount: EROFS | Read-only file system | Read-only file system",
        "written",
        "without the permission to write: EACCES in place of EROFS",
        "150000 True",
        "0",
    ]
    assert not list(tmp_path.glob("*-disk"))
