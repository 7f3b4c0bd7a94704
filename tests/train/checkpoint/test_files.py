"""Files of a checkpoint that are read and written: every byte in its place and in the hash, however they are cut."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainmaster.core.errors import CheckpointError
from trainmaster.train.checkpoint.read import Slices
from trainmaster.train.checkpoint.write import write


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("hashing", [True, False])
def test_what_is_taken_is_what_is_there_and_all_of_it_is_hashed(tmp_path: Path, seed: int, *, hashing: bool) -> None:
    dice = random.Random(seed)
    content = dice.randbytes(dice.randint(1, 5000))
    path = tmp_path / "shard"
    path.write_bytes(content)
    digest, at = hashlib.sha256() if hashing else None, 0
    with path.open("rb", buffering=0) as file:
        slices = Slices(file, digest, gpu=None, size_bytes=64)
        while at < len(content):
            wanted = min(dice.choice((1, 7, 63, 64, 65, 200)), len(content) - at)
            if dice.random() < 0.5:
                flat = torch.zeros(wanted, dtype=torch.uint8)
                slices.fill(flat)
                read = bytes(flat.tolist())
            else:
                read = bytes(slices.next(wanted).tolist())
            assert read == content[at : at + len(read)] and 1 <= len(read) <= wanted
            at += len(read)
            assert hashing or file.tell() == at, "a file that is not hashed is not read ahead"
        with pytest.raises(CheckpointError, match="shard ends too early"):
            slices.next(1)
    assert digest is None or digest.hexdigest() == hashlib.sha256(content).hexdigest()


def test_bytes_stay_while_the_next_slice_is_read(tmp_path: Path) -> None:
    """A GPU may still copy from the slice before."""
    path = tmp_path / "shard"
    path.write_bytes(bytes(range(192)))
    with path.open("rb", buffering=0) as file:
        slices = Slices(file, hashlib.sha256(), gpu=None, size_bytes=64)
        first = slices.next(64)
        assert file.tell() == 64
        slices.next(64)
        assert first.tolist() == list(range(64))


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, (8 << 20) + 4096, (16 << 20) + 5])
@pytest.mark.parametrize("refusal", ["none", "at the opening", "at a write"])
def test_pages_are_written_past_the_cache_and_by_way_of_it_where_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, refusal: str
) -> None:
    content = random.Random(size).randbytes(size)
    pages = mmap.mmap(-1, size)
    pages.write(content)
    opened, written = os.open, os.write

    def open_buffered(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            opened(path, flags & ~os.O_DIRECT, mode)  # as a FUSE may: the file is there, and is refused
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opened(path, flags, mode)

    calls: list[int] = []

    def write_buffered(fd: int, part: memoryview) -> int:
        calls.append(len(part))
        if len(calls) == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(fd, part)

    if refusal == "at the opening":
        monkeypatch.setattr(os, "open", open_buffered)
    if refusal == "at a write" and size >= 4096:
        monkeypatch.setattr(os, "write", write_buffered)
    record = write(tmp_path / "file", [memoryview(pages)], paged=True)
    monkeypatch.undo()
    assert (tmp_path / "file").read_bytes() == content
    assert (record.size_bytes, record.sha256) == (size, hashlib.sha256(content).hexdigest())


def test_a_full_disk_is_said_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, part: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    pages = mmap.mmap(-1, 8192)
    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", [memoryview(pages)], paged=True)


@pytest.mark.parametrize("before", [0, 100, 5000, 9000])
def test_an_older_file_is_written_over_and_cut_to_its_new_size(tmp_path: Path, before: int) -> None:
    path, content = tmp_path / "file", random.Random(before).randbytes(5000)
    path.write_bytes(b"\xff" * before)
    number = path.stat().st_ino
    record = write(path, [content[:700], content[700:]], over=True)
    assert path.read_bytes() == content and path.stat().st_ino == number
    assert (record.size_bytes, record.sha256) == (5000, hashlib.sha256(content).hexdigest())
    with pytest.raises(FileExistsError):
        write(path, [content])


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "file").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        write(tmp_path / "file", [b"x"], over=True)
    assert (tmp_path / "mine").read_bytes() == b"mine"


class _Cuda:
    """Stands in for torch.cuda on a machine without GPU: the calls in their order, and the device of the thread."""

    def __init__(self) -> None:
        self.device, self.calls = 0, list[str]()

    def set_device(self, device: torch.device) -> None:
        self.device = device.index

    def note(self, call: str) -> int:
        self.calls.append(f"{call} on {self.device}")
        return 0

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(
            cudaHostRegister=lambda *_: self.note("pin"), cudaHostUnregister=lambda *_: self.note("unpin")
        )


def test_a_thread_that_reads_for_a_gpu_never_opens_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new thread's device is the first GPU; there the driver would take 0.5 GB for each rank of the node."""
    cuda = _Cuda()
    stream = SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)
    for name, stand_in in {
        "set_device": cuda.set_device,
        "cudart": cuda.cudart,
        "Stream": lambda gpu: stream,
        "current_stream": lambda gpu: stream,
        "Event": lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None),
        "stream": contextlib.nullcontext,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    (tmp_path / "shard").write_bytes(bytes(range(192)))
    with (tmp_path / "shard").open("rb", buffering=0) as file:
        slices = Slices(file, hashlib.sha256(), gpu=torch.device("cuda", 3), size_bytes=64)
        flat = torch.zeros(192, dtype=torch.uint8)
        slices.fill(flat)
        slices.close()
    assert flat.tolist() == list(range(192))
    assert cuda.calls == ["pin on 3", "pin on 3", "unpin on 3", "unpin on 3"]
