"""Seed 004, phase 2.3: file transfer over SSH, on a real OpenSSH server. One test per checkbox, named after it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from sshd import needs_sshd
from trainmaster.core.errors import PathDenied
from trainmaster.targets.ssh.transfer import download, upload

pytestmark = [pytest.mark.spawns, needs_sshd]


def digest(path: Path) -> str:
    """SHA-256 by another program."""
    return subprocess.run(["sha256sum", str(path)], check=True, capture_output=True, text=True).stdout.split()[0]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.jsonl").write_bytes(b'{"x": 1}\n')
    return tmp_path / "here"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A folder that the server has and this test looks into."""
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


def test_can_upload_single_file_to_gpu_server(box: Any, run: Any, here: Path, there: Path) -> None:
    async def go() -> None:
        receipt = await upload(box(), here / "a.jsonl", f"{there}/b.jsonl")
        assert (receipt.files, receipt.size_bytes) == (1, 9)

    run(go())
    assert (there / "b.jsonl").read_bytes() == b'{"x": 1}\n'
    assert [path.name for path in there.iterdir()] == ["b.jsonl"]


def test_can_upload_to_nested_directories(box: Any, run: Any, here: Path, there: Path) -> None:
    async def go() -> None:
        await upload(box(), here / "a.jsonl", f"{there}/data/train/a.jsonl")

    run(go())
    assert (there / "data" / "train" / "a.jsonl").read_bytes() == b'{"x": 1}\n'


def test_can_download_single_file_from_gpu_server(box: Any, run: Any, here: Path, there: Path) -> None:
    (there / "result").write_bytes(b"result")

    async def go() -> None:
        await download(box(), f"{there}/result", here / "new" / "copy")

    run(go())
    assert (here / "new" / "copy").read_bytes() == b"result"


def test_can_upload_multiple_files(box: Any, run: Any, here: Path, there: Path) -> None:
    for number in range(500):
        (here / f"{number}").write_bytes(os.urandom(number))
    seen: list[tuple[int, int]] = []

    async def go() -> None:
        receipt = await upload(box(), here, str(there), progress=lambda done, total: seen.append((done, total)))
        assert receipt.files == 501

    run(go())
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {
        path.name: path.read_bytes() for path in here.iterdir()
    }
    total = sum(path.stat().st_size for path in here.iterdir())
    assert seen[0] == (0, total) and seen[-1] == (total, total)


def test_can_download_entire_directory_recursively(box: Any, run: Any, here: Path, there: Path) -> None:
    for number in range(50):
        (there / f"{number % 5}" / "deep").mkdir(parents=True, exist_ok=True)
        (there / f"{number % 5}" / "deep" / f"{number}").write_bytes(os.urandom(2000))

    async def go() -> None:
        assert (await download(box(), str(there), here / "all")).files == 50

    run(go())
    files = [path.relative_to(there) for path in there.rglob("*") if path.is_file()]
    assert len(files) == 50
    assert all((here / "all" / name).read_bytes() == (there / name).read_bytes() for name in files)


def test_file_integrity_verified(box: Any, run: Any, here: Path, there: Path) -> None:
    (here / "model").write_bytes(os.urandom(20_000_001))

    async def go() -> None:
        receipt = await upload(box(), here / "model", f"{there}/model")
        assert receipt.size_bytes == 20_000_001
        await download(box(), f"{there}/model", here / "back")

    run(go())
    assert digest(here / "model") == digest(there / "model") == digest(here / "back")


@pytest.mark.proof
def test_handles_large_files_correctly(box: Any, run: Any, here: Path, there: Path) -> None:
    with (here / "large").open("wb") as out:
        for _ in range(110):
            out.write(os.urandom(1 << 20))

    async def go() -> None:
        assert (await upload(box(), here / "large", f"{there}/large")).size_bytes == 110 << 20

    run(go())
    assert digest(here / "large") == digest(there / "large")


@pytest.mark.proof
def test_file_transfer_speed(box: Any, run: Any, here: Path, there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured and printed; `benchmarks/transfer.py` compares it with scp and rsync."""
    (here / "speed").write_bytes(os.urandom(64 << 20))

    async def go() -> float:
        began = time.monotonic()
        receipt = await upload(box(), here / "speed", f"{there}/speed")
        return receipt.size_bytes / (time.monotonic() - began) / 1e6

    mb_per_s = run(go())
    with capsys.disabled():
        print(f"\nupload of 64 MiB: {mb_per_s:.0f} MB/s")
    assert mb_per_s > 0 and digest(there / "speed") == digest(here / "speed")


def test_handles_permission_errors(box: Any, run: Any, here: Path, there: Path) -> None:
    closed = Path("/sys/kernel") if os.geteuid() == 0 else there / "closed"  # root may write anywhere else
    if os.geteuid() != 0:
        closed.mkdir(mode=0o500)

    async def go() -> None:
        with pytest.raises(PathDenied, match=r"n1: .*(ermission|ead-only|not permitted)"):
            await upload(box(), here / "a.jsonl", f"{closed}/a/b")
        await upload(box(), here / "a.jsonl", f"{there}/open")  # the session goes on

    run(go())
    assert (there / "open").exists()
