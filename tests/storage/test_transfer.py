"""Checksums, large objects in parts, and downloads that were cut off: over a link that really breaks."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from trainmaster.core.errors import Damaged, StorageError, StorageUnreachable
from trainmaster.storage import Store, open_store
from trainmaster.storage.objects import part_bytes
from trainmaster.storage.transfer import _part, download, upload, verify


def test_a_large_file_goes_up_in_parts_and_comes_back(any_store: Store, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 18  # three parts of 8 MiB
    (tmp_path / "large").write_bytes(data)
    sent = upload(any_store, "large", tmp_path / "large")
    assert upload(any_store, "pieces", (data[n : n + 1_000_000] for n in range(0, len(data), 1_000_000))) == sent
    assert download(any_store, "pieces", tmp_path / "back", sha256=sent.sha256) == sent
    assert (tmp_path / "back").read_bytes() == data


@pytest.mark.parametrize("size", [0, 1, 80 << 30, (80 << 30) + 1, 5 << 40])
def test_no_object_has_more_parts_than_s3_takes(size: int) -> None:
    part = part_bytes(size)
    assert part >= 5 << 20 and -(-size // part) <= 10_000


def test_an_object_that_was_changed_is_found(any_store: Store, tmp_path: Path) -> None:
    sent = upload(any_store, "a", b"right")
    for wrong in (b"wrong", b"right and more", b""):
        any_store.put("a", wrong)
        with pytest.raises(Damaged):
            verify(any_store, "a", sent)
        with pytest.raises(Damaged):
            download(any_store, "a", tmp_path / "a", sha256=sent.sha256)
        assert list(tmp_path.glob("*a*")) == []  # neither the file nor a part that would be gone on with
    any_store.put("a", b"right")
    verify(any_store, "a", sent)


def test_an_empty_object(any_store: Store, tmp_path: Path) -> None:
    sent = upload(any_store, "none", b"")
    assert download(any_store, "none", tmp_path / "none") == sent
    assert (tmp_path / "none").read_bytes() == b""


def test_bytes_of_an_object_that_was_replaced_are_not_gone_on_with(any_store: Store, tmp_path: Path) -> None:
    upload(any_store, "a", b"1" * 3000)
    _part(tmp_path / "a", any_store.stat("a").version).write_bytes(b"1" * 1000)  # as a download leaves that was cut off
    sent = upload(any_store, "a", b"2" * 3000)
    assert download(any_store, "a", tmp_path / "a", chunk=1000) == sent
    assert (tmp_path / "a").read_bytes() == b"2" * 3000 and list(tmp_path.glob(".a.*")) == []


def test_a_download_over_a_lost_connection_goes_on_where_it_was(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.use(monkeypatch)
    data = os.urandom(4 << 20)
    place = f"s3://{s3.bucket}/{tmp_path.name}/cut"
    sent = upload(open_store(place), "a", data)
    with link(s3.endpoint, budget=2_500_000) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        with pytest.raises(StorageUnreachable):
            download(open_store(place), "a", tmp_path / "a", chunk=1 << 20)
    (part,) = tmp_path.glob(".a.*.part")
    assert part.read_bytes() == data[: 2 << 20] and not (tmp_path / "a").exists()
    with link(s3.endpoint, budget=2_500_000) as address:  # not enough for all of it: the first half is not read again
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        assert download(open_store(place), "a", tmp_path / "a", sha256=sent.sha256, chunk=1 << 20) == sent
    assert (tmp_path / "a").read_bytes() == data


def test_a_file_that_cannot_be_written(any_store: Store, tmp_path: Path) -> None:
    upload(any_store, "a", b"1")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        download(any_store, "a", tmp_path / "file" / "a")


@contextlib.contextmanager
def link(endpoint: str, *, budget: int) -> Iterator[str]:
    """A way to the server that carries so many bytes back, and then breaks for good."""
    server = urlsplit(endpoint)
    left, lock = [budget], threading.Lock()
    listening = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, to: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if counted:
                    with lock:
                        left[0] -= len(data)
                    if left[0] < 0:
                        with contextlib.suppress(OSError):
                            listening.shutdown(socket.SHUT_RDWR)
                        break
                to.sendall(data)
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    threads: list[threading.Thread] = []
    opened: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                behind = socket.create_connection((server.hostname or "", server.port or 0))
                opened.extend((client, behind))
                for arguments in ((client, behind, False), (behind, client, True)):
                    threads.append(threading.Thread(target=carry, args=arguments))
                    threads[-1].start()

    threads.append(threading.Thread(target=accept))
    threads[0].start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for end in opened:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for end in opened:
            end.close()
