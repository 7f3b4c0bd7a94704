"""What a store cannot do is told as what it is: missing, not allowed, not reachable, wrongly asked."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from s3_server import READER, READER_SECRET, SECRET
from trainmaster.core.errors import (
    AccessDenied,
    MissingExtra,
    ObjectMissing,
    StorageError,
    StorageUnreachable,
    UsageError,
)
from trainmaster.storage import open_store, upload_bundle


@pytest.mark.parametrize(("key", "secret"), [("AKTEST", "SKOTHER"), ("NOBODY", SECRET)])
def test_wrong_credentials(s3: Any, monkeypatch: pytest.MonkeyPatch, key: str, secret: str) -> None:
    s3.use(monkeypatch, key, secret)
    store = open_store(f"s3://{s3.bucket}/x")
    for ask in (store.get, store.exists, lambda name: store.put(name, b"x"), store.list):
        with pytest.raises(AccessDenied, match="credentials") as told:
            ask("a")
        assert secret not in str(told.value)


def test_a_reader_reads_and_may_not_write(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.use(monkeypatch)
    open_store(f"s3://{s3.bucket}/shared").put("a", b"1")
    s3.use(monkeypatch, READER, READER_SECRET)
    store = open_store(f"s3://{s3.bucket}/shared")
    assert store.get("a") == b"1"
    with pytest.raises(AccessDenied):
        store.put("a", b"2")
    assert store.get("a") == b"1"


def test_a_bucket_that_is_not_there(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.use(monkeypatch)
    with pytest.raises(ObjectMissing):
        open_store("s3://no-such-bucket/x").get("a")


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    with socket.socket() as held:  # bound and not listening: every connection is refused
        held.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{held.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKTEST")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SKTEST")
        store = open_store("s3://bundles/x")
        for ask in (store.get, store.exists):  # not knowing is never "not there"
            with pytest.raises(StorageUnreachable):
                ask("a")


@pytest.mark.parametrize("place", ["ftp://host/x", "http://host/x", "s3://", "s3:///x", "s3://key:secret@bucket/x"])
def test_what_is_no_address(place: str) -> None:
    with pytest.raises(UsageError):
        open_store(place)


def test_without_obstore_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingExtra, match=r"pip install .*\[storage\]"):
        open_store("s3://bucket/x")


def test_a_link_in_the_folder_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "store" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError, match="leads out"):
        open_store(tmp_path / "store").get("link")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        open_store(tmp_path / "file" / "store").put("a", b"x")


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.put("a", b"old")
    with pytest.raises(StorageError):
        store.put("a", tmp_path / "nothing")
    assert store.get("a") == b"old"
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["a"]


def test_an_empty_bundle_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError):
            upload_bundle(folder, tmp_path / "store")
