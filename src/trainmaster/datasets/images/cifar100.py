"""CIFAR-100: 50,000 images in 100 classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainmaster.datasets.images import Images, ImagesInMemory
from trainmaster.datasets.images._cifar import CHANNELS, SIZE, Layout, read
from trainmaster.datasets.images._download import Remote

# https://www.cs.toronto.edu/~kriz/cifar.html
LAYOUT = Layout(
    remote=Remote(
        name="cifar-100-python.tar.gz",
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
    ),
    folder="cifar-100-python",
    batches=("train",),
    labels=b"fine_labels",
)


class Cifar100(ImagesInMemory):
    """The training images."""

    channels, size, classes = CHANNELS, SIZE, 100
    mean, deviation = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)  # of the 50,000 training images


def load(folder: Path, *, image_size: int | None, show: Callable[[str], None]) -> Images:  # noqa: ARG001
    """Read the training batch with its 100 fine labels."""
    return read(LAYOUT, folder, Cifar100, show)
