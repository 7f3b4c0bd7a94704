"""Local ranks of an acceptance run: started, watched, and none left behind. A rank that dies is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trainmaster.bench.accept.options import Options
from trainmaster.bench.accept.record import RankRecord
from trainmaster.bench.collectives.capabilities import free_ports
from trainmaster.core import schema

PARENT_VARIABLE = "TRAINMASTER_ACCEPT_PARENT"  # the launcher's process number; ranks die with it
_LOOK_S = 0.05
_GRACE_S = 2.0  # after one rank ended: time for the ends of others to show


class RankLost(Exception):
    """Ranks that ended before the others, each with its last words."""

    def __init__(self, lost: dict[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank}: {why}" for rank, why in lost.items()))
        self.lost = lost


def launch(options: Options, processes: int, *, show: Callable[[str], None]) -> list[RankRecord]:
    """Run with local ranks; their records. RankLost names those that died."""
    with tempfile.TemporaryDirectory(prefix="trainmaster-accept-") as name:
        folder = Path(name)
        (folder / "options.json").write_text(json.dumps(schema.to_plain(options)))
        port = free_ports(1)[0]
        running = [_start(rank, processes, folder, port) for rank in range(processes)]
        try:
            _watch(running, folder, show)
        finally:
            _end(running)
        records = json.loads((folder / "records.json").read_text())
    return [RankRecord(**record) for record in records]


def _start(rank: int, world: int, folder: Path, port: int) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), PARENT_VARIABLE: str(os.getpid()),
    }  # fmt: skip
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "trainmaster.bench.accept", "--rank-of", str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


def _watch(running: list[subprocess.Popen[bytes]], folder: Path, show: Callable[[str], None]) -> None:
    shown, first_end = 0, None
    while True:
        shown = _show_new(folder / "progress", shown, show)
        codes = [process.poll() for process in running]
        if all(code == 0 for code in codes):
            return
        ended = any(code not in (None, 0) for code in codes)
        first_end = first_end or (time.monotonic() if ended else None)
        if first_end is not None and time.monotonic() - first_end > _GRACE_S:
            raise RankLost(_lost(codes, folder))
        time.sleep(_LOOK_S)


def _lost(codes: list[int | None], folder: Path) -> dict[int, str]:
    """The ranks that failed by themselves: a peer's end breaks the connections of the others, and they say so."""
    words = {rank: _last_words(folder, rank, code) for rank, code in enumerate(codes) if code not in (None, 0)}
    first = {rank: text for rank, text in words.items() if not _broken_by_peer(text)}
    return first or words


def _broken_by_peer(text: str) -> bool:
    return any(word in text for word in ("Connection closed by peer", "Connection reset by peer", "DistNetworkError"))


def _last_words(folder: Path, rank: int, code: int | None) -> str:
    lines = (folder / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines()
    how = f"ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with {code}"
    return f"{how}: {lines[-1][:400]}" if lines else how


def _show_new(path: Path, shown: int, show: Callable[[str], None]) -> int:
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines[shown:]:
        show(line)
    return len(lines)


def _end(running: list[subprocess.Popen[bytes]]) -> None:
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
