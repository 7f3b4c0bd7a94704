"""CIFAR batches: colour images of 32 x 32 pixels, pickled, in a tar.gz archive or unpacked beside it."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.core.errors import DataError
from trainmaster.datasets.images import ImagesInMemory
from trainmaster.datasets.images._download import Remote, fetch
from trainmaster.datasets.images._pickles import ByteArray, NotPlain
from trainmaster.datasets.images._pickles import load as unpickle

SIZE, CHANNELS = 32, 3
_ROW = SIZE * SIZE * CHANNELS
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names inside the archive."""

    remote: Remote
    folder: str
    batches: Sequence[str]
    labels: bytes


def read(layout: Layout, folder: Path, kind: type[ImagesInMemory], show: Callable[[str], None]) -> ImagesInMemory:
    """All batches as one data set."""
    import torch

    images, labels = [], []
    for name, data in _batches(layout, folder, show):
        pixels, numbers = _parse(name, data, layout.labels, kind.classes)
        images.append(torch.frombuffer(bytearray(pixels.data), dtype=torch.uint8).view(-1, CHANNELS, SIZE, SIZE))
        labels.append(torch.tensor(numbers, dtype=torch.int64))
    return kind(torch.cat(images), torch.cat(labels))


def _batches(layout: Layout, folder: Path, show: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each batch file. Only these members of the archive are read; nothing is unpacked."""
    unpacked = folder / layout.folder
    if unpacked.is_dir():
        for name in layout.batches:
            try:
                yield str(unpacked / name), (unpacked / name).read_bytes()
            except OSError as error:
                raise DataError(f"{unpacked / name}: cannot be read: {error.strerror or error}") from None
        return
    path = fetch(layout.remote, folder, show=show)
    wanted = {f"{layout.folder}/{name}" for name in layout.batches}
    seen = set()
    try:
        with gzip.open(path) as packed, tarfile.open(fileobj=packed, mode="r|") as archive:
            for member in archive:
                if member.name.removeprefix("./") not in wanted or not member.isreg():
                    continue
                if member.size > _MAX_BYTES:
                    raise DataError(f"{path}: {member.name} has {member.size:,} bytes")
                file = archive.extractfile(member)
                seen.add(member.name.removeprefix("./"))
                yield f"{path}: {member.name}", file.read() if file is not None else b""
            while packed.read(1 << 20):  # gzip compares its checksum at the end of the file only
                pass
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path}: truncated or damaged ({error}); remove it and run again to download it") from None
    if wanted - seen:
        raise DataError(f"{path}: without {', '.join(sorted(wanted - seen))}; remove it and run again to download it")


def _parse(name: str, data: bytes, label_key: bytes, classes: int) -> tuple[ByteArray, list[int]]:
    try:
        content = unpickle(data)
    except NotPlain as error:
        raise DataError(f"{name}: not a CIFAR batch: {error}") from None
    if not isinstance(content, Mapping):
        raise DataError(f"{name}: not a CIFAR batch: {type(content).__name__} in place of a dict")
    fields: dict[Any, Any] = {key.encode() if isinstance(key, str) else key: value for key, value in content.items()}
    pixels, labels = fields.get(b"data"), fields.get(label_key)
    if not isinstance(pixels, ByteArray) or pixels.shape[1:] != (_ROW,) or not pixels.shape[0]:
        raise DataError(f"{name}: its data is no array of {_ROW:,} bytes for each image")
    fine = isinstance(labels, list) and all(type(label) is int and 0 <= label < classes for label in labels)
    if not fine or len(labels or ()) != pixels.shape[0]:
        raise DataError(
            f"{name}: {label_key.decode()} are not {pixels.shape[0]:,} whole numbers from 0 to {classes - 1}"
        )
    return pixels, list(labels or ())
