"""Read a checkpoint's files once: the bytes that fill the tensors are the bytes that are hashed.

Each file is verified whole by one rank. Where that rank also needs it, as on as many ranks as wrote it, it is read a
single time; on another number of ranks the others read just the parts they need. Tensors are filled before the last
byte of their file is hashed: the loader must discard all tensors when one file is bad.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from trainmaster.core.errors import CheckpointError
from trainmaster.train.checkpoint import pinning
from trainmaster.train.checkpoint.layout import Frame, frame_of
from trainmaster.train.checkpoint.manifest import FileRecord, Manifest
from trainmaster.train.parallel import rank_sync

# Read and hashed at one go. For each slice a thread needs the interpreter, which compiles beside it (warm_up.py). 16
# threads on an H200's host beside a busy one: 3.0 GB/s in slices of 8 MiB, 7.2 of 32; without it 14.0 and 11.1.
_SLICE_BYTES = 32 << 20
_WRITER = re.compile(r"__(\d+)_\d+\.distcp")


def fill(state: dict[str, Any], reader: Reader, *, group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of a state dict in place; RankError on all ranks where one of them fails.

    Each rank plans its own reads from the index. torch's loader sends every plan to rank 0 and back, unchanged: about
    164 s on 1,024 ranks with 80 layers.
    """

    def fill_mine() -> None:
        index = reader.read_metadata()
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, index, is_coordinator=False)
        reader.set_up_storage_reader(index, is_coordinator=False)
        plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.read_data(plan, planner)

    rank_sync.on_all(fill_mine, group=group)


class Reader(FileSystemReader):
    """torch's reader of a checkpoint, in threads; it verifies the files of `verify` on the way."""

    def __init__(self, path: Path, *, verify: Mapping[str, FileRecord], threads: int) -> None:
        super().__init__(path)
        self._folder, self._verify, self._threads = path, verify, threads
        self._frames: dict[tuple[torch.Size, torch.dtype], Frame] = {}

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._index = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[str, list[ReadItem]] = {name: [] for name in self._verify}
        for item in plan.items:
            wanted.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="checkpoint-read") as pool:
            begun = [pool.submit(self._read, name, items, planner) for name, items in wanted.items()]
            for reading in begun:
                reading.result()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, name: str, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Fill these items from one file, front to back, never more than one of them in memory."""
        record = self._verify.get(name)
        places: dict[tuple[int, int], list[ReadItem]] = {}
        for item in items:
            where = self.storage_data[item.storage_index]
            places.setdefault((where.offset, where.length), []).append(item)
        pickles: list[tuple[ReadItem, bytes]] = []
        first_error: Exception | None = None
        with (
            (self._folder / name).open("rb", buffering=0) as file,
            contextlib.closing(_Hashed(file, hashing=record is not None)) as stream,
        ):
            for (offset, length), group in sorted(places.items(), key=lambda place: place[0]):
                if record is None and len(group) == 1 and self._fill_rows(group[0], stream, offset, planner):
                    continue
                stream.skip_to(offset)
                blob = self._fill_as_read(group, stream, length, planner)
                for item in group if blob is not None else ():
                    if item.type == LoadItemType.BYTE_IO:
                        pickles.append((item, bytes(cast(memoryview, blob))))
                        continue
                    try:
                        _fill(item, self._unwrap(item, cast(memoryview, blob)), planner)
                    except Exception as fault:  # damage, most likely: the hash will tell
                        first_error = first_error or fault
            if record is not None and stream.rest() != record:
                raise CheckpointError(f"{name} does not match its SHA-256")
        if first_error is not None:
            raise first_error
        # Pickles, which can do anything: not before their bytes are known to be ours.
        for item, pickled in pickles:
            planner.load_bytes(item, io.BytesIO(pickled))

    def _fill_as_read(
        self, items: list[ReadItem], stream: _Hashed, length: int, planner: LoadPlanner
    ) -> memoryview | None:
        """Read the next bytes into the tensor itself where they are exactly that tensor; else they are returned."""
        stored = self._shape_of(items[0]) if len(items) == 1 else None
        if stored is None or not stored[0].numel() or items[0].lengths != stored[0]:
            return stream.take(length)
        target = planner.resolve_tensor(items[0]).data  # a backward pass may run beside the load (load.py)
        fits = target.size() == stored[0] and target.dtype == stored[1] and target.is_contiguous()
        if not fits or not stream.can_fill(target):
            return stream.take(length)
        head = self._frame(*stored).head
        began = bytes(stream.take(len(head)))
        if began != head:
            return memoryview(began + stream.take(length - len(head)))
        stream.fill(target)
        planner.commit_tensor(items[0], target)
        return None

    def _fill_rows(self, item: ReadItem, stream: _Hashed, offset: int, planner: LoadPlanner) -> bool:
        """Read only the rows that this rank needs of a stored tensor; False where they cannot be told apart.

        A rank of many needs little of a tensor that was stored whole, as imported models are.
        """
        stored = self._shape_of(item)
        if stored is None or not stored[0] or not stored[0].numel() or list(item.lengths[1:]) != list(stored[0][1:]):
            return False
        shape, dtype = stored
        frame = self._frame(shape, dtype)
        stream.skip_to(offset)
        if stream.take(len(frame.head)) != frame.head:
            return False
        row_bytes = shape.numel() // shape[0] * dtype.itemsize
        stream.skip_to(offset + len(frame.head) + item.storage_offsets[0] * row_bytes)
        blob = stream.take(item.lengths[0] * row_bytes)
        rows = torch.frombuffer(blob, dtype=dtype, count=item.lengths.numel()).view(item.lengths)
        _put(item, rows, planner)
        return True

    def _shape_of(self, item: ReadItem) -> tuple[torch.Size, torch.dtype] | None:
        """Shape and type of the stored tensor that an item reads from; None for another object."""
        if item.type == LoadItemType.BYTE_IO:
            return None
        held, at = self._index.state_dict_metadata[item.storage_index.fqn], item.storage_index.offset
        assert isinstance(held, TensorStorageMetadata)
        shape = next((chunk.sizes for chunk in held.chunks if chunk.offsets == at), None)
        return (shape, held.properties.dtype) if shape is not None else None

    def _frame(self, shape: torch.Size, dtype: torch.dtype) -> Frame:
        key = shape, dtype
        return self._frames.get(key) or self._frames.setdefault(key, frame_of(*key))

    def _unwrap(self, item: ReadItem, blob: memoryview) -> Tensor:
        """The tensor in what torch.save wrote: in place where that looks as it would today, else by torch.load."""
        stored = self._shape_of(item)
        if stored is not None and stored[0].numel():
            shape, dtype = stored
            frame = self._frame(shape, dtype)
            if blob[: len(frame.head)] == frame.head:
                values = torch.frombuffer(blob, dtype=dtype, count=shape.numel(), offset=len(frame.head))
                return values.view(shape)
        loaded: Tensor = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
        return loaded


def share_out(manifest: Manifest, *, rank: int, ranks: int) -> dict[str, FileRecord]:
    """The files that this rank verifies: its own where as many ranks wrote as read, else about as much as any other."""
    shares: list[dict[str, FileRecord]] = [{} for _ in range(ranks)]
    for name, record in sorted(manifest.files.items(), key=lambda file: (-file[1].size_bytes, file[0])):
        writer = _WRITER.fullmatch(name)
        if writer and manifest.ranks == ranks and int(writer[1]) < ranks:
            shares[int(writer[1])][name] = record
        else:
            min(shares, key=lambda share: sum(held.size_bytes for held in share.values()))[name] = record
    return shares[rank]


class _Hashed:
    """A file read front to back, hashed as far as it was read."""

    def __init__(self, file: IO[bytes], *, hashing: bool) -> None:
        self._file, self._at = file, 0
        self._room = bytearray()  # used again for each take: new memory comes slower than most disks read
        self._slices: Slices | None = None
        self._digest = hashlib.sha256() if hashing else None

    def skip_to(self, offset: int) -> None:
        if self._digest is None:
            self._at = self._file.seek(offset)
        while self._at < offset:
            if self._slices is None:
                self.take(min(_SLICE_BYTES, offset - self._at))
            else:
                self._at += len(self._slices.next(offset - self._at))

    def take(self, length: int) -> memoryview:
        """The next bytes; they are there until the next take."""
        if len(self._room) < length:
            self._room = bytearray(length)
        view = memoryview(self._room)[:length]
        self._read_into(view)
        return view

    def can_fill(self, target: Tensor) -> bool:
        """Whether bytes can go into a tensor without a copy in between that costs more than the read."""
        if target.device.type == "cuda" and self._slices is None:
            self._slices = Slices(self._file, self._digest, gpu=target.device)
        return target.device.type in ("cpu", "cuda")

    def fill(self, target: Tensor) -> None:
        """The next bytes, into a contiguous tensor. To a GPU from pinned memory, four times as fast as from other."""
        if target.device.type == "cpu":
            self._read_into(_bytes_of(target))
            return
        assert self._slices is not None
        self._slices.fill(target.view(-1).view(torch.uint8))
        self._at += target.numel() * target.element_size()

    def _read_into(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            part = view[done : done + _SLICE_BYTES]
            if self._slices is not None:
                read = self._slices.next(len(part))
                count = len(read)
                part[:count] = _bytes_of(read)
            else:
                count = _read(self._file, part)
                if self._digest is not None:
                    self._digest.update(part[:count])
            done += count
        self._at += len(view)

    def rest(self) -> FileRecord:
        """Read on to the end; what the whole file is."""
        assert self._digest is not None
        self.skip_to(os.fstat(self._file.fileno()).st_size)
        return FileRecord(size_bytes=self._at, sha256=self._digest.hexdigest())

    def close(self) -> None:
        if self._slices is not None:
            self._slices.close()


class Slices:
    """The rest of a file through two rooms of memory: one is read into while the GPU still copies from the other.

    A file that is hashed is read whole, so each slice is read and hashed at one go, whatever tensors lie in it: for
    each of these calls the thread waits for the interpreter, and a checkpoint has more tensors than slices.
    """

    def __init__(
        self, file: IO[bytes], digest: Any, *, gpu: torch.device | None, size_bytes: int = _SLICE_BYTES
    ) -> None:
        self._file, self._digest, self._gpu = file, digest, gpu
        self._stream: torch.cuda.Stream | None = None
        if gpu is not None:
            torch.cuda.set_device(gpu)  # of this thread: the driver would open the first GPU too, for each rank
            # Its own: on that of the passes a copy would wait for what the compilation runs (warm_up.py).
            self._stream = torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(gpu))  # the first values of the tensors
        # With the end of the copies out of a room, where they go on after the call.
        self._rooms = [
            (pinning.take(size_bytes)[:size_bytes], torch.cuda.Event() if gpu is not None else None)  # type: ignore[no-untyped-call]
            for _ in range(2)
        ]
        self._pinned: dict[int, bool] = {}  # rooms, by their address, and whether the system pins them
        self._used = self._filled = 0  # of the first room

    def next(self, most: int) -> Tensor:
        """The next bytes, one or more, up to so many; they are there until those after the next slice are asked for."""
        if self._used == self._filled:
            self._turn(most)
        start = self._used
        self._used = min(self._filled, start + most)
        return self._rooms[0][0][start : self._used]

    def fill(self, flat: Tensor) -> None:
        """The next bytes, into a tensor of bytes."""
        done = 0
        with self._on_gpu():
            while done < len(flat):
                part = self.next(len(flat) - done)
                flat[done : done + len(part)].copy_(part, non_blocking=True)
                done += len(part)

    def _turn(self, most: int) -> None:
        """Read the next slice into the other room. A file that is not hashed is read only as far as it is needed."""
        (_, left), (room, copied) = self._rooms
        if left is not None and copied is not None:
            with self._on_gpu():
                left.record()
            copied.synchronize()
        view = _bytes_of(room)
        count = _read(self._file, view if self._digest is not None else view[:most])
        if self._digest is not None:
            self._digest.update(view[:count])
        if self._gpu is not None and room.data_ptr() not in self._pinned:
            with self._on_gpu():  # only now: the read has made its pages exist
                self._pinned[room.data_ptr()] = pinning.pin(room, self._gpu)
        self._rooms.reverse()
        self._used, self._filled = 0, count

    def close(self) -> None:
        """Wait for the last copies, and give the rooms back."""
        if self._stream is not None:
            self._stream.synchronize()
        for room, _ in self._rooms:
            if self._pinned.get(room.data_ptr()):
                pinning.unpin(room)
        self._rooms.clear()

    def _on_gpu(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()


def _read(file: IO[bytes], view: memoryview) -> int:
    count = cast(io.RawIOBase, file).readinto(view)
    if not count:
        raise CheckpointError(f"{Path(file.name).name} ends too early")
    return count


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host; the tensor must outlive it."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _fill(item: ReadItem, saved: Tensor, planner: LoadPlanner) -> None:
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        saved = saved.narrow(dimension, offset, length)
    _put(item, saved, planner)


def _put(item: ReadItem, saved: Tensor, planner: LoadPlanner) -> None:
    target = planner.resolve_tensor(item).data  # as above: autograd must not see that the weight changes
    if target.size() != saved.size():
        raise CheckpointError(f"{item.storage_index.fqn} is {list(saved.size())} and should be {list(target.size())}")
    target.copy_(saved)
    planner.commit_tensor(item, target)
