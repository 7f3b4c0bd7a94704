"""Files of a checkpoint: which tensors lie in which file, in the format of torch.distributed.checkpoint.

The layout of a run does not change from save to save. Every rank computes its own files from the shares of the ranks,
and rank 0 computes the index of all files in the background, when it is first written. Each tensor's frame in a file
(the bytes that torch.save puts around it) is made once too, so that a save only moves bytes from memory to the disk.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType

from trainmaster.train.checkpoint.gathered_plan import GatheredShares, gather_shares
from trainmaster.train.checkpoint.write_plan import Part, Shares, read_entries
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


class Layout:
    """This rank's files, and on rank 0 the index of all."""

    def __init__(self, state: Mapping[str, Any], *, group: dist.ProcessGroup, files: int) -> None:
        """Agree with the other ranks; `files` is the number of files that this rank may write at once."""
        rank = dist.get_rank()
        planner = _flatten(state, first=rank == 0)
        items = planner.create_local_plan().items
        # Small objects that all ranks have alike (the optimizer's settings): rank 0 writes them, into its first file.
        self._things = [item for item in items if item.type == WriteItemType.BYTE_IO]
        self._mappings = planner.mappings  # not the planner: it holds the tensors, which a rollback replaces
        entries = read_entries(planner.state_dict, rank=rank)
        shares = Shares(entries) if entries is not None else None
        seen = rank_sync.on_all(lambda: (shares.digest() if shares is not None else None, files), group=group)
        self._files = [count for _, count in seen]
        self._shares: Shares | GatheredShares
        if shares is not None and len({digest for digest, _ in seen}) == 1:
            self._shares = shares
        else:
            self._shares = gather_shares(items, group=group)
        mine = self._shares.of(rank)
        self._indices = [MetadataIndex(part.entry.name, part.offsets) for part in mine]
        self._parts = mine
        self.shards, self._things_at = _name(arrange(mine, files=files), rank)
        self._index: tuple[list[int], bytes] | None = None

    def pick(self, state: Mapping[str, Any]) -> tuple[list[Tensor], list[bytes]]:
        """This rank's tensors, in the order of their numbers, and on rank 0 the other things as bytes."""
        first = dist.get_rank() == 0
        planner = _flatten(state, first=first)
        tensors = [planner.lookup_object(index).detach() for index in self._indices]
        for part, tensor in zip(self._parts, tensors, strict=True):
            planned = part.sizes, part.entry.dtype
            if planned != (tensor.shape, tensor.dtype):
                raise RuntimeError(f"{part.entry.name} was {planned} and is {(tensor.shape, tensor.dtype)} now")
        return tensors, [pickled(planner.lookup_object(item.index)) for item in self._things] if first else []

    @property
    def paths(self) -> Sequence[Sequence[Any]]:
        """Where in the state the other things are that `pick` returns on this rank."""
        return [self._mappings[item.index.fqn] for item in self._things] if dist.get_rank() == 0 else []

    def pieces(self, shard: Shard, tensors: Sequence[Tensor], things: Sequence[bytes]) -> list[bytes | memoryview]:
        """The bytes of a file, in order."""
        pieces: list[bytes | memoryview] = []
        for number, frame in shard.tensors:
            pieces += [frame.head, _bytes_of(tensors[number]), frame.tail]
        return pieces + list(things) if shard is self.shards[0] else pieces

    def index(self, things: Sequence[bytes]) -> bytes:
        """The index of all files, as torch's reader expects it. On rank 0."""
        lengths = [len(thing) for thing in things]
        if self._index is None or self._index[0] != lengths:
            whole = build_index(self._shares, files=self._files)
            storage, offset = whole.storage_data, self._things_at
            for item, length in zip(self._things, lengths, strict=True):
                whole.state_dict_metadata[item.index.fqn] = BytesStorageMetadata()
                storage[item.index] = _Where(self.shards[0].name, offset, length)
                offset += length
            whole.planner_data = self._mappings
            self._index = lengths, pickle.dumps(whole)
        return self._index[1]


def build_index(shares: Shares | GatheredShares, *, files: Sequence[int]) -> Metadata:
    """Where every part of every rank lies; `files` is the number of files that each rank may write."""
    tensors: dict[str, STORAGE_TYPES] = {}
    storage: dict[MetadataIndex, Any] = {}
    known: dict[tuple[Any, ...], Arrangement] = {}
    for rank, count in enumerate(files):
        parts = shares.of(rank)
        # Most ranks hold parts of the same sizes, and their files are arranged alike.
        key = (count, *(part.sizes for part in parts))
        arrangement = known.get(key) or known.setdefault(key, arrange(parts, files=count))
        for part, (file, offset, length) in zip(parts, arrangement.places, strict=True):
            held = tensors.get(part.entry.name)
            if held is None:
                properties = TensorProperties(dtype=part.entry.dtype)
                held = TensorStorageMetadata(properties=properties, size=part.entry.size, chunks=[])
                tensors[part.entry.name] = held
            assert isinstance(held, TensorStorageMetadata)
            index = MetadataIndex(part.entry.name, part.offsets, len(held.chunks))
            held.chunks.append(ChunkStorageMetadata(offsets=part.offsets, sizes=part.sizes))
            storage[index] = _Where(_file_name(rank, file), offset, length)
    return Metadata(tensors, storage_data=storage, version=filesystem.CURRENT_DCP_VERSION)


def _flatten(state: Mapping[str, Any], *, first: bool) -> DefaultSavePlanner:
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=first)
    return planner


def pickled(thing: object) -> bytes:
    """An object as torch's reader expects it."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Parts over files: for each file its parts in their frames, and for each part its file, offset and length."""

    files: Sequence[Sequence[tuple[int, Frame]]]
    places: Sequence[tuple[int, int, int]]
    first_end: int  # length of the first file


def arrange(parts: Sequence[Part], *, files: int) -> Arrangement:
    """Distribute parts over at most `files` files of about the same size."""
    sizes = [part.size_bytes for part in parts]
    count = max(1, min(files, sum(sizes) // _FILE_BYTES))
    members: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for number in sorted(range(len(parts)), key=lambda number: -sizes[number]):
        least = filled.index(min(filled))
        members[least].append(number)
        filled[least] += sizes[number]
    frames = _Frames()
    framed, ends = [], []
    places = [(0, 0, 0)] * len(parts)
    for file, numbers in enumerate(members):
        offset, inside = 0, []
        for number in sorted(numbers):
            frame = frames.of(parts[number])
            length = len(frame.head) + sizes[number] + len(frame.tail)
            places[number] = (file, offset, length)
            inside.append((number, frame))
            offset += length
        framed.append(inside)
        ends.append(offset)
    return Arrangement(files=framed, places=places, first_end=ends[0])


def _name(arrangement: Arrangement, rank: int) -> tuple[list[Shard], int]:
    shards = [Shard(name=_file_name(rank, file), tensors=inside) for file, inside in enumerate(arrangement.files)]
    return shards, arrangement.first_end


def _file_name(rank: int, file: int) -> str:
    return f"__{rank}_{file}{filesystem.DEFAULT_SUFFIX}"


class _Frames:
    """Frames by shape and type: a model has a dozen of them."""

    def __init__(self) -> None:
        self._known: dict[tuple[torch.Size, torch.dtype], Frame] = {}

    def of(self, part: Part) -> Frame:
        key = part.sizes, part.entry.dtype
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


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, not a copy."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    if tensor.nbytes == 0:
        return memoryview(b"")
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return cast(Any, flat.numpy()).data  # type: ignore[no-any-return]
