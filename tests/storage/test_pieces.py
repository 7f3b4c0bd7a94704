"""An object written piece by piece and read in parts, in a folder and in a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmaster.core.errors import ObjectMissing, StorageError
from trainmaster.storage import Store, open_store


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    if request.param == "folder":
        return open_store(tmp_path / "store")
    server = request.getfixturevalue("s3")
    server.use(monkeypatch)
    return open_store(f"s3://{server.bucket}/{tmp_path.name}/pieces")


def test_pieces_become_one_object_and_parts_of_it_come_back(store: Store) -> None:
    pieces = [bytes([number]) * 3_000_000 for number in range(4)]  # over the 5 MiB of one part of an upload
    store.put("a/whole", iter(pieces))
    assert store.get("a/whole") == b"".join(pieces)
    assert store.read("a/whole", start=2_999_998, size=4) == b"\0\0\1\1"
    assert store.read("a/whole", start=12_000_000, size=0) == b""
    store.put("none", iter([]))
    assert store.get("none") == b""


def test_pieces_that_fail_on_the_way_leave_nothing(store: Store) -> None:
    def cut_off() -> Iterator[bytes]:
        yield b"x" * 6_000_000
        raise ValueError("the file changed while it was read")

    with pytest.raises((ValueError, StorageError), match="changed while it was read"):
        store.put("half", cut_off())
    assert not store.exists("half")


def test_a_part_that_is_not_there_is_an_error(store: Store) -> None:
    store.put("short", b"12345")
    with pytest.raises(StorageError):
        store.read("short", start=3, size=10)
    with pytest.raises(ObjectMissing):
        store.read("missing", start=0, size=1)
