"""Files from rank to rank in pieces, over a group of their own. What arrives counts once its hash is right."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from trainmaster.train.checkpoint.manifest import FileRecord

PIECE_BYTES = 16 << 20  # long against the time to ask for the next, short against the memory of a node


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One file on its way."""

    name: str
    source: int  # ranks of the whole run
    target: int
    record: FileRecord


def exchange(folder: Path, transfers: Sequence[Transfer], *, group: dist.ProcessGroup | None) -> list[str]:
    """Do this rank's part of all transfers, from and into its own folder; what it could not receive, and why.

    Every rank is given the same list. Each pair of ranks has a thread of its own: no order of the files can make two
    of them wait for each other.
    """
    rank = dist.get_rank()
    streams: dict[tuple[Callable[..., list[str]], int], list[Transfer]] = {}
    for item in transfers:
        if rank == item.source:
            streams.setdefault((_send, item.target), []).append(item)
        if rank == item.target:
            streams.setdefault((_receive, item.source), []).append(item)
    if not streams:
        return []
    with ThreadPoolExecutor(len(streams), thread_name_prefix="checkpoint-send") as pool:
        begun = [pool.submit(act, folder, items, other, group) for (act, other), items in streams.items()]
        return [fault for future in begun for fault in future.result()]


def _send(folder: Path, items: Sequence[Transfer], target: int, group: dist.ProcessGroup | None) -> list[str]:
    buffer = bytearray(PIECE_BYTES)
    piece = torch.frombuffer(buffer, dtype=torch.uint8)
    for item in items:
        path = folder / item.name
        try:
            file = path.open("rb", buffering=0)
        except OSError:
            _send_number(-1, target, group)  # the receiver has this file down as missing
            continue
        with file:
            size = path.stat().st_size
            _send_number(size, target, group)
            for start in range(0, size, PIECE_BYTES):
                count = min(PIECE_BYTES, size - start)
                # What cannot be read goes out as it is in the buffer, and fails the hash on the other side.
                with contextlib.suppress(OSError):
                    _read_into(file, memoryview(buffer)[:count])
                dist.send(piece[:count], target, group=group)
    return []


def _receive(folder: Path, items: Sequence[Transfer], source: int, group: dist.ProcessGroup | None) -> list[str]:
    buffer = bytearray(PIECE_BYTES)
    piece = torch.frombuffer(buffer, dtype=torch.uint8)
    faults = []
    for item in items:
        size, digest, fault = _receive_number(source, group), hashlib.sha256(), None
        part = folder / f"{item.name}.part"
        if size < 0:
            faults.append(f"{item.name} cannot be read on rank {source}")
            continue
        with contextlib.ExitStack() as stack:
            try:
                (folder / item.name).unlink(missing_ok=True)  # an older one: there may be no room for both
                file = stack.enter_context(part.open("wb", buffering=0))
            except OSError as error:
                file, fault = None, f"{item.name} cannot be written: {error}"
            for start in range(0, size, PIECE_BYTES):
                count = min(PIECE_BYTES, size - start)
                dist.recv(piece[:count], source, group=group)
                if file is None or fault is not None:
                    continue  # it is on its way all the same, and the next file comes after it
                digest.update(memoryview(buffer)[:count])
                try:
                    _write(file, memoryview(buffer)[:count])
                except OSError as error:
                    fault = f"{item.name} cannot be written: {error}"
        if fault is None and FileRecord(size_bytes=size, sha256=digest.hexdigest()) != item.record:
            fault = f"{item.name} from rank {source} does not match its SHA-256"
        if fault is None:
            part.rename(folder / item.name)
            continue
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        faults.append(fault)
    return faults


def _read_into(file: io.FileIO, view: memoryview) -> None:
    while view:
        count = file.readinto(view)
        if not count:
            return
        view = view[count:]


def _write(file: io.FileIO, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


def _send_number(number: int, target: int, group: dist.ProcessGroup | None) -> None:
    dist.send(torch.tensor([number], dtype=torch.int64), target, group=group)


def _receive_number(source: int, group: dist.ProcessGroup | None) -> int:
    word = torch.zeros(1, dtype=torch.int64)
    dist.recv(word, source, group=group)
    return int(word.item())
