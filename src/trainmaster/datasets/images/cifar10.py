"""CIFAR-10: 50,000 images in 10 classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainmaster.datasets.images import Images, ImagesInMemory
from trainmaster.datasets.images._cifar import CHANNELS, SIZE, Layout, read
from trainmaster.datasets.images._download import Remote

# https://www.cs.toronto.edu/~kriz/cifar.html
LAYOUT = Layout(
    remote=Remote(
        name="cifar-10-python.tar.gz",
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
    ),
    folder="cifar-10-batches-py",
    batches=tuple(f"data_batch_{number}" for number in range(1, 6)),
    labels=b"labels",
)


class Cifar10(ImagesInMemory):
    """The training images."""

    channels, size, classes = CHANNELS, SIZE, 10
    mean, deviation = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the 50,000 training images


def load(folder: Path, *, image_size: int | None, show: Callable[[str], None]) -> Images:  # noqa: ARG001
    """Read the five training batches."""
    return read(LAYOUT, folder, Cifar10, show)
