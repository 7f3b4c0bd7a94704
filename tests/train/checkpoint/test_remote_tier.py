"""The copy in an object store: whole or not there, verified both ways, and a download goes on where it ended."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from s3_server import S3
from trainmaster.core.errors import CheckpointError, StorageError
from trainmaster.storage import Store, open_store
from trainmaster.train.checkpoint import manifest as manifests
from trainmaster.train.checkpoint.manifest import Manifest
from trainmaster.train.checkpoint.tiers import remote as tier
from trainmaster.train.checkpoint.tiers.remote import Remote, list_steps
from trainmaster.train.parallel import rank_sync, shard

from ..runs import ALONE

FILES = {".metadata": b"index", "__0_0.distcp": bytes(range(256)) * 30_000, "__1_0.distcp": b"second" * 1000}


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A group of one rank."""
    shard.join(ALONE, torch.device("cpu"), timeout_s=60)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["folder", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "folder":
        return str(tmp_path / "far")
    server: S3 = request.getfixturevalue("s3")
    server.use(monkeypatch)
    return f"s3://{server.bucket}/{tmp_path.name}/run"


def put_on_disk(disk: Path, step: int) -> Path:
    """A committed checkpoint of the disk tier."""
    draft = disk / f"step-{step:08d}.tmp"
    manifests.begin(draft)
    for name, data in FILES.items():
        (draft / name).write_bytes(data + str(step).encode())
    files = {name: manifests.measure(draft / name) for name in FILES}
    manifest = Manifest(
        step=step, state={"step": step}, run={}, files=files, ranks=2, torch="2", saved_at="2026-01-01T00:00:00+00:00"
    )
    return manifests.commit(draft, manifest)


def remote(url: str, disk: Path) -> Remote:
    return Remote(url, disk=disk, lease_s=60, uploads=None, asks=None)


def test_what_goes_there_comes_back_and_the_old_is_deleted(url: str, tmp_path: Path) -> None:
    disk, other = tmp_path / "disk", tmp_path / "other"
    store = open_store(url)
    for step in (10, 20, 30):
        put_on_disk(disk, step)
        assert remote(url, disk).upload(step, keep=2) is None
    assert remote(url, other).list_steps() == [30, 20]
    folders = {item.path.split("/")[0] for item in store.list()}
    assert folders == {".lock", "step-00000020", "step-00000020.2", "step-00000030", "step-00000030.3"}
    path, manifest = remote(url, other).fetch(30)
    assert path == other / "step-00000030"
    assert manifests.find_fault(path, manifest.files, deep=True) is None
    assert (path / "__0_0.distcp").read_bytes() == FILES["__0_0.distcp"] + b"30"
    assert manifests.read(path) == manifest == manifests.read(disk / "step-00000030")


def test_an_upload_that_was_cut_off_is_never_read(url: str, tmp_path: Path) -> None:
    disk, store = tmp_path / "disk", open_store(url)
    put_on_disk(disk, 10)
    remote(url, disk).upload(10, keep=2)
    path = put_on_disk(disk, 20)
    # Damaged under the upload's hands: what does not match the manifest is not put there, nor is a manifest.
    (path / "__0_0.distcp").write_bytes(FILES["__0_0.distcp"] + b"21")
    with pytest.raises(rank_sync.RankError, match="does not match its SHA-256, and was not uploaded"):
        remote(url, disk).upload(20, keep=2)
    assert not store.exists("step-00000020.2/__0_0.distcp")
    assert list_steps(store) == [10]
    put_on_disk(disk, 30)
    remote(url, disk).upload(30, keep=2)
    assert list_steps(store) == [30, 10]
    assert store.list("step-00000020.2") == []  # its remains are deleted


def test_an_older_upload_of_the_same_step_is_whole_until_it_is_replaced(url: str, tmp_path: Path) -> None:
    disk, store = tmp_path / "disk", open_store(url)
    path = put_on_disk(disk, 10)
    remote(url, disk).upload(10, keep=2)
    data = (path / "__1_0.distcp").read_bytes()
    (path / "__1_0.distcp").unlink()
    with pytest.raises(rank_sync.RankError):
        remote(url, disk).upload(10, keep=2)
    remote(url, tmp_path / "other").fetch(10)
    (path / "__1_0.distcp").write_bytes(data)
    remote(url, disk).upload(10, keep=2)
    assert {item.path.split("/")[0] for item in store.list()} == {".lock", "step-00000010", "step-00000010.3"}
    remote(url, tmp_path / "third").fetch(10)


def test_an_upload_of_version_0_1_0_is_read(tmp_path: Path) -> None:
    """Its files lie beside the manifest, which names no prefix and no fencing number."""
    path = put_on_disk(tmp_path / "disk", 10)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["fence"], manifest["objects"], manifest["digest"]
    plain = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["digest"] = hashlib.sha256(plain.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    shutil.copytree(path, tmp_path / "far" / path.name)
    fetched, found = remote(str(tmp_path / "far"), tmp_path / "other").fetch(10)
    assert manifests.find_fault(fetched, found.files, deep=True) is None


def test_damage_there_is_found(url: str, tmp_path: Path) -> None:
    disk, store = tmp_path / "disk", open_store(url)
    put_on_disk(disk, 10)
    remote(url, disk).upload(10, keep=2)

    def fetch() -> str:
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        with pytest.raises(rank_sync.RankError) as refused:
            remote(url, tmp_path / "other").fetch(10)
        assert list((tmp_path / "other").glob("step-????????")) == []
        return str(refused.value)

    store.put("step-00000010.1/__1_0.distcp", b"Second" * 1000 + b"10")
    assert "step-00000010.1/__1_0.distcp does not match its SHA-256" in fetch()
    store.put("step-00000010.1/__1_0.distcp", b"short")
    assert "__1_0.distcp has 5 bytes instead of 6002" in fetch()
    store.delete("step-00000010.1/__1_0.distcp")
    assert "__1_0.distcp is missing" in fetch()
    store.put("step-00000010/manifest.json", b"{")
    assert "manifest.json is damaged" in fetch()


class Counting:
    """A store that counts what is read from it, and may fail for a while."""

    def __init__(self, store: Store, fail_after: int | None = None) -> None:
        self._store, self.read_bytes, self.left, self.url = store, 0, fail_after, store.url

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def read(self, path: str, *, start: int, size: int) -> bytes:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise StorageError("the store has a bad minute")
        self.read_bytes += size
        return self._store.read(path, start=start, size=size)


def test_a_download_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, url, monkey = tmp_path / "disk", str(tmp_path / "far"), monkeypatch
    monkey.setattr(tier, "_PIECE_BYTES", 1 << 20)
    monkey.setattr(tier, "_PAUSES_S", (0.0,))
    manifest = manifests.read(put_on_disk(disk, 10))
    remote(url, disk).upload(10, keep=2)
    broken = remote(url, tmp_path / "other")
    broken._store = Counting(open_store(url), fail_after=3)  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="was found, and cannot be downloaded now: the store has a bad minute"):
        broken.fetch(10)
    assert (tmp_path / "other" / "step-00000010.tmp" / "__0_0.distcp").stat().st_size == 3 << 20
    again = remote(url, tmp_path / "other")
    counting = Counting(open_store(url))
    again._store = counting  # type: ignore[assignment]
    path, _ = again.fetch(10)
    assert counting.read_bytes == manifest.size_bytes - (3 << 20)
    assert manifests.find_fault(path, manifest.files, deep=True) is None


def test_what_a_cut_off_save_left_is_no_part_of_a_download(tmp_path: Path) -> None:
    disk, url, other = tmp_path / "disk", str(tmp_path / "far"), tmp_path / "other"
    put_on_disk(disk, 10)
    remote(url, disk).upload(10, keep=2)
    draft = other / "step-00000010.tmp"
    draft.mkdir(parents=True)
    (draft / "__0_0.distcp").write_bytes(b"half a shard of another time")
    (draft / "__7_0.distcp").write_bytes(b"and a rank that is no more")
    path, manifest = remote(url, other).fetch(10)
    assert {entry.name for entry in path.iterdir()} == {*FILES, "manifest.json"}
    assert manifests.find_fault(path, manifest.files, deep=True) is None


def test_a_store_that_does_not_answer_says_nothing_of_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    S3(endpoint=f"http://127.0.0.1:{port}").use(monkeypatch)
    with pytest.raises(rank_sync.RankError, match="no answer"):
        remote("s3://bundles/run", tmp_path).list_steps()
