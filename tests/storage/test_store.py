"""A folder and an S3 bucket keep the same promises."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainmaster.core.errors import ObjectMissing, UsageError
from trainmaster.storage import Store, Stored, open_store, upload_bundle


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address that holds nothing yet."""
    if request.param == "folder":
        return str(tmp_path / "store")
    server = request.getfixturevalue("s3")
    server.use(monkeypatch)
    return f"s3://{server.bucket}/{tmp_path.name}/run"


@pytest.fixture
def store(place: str) -> Store:
    return open_store(place)


def test_what_is_put_is_what_comes_back(store: Store, tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    (tmp_path / "big").write_bytes(data * 900)  # over the 5 MiB of one part
    store.put("nodes/n1/answers.json", data)
    store.put("big", tmp_path / "big")
    assert store.get("nodes/n1/answers.json") == data
    assert store.get("big") == data * 900
    store.put("nodes/n1/answers.json", b"")
    assert store.get("nodes/n1/answers.json") == b""


def test_listing_is_sorted_whole_and_by_folder(store: Store) -> None:
    for name in ("b", "a/2", "a/1", "ab/3"):
        store.put(name, name.encode())
    assert [item.path for item in store.list()] == ["a/1", "a/2", "ab/3", "b"]
    assert (
        store.list("a")
        == store.list("a/")
        == [
            Stored(path="a/1", size_bytes=3),
            Stored(path="a/2", size_bytes=3),
        ]
    )
    assert store.list("nothing") == []


def test_an_object_that_is_not_there(store: Store) -> None:
    assert not store.exists("a/b")
    with pytest.raises(ObjectMissing, match="a/b"):
        store.get("a/b")
    store.delete("a/b")


def test_deleted_is_gone(store: Store) -> None:
    store.put("a/b", b"x")
    assert store.exists("a/b")
    store.delete("a/b")
    assert not store.exists("a/b")
    assert store.list() == []


@pytest.mark.parametrize("path", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", ".", "a\x00b", "a\\b"])
def test_no_path_leads_out(store: Store, path: str) -> None:
    for ask in (store.get, store.delete, store.exists, lambda name: store.put(name, b"x")):
        with pytest.raises(UsageError, match="not an object path"):
            ask(path)


def test_a_bundle_is_uploaded_whole_with_its_health_last(place: str, store: Store, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    (bundle / "nodes" / "n1").mkdir(parents=True)
    for name in ("health.json", "zz.md", "nodes/n1/answers.json"):
        (bundle / name).write_text(name)
    (bundle / "link").symlink_to("/etc/passwd")
    written = upload_bundle(bundle, place)
    assert [url.removeprefix(place) for url in written] == ["/nodes/n1/answers.json", "/zz.md", "/health.json"]
    assert [item.path for item in store.list()] == ["health.json", "nodes/n1/answers.json", "zz.md"]
    assert store.get("zz.md") == b"zz.md"


def test_of_several_writers_of_a_new_object_one_wins(any_store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda number: any_store.put_new("lock/1.json", f"{number}".encode()), range(8)))
    assert won.count(True) == 1
    assert any_store.get("lock/1.json") == f"{won.index(True)}".encode()
    assert any_store.put_new("lock/1.json", b"late") is False


def test_pieces_of_zeros_become_holes(tmp_path: Path) -> None:
    store, zeros = open_store(str(tmp_path / "folder")), bytes(4 << 20)
    store.put("sparse", iter([b"a", zeros, zeros, b"\x00b\x00", zeros]))
    assert store.get("sparse") == b"a" + 2 * zeros + b"\x00b\x00" + zeros
    assert (tmp_path / "folder" / "sparse").stat().st_blocks * 512 < 1 << 20
