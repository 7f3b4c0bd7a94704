"""Local launcher: starts the ranks, watches their progress, names a rank that stops, leaves nothing running.

The launcher judges because it takes no part: a hung collective cannot hang it. It imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainmaster.bench.collectives.gather import RankRecords, RunOutcome, row_of, sum_up
from trainmaster.bench.collectives.hang import RankView, find_lost_ranks
from trainmaster.bench.collectives.progress import ProgressReader
from trainmaster.bench.collectives.result import Row
from trainmaster.bench.collectives.sweep import Backend, Point, Sweep, cut, points
from trainmaster.core import schema
from trainmaster.node.owner import die_with
from trainmaster.train.watch.hang_ladder import read_state

PROGRAM = (sys.executable, "-m", "trainmaster.bench.collectives.rank")
_POLL_S = 0.05
# After one rank ended: time for the others' ends to show. Two may fail at once, and both are named.
_GRACE_S = 1.5
_REAP_S = 5.0


def launch(
    sweep: Sweep,
    backend: Backend,
    processes: int,
    folder: Path,
    *,
    on_row: Callable[[Row], None] = lambda _: None,
    program: Sequence[str] = PROGRAM,
    env: Mapping[str, str] | None = None,
) -> RunOutcome:
    """Run the sweep with local ranks; `folder` keeps their progress files and output."""
    _clear(folder)
    plain = schema.to_plain(sweep)
    (folder / "sweep.json").write_text(json.dumps({**plain, "backend": backend, "processes": processes}) + "\n")
    running: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(processes):
            running.append(_start(rank, processes, folder, backend, program=program, env=env or {}))
        return _Watch(sweep, backend, folder, running, on_row).until_the_end()
    finally:
        _end(running)


def _clear(folder: Path) -> None:
    """Remove an earlier run's files, which would be read as this run's."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("rank-*.jsonl", "rank-*.pulse", "rank-*.log", "nccl-*.log", "store"):
        for path in folder.glob(pattern):
            path.unlink()


def _start(
    rank: int, world: int, folder: Path, backend: Backend, *, program: Sequence[str], env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    own = {
        **_OWN[backend],
        **os.environ,
        **_debug(backend, folder, rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "TRAINMASTER_BANDWIDTH_PARENT": str(os.getpid()),
        **env,
    }
    with (folder / f"rank-{rank}.log").open("wb") as log:
        # A session of its own: it and all it starts can be killed together.
        return subprocess.Popen(
            [*program, str(folder)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=own, start_new_session=True,
            preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 (two system calls; a rank asks late, after torch is loaded)
        )  # fmt: skip


# The user's settings win: they may be what is tested.
_OWN: Mapping[str, Mapping[str, str]] = {
    "gloo": {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},  # a name that does not resolve must not matter here
    "nccl": {},
}


def _debug(backend: Backend, folder: Path, rank: int) -> dict[str, str]:
    """NCCL's own log of its transports, one file per rank: the proof of transport."""
    if backend != "nccl":
        return {}
    return {**NCCL_DEBUG, "NCCL_DEBUG_FILE": str(folder / f"nccl-{rank}.log")}


# Channels are logged under INIT. COLL would log every round and distort the measurement.
NCCL_DEBUG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV"}


class _Watch:
    """Watcher of every rank's progress and process."""

    def __init__(
        self,
        sweep: Sweep,
        backend: Backend,
        folder: Path,
        running: Sequence[subprocess.Popen[bytes]],
        on_row: Callable[[Row], None],
    ) -> None:
        self._sweep, self._backend, self._running, self._on_row = sweep, backend, running, on_row
        self._readers = [ProgressReader(folder, rank) for rank in range(len(running))]
        self._records = [RankRecords(rank=rank) for rank in range(len(running))]
        self._folder = folder
        self._points: list[Point] = points(sweep, backend)
        self._shown = 0

    def until_the_end(self) -> RunOutcome:
        signs: object = None
        since = time.monotonic()
        ended: float | None = None  # when a rank was first seen to have ended too early
        while True:
            self._poll()
            now = time.monotonic()
            if all(records.done for records in self._records):
                self._let_go()
                return sum_up(self._records, self._points, [])
            if (seen := self._signs()) != signs:
                signs, since = seen, now
            early = [
                process
                for process, records in zip(self._running, self._records, strict=True)
                if process.poll() is not None and not records.done
            ]
            if early and ended is None:
                ended = now
            limit = (
                self._sweep.timeout_s if all(records.met for records in self._records) else self._sweep.start_timeout_s
            )
            if (ended is not None and now - ended > _GRACE_S) or now - since > limit:
                self._poll()
                views = [self._view(rank) for rank in range(len(self._running))]
                return sum_up(self._records, self._points, find_lost_ranks(views, self._points, waited_s=now - since))
            time.sleep(_POLL_S)

    def _let_go(self) -> None:
        """Grace period: killing a rank while it closes a device can upset the driver."""
        deadline = time.monotonic() + _REAP_S
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(deadline - time.monotonic(), 0.1))

    def _poll(self) -> None:
        for reader, records in zip(self._readers, self._records, strict=True):
            for line in reader.lines():
                records.take(line)
        planned = next((records.points for records in self._records if records.points is not None), None)
        if planned is not None and planned != len(self._points):
            self._points = cut(self._sweep, self._points, planned)
        while self._shown < len(self._points):
            point = self._points[self._shown]
            finished = [records.timings[point.seq] for records in self._records if point.seq in records.timings]
            if len(finished) < len(self._records):
                return
            self._on_row(row_of(point, finished, len(self._records)))
            self._shown += 1

    def _signs(self) -> object:
        both = zip(self._readers, self._records, strict=True)
        return [(reader.progress().beats, len(records.timings), records.met) for reader, records in both]

    def _view(self, rank: int) -> RankView:
        records, process = self._records[rank], self._running[rank]
        code = process.poll()
        return RankView(
            rank=rank,
            host=records.member.host if records.member else os.uname().nodename,
            pid=process.pid,
            progress=self._readers[rank].progress(),
            exit_code=code,
            state=read_state(process.pid),
            error=records.error or (_last_words(self._folder, rank) if code is not None and code > 0 else None),
            failed_at=records.failed_at,
            done=records.done,
        )


def _last_words(folder: Path, rank: int) -> str | None:
    """Last output line of a rank that ended before its first record, for example for want of torch."""
    try:
        lines = (folder / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines()
    except OSError:
        return None
    return lines[-1][:500] if lines and "Error" in lines[-1] else None


def _end(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill every remaining rank with its children, stopped ones included, and reap them."""
    for process in running:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + _REAP_S
    for process in running:
        # A process that a faulty driver holds in the kernel cannot be reaped.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(deadline - time.monotonic(), 0.1))
