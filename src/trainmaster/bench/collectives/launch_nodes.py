"""One rank of a run that another launcher started (torchrun, Slurm, MPI), on one machine or many.

The collectives run in a thread; the main thread publishes the rank's progress to the shared store twice a second, over
a connection of its own. Rank 0's main thread reads all of it and judges: a rank that is stopped, dead or cut off stops
publishing; one that hangs in a collective goes on.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from trainmaster.bench.collectives import rank as worker
from trainmaster.bench.collectives import report
from trainmaster.bench.collectives.gather import RankRecords, RunOutcome, row_of, sum_up
from trainmaster.bench.collectives.hang import RankView, find_lost_ranks
from trainmaster.bench.collectives.launch import NCCL_DEBUG
from trainmaster.bench.collectives.progress import Progress, pack, unpack
from trainmaster.bench.collectives.result import Lost, Report, Row
from trainmaster.bench.collectives.route import lead_gloo
from trainmaster.bench.collectives.sweep import Backend, Point, Sweep, cut, points
from trainmaster.bench.collectives.transport import Expected
from trainmaster.core.errors import TrainmasterError
from trainmaster.node.node_name import host_name
from trainmaster.node.parse import ParseError
from trainmaster.node.parse.nccl_debug import NcclLog, parse_lines
from trainmaster.train.parallel.rank_info import RankInfo

_PUBLISH_S = 0.5
_SILENT_S = 5.0  # ten publish intervals
# After a failure: its neighbours fail with it, and a dead rank shows only by its silence.
_GRACE_S = _SILENT_S + 1.0
_LOG_BYTES = 32 << 20  # a larger log is not sent, and proves nothing


@dataclass(slots=True)
class _Memory:
    """Progress of this rank, kept until it is published."""

    lines: list[str] = field(default_factory=list)
    now: Progress = field(default_factory=Progress)
    done: bool = False

    def record(self, what: str, **words: Any) -> None:
        self.lines.append(json.dumps({"what": what, "at": time.time(), **words}))
        self.done |= what == "done"

    def advance(self, seq: int, op: int, *, inside: bool) -> None:
        self.now = Progress(seq=seq, op=op, inside=inside, beats=self.now.beats + 1, at=time.time())

    def close(self) -> None:
        pass


def take_part(
    sweep: Sweep,
    rank_info: RankInfo,
    backend: Backend,
    *,
    folder: Path,
    expected: Expected | None = None,
    least_gbps: float | None = None,
    on_row: Callable[[Row], None] = lambda _: None,
) -> Report | int:
    """The report on rank 0; on other ranks the exit code that rank 0 decided on.

    After a loss the thread is still inside its collective: the caller must end the process with `os._exit`.
    """
    begun = time.monotonic()
    log = folder / f"nccl-{rank_info.rank}.log"
    if backend == "nccl":
        os.environ.update({**NCCL_DEBUG, "NCCL_DEBUG_FILE": str(log)})
    elif rank_info.nodes > 1 and rank_info.master is not None:
        lead_gloo(os.environ, rank_info.master[0])
    store = _connect_store(sweep, rank_info)
    memory = _Memory()
    config = worker.RankConfig(
        rank=rank_info.rank,
        world=rank_info.world_size,
        local_rank=rank_info.local_rank,
        local_world=rank_info.local_world_size,
        backend=backend,
    )
    own = store.clone()  # the collectives' thread may block on its connection; publishing needs its own
    thread = threading.Thread(target=_work, args=(sweep, config, store, memory), daemon=True, name="collectives")
    thread.start()
    main = _MainThread(sweep, config, own, memory, log)
    if rank_info.rank != 0:
        return main.publish_until_verdict()
    outcome, logs, hosts = main.judge(on_row)
    judged = report(
        sweep,
        outcome,
        backend=backend,
        world=rank_info.world_size,
        nodes=max(hosts, rank_info.nodes),  # includes hosts that never published
        log=logs,
        expected=expected,
        least_gbps=least_gbps,
        took_s=time.monotonic() - begun,
    )
    main.dismiss(judged)
    return judged


def _connect_store(sweep: Sweep, rank_info: RankInfo) -> Any:
    """The store shared by all ranks. (torch types neither `clone` nor values that are bytes.)"""
    if rank_info.master is not None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = rank_info.master[0], str(rank_info.master[1])
    timeout = datetime.timedelta(seconds=sweep.start_timeout_s)
    try:
        met = next(iter(rendezvous("env://", rank=rank_info.rank, world_size=rank_info.world_size, timeout=timeout)))
    except RuntimeError as error:
        raise TrainmasterError(
            f"rank {rank_info.rank} on {host_name()} cannot reach rank 0 at {rank_info.master}: "
            f"{str(error).splitlines()[0][:300]}"
        ) from None
    return PrefixStore("trainmaster-bandwidth", met[0])


def _work(sweep: Sweep, config: worker.RankConfig, store: Store, memory: _Memory) -> None:
    try:
        worker.run(sweep, config, store, memory)
    except Exception as error:
        memory.record("failed", why=f"{type(error).__name__}: {error}"[:2000])


@dataclass(slots=True)
class _Seen:
    """State of one rank as rank 0 sees it."""

    records: RankRecords
    lines: int = 0
    beat: int = -1  # of its main thread
    changed: float = field(default_factory=time.monotonic)
    progress: Progress = field(default_factory=Progress)
    host: str = "an unknown host"
    pid: int | None = None


class _MainThread:
    """The main thread of a rank: publishes its progress; at rank 0 it also reads and judges all ranks."""

    def __init__(self, sweep: Sweep, config: worker.RankConfig, store: Any, memory: _Memory, log: Path) -> None:
        self._sweep, self._config, self._backend = sweep, config, config.backend
        self._store, self._memory, self._log = store, memory, log
        self._sent = self._beat = 0
        self._log_sent = False

    def publish_until_verdict(self) -> int:
        quiet: float | None = None
        while True:
            try:
                self._publish()
                quiet = None
                if self._store.check(["verdict"]):
                    return int(self._store.get("verdict"))
            except RuntimeError as error:  # torch's DistError and its kin
                quiet = quiet or time.monotonic()
                if time.monotonic() - quiet > _SILENT_S:
                    raise TrainmasterError(
                        f"rank 0, which judges, does not answer rank {self._config.rank} on {host_name()}: "
                        f"it is gone or cut off ({str(error).splitlines()[0][:200]})"
                    ) from None
            time.sleep(_PUBLISH_S)

    def _publish(self) -> None:
        rank = self._config.rank
        while self._sent < len(self._memory.lines):
            self._store.set(f"line/{rank}/{self._sent}", self._memory.lines[self._sent])
            self._sent += 1
        if self._memory.done and not self._log_sent:
            self._log_sent = True
            self._store.set(f"log/{rank}", _squeeze(self._log))
        self._beat += 1
        head = json.dumps({"beat": self._beat, "lines": self._sent, "host": host_name(), "pid": os.getpid()})
        self._store.set(f"pulse/{rank}", pack(self._memory.now) + head.encode())

    def judge(self, on_row: Callable[[Row], None]) -> tuple[RunOutcome, NcclLog | None, int]:
        world = self._config.world
        seen = [_Seen(records=RankRecords(rank=rank)) for rank in range(world)]
        plan, shown = points(self._sweep, self._backend), 0
        signs: object = None
        since = time.monotonic()
        broken: float | None = None
        while True:
            self._publish()
            self._listen(seen)
            now = time.monotonic()
            planned = next((item.records.points for item in seen if item.records.points is not None), None)
            if planned is not None and planned != len(plan):
                plan = cut(self._sweep, plan, planned)
            shown = _show(seen, plan, shown, on_row)
            if (new := [(item.progress.beats, len(item.records.timings)) for item in seen]) != signs:
                signs, since = new, now
            lost: list[Lost] = []
            if not all(item.records.done for item in seen):
                if any(item.records.error for item in seen) and broken is None:
                    broken = now
                limit = self._sweep.timeout_s if all(i.records.met for i in seen) else self._sweep.start_timeout_s
                if now - since <= limit and (broken is None or now - broken <= _GRACE_S):
                    time.sleep(_PUBLISH_S)
                    continue
                lost = find_lost_ranks([_view(item, now) for item in seen], plan, waited_s=now - since)
            outcome = sum_up([item.records for item in seen], plan, lost)
            hosts = {item.host for item in seen if item.beat >= 0}
            return outcome, self._logs(seen), len(hosts)

    def _listen(self, seen: list[_Seen]) -> None:
        for rank, item in enumerate(seen):
            if not self._store.check([f"pulse/{rank}"]):
                continue
            raw = self._store.get(f"pulse/{rank}")
            size = len(pack(Progress()))
            head = json.loads(raw[size:])
            item.progress, item.host, item.pid = unpack(raw[:size]), str(head["host"]), int(head["pid"])
            if head["beat"] != item.beat:
                item.beat, item.changed = head["beat"], time.monotonic()
            for number in range(item.lines, int(head["lines"])):
                item.records.take(json.loads(self._store.get(f"line/{rank}/{number}")))
                item.lines = number + 1

    def _logs(self, seen: list[_Seen]) -> NcclLog | None:
        if self._backend != "nccl":
            return None
        deadline = time.monotonic() + _SILENT_S
        lines: list[str] = []
        for rank in range(len(seen)):
            while not self._store.check([f"log/{rank}"]) and time.monotonic() < deadline:
                time.sleep(0.05)
            if self._store.check([f"log/{rank}"]):
                lines += zlib.decompress(self._store.get(f"log/{rank}")).decode("utf-8", "replace").splitlines()
        try:
            return parse_lines(lines)
        except ParseError:
            return None

    def dismiss(self, judged: Report) -> None:
        """Publish the verdict, and stay until the living ranks have had time to read it."""
        from trainmaster.core.results import exit_code

        with contextlib.suppress(RuntimeError):
            self._store.set("verdict", str(exit_code(judged.overall)))
            time.sleep(3 * _PUBLISH_S)


def _show(seen: list[_Seen], plan: list[Point], shown: int, on_row: Callable[[Row], None]) -> int:
    while shown < len(plan):
        finished = [item.records.timings[shown] for item in seen if shown in item.records.timings]
        if len(finished) < len(seen):
            break
        on_row(row_of(plan[shown], finished, len(seen)))
        shown += 1
    return shown


def _view(item: _Seen, now: float) -> RankView:
    quiet = now - item.changed
    return RankView(
        rank=item.records.rank,
        host=item.host,
        pid=item.pid,
        progress=item.progress,
        error=item.records.error,
        failed_at=item.records.failed_at,
        done=item.records.done,
        silent_s=quiet if quiet > _SILENT_S else None,
    )


def _squeeze(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except OSError:
        return zlib.compress(b"")
    return zlib.compress(raw if len(raw) <= _LOG_BYTES else b"")
