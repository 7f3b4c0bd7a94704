"""Batches of each step, on this rank's device. One cursor numbers the samples over all ranks.

A thread prefetches. Before a step all ranks agree that its data is present; until then they poll in short collectives
instead of blocking in one, so slow data is not taken for a dead rank, and a stop request is seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainmaster import datasets
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import DataError, Fault, SpecError, TrainmasterError, UsageError
from trainmaster.datasets import Rows, Source
from trainmaster.datasets.corpus.retry import Retry, brief
from trainmaster.train.parallel import rank_sync
from trainmaster.train.parallel.shard import World
from trainmaster.train.run_log import RunLog
from trainmaster.train.watch.stop import Stop

_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.25  # between two looks at data that is not there yet
_TELL_EVERY_S = 10
_OPENING_S = 2  # a stop waits this long for the data to open: a run that has begun can say where it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Input of one pass: rows of tokens, and for each token the one that follows it."""

    tokens: Tensor  # (rows, sequence_tokens)
    targets: Tensor  # the same shape; -100 where no token follows: at a document's end and in padding
    documents: Tensor | None = None  # int32, the same shape: which document of its row; None: one document a row


class Feed:
    """Source of this rank's part of every batch."""

    def __init__(
        self, config: TrainConfig, world: World, *, stop: Stop | None = None, run_log: RunLog | None = None
    ) -> None:
        self._config, self._rank_info, self._device = config, world.rank_info, world.device
        self._stop, self._run_log = stop or Stop(None), run_log
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._name = f"{config.data.source} {config.data.dataset or config.data.path or ''}".strip()
        self._retry = Retry(self._name)
        self._requested: dict[tuple[bool, int], Future[list[Rows]]] = {}  # (held out, first sample) → its rows to come
        self._source: Source | None = None
        self._upto = config.steps * config.batch_sequences  # no sample from here on is ever needed
        self._parts: Sequence[range] | None = None  # this rank's passes of every step; None: as all ranks divide it
        self.stopping: bool | None = None  # whether to stop before the next step; None: as a stop request says
        self.waited_s = 0.0  # in all, by steps and evaluations, for data that was not there yet
        self.own_waited_s = 0.0  # of that, for this rank's own data
        if not self.open():
            self.close()
            raise StoppedWaiting("stop request while the data was being opened")

    def open(self) -> bool:
        """Open the data and compare it with the config, on all ranks. False if a stop request came first.

        Raw files are tokenised here. Rank 0 goes first: with a cache that all nodes share it is done once.
        """
        rank_info = self._rank_info
        for turn in (rank_info.rank == 0, rank_info.local_rank == 0, True):
            jobs = [self._worker.submit(self._load)] if turn and self._source is None else []
            # Tokenising has no limit of time: it works, it does not wait.
            if not self._wait(jobs, what="opening the data", limit_s=None, heed_stop_after_s=_OPENING_S):
                return False
            self._source = jobs[0].result() if jobs else self._source
        assert self._source is not None
        prints = rank_sync.on_all(lambda: self._source.fingerprint if self._source else "")
        other = next((rank for rank, fingerprint in enumerate(prints) if fingerprint != prints[0]), None)
        if other is not None:
            raise DataError(f"rank {other} reads other data than rank 0 ({prints[other]}; {prints[0]}); copy it again")
        self._check(self._source)
        if self._source.summary and self._run_log is not None:
            self._run_log.line(f"data: {self._source.summary}")
        return True

    def ready(self, cursor: int) -> bool:
        """Wait until every rank has its share of the step at `cursor`; False on a stop request.

        DataError on all ranks after data.wait_s, or when the data cannot be read at all.
        """
        if self.stopping:
            return False
        self._request_ahead(cursor)
        heed = 0 if self.stopping is None else None
        jobs = [self._requested[False, cursor]]
        return self._wait(jobs, what=f"the step at sample {cursor}", limit_s=self._limit_s, heed_stop_after_s=heed)

    def divide(self, parts: Sequence[range]) -> None:
        """From now on these are this rank's passes, counted from the first sample of a step."""
        if self._opened.is_stream:
            message = "recovery.groups needs data that can be read in any order, and a stream cannot; leave it out"
            raise UsageError(message)
        self._forget_requested()
        self._parts = parts

    def take(self, cursor: int) -> list[Batch]:
        """This rank's share of the step whose first sample is `cursor`, as passes of micro_sequences each."""
        self._request_ahead(cursor)
        passes = self._result(self._requested.pop((False, cursor)))
        self._worker.submit(self._opened.forget, self._upcoming(cursor))
        return [self._place_on_device(rows) for rows in passes]

    def example(self) -> list[Batch] | None:
        """Batches like those of every step, of samples that are not used up; None where there can be none.

        Called on all ranks. Reading a stream would move it.
        """
        if self._opened.is_stream:
            return None
        reading = self._worker.submit(self._read, self._passes(0), held_out=False)
        try:
            rank_sync.on_all(lambda: reading.result() and None)
        except rank_sync.RankError:
            return None
        return [self._place_on_device(rows) for rows in reading.result()]

    def held_out_ready(self, first: int, count: int) -> bool:
        """The same as `ready`, for held-out samples."""
        return self._wait([self._request_held_out(first, count)], what="an evaluation", limit_s=self._limit_s)

    def held_out(self, first: int, count: int) -> Batch:
        """Held-out samples, for an evaluation. The training cursor stays where it is."""
        (rows,) = self._result(self._request_held_out(first, count))
        del self._requested[True, first]
        return self._place_on_device(rows)

    def state(self, cursor: int) -> Mapping[str, Any]:
        """State of the data when sample `cursor` comes next, for the manifest. Called on all ranks."""
        source = self._opened
        upcoming = self._upcoming(cursor)
        inner = source.join(rank_sync.on_all(lambda: source.state(upcoming))) if source.is_stream else {}
        return {"fingerprint": source.fingerprint, "source": inner}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state, on any number of ranks. DataError if the data has changed."""
        self._forget_requested()
        source = self._opened
        if state.get("source"):
            # In the reading thread, behind what it still reads; it may have to open the stream anew.
            job = self._worker.submit(source.restore, state["source"])
            self._wait([job], what="going on with the stream", limit_s=self._limit_s, heed_stop_after_s=None)
        if state.get("fingerprint") != source.fingerprint:
            raise DataError(
                f"data.source {self._config.data.source}: this is not the data the run began with "
                f"(then {state.get('fingerprint')}, now {source.fingerprint}); bring it back, or start a new run"
            )

    def close(self) -> None:
        """Stop reading. Prefetched samples are dropped; the next run reads them again."""
        self._forget_requested()
        self._retry.close()
        if self._source is not None:
            self._source.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    @property
    def _opened(self) -> Source:
        assert self._source is not None
        return self._source

    @property
    def _limit_s(self) -> float:
        return self._config.data.wait_s

    def _load(self) -> Source:
        config = self._config
        shape = datasets.Shape(sequence_tokens=config.sequence_tokens, batch_sequences=config.batch_sequences)
        return datasets.load(config.data, shape)

    def _check(self, source: Source) -> None:
        config, faults = self._config, []
        if source.vocab > config.model.vocab:
            message = f"{config.model.vocab} is less than the {source.vocab} tokens of {config.data.source}; use "
            faults.append(Fault(path="model.vocab", message=f"{message}{source.vocab}"))
        have = source.held_out_rows
        if have is not None and have < config.eval_sequences:
            # Fewer, but still the same number for each rank; none at all is an answer too.
            fit = have - have % self._rank_info.world_size
            message = (
                f"{config.eval_sequences}, but the data holds out {have} rows of {config.sequence_tokens} tokens; use "
                f"{fit}, or hold out more (data.held_out_path, or `trainmaster data prepare --held-out-share`)"
            )
            faults.append(Fault(path="eval_sequences", message=message))
        if faults:
            raise SpecError(faults)

    def _request_ahead(self, cursor: int) -> None:
        """Prefetch the steps from `cursor` on, in order; drop what was prefetched for other steps."""
        batch = self._config.batch_sequences
        ahead = [cursor + step * batch for step in range(self._config.data.prefetch_steps + 1)]
        wanted = [first for first in ahead if first < self._upto or first == cursor]
        for key in [key for key in self._requested if not key[0] and key[1] not in wanted]:
            self._requested.pop(key).cancel()
        for first in wanted:
            if (False, first) not in self._requested:
                self._requested[False, first] = self._worker.submit(self._read, self._passes(first), held_out=False)

    def _passes(self, first: int) -> list[range]:
        """This rank's samples of the step that begins with sample `first`, as passes of micro_sequences each."""
        if self._parts is not None:
            return [range(first + part.start, first + part.stop) for part in self._parts]
        mine = self._rank_info.share(self._config.batch_sequences)
        at_once = self._config.micro_sequences or len(mine)
        return [range(first + start, first + start + at_once) for start in mine[::at_once]]

    def _request_held_out(self, first: int, count: int) -> Future[list[Rows]]:
        key = (True, first)
        if key not in self._requested:
            self._requested[key] = self._worker.submit(self._read, [range(first, first + count)], held_out=True)
        return self._requested[key]

    def _read(self, parts: Sequence[Sequence[int]], *, held_out: bool) -> list[Rows]:
        # A disk or a network file system may fail now and then, too.
        return [self._pinned(self._retry.call(self._reading(part, held_out=held_out))) for part in parts]

    def _reading(self, numbers: Sequence[int], *, held_out: bool) -> Callable[[], Rows]:
        return lambda: self._opened.rows(numbers, held_out=held_out)

    def _pinned(self, rows: Rows) -> Rows:
        """Copy into pinned memory."""
        if self._device.type != "cuda":
            return rows
        documents = None if rows.documents is None else rows.documents.pin_memory()
        return Rows(tokens=rows.tokens.pin_memory(), targets=rows.targets.pin_memory(), documents=documents)

    def _place_on_device(self, rows: Rows) -> Batch:
        return Batch(
            tokens=rows.tokens.to(self._device, non_blocking=True),
            targets=rows.targets.to(self._device, non_blocking=True),
            documents=None if rows.documents is None else rows.documents.to(self._device, non_blocking=True),
        )

    def _upcoming(self, cursor: int) -> range:
        return range(cursor, cursor + self._config.batch_sequences)

    def _forget_requested(self) -> None:
        for future in self._requested.values():
            future.cancel()
        self._requested.clear()

    def _result(self, future: Future[list[Rows]]) -> list[Rows]:
        started = time.perf_counter()
        rows = future.result()
        self.waited_s += time.perf_counter() - started
        return rows

    def _wait(
        self, jobs: Sequence[Future[Any]], *, what: str, limit_s: float | None, heed_stop_after_s: float | None = 0
    ) -> bool:
        """Wait until the jobs of all ranks are done. All ranks see the same numbers, so they return together.

        False on a stop request, which is heeded after `heed_stop_after_s`; None: never.
        """
        started, reported, pause = time.perf_counter(), 0, _FIRST_LOOK_S
        stop, ask_stop_at = False, heed_stop_after_s
        own_s = 0.0
        while True:
            mine = not all(job.done() for job in jobs)
            failed = any(job.done() and not job.cancelled() and job.exception() for job in jobs)
            waited = time.perf_counter() - started
            own_s = waited if mine else own_s
            if ask_stop_at is not None and waited >= ask_stop_at:
                stop, ask_stop_at = self._stop.asked() is not None, waited + _LONGEST_LOOK_S
            waiting, failing, stopping, longest = rank_sync.highest([mine, failed, stop, int(waited)])
            if failing:
                self._fail(jobs)
            if stopping or not waiting:
                if pause > _FIRST_LOOK_S:
                    self.waited_s += time.perf_counter() - started
                self.own_waited_s += own_s
                return not stopping
            if longest >= (reported + 1) * _TELL_EVERY_S:
                reported = longest // _TELL_EVERY_S
                self._tell(what, longest, mine)
            if limit_s is not None and longest >= limit_s:
                raise DataError(f"no data for {what} after {longest} s: {'; '.join(self._who_waits(mine))}")
            time.sleep(pause)
            pause = min(_LONGEST_LOOK_S, pause * 1.5)

    def _tell(self, what: str, longest: int, mine: bool) -> None:
        waiting = self._who_waits(mine)
        if self._run_log is not None:
            self._run_log.line(f"{what} waits for data since {longest} s: {'; '.join(waiting)}")

    def _who_waits(self, mine: bool) -> list[str]:
        """Ranks that wait, with node and cause. Called on all ranks."""
        rank_info = self._rank_info

        def mine_is() -> str | None:
            trouble = self._retry.trouble or (self._source.trouble if self._source is not None else None)
            return (
                f"rank {rank_info.rank} (node {rank_info.node_rank}): {trouble or f'reading {self._name}'}"
                if mine
                else None
            )

        return [words for words in rank_sync.on_all(mine_is) if words]

    def _fail(self, jobs: Sequence[Future[Any]]) -> None:
        """Raise the failures of all ranks on all of them; UsageError if each one is a wrong config."""
        error = next((job.exception() for job in jobs if job.done() and job.exception()), None)
        faults = [
            (f"rank {rank} (node {node}): {text}", usage)
            for rank, (node, text, usage) in enumerate(
                rank_sync.on_all(lambda: _describe(error, self._rank_info.node_rank))
            )
            if text is not None
        ]
        kind: type[TrainmasterError] = UsageError if all(usage for _, usage in faults) else DataError
        if isinstance(error, kind) and self._rank_info.world_size == 1:
            raise error  # alone: as it was, a config's faults one by one
        raise kind("; ".join(text for text, _ in faults)) from error


class StoppedWaiting(TrainmasterError):
    """Stop request before there was anything to save."""


def _describe(error: BaseException | None, node: int) -> tuple[int, str | None, bool]:
    if error is None:
        return node, None, False
    return node, str(error) if isinstance(error, TrainmasterError) else brief(error), isinstance(error, UsageError)
