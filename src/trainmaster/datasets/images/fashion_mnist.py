"""FashionMNIST: 60,000 grey images of 28 x 28 pixels in 10 classes, in idx files (gzip, or unpacked)."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.core.errors import DataError
from trainmaster.datasets.images import Images, ImagesInMemory
from trainmaster.datasets.images._download import Remote, fetch

if TYPE_CHECKING:
    from torch import Tensor

# https://github.com/zalandoresearch/fashion-mnist, table "Get the data".
_BASE = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FILES = tuple(
    Remote(name=name, url=_BASE + name, md5=md5)
    for name, md5 in (
        ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
    )
)
_UNSIGNED_BYTE = 0x08
_MAX_BYTES = 1 << 30


class FashionMnist(ImagesInMemory):
    """The training images."""

    channels, size, classes = 1, 28, 10
    mean, deviation = (0.2860,), (0.3530,)  # of the 60,000 training images


def load(folder: Path, *, image_size: int | None, show: Callable[[str], None]) -> Images:  # noqa: ARG001
    """Read the images from FashionMNIST/raw below the folder (torchvision's place) or from the folder itself."""
    places = (folder / "FashionMNIST" / "raw", folder / "FashionMNIST", folder)
    images, labels = (_parse(_find(remote, places, show), 3 - 2 * number) for number, remote in enumerate(FILES))
    if len(images) != len(labels):
        raise DataError(f"{places[0]}: {len(images)} images, but {len(labels)} labels")
    if not len(labels) or int(labels.max()) >= FashionMnist.classes:
        raise DataError(f"{places[0]}: labels are not 0 to {FashionMnist.classes - 1}")
    return FashionMnist(images[:, None], labels.long())


def _find(remote: Remote, places: tuple[Path, ...], show: Callable[[str], None]) -> Path:
    unpacked = remote.name.removesuffix(".gz")
    known = (place / name for place in places for name in (remote.name, unpacked))
    return next((path for path in known if path.exists()), None) or fetch(remote, places[0], show=show)


def _parse(path: Path, dimensions: int) -> Tensor:
    """An idx file of unsigned bytes as a tensor."""
    import torch

    data = _read(path)
    head = 4 + 4 * dimensions
    if len(data) < head or data[:4] != bytes((0, 0, _UNSIGNED_BYTE, dimensions)):
        raise DataError(f"{path}: not an idx file of unsigned bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", data[4:head])
    if dimensions == 3 and shape[1:] != (FashionMnist.size, FashionMnist.size):
        raise DataError(f"{path}: images of {shape[1]} x {shape[2]} pixels, not {FashionMnist.size}")
    wanted = head + math.prod(shape)
    if len(data) != wanted:
        raise DataError(f"{path}: {len(data):,} bytes, but its header promises {wanted:,}; copy it again")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)[head:].reshape(shape)


def _read(path: Path) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: truncated or damaged ({error}); copy it again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > _MAX_BYTES:
        raise DataError(f"{path}: more than {_MAX_BYTES:,} bytes")
    return data
