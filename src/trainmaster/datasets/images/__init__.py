"""Labelled images from the files of public data sets. One file per format; the modules are the registry.

    open_images("cifar10", Path("./data"))     finds the files, downloads them where they are missing, reads them

Images are 8-bit and stay on the CPU. A truncated, damaged or foreign file is a DataError with the name of the file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


class Images:
    """Images of one size with their labels, by number. Instances travel to the workers of a DataLoader."""

    channels: int
    size: int  # height and width
    classes: int
    mean: tuple[float, ...]  # of each channel, of values from 0 to 1
    deviation: tuple[float, ...]
    in_memory: bool = True  # False: each image is read and decoded when it is asked for

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitems__(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A batch: images (count, channels, size, size) as uint8, labels (count,) as int64."""
        raise NotImplementedError


class ImagesInMemory(Images):
    """A data set that fits into memory whole."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self._images[numbers], self._labels[numbers]


def names() -> list[str]:
    """Names of all data sets."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def open_images(
    name: str, folder: Path, *, image_size: int | None = None, show: Callable[[str], None] = lambda _: None
) -> Images:
    """The training images of a data set below `folder`; `image_size` for sets that have no size of their own."""
    if name not in names():
        raise UsageError(f"data set {name!r}: one of {', '.join(names())}")
    images: Images = importlib.import_module(f"{__name__}.{name}").load(folder, image_size=image_size, show=show)
    return images
