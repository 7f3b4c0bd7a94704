"""Watchdog threads of a rank: publish its status, propagate stop requests, attribute hangs.

Every rank writes its status into the rendezvous store once a second, over a connection of its own: activity, step, and
from torch's flight recorder the collectives it has begun. The training thread does no work for it. A rank that has
waited in one collective for a quarter of the group's timeout reads all statuses, reads them again at half of it and
logs the missing ranks; shortly before the timeout it logs them once more and exits.

The same threads propagate a stop request to all ranks, and end a run at once if the request comes before the first step
is done: a long compilation does not poll, and there is nothing to save.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trainmaster.core.plan import RESUMABLE_EXIT
from trainmaster.train.parallel.rank_info import RankInfo
from trainmaster.train.run_log import RunLog, flush_output
from trainmaster.train.watch import flight_recorder, hang, hang_ladder
from trainmaster.train.watch.hang import Hang, RankProcess, RankStatus, RankView
from trainmaster.train.watch.stop import Stop

_BEAT_S = 1.0
# Shares of the time that a collective may take. Before the last of them the group itself would raise, or NCCL abort.
_LOOK_AT, _SAY_AT, _GIVE_UP_AT = 0.25, 0.5, 0.9
# Ranks that read the status of all ranks: local rank 0 of the first nodes. The others read the leaders' verdict, and
# find out by themselves, between these shares of the time, only if there is none.
_LEADERS = 16
_ALONE_AT, _ALONE_FIND_AT = 0.6, 0.75
_PARTING_S = 5.0  # how long the keeper of the store waits for the others to have read the verdict
_STOP, _LEAVE, _STAY, _LEFT = "watchdog/stop", "watchdog/leave", "watchdog/stay", "watchdog/left"


_Look = tuple[float, list[RankStatus | None]]  # when, and every rank's pulse then


class Store(Protocol):
    """The used part of torch's TCPStore."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


class Watchdog:
    """Watchdog of one rank. Inert until `start`."""

    def __init__(self, rank_info: RankInfo, *, stop: Stop, run_log: RunLog, timeout_s: float = 120.0) -> None:
        self._rank_info, self._stop, self._run_log, self._timeout_s = rank_info, stop, run_log, timeout_s
        self.doing = "load"  # written by the training thread, at no cost
        self.step = 0
        self._beat_s = min(_BEAT_S, timeout_s / 20)
        self._beats = 0
        self._everyone: list[RankProcess] = []
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._connect: Callable[[], Store] | None = None
        self._first: _Look | None = None
        self._has_store = True  # it answered the last question
        self._hang: Hang | None = None
        # The time in which a stop may end the process at once.
        self._window = threading.Lock()
        self._window_open = self._voted = False
        self._verdict = threading.Event()
        self._farewell: Callable[[str], None] = lambda _: None

    def start(self, everyone: Sequence[RankProcess], connect: Callable[[], Store] | None) -> None:
        """Begin, once all ranks have met; `connect` opens a new connection to the store, None for a lone rank."""
        self._everyone, self._connect = list(everyone), connect
        for work in (self._beat, self._watch):
            thread = threading.Thread(target=self._guarded, args=(work,), name=f"watchdog {work.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        """Stop watching, before the ranks leave."""
        self._over.set()
        for thread in self._threads:
            thread.join(timeout=2 * self._beat_s)

    # The first step: nothing has been computed since the resume, so a stop may end the process where it is.

    def open_window(self, farewell: Callable[[str], None]) -> None:
        """From here on a stop may end this process at once; `farewell` is called with the reason before it does."""
        with self._window:
            self._farewell, self._window_open = farewell, True

    def close_window(self) -> None:
        """A step is done, so its result must be saved. If the ranks are agreeing to exit, wait for the decision."""
        with self._window:
            self._window_open = False
        self.await_verdict()

    def await_verdict(self) -> None:
        """If this rank has voted to exit, wait for the decision: the process exits in here, or all ranks stay."""
        if self._voted:
            self._verdict.wait(timeout=self._timeout_s)

    def _vote(self, store: Store | None, why: str) -> None:
        with self._window:
            if self._window_open and not self._voted:
                self._voted = True
                if store is not None:
                    store.add(_LEAVE, 1)
            elif not self._voted and store is not None and not store.check([_STAY]):
                store.set(_STAY, "1")
        if not self._voted or self._verdict.is_set():
            return
        if store is None:
            self._leave(why)
        elif store.check([_STAY]):
            self._verdict.set()
        elif store.add(_LEAVE, 0) == self._rank_info.world_size:
            store.add(_LEFT, 1)
            end = time.monotonic() + _PARTING_S
            # Rank 0 may keep the store: if it left first, the others would never know the verdict.
            while (
                self._rank_info.rank == 0
                and time.monotonic() < end
                and store.add(_LEFT, 0) < self._rank_info.world_size
            ):
                time.sleep(0.02)
            self._leave(why)

    def _leave(self, why: str) -> None:
        self._farewell(why)
        _exit(RESUMABLE_EXIT)

    # Saying that it lives, and hearing of a stop.

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # the store went with its keeper, or this torch writes its records otherwise
            if not self._over.is_set():
                self._run_log.alarm(f"watchdog ended: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")

    def _beat(self) -> None:
        store = self._connect() if self._connect is not None else None
        passed_on = False
        while not self._over.wait(self._beat_s):
            self._beats += 1
            if store is not None:
                pulse = RankStatus(beats=self._beats, doing=self.doing, step=self.step, trace=flight_recorder.read())
                store.set(_key(self._rank_info.rank), hang.render(pulse))
            why = self._stop.asked()
            if why is not None and store is not None and not passed_on:
                store.set(_STOP, f"{why} on rank {self._rank_info.rank}")
                passed_on = True
            elif why is None and store is not None and store.check([_STOP]):
                self._stop.pass_on(store.get(_STOP).decode())
                passed_on = True
            if self._stop.asked() is not None:
                self._vote(store, str(self._stop.asked()))

    # Watching the training thread, and attributing hangs.

    def _watch(self) -> None:
        if self._connect is None:
            return
        warned = False
        while not self._over.wait(self._beat_s):
            trace, now = flight_recorder.read(), time.time()
            share = trace.waiting[0].share_waited(now) if trace.waiting else 0.0
            if share < _LOOK_AT:
                self._first, warned, self._hang = None, False, None
            elif share >= _GIVE_UP_AT:
                self._give_up(trace)
            elif self._first is None and (self._leads or share >= _ALONE_AT):
                self._first = time.monotonic(), self._statuses(_end_of(trace))
            elif share >= _SAY_AT and not warned and (verdict := self._judge(trace, share)):
                self._hang = verdict
                self._tell(self._hang)
                self._run_log.warning(self._hang.line.replace(hang.MARK, "waiting:", 1))
                warned = True

    @property
    def _leads(self) -> bool:
        """Whether this rank reads the status of all ranks. If all did, 1,024 ranks would read a million keys."""
        return self._rank_info.local_rank == 0 and self._rank_info.node_rank < _LEADERS

    def _judge(self, trace: flight_recorder.Trace, share: float) -> Hang | None:
        """The missing ranks of the collective that this rank waits in: found here, or published by a leader."""
        if not self._leads and (verdict := self._published(trace)) is not None:
            return verdict
        if self._first is None or (not self._leads and share < _ALONE_FIND_AT):
            return None
        verdict = self._find(trace, self._first, by=_end_of(trace))
        self._answered(lambda store: store.set(_hang_key(trace), hang.render_hang(verdict)), by=_end_of(trace))
        return verdict

    def _published(self, trace: flight_recorder.Trace) -> Hang | None:
        key = _hang_key(trace)
        text = self._answered(lambda store: store.get(key) if store.check([key]) else None, by=_end_of(trace))
        return hang.parse_hang(text) if text is not None else None

    def _answered(self, ask: Callable[[Store], Any], *, by: float = math.inf) -> Any:
        """The answer of the store; None where it does not answer in time, or not `by` this time of the clock."""
        box: list[Any] = []

        def work() -> None:
            assert self._connect is not None
            box.append(ask(self._connect()))

        # In a thread of its own: a store whose process is stopped takes the question and never answers.
        asking = threading.Thread(target=_quietly, args=(work,), daemon=True)
        asking.start()
        asking.join(timeout=min(max(2.0, self._timeout_s / 10), max(self._beat_s, by - time.time())))
        return box[0] if box else None

    def _find(self, trace: flight_recorder.Trace, first: _Look, *, by: float) -> Hang:
        (since, before), now = first, self._statuses(by)
        quiet_s = time.monotonic() - since
        views = [
            RankView(process=who, status=new, silent_s=quiet_s if _same(old, new) else 0.0, state=_state(who))
            for who, old, new in zip(self._everyone, before, now, strict=True)
        ]
        return hang.attribute(views, trace, step=self.step, now=time.time())

    def _statuses(self, by: float = math.inf) -> list[RankStatus | None]:
        """Status of every rank. If the store does not answer, only rank 0's is missing: it holds the store."""
        keys = [_key(who.rank) for who in self._everyone]

        def read(store: Store) -> list[bytes]:
            # A rank that has not spoken yet has no key, and the store would wait for it.
            known = keys if store.check(keys) else [key for key in keys if store.check([key])]
            values = dict(zip(known, store.multi_get(known), strict=True))
            return [values.get(key, b"") for key in keys]

        texts: list[bytes] | None = self._answered(read, by=by)
        self._has_store = texts is not None
        if texts is None:
            alive = RankStatus(beats=time.monotonic_ns(), doing="train", step=self.step, trace=flight_recorder.read())
            return [None if who.rank == 0 else alive for who in self._everyone]
        return [hang.parse(value) for value in texts]

    def _tell(self, verdict: Hang) -> None:
        self._run_log.hang_found(
            ranks=verdict.ranks, nodes=verdict.nodes, collective=verdict.collective, why=verdict.line
        )

    def _give_up(self, trace: flight_recorder.Trace) -> None:
        # Not asked again: another rank may have given up a moment ago and taken the store with it.
        verdict = self._hang or self._published(trace)
        if verdict is None:
            by = _end_of(trace)
            verdict = self._find(trace, self._first or (time.monotonic(), self._statuses(by)), by=by)
        self._tell(verdict)
        self._run_log.alarm(f"{verdict.line}; gave up after {time.time() - trace.waiting[0].since:.0f} s")
        _exit(1)

    def explain(self) -> str | None:
        """Missing ranks after the training thread failed in a collective; None if none is found."""
        if self._connect is None:
            return None
        first = time.monotonic(), self._statuses()
        if self._has_store:  # else rank 0 is gone, and the others wait for this rank to say so
            time.sleep(3 * self._beat_s)
        verdict = self._find(flight_recorder.Trace(), first, by=math.inf if self._has_store else 0.0)
        return verdict.line.removeprefix(hang.MARK).split("; ")[0].strip() if verdict.ranks else None


def exchange_ranks(rank_info: RankInfo) -> tuple[list[RankProcess], Callable[[], Store] | None]:
    """Processes of all ranks, and a function that opens another connection to the rendezvous store."""
    import torch.distributed as dist

    from trainmaster.train.parallel import rendezvous

    mine = RankProcess(rank=rank_info.rank, node=rank_info.node_rank, host=socket.gethostname(), pid=os.getpid())
    if rank_info.master is None or rank_info.world_size == 1:
        return [mine], None
    everyone: list[Any] = [None] * rank_info.world_size
    dist.all_gather_object(everyone, mine)
    return everyone, lambda: rendezvous.connect(rank_info)


def _end_of(trace: flight_recorder.Trace) -> float:
    """When this rank gives up the collective that it waits in: a store that stands still must not keep it longer."""
    return trace.waiting[0].since + _GIVE_UP_AT * trace.waiting[0].limit_s if trace.waiting else math.inf


def _hang_key(trace: flight_recorder.Trace) -> str:
    where = trace.waiting[0]
    return f"watchdog/hang/{where.group}/{where.seq}"


def _key(rank: int) -> str:
    return f"watchdog/pulse/{rank}"


def _same(old: RankStatus | None, new: RankStatus | None) -> bool:
    return old is not None and new is not None and old.beats == new.beats


def _state(who: RankProcess) -> str | None:
    """State letter of a process; None if it is on another machine."""
    if who.host != socket.gethostname():
        return None
    return hang_ladder.read_state(who.pid)


def _quietly(work: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):  # no answer is the answer
        work()


def _exit(code: int) -> None:
    flush_output()
    os._exit(code)
