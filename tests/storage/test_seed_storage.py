"""Seed 004, phase 1.3: each of its checkboxes, in a folder and in a bucket of a real S3 server."""

from __future__ import annotations

import hashlib
import os
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.errors import (
    AccessDenied,
    NoSignedUrls,
    ObjectMissing,
    StorageError,
    StorageUnreachable,
    UsageError,
)
from trainmaster.storage import Store, Stored, open_store
from trainmaster.storage.transfer import download, upload


def test_can_connect_to_storage(any_store: Store) -> None:
    assert any_store.list() == []


def test_can_upload_single_file(any_store: Store, tmp_path: Path) -> None:
    data = os.urandom(100_000)
    (tmp_path / "file").write_bytes(data)
    receipt = upload(any_store, "runs/1/file", tmp_path / "file")
    assert receipt.size_bytes == 100_000 and receipt.sha256 == hashlib.sha256(data).hexdigest()
    assert any_store.get("runs/1/file") == data


def test_can_download_single_file(any_store: Store, tmp_path: Path) -> None:
    sent = upload(any_store, "a/b", os.urandom(3_000_000))
    received = download(any_store, "a/b", tmp_path / "new" / "b", sha256=sent.sha256, chunk=1 << 20)
    assert received == sent
    assert hashlib.sha256((tmp_path / "new" / "b").read_bytes()).hexdigest() == sent.sha256
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["b"]


def test_can_list_objects_with_prefix(any_store: Store) -> None:
    for name in ("jobs/1/a", "jobs/1/b/c", "jobs/11/a", "other"):
        any_store.put(name, b"12")
    found = [Stored(path="jobs/1/a", size_bytes=2), Stored(path="jobs/1/b/c", size_bytes=2)]
    assert any_store.list("jobs/1") == any_store.list("jobs/1/") == found
    assert any_store.list("nothing/") == []


def test_can_delete_objects(any_store: Store) -> None:
    any_store.put("a", b"1")
    any_store.put("b", b"2")
    any_store.delete("a")
    any_store.delete("a")  # gone is gone
    assert [item.path for item in any_store.list()] == ["b"]


def test_handles_non_existent_files_gracefully(any_store: Store, tmp_path: Path) -> None:
    for ask in (any_store.get, any_store.stat, lambda name: any_store.read(name, start=0, size=1)):
        with pytest.raises(ObjectMissing, match="no/such"):
            ask("no/such")
    with pytest.raises(ObjectMissing):
        download(any_store, "no/such", tmp_path / "here")
    with pytest.raises(StorageError, match="cannot be read"):
        upload(any_store, "x", tmp_path / "no such file")
    assert not (tmp_path / "here").exists() and not any_store.exists("x")


def test_handles_connection_errors(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.use(monkeypatch, secret="wrong")
    with pytest.raises(AccessDenied):
        open_store(f"s3://{s3.bucket}/x").stat("a")
    with socket.socket() as nobody:  # bound and not listening
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(StorageUnreachable):
            open_store(f"s3://{s3.bucket}/x").stat("a")


def test_can_generate_presigned_urls(s3_store: Store) -> None:
    """Somebody without credentials puts an object with one URL and fetches it with another; and nothing else."""
    put = s3_store.sign("a b/ü.bin", method="PUT", expires_s=60)
    request = urllib.request.Request(put, data=b"hello", method="PUT")
    urllib.request.urlopen(request, timeout=30).close()
    assert s3_store.get("a b/ü.bin") == b"hello"
    signed = s3_store.sign("a b/ü.bin")
    with urllib.request.urlopen(signed, timeout=30) as answer:
        assert answer.read() == b"hello"
    for wrong in (signed.partition("?")[0], signed.replace("%20b", "%20c"), put):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(wrong, timeout=30)
        refused.value.close()
        assert refused.value.code == 403


def test_a_presigned_url_runs_out(s3_store: Store) -> None:
    s3_store.put("a", b"1")
    signed = s3_store.sign("a", expires_s=1)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(signed, timeout=30).close()
        except urllib.error.HTTPError as refused:
            refused.close()
            assert refused.code == 403
            return
        time.sleep(0.3)
    raise AssertionError("a URL signed for one second is good after thirty")


def test_a_folder_says_that_it_has_no_urls(tmp_path: Path) -> None:
    with pytest.raises(NoSignedUrls, match="a folder has no URLs"):
        open_store(tmp_path).sign("a")


@pytest.mark.parametrize("seconds", [0, -1, 8 * 86400])
def test_a_url_is_not_signed_for_ever(any_store: Store, seconds: int) -> None:
    with pytest.raises(UsageError, match="seconds"):
        any_store.sign("a", expires_s=seconds)
