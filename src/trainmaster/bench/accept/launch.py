"""Local ranks of an acceptance run: started, watched, and none left behind. A rank that dies is named."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from trainmaster.bench.accept.options import Options
from trainmaster.bench.accept.record import RankRecord
from trainmaster.bench.collectives.capabilities import free_ports
from trainmaster.core import schema

PARENT_VARIABLE = "TRAINMASTER_ACCEPT_PARENT"  # the launcher's process number; ranks end with it
_LOOK_S = 0.05
_GRACE_S = 2.0  # after one rank ended: time for the ends of others to show


class RankLost(Exception):
    """Ranks that ended before the others, each with its last words."""

    def __init__(self, lost: dict[int, str]) -> None:
        super().__init__("; ".join(f"rank {rank}: {why}" for rank, why in lost.items()))
        self.lost = lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """This node among all nodes of the run, each with the same number of ranks."""

    number: int = 0
    nodes: int = 1
    master: tuple[str, int] | None = None  # None: a free port of this machine


def launch(
    options: Options, processes: int, *, show: Callable[[str], None], node: Node | None = None
) -> list[RankRecord] | None:
    """Run with local ranks; all records, None on nodes other than the first. RankLost names ranks that died."""
    node = node or Node()
    with tempfile.TemporaryDirectory(prefix="trainmaster-accept-") as name:
        folder = Path(name)
        (folder / "options.json").write_text(json.dumps(schema.to_plain(options)))
        master = node.master or ("127.0.0.1", free_ports(1)[0])
        running = [_start(local, processes, folder, node, master) for local in range(processes)]
        try:
            _watch(running, folder, show, first=node.number * processes, timeout_s=options.timeout_s)
        finally:
            _end(running)
            _keep_logs(folder, options)
        if node.number:
            return None
        records = json.loads((folder / "records.json").read_text())
    return [RankRecord(**record) for record in records]


def _start(local: int, processes: int, folder: Path, node: Node, master: tuple[str, int]) -> subprocess.Popen[bytes]:
    rank = node.number * processes + local
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PET_")},
        "RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(processes * node.nodes),
        "LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": str(node.number), "GROUP_WORLD_SIZE": str(node.nodes),
        "MASTER_ADDR": master[0], "MASTER_PORT": str(master[1]), PARENT_VARIABLE: str(os.getpid()),
    }  # fmt: skip
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "trainmaster.bench.accept", "--rank-of", str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


def _keep_logs(folder: Path, options: Options) -> None:
    """Copy the output of ranks that printed anything."""
    for log in folder.glob("rank-*.log") if options.log_dir is not None else ():
        if log.stat().st_size:
            place = Path(options.log_dir or "")
            place.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(log, place / log.name)


def _watch(
    running: list[subprocess.Popen[bytes]], folder: Path, show: Callable[[str], None], *, first: int, timeout_s: float
) -> None:
    shown, first_end = 0, None
    while True:
        shown = _show_new(folder / "progress", shown, show)
        codes = [process.poll() for process in running]
        if all(code == 0 for code in codes):
            return
        ended = any(code not in (None, 0) for code in codes)
        first_end = first_end or (time.monotonic() if ended else None)
        waited_s = time.monotonic() - first_end if first_end is not None else 0.0
        patience_s = timeout_s if None in codes and ended and _only_timeouts(codes, folder, first) else _GRACE_S
        if ended and waited_s > patience_s:
            raise RankLost(_lost(dict(enumerate(codes, first)), folder))
        time.sleep(_LOOK_S)


def _only_timeouts(codes: list[int | None], folder: Path, first: int) -> bool:
    """Whether ranks ended because they had waited in vain. More may still wait; one that hangs stays to the last."""
    return _in_vain([_last_words(folder, rank, code) for rank, code in enumerate(codes, first) if code])


def _lost(codes: dict[int, int | None], folder: Path) -> dict[int, str]:
    """The ranks that failed by themselves: a peer's end breaks the connections of the others, as their logs show."""
    words = {rank: _last_words(folder, rank, code) for rank, code in codes.items() if code not in (None, 0)}
    hung = [rank for rank, code in codes.items() if code is None]
    if hung and _in_vain(words.values()):
        rank, text = next((rank, text) for rank, text in words.items() if _timed_out(text))
        return dict.fromkeys(hung, f"hangs: rank {rank} waited for it and {text}")
    first = {rank: text for rank, text in words.items() if not _broken_by_peer(text)}
    return first or words


def _in_vain(words: Iterable[str]) -> bool:
    """Whether a rank gave up waiting for another one, and none had a fault of its own."""
    messages = list(words)
    return any(map(_timed_out, messages)) and all(_timed_out(text) or _broken_by_peer(text) for text in messages)


def _timed_out(text: str) -> bool:
    return any(word in text for word in ("Timed out waiting", "Watchdog caught collective operation timeout"))


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
