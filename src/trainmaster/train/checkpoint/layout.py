"""Which rank writes which tensor into which file, in the format of torch.distributed.checkpoint.

The layout of a run does not change from save to save. It is agreed on once, by torch's own planner, and kept: a save
then needs nothing from the other ranks but the hashes of their files. Each tensor's frame in a file (what torch.save
puts around its bytes) is made once too, so that a save moves bytes from memory to the disk and does nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from trainmaster.train.parallel import rank_sync

INDEX = ".metadata"
# What the index holds for each tensor. torch's reader asks for exactly this class, and gives it no public name.
_Where = filesystem._StorageInfo
_FILE_BYTES = 64 << 20  # a file for each thread, but none smaller than this without need


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What torch.save writes before and after the bytes of a tensor."""

    head: bytes
    tail: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of this rank: the tensors in it by their number among all tensors of this rank, each in its frame."""

    name: str
    tensors: Sequence[tuple[int, Frame]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where one thing lies."""

    index: MetadataIndex
    file: str
    offset: int
    length: int


class Layout:
    """This rank's part, and on rank 0 the index of all."""

    def __init__(self, state: Mapping[str, Any], *, group: dist.ProcessGroup, files: int) -> None:
        """Agree with the other ranks; `files` is how many this rank may write at once."""
        rank = dist.get_rank()
        planner = _flatten(state, first=rank == 0)
        plans = rank_sync.on_all(planner.create_local_plan, group=group)
        everything = rank_sync.on_first(lambda: _plan(planner, plans), group=group)
        self._tensors = [item for item in everything[rank].items if item.type != WriteItemType.BYTE_IO]
        # Small things that all ranks have alike (the optimizer's settings): rank 0 writes them, into its first file.
        self._things = [item for plan in everything for item in plan.items if item.type == WriteItemType.BYTE_IO]
        self.shards, placed, things_at = _arrange(self._tensors, rank=rank, files=files)
        self.placed = [part for parts in rank_sync.on_all(lambda: placed, group=group) for part in parts]
        self._things_at = things_at
        self._metadata: Metadata | None = planner.metadata if rank == 0 else None
        self._index: tuple[list[int], bytes] | None = None

    def pick(self, state: Mapping[str, Any]) -> tuple[list[Tensor], list[bytes]]:
        """This rank's tensors, in the order of their numbers, and on rank 0 the other things as bytes."""
        first = dist.get_rank() == 0
        planner = _flatten(state, first=first)
        tensors = [planner.lookup_object(item.index).detach() for item in self._tensors]
        for item, tensor in zip(self._tensors, tensors, strict=True):
            assert item.tensor_data is not None
            planned = item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype
            if planned != (tensor.shape, tensor.dtype):
                raise RuntimeError(f"{item.index.fqn} was {planned} and is {(tensor.shape, tensor.dtype)} now")
        return tensors, [_pickled(planner.lookup_object(item.index)) for item in self._things] if first else []

    def pieces(self, shard: Shard, tensors: Sequence[Tensor], things: Sequence[bytes]) -> list[bytes | memoryview]:
        """The bytes of a file, in order."""
        found: list[bytes | memoryview] = []
        for number, frame in shard.tensors:
            found += [frame.head, _bytes_of(tensors[number]), frame.tail]
        return found + list(things) if shard is self.shards[0] else found

    def index(self, things: Sequence[bytes]) -> bytes:
        """What is where in all files, as torch's reader wants it. On rank 0."""
        assert self._metadata is not None
        lengths = [len(thing) for thing in things]
        if self._index is None or self._index[0] != lengths:
            storage = {part.index: _Where(part.file, part.offset, part.length) for part in self.placed}
            offset = self._things_at
            for item, length in zip(self._things, lengths, strict=True):
                storage[item.index] = _Where(self.shards[0].name, offset, length)
                offset += length
            whole = replace(self._metadata, storage_data=storage, version=filesystem.CURRENT_DCP_VERSION)
            self._index = lengths, pickle.dumps(whole)
        return self._index[1]


def _flatten(state: Mapping[str, Any], *, first: bool) -> DefaultSavePlanner:
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=first)
    return planner


def _pickled(thing: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def _plan(planner: DefaultSavePlanner, plans: list[SavePlan]) -> list[SavePlan]:
    """Everything once: what several ranks hold alike is written by one of them."""
    return planner.create_global_plan(plans)[0]


def _arrange(items: Sequence[WriteItem], *, rank: int, files: int) -> tuple[list[Shard], list[Placed], int]:
    """Tensors over files of about the same size; also where the first file ends."""
    sizes = [_size_of(item) for item in items]
    count = max(1, min(files, sum(sizes) // _FILE_BYTES))
    members: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for number in sorted(range(len(items)), key=lambda number: -sizes[number]):
        least = filled.index(min(filled))
        members[least].append(number)
        filled[least] += sizes[number]
    frames = _Frames()
    shards, placed, ends = [], [], []
    for file, numbers in enumerate(members):
        name, offset = f"__{rank}_{file}{filesystem.DEFAULT_SUFFIX}", 0
        framed = []
        for number in sorted(numbers):
            frame = frames.of(items[number])
            length = len(frame.head) + sizes[number] + len(frame.tail)
            placed.append(Placed(index=items[number].index, file=name, offset=offset, length=length))
            framed.append((number, frame))
            offset += length
        shards.append(Shard(name=name, tensors=framed))
        ends.append(offset)
    return shards, placed, ends[0]


class _Frames:
    """Frames by shape and type: a model has a dozen of them."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.Size, torch.dtype], Frame] = {}

    def of(self, item: WriteItem) -> Frame:
        assert item.tensor_data is not None
        key = item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype
        if key not in self._known:
            self._known[key] = frame_of(*key)
        return self._known[key]


def frame_of(shape: torch.Size, dtype: torch.dtype) -> Frame:
    """Ask torch.save itself, for a tensor whose bytes are left out.

    The zip inside then carries no checksum of the bytes. torch.load does not look at it, and every byte is under the
    manifest's SHA-256; computing it would cost as much time as that.
    """
    recorder = _Recorder()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(IO[bytes], recorder))
    return Frame(head=bytes(recorder.head), tail=bytes(recorder.tail))


class _Recorder(io.RawIOBase):
    """Takes what torch.save writes; the hole it leaves for the bytes parts head and tail."""

    def __init__(self) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self._into = self.head

    def write(self, data: Any) -> int:
        self._into += data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        assert whence == io.SEEK_CUR and self._into is self.head, "one tensor has one hole"
        self._into = self.tail
        return offset


def _size_of(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, not a copy."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    if tensor.nbytes == 0:
        return memoryview(b"")
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return cast(Any, flat.numpy()).data  # type: ignore[no-any-return]
