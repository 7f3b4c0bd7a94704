"""ImageNet, or any folder of JPEG files with one folder per class. ImageNet needs a licence and is not downloaded."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.core.errors import DataError, MissingExtra
from trainmaster.datasets.images import Images

if TYPE_CHECKING:
    from torch import Tensor

_ENDINGS = (".jpeg", ".jpg")
_SIZE = 224
_MAX_PIXELS = 1 << 28  # a small file can decode to gigabytes


class ImageNet(Images):
    """Files of all classes. Each is decoded, scaled and cut to a square in its middle when it is asked for."""

    channels = 3
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training images
    in_memory = False

    def __init__(self, files: Sequence[tuple[str, int]], *, classes: int, size: int) -> None:
        self._files, self.classes, self.size = files, classes, size

    def __len__(self) -> int:
        return len(self._files)

    def __getitems__(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        import torch

        chosen = [self._files[number] for number in numbers]
        images = torch.stack([_decode(path, self.size) for path, _ in chosen])
        return images, torch.tensor([label for _, label in chosen], dtype=torch.int64)


def load(folder: Path, *, image_size: int | None, show: Callable[[str], None]) -> Images:  # noqa: ARG001
    """List the files below imagenet/train, imagenet/val or imagenet itself."""
    if importlib.util.find_spec("PIL") is None:
        raise MissingExtra("decoding JPEG files", "images")
    root = folder / "imagenet"
    for place in (root / "train", root / "val", root):
        classes = _subfolders(place)
        if classes and {entry.name for entry in classes} - {"train", "val"}:
            return _list(place, classes, image_size or _SIZE)
    raise DataError(
        f"{root}: no folders of classes; put one folder per class with JPEG files into it, or use --data-mode synthetic"
    )


def _subfolders(place: Path) -> list[Path]:
    if not place.is_dir():
        return []
    return sorted(Path(entry.path) for entry in os.scandir(place) if entry.is_dir() and not entry.name.startswith("."))


def _list(place: Path, classes: Sequence[Path], size: int) -> ImageNet:
    files = [
        (entry.path, label)
        for label, class_folder in enumerate(classes)
        for entry in sorted(os.scandir(class_folder), key=lambda entry: entry.name)
        if entry.name.lower().endswith(_ENDINGS)
    ]
    if not files:
        raise DataError(f"{place}: {len(classes)} folders without a .JPEG file")
    return ImageNet(files, classes=len(classes), size=size)


def _decode(path: str, size: int) -> Tensor:
    """The square in the middle of an image as (3, size, size)."""
    import torch
    from PIL import Image

    try:
        with Image.open(path, formats=("JPEG",)) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise DataError(f"{path}: {image.width} x {image.height} pixels")
            image.draft("RGB", (size, size))  # decodes at a fraction of the size where that is enough
            edge = min(image.size)
            left, top = (image.width - edge) / 2, (image.height - edge) / 2
            square = image.convert("RGB").resize(
                (size, size), Image.Resampling.BILINEAR, box=(left, top, left + edge, top + edge)
            )
            pixels = bytearray(square.tobytes())
    except FileNotFoundError:
        raise DataError(f"{path}: removed while it was being used") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path}: truncated, damaged or no JPEG file: {error}") from None
    return torch.frombuffer(pixels, dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)
