"""Image data sets read from their published formats, whole and damaged."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import pickle
import socketserver
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import image_files
import pytest
import torch

from trainmaster.core.errors import DataError, UsageError
from trainmaster.datasets import images
from trainmaster.datasets.images import _download, open_images
from trainmaster.datasets.images._download import MIRROR_VARIABLE, Remote, fetch
from trainmaster.datasets.images._pickles import NotPlain, load


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror on a port at which nothing listens."""
    monkeypatch.setenv(MIRROR_VARIABLE, "http://127.0.0.1:9")


def test_every_data_mode_has_a_reader() -> None:
    assert images.names() == ["cifar10", "cifar100", "fashion_mnist", "imagenet"]
    with pytest.raises(UsageError, match="mnist"):
        open_images("mnist", Path("nowhere"))


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_is_read(tmp_path: Path, packed: bool) -> None:
    place = image_files.fashion_mnist(tmp_path, packed=packed)
    found = open_images("fashion_mnist", tmp_path)
    pixels, labels = found.__getitems__([0, 13])
    assert len(found) == 40
    assert pixels.shape == (2, 1, 28, 28)
    assert labels.tolist() == [0, 3]
    raw = (place / f"train-images-idx3-ubyte{'.gz' * packed}").read_bytes()
    data = gzip.decompress(raw) if packed else raw
    assert pixels[0].flatten().tolist() == list(data[16 : 16 + 784])


@pytest.mark.parametrize(("name", "classes", "count"), [("cifar10", 10, 40), ("cifar100", 100, 8)])
@pytest.mark.parametrize("unpacked", [False, True])
def test_cifar_is_read(tmp_path: Path, name: str, classes: int, count: int, unpacked: bool) -> None:
    image_files.cifar(tmp_path, classes=classes, unpacked=unpacked)
    found = open_images(name, tmp_path)
    pixels, labels = found.__getitems__(range(count))
    assert len(found) == count
    assert pixels.shape == (count, 3, 32, 32)
    assert pixels.dtype == torch.uint8
    assert 0 <= int(labels.min()) <= int(labels.max()) < classes
    assert len(set(pixels.flatten(1).sum(1).tolist())) > 1


@pytest.mark.parametrize("split", ["train", "val", "."])
def test_an_imagenet_folder_is_read(tmp_path: Path, split: str) -> None:
    image_files.imagenet(tmp_path, split=split)
    found = open_images("imagenet", tmp_path, image_size=32)
    pixels, labels = found.__getitems__([0, 5, 11])
    assert len(found) == 12
    assert pixels.shape == (3, 3, 32, 32)
    assert labels.tolist() == [0, 1, 2]


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])


def _spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3 : len(data) // 3 + 40] = b"\x5a" * 40
    path.write_bytes(data)


def _text(path: Path) -> None:
    path.write_text("404 not found\n")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [_cut, _text, _empty])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("fashion_mnist", "FashionMNIST/raw/train-images-idx3-ubyte.gz"),
        ("fashion_mnist", "FashionMNIST/raw/train-labels-idx1-ubyte.gz"),
        ("cifar10", "cifar-10-python.tar.gz"),
        ("cifar100", "cifar-100-python.tar.gz"),
        ("imagenet", "imagenet/train/n00000001/2.JPEG"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, file: str, damage: Callable[[Path], None]) -> None:
    _make(name, tmp_path)
    damage(tmp_path / file)
    with pytest.raises(DataError, match=Path(file).name.replace(".", r"\.")):
        open_images(name, tmp_path).__getitems__(range(8))


def test_spoiled_bytes_in_an_archive_are_noticed(tmp_path: Path) -> None:
    for name in ("cifar100", "fashion_mnist"):
        _make(name, tmp_path / name)
    _spoil(tmp_path / "cifar100" / "cifar-100-python.tar.gz")
    _spoil(tmp_path / "fashion_mnist/FashionMNIST/raw/train-images-idx3-ubyte.gz")
    with pytest.raises(DataError, match=r"cifar-100-python\.tar\.gz"):
        open_images("cifar100", tmp_path / "cifar100")
    with pytest.raises(DataError, match="train-images"):
        open_images("fashion_mnist", tmp_path / "fashion_mnist")


def test_images_and_labels_must_be_as_many(tmp_path: Path) -> None:
    place = image_files.fashion_mnist(tmp_path)
    (place / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x01" + b"\0\0\0\x02" + b"\1\2"))
    with pytest.raises(DataError, match="40 images, but 2 labels"):
        open_images("fashion_mnist", tmp_path)


def test_an_archive_without_a_batch_is_named(tmp_path: Path) -> None:
    path = image_files.cifar(tmp_path, classes=10)
    whole = path.with_suffix(".whole")
    path.rename(whole)
    with tarfile.open(whole) as source, tarfile.open(path, "w:gz") as archive:
        for member in source:
            if not member.name.endswith("_3"):
                archive.addfile(member, source.extractfile(member))
    with pytest.raises(DataError, match="data_batch_3"):
        open_images("cifar10", tmp_path)


def test_a_folder_without_classes_is_no_data_set(tmp_path: Path) -> None:
    (tmp_path / "imagenet").mkdir()
    (tmp_path / "imagenet" / "ILSVRC2012_val_00000001.JPEG").write_bytes(b"")
    with pytest.raises(DataError, match="one folder per class"):
        open_images("imagenet", tmp_path)


class _Evil:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return exec, ("open('/tmp/never-written', 'w')",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({b"data": _Evil()}, protocol=2),
        pickle.dumps(Path.home),
        b"cos\nsystem\n(S'true'\ntR.",
        b"cnumpy\nencode\n.",
        b"c_codecs\ndtype\n.",
    ],
)
def test_no_code_of_a_pickle_runs(data: bytes) -> None:
    with pytest.raises(NotPlain):
        load(data)


def test_a_pickle_of_numpy_under_python_3_is_read() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(12, dtype=numpy.uint8).reshape(3, 4)
    found = load(pickle.dumps({b"data": array, b"labels": [1, 2]}, protocol=2))
    assert (found[b"data"].shape, found[b"data"].data) == ((3, 4), array.tobytes())
    with pytest.raises(NotPlain, match="unsigned bytes"):
        load(pickle.dumps(array.astype(numpy.float32), protocol=2))


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10", "cifar100"])
def test_without_a_network_the_message_says_what_to_copy(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"cannot be reached .* copy .*gz to .*--data-mode synthetic"):
        open_images(name, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "mirror"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *words: object) -> None:
            super().__init__(*words, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        (folder / "address").write_text(f"http://127.0.0.1:{server.server_port}")
        yield folder
        server.shutdown()
        thread.join()


@pytest.mark.spawns
def test_a_download_is_checked_and_happens_once(tmp_path: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MIRROR_VARIABLE)
    (mirror / "set.gz").write_bytes(b"images")
    url = (mirror / "address").read_text() + "/set.gz"
    said: list[str] = []
    right = Remote(name="set.gz", url=url, md5=hashlib.md5(b"images").hexdigest())
    threads = [
        threading.Thread(target=fetch, args=(right, tmp_path / "data"), kwargs={"show": said.append}) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == [f"downloading {url}"]
    assert (tmp_path / "data" / "set.gz").read_bytes() == b"images"
    with pytest.raises(DataError, match="MD5 is"):
        fetch(Remote(name="set.gz", url=url, md5="0" * 32), tmp_path / "other", show=said.append)
    assert not (tmp_path / "other" / "set.gz").exists()
    monkeypatch.setenv(MIRROR_VARIABLE, (mirror / "address").read_text())
    elsewhere = Remote(name="set.gz", url="http://127.0.0.1:9/set.gz", md5=right.md5)
    assert fetch(elsewhere, tmp_path / "third", show=said.append).exists()


def _make(name: str, folder: Path) -> None:
    if name == "fashion_mnist":
        image_files.fashion_mnist(folder)
    elif name == "imagenet":
        image_files.imagenet(folder)
    else:
        image_files.cifar(folder, classes=int(name.removeprefix("cifar")))


class _Broken(socketserver.StreamRequestHandler):
    """A mirror that answers with what the test says, and then closes the connection."""

    def handle(self) -> None:
        while self.rfile.readline().strip():
            pass
        self.wfile.write(self.server.answer)  # type: ignore[attr-defined]


@pytest.mark.spawns
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nhello",
        b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\n\r\n",
    ],
)
def test_a_mirror_that_breaks_off_leaves_nothing_behind(
    tmp_path: Path, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Broken) as server:
        server.answer = answer  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv(MIRROR_VARIABLE, f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(DataError, match=r"127\.0\.0\.1"):
            fetch(
                Remote(name="a.tar.gz", url="http://127.0.0.1:9/a.tar.gz", md5="0" * 32), tmp_path, show=lambda _: None
            )
        server.shutdown()
    assert [one.name for one in tmp_path.iterdir()] == [".a.tar.gz.lock"]


@pytest.mark.spawns
def test_a_file_without_an_end_does_not_fill_the_disk(
    tmp_path: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_download, "_MOST_BYTES", 100)
    monkeypatch.setenv(MIRROR_VARIABLE, (mirror / "address").read_text())
    (mirror / "a.tar.gz").write_bytes(b"x" * 101)
    with pytest.raises(DataError, match="more than 100 bytes"):
        fetch(Remote(name="a.tar.gz", url="", md5="0" * 32), tmp_path / "data", show=lambda _: None)
    assert not list((tmp_path / "data").glob("*.part"))


def test_names_that_lead_out_of_an_archive_are_not_followed(tmp_path: Path) -> None:
    """Nothing is unpacked, and a link in the place of a batch is no batch."""
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        link = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        out = tarfile.TarInfo("../../outside")
        out.size = 3
        archive.addfile(out, io.BytesIO(b"abc"))
    with pytest.raises(DataError, match="without cifar-10-batches-py/data_batch_1"):
        open_images("cifar10", tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["cifar-10-python.tar.gz"]
    assert not (tmp_path.parent / "outside").exists()
