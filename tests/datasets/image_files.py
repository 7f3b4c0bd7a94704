"""Files of image data sets in their published formats, small."""

from __future__ import annotations

import gzip
import io
import random
import struct
import tarfile
from pathlib import Path


def fashion_mnist(folder: Path, count: int = 40, *, packed: bool = True) -> Path:
    """idx files with magic numbers 2051 and 2049, big-endian counts."""
    place = folder / "FashionMNIST" / "raw"
    place.mkdir(parents=True)
    draw = random.Random(3)
    images = struct.pack(">4I", 2051, count, 28, 28) + draw.randbytes(count * 28 * 28)
    labels = struct.pack(">2I", 2049, count) + bytes(number % 10 for number in range(count))
    for name, data in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        (place / (name + ".gz" * packed)).write_bytes(gzip.compress(data) if packed else data)
    return place


def python2_batch(pixels: bytes, labels: list[int], *, label_key: bytes) -> bytes:
    """A dict as cPickle of Python 2 writes it with protocol 2: byte strings, and an array of numpy."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    rows = len(labels)
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + b"K\x00\x85" + text(b"b") + b"\x87R"
        + b"(K\x01" + number(rows) + number(3072) + b"\x86" + b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R"
        + b"(K\x03" + text(b"|") + b"NNN" + number(-1) + number(-1) + b"K\x00tb" + b"\x89" + text(pixels) + b"tb"
    )  # fmt: skip
    numbers = b"](" + b"".join(number(label) for label in labels) + b"e"
    pairs = text(b"data") + array + text(label_key) + numbers + text(b"batch_label") + text(b"training batch")
    return b"\x80\x02}(" + pairs + b"u."


def cifar(folder: Path, *, classes: int, each: int = 8, unpacked: bool = False) -> Path:
    """cifar-10-python.tar.gz or cifar-100-python.tar.gz with `each` images in a batch."""
    inside, names, key = (
        ("cifar-10-batches-py", [f"data_batch_{number}" for number in range(1, 6)], b"labels")
        if classes == 10 else ("cifar-100-python", ["train"], b"fine_labels")
    )  # fmt: skip
    draw, batches = random.Random(4), {}
    for name in names:
        labels = [draw.randrange(classes) for _ in range(each)]
        batches[name] = python2_batch(draw.randbytes(each * 3072), labels, label_key=key)
    folder.mkdir(parents=True, exist_ok=True)
    if unpacked:
        (folder / inside).mkdir()
        for name, data in batches.items():
            (folder / inside / name).write_bytes(data)
        return folder / inside
    path = folder / f"cifar-{classes}-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in {"readme.html": b"<html>", **batches}.items():
            member = tarfile.TarInfo(f"{inside}/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def imagenet(folder: Path, *, classes: int = 3, each: int = 4, split: str = "train") -> Path:
    """Folders of classes with JPEG files of other sizes and colour modes than the model's."""
    from PIL import Image

    draw = random.Random(5)
    for label in range(classes):
        place = folder / "imagenet" / split / f"n{label:08d}"
        place.mkdir(parents=True)
        for number in range(each):
            size, mode = (draw.randint(40, 90), draw.randint(40, 90)), ("RGB", "L", "CMYK")[number % 3]
            count = size[0] * size[1] * {"RGB": 3, "L": 1, "CMYK": 4}[mode]
            Image.frombytes(mode, size, draw.randbytes(count)).save(place / f"{number}.JPEG", "JPEG")
    return folder / "imagenet"
