"""Transfers to a host behind sshd on loopback, beside `scp` and `rsync` over the same server, in one run.

    PYTHONPATH=tests python benchmarks/transfer.py                       1 GB file, 10,000 small files, a cut
    PYTHONPATH=tests python benchmarks/transfer.py --mb 100 --files 1000 --rounds 1

Rounds alternate between the programs and the fastest of each counts: other work on the machine slows all of them. Every
copy is compared with its source by SHA-256 outside the timed part. The connection is open before the first copy, as it
is for a job; scp and rsync open theirs, which takes them some 0.2 s.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from sshd import Lab, Sshd, lab
from trainmaster import targets
from trainmaster.targets.ssh.hosts import SshHost
from trainmaster.targets.ssh.session import Session, session
from trainmaster.targets.ssh.transfer import download, upload


def digest(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents of a folder."""
    total = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file()):
        total.update(b"" if path.is_file() else file.relative_to(path).as_posix().encode())
        with file.open("rb") as content:
            total.update(hashlib.file_digest(content, "sha256").digest())
    return total.hexdigest()


def make_files(folder: Path, mb: int, files: int) -> tuple[Path, Path]:
    big, small = folder / "big", folder / "small"
    with big.open("wb") as out:
        for _ in range(mb):
            out.write(os.urandom(1_000_000))
    for number in range(files):
        place = small / f"{number % 100:02d}" / f"{number}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(os.urandom(1000 + number % 3000))
    return big, small


def clear(path: Path) -> None:
    """Remove a copy, and write what it left in memory to the disk before the next one is timed."""
    subprocess.run(["rm", "-rf", str(path)], check=True)
    os.sync()


async def timed(copy: Callable[[], Awaitable[object]]) -> float:
    began = time.monotonic()
    await copy()
    return time.monotonic() - began


async def compare(node: Session, machines: Lab, host: Sshd, source: Path, there: Path, rounds: int) -> dict[str, float]:
    """Fastest seconds of each program for one source."""
    options = ["-i", str(machines.key), "-o", f"UserKnownHostsFile={machines.known_hosts}", "-o", "BatchMode=yes"]
    remote, end = f"127.0.0.1:{there}", "/" if source.name == "small" else ""

    def program(*words: str) -> Callable[[], Awaitable[object]]:
        return lambda: asyncio.to_thread(subprocess.run, words, check=True)

    ways = {
        "trainmaster": lambda: upload(node, source, str(there)),
        "scp": program("scp", "-q", "-r", "-P", str(host.port), *options, str(source), remote),
    }
    if shutil.which("rsync"):
        shell = " ".join(["ssh", "-p", str(host.port), *options])
        ways["rsync"] = program("rsync", "-a", "-e", shell, f"{source}{end}", f"{remote}{end}")
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, copy in ways.items():
            clear(there)
            took = await timed(copy)
            assert digest(there) == digest(source), name
            best[name] = min(took, best.get(name, took))
    back = source.with_name("back")
    for _ in range(rounds):
        clear(back)
        took = await timed(lambda: download(node, str(there), back))
        assert digest(back) == digest(source)
        best["trainmaster, download"] = min(took, best.get("trainmaster, download", took))
    return best


async def cut(node: Session, host: Sshd, source: Path, there: Path) -> tuple[float, int]:
    """Upload with the connection cut in the middle; seconds, and bytes that were there when it went on."""
    kept: list[int] = []

    def watch(done: int, total: int) -> None:
        if not kept and done > total // 2:
            kept.append(done)
            host.cut(also_server=False)

    clear(there)
    took = await timed(lambda: upload(node, source, str(there), progress=watch))
    assert digest(there) == digest(source)
    return took, kept[0]


async def measure(folder: Path, machines: Lab, host: Sshd, args: argparse.Namespace) -> None:
    entry = SshHost(host="127.0.0.1", name="n1", port=host.port, key=str(machines.key), python=sys.executable)
    node = session(entry, machines.known_hosts.read_bytes())
    big, small = make_files(folder, args.mb, args.files)
    try:
        await node.ask("exists", path="/")
        for source, what in ((big, f"{args.mb} MB file"), (small, f"{args.files:,} small files")):
            best = await compare(node, machines, host, source, folder / "there", args.rounds)
            size = sum(one.stat().st_size for one in [source, *source.rglob("*")] if one.is_file())
            print(what)
            for name, took in best.items():
                print(f"  {name:22} {took:7.2f} s {size / took / 1e6:7.0f} MB/s   scp took {best['scp'] / took:.2f} ×")
            clear(folder / "there")
        took, kept = await cut(node, host, big, folder / "there")
        print(f"{args.mb} MB file, connection cut after {kept / 1e6:.0f} MB: {took:.2f} s, SHA-256 equal")
    finally:
        await targets.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="transfer-") as folder, lab(Path(folder)) as machines:
        host = machines.start("n1")
        machines.wait()
        asyncio.run(measure(Path(folder), machines, host, args))


if __name__ == "__main__":
    main()
