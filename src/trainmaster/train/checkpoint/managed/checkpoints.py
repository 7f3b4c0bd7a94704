"""Checkpoints in HyperPod's managed tiers, with the interface and the guarantees of our own.

    save   staged copy ─▶ the library's writer, all ranks (daemon's memory, and S3 if due) ─▶ hashes of all ranks to
           rank 0 ─▶ record to S3 ─▶ record to memory. Only then is it a checkpoint.
    load   records of both tiers ─▶ newest first, memory before S3 ─▶ every part against its hash ─▶ filled

The record in S3 is written for saves to memory too. So a daemon that has lost its memory is known to have lost it: a
run that was saved never starts over unasked. Where a tier cannot be asked and the other has nothing, nobody knows, and
the run is refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from trainmaster.core import schema
from trainmaster.core.backoff import backoff_s
from trainmaster.core.compat import UTC
from trainmaster.core.config.managed import ManagedConfig
from trainmaster.core.errors import CheckpointError, SpecError
from trainmaster.train.checkpoint.load import as_of_today, must_match
from trainmaster.train.checkpoint.lock import Fence
from trainmaster.train.checkpoint.managed.library import Library, Tier
from trainmaster.train.checkpoint.managed.record import Record
from trainmaster.train.checkpoint.managed.survey import Records, Survey, survey
from trainmaster.train.checkpoint.protocol import Ended, Failed, Loaded, Run, Saved
from trainmaster.train.checkpoint.snapshot import read_feed_state, restore_feed
from trainmaster.train.checkpoint.tiers.loss_bound import Bound
from trainmaster.train.drill.failpoints import reach
from trainmaster.train.parallel import rank_sync
from trainmaster.train.state import State

# A slow store is no dead peer; a dead one is noticed at once, by its closed connection.
_GROUP_TIMEOUT = timedelta(hours=1)


class NotSaved(Exception):
    """A save that did not happen in a tier, with the same words on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A save under way."""

    state: State
    to_s3: bool
    begun: float
    staged: Future[Any]
    feed: Mapping[str, Any] | None


class Managed:
    """Every save goes to the daemon's memory, and to S3 when that is due; one that a tier refuses goes to the other."""

    def __init__(self, run: Run, config: ManagedConfig) -> None:
        rank_info = run.world.rank_info
        self._run, self._config = run, config
        self._library = Library(config, rank=rank_info.rank, ranks=rank_info.world_size)
        self._records = Records(self._library, config)
        # A group of its own, on the CPU: its collectives run beside those of training, and may take longer.
        self._group = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUT)
        cuda = run.world.device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=cuda
            )
        )
        self._fence = Fence(lambda: self._records.store, lease_s=run.config.checkpoint.lease_s)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="managed-checkpoint")
        self._draft: Draft | None = None
        self._saving: Future[list[Ended]] | None = None
        self._ended: list[Ended] = []
        self._stall_s = 0.0
        self._s3_step = 0  # of the newest save to S3
        self._ending = False

    # Resuming

    def resume(self) -> Loaded | None:
        started = time.perf_counter()
        self._wait()  # after a rollback one may still be under way, and be the newest
        self._ending = False
        self._guard()
        try:
            result = rank_sync.on_first(lambda: survey(self._records, self._library), group=self._group)
        except rank_sync.RankError as error:
            raise CheckpointError(f"cannot tell what namespace {self._config.namespace} holds: {error}") from error
        reach("load:listed")
        self._records.in_s3 = result.in_s3
        for where, why in result.remarks:
            self._run.rejected(where, why)
        for tier, record in result.whole:
            where = self._where(tier, record.step)
            must_match(where, as_of_today(where, record.run), self._run.identity)
            try:
                state = schema.build(State, record.state)
                self._fill(tier, record)
            except (rank_sync.RankError, CheckpointException, SpecError, NotSaved) as error:
                self._run.rejected(where, rank_sync.cause(error))
                continue
            reach("load:filled")
            if record.feed is not None:
                restore_feed(self._run.feed, record.feed)
            in_s3 = (saved.step for kind, saved in result.whole if kind == "s3" and saved.step <= state.step)
            self._s3_step = max(in_s3, default=0)
            return Loaded(state=state, path=where, seconds=time.perf_counter() - started, feed=record.feed, tier=tier)
        self._refuse(result)
        return None

    def _fill(self, tier: Tier, record: Record) -> None:
        """Fill model and optimizer from that tier, or raise on every rank alike."""
        run, made = self._run, []
        rank_sync.on_all(lambda: made.append(self._library.reader(record, tier)), group=self._group)
        reader, faults = made[0]
        weights, moments = get_state_dict(run.model, run.optimizer)
        try:
            load_shards({"model": weights, "optimizer": moments}, storage_reader=reader, process_group=self._group)
        except CheckpointException as error:
            # Its own words are "read failed"; what was wrong with which part is in the faults.
            seen = sorted({fault for part in rank_sync.on_all(lambda: faults, group=self._group) for fault in part})
            raise rank_sync.RankError("; ".join(seen) or rank_sync.cause(error)) from error
        set_state_dict(run.model, run.optimizer, model_state_dict=weights, optim_state_dict=moments)

    def _refuse(self, result: Survey) -> None:
        """Raise unless it is certain that there has never been a checkpoint."""
        config = self._config
        another = "or choose another checkpoint.managed.namespace to start at step 0"
        if result.exist:
            raise CheckpointError(
                f"namespace {config.namespace} has checkpoints (newest: step {result.newest}) and none can be trusted, "
                f"in memory or in {config.s3}: {result.unknown or 'see the lines above'}; bring one back, {another}"
            )
        if result.unknown:
            raise CheckpointError(
                f"cannot tell whether namespace {config.namespace} has checkpoints: {result.unknown}; bring it back, "
                f"{another}"
            )

    # Saving, on the thread that trains

    @property
    def busy(self) -> bool:
        return self._saving is not None and self._run.config.checkpoint.mode == "async"

    def due(self, step: int) -> bool:
        return step % self.every_steps == 0

    @property
    def every_steps(self) -> int:
        return self._run.config.checkpoint.every_steps

    @property
    def bound(self) -> Bound | None:
        return None  # not measured for these tiers

    def hold(self, least: int) -> list[Ended]:  # noqa: ARG002 (nothing is promised that could be held)
        return []

    def save(self, state: State) -> None:
        begun = time.perf_counter()
        self._wait()
        run, every = self._run, self._config.s3_every_steps or 1
        weights, moments = get_state_dict(run.model, run.optimizer)
        if run.world.device.type == "cuda":
            # The stager copies on a stream of its own, which does not wait for the update that is still under way.
            torch.cuda.current_stream(run.world.device).synchronize()
        staged = self._stager.stage({"model": weights, "optimizer": moments})
        assert isinstance(staged, Future)
        last = self._ending or state.step == run.config.steps
        self._draft = Draft(
            state=state,
            to_s3=last or state.step - self._s3_step >= every,
            begun=begun,
            staged=staged,
            feed=read_feed_state(run.feed, state.cursor),
        )
        self._saving = self._worker.submit(self._save, self._draft)
        if run.config.checkpoint.mode == "sync":
            self._saving.exception()
        self._stall_s = time.perf_counter() - begun

    def before_update(self) -> None:
        if self._draft is not None and not self._draft.staged.done():
            begun = time.perf_counter()
            self._draft.staged.exception()
            self._stall_s += time.perf_counter() - begun

    def collect_finished(self) -> list[Ended]:
        if self._saving is not None and not rank_sync.any_rank(not self._saving.done()):
            self._wait()
        ended, self._ended = self._ended, []
        return ended

    def finish(self, patience_s: float | None = None) -> list[Ended]:
        self._ending = True
        self._wait(patience_s)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        self._fence.release()

    def _guard(self) -> None:
        """LockHeld or LockLost where another run writes to this namespace."""
        try:
            self._fence.check(group=self._group)
        except rank_sync.RankError:
            return  # S3 cannot be read: saves go to the daemon's memory alone until it can

    def _wait(self, patience_s: float | None = None) -> None:
        """Wait for the save under way. No collective: every rank's thread ends with the same result."""
        if self._saving is None:
            return
        try:
            ended = self._saving.result(patience_s)
        except TimeoutError:
            return
        self._saving = self._draft = None
        for save in ended:
            if isinstance(save, Saved) and save.tier == "s3":
                self._s3_step = save.step
            self._ended.append(replace(save, stall_s=self._stall_s) if isinstance(save, Saved) else save)

    # Saving, in the background

    def _save(self, draft: Draft) -> list[Ended]:
        config, ended = self._run.config.checkpoint, list[Ended]()
        for number in range(1 + config.retries):
            if number:
                time.sleep(backoff_s(number, first_s=config.retry_s, jitter=False))
            ended = self._attempt(draft)
            if any(isinstance(save, Saved) for save in ended):
                break
        return ended

    def _attempt(self, draft: Draft) -> list[Ended]:
        """A tier that fails is no reason to lose the step: the other one is tried with the same copy."""
        self._guard()
        step, ended = draft.state.step, list[Ended]()
        for to_s3 in (draft.to_s3, not draft.to_s3):
            try:
                record = self._commit(self._write(draft, to_s3=to_s3))
            except NotSaved as error:
                ended.append(Failed(step=step, why=str(error), tier="s3" if to_s3 else "memory"))
                continue
            warning = self._prune(step) if record.s3 else None
            tiers: list[Tier] = [tier for tier in ("memory", "s3") if getattr(record, tier)]
            ended += [
                Saved(
                    step=step,
                    path=self._where(tier, step),
                    size_bytes=record.size_bytes,
                    seconds=time.perf_counter() - draft.begun,
                    tier=tier,
                    warning=warning if tier == "s3" else None,
                )
                for tier in tiers
            ]
            break
        return ended

    def _write(self, draft: Draft, *, to_s3: bool) -> Record:
        """The library's writer on all ranks; the record of what it wrote, in no tier yet."""
        made: list[Any] = []

        def prepare() -> None:
            made.append(draft.staged.result())
            made.append(self._library.writer(draft.state.step, to_s3=to_s3))

        try:
            rank_sync.on_all(prepare, group=self._group)
            reach("save:staged")
            staged, (writer, written) = made
            save_shards(staged, storage_writer=writer, process_group=self._group)
            reach("save:shards")
            per_rank = rank_sync.on_all(lambda: (written.parts, written.refused), group=self._group)
        except (rank_sync.RankError, CheckpointException) as error:
            # The library's words are "write failed"; its client holds why the daemon refused.
            refusals = rank_sync.on_all(lambda: made[1][1].refused if len(made) == 2 else [], group=self._group)
            words = sorted({word for part in refusals for word in part})
            raise NotSaved("; ".join([rank_sync.cause(error), *words])) from error
        finally:
            if len(made) == 2:
                made[1][1].close()
        return Record(
            step=draft.state.step,
            namespace=self._library.namespace,
            ranks=dist.get_world_size(),
            parts={name: part for parts, _ in per_rank for name, part in parts.items()},
            memory=not any(refused for _, refused in per_rank),
            s3=to_s3,
            state=asdict(draft.state),
            run=self._run.identity,
            feed=draft.feed,
            torch=torch.__version__,
            saved_at=datetime.now(UTC).isoformat(),
        )

    def _commit(self, record: Record) -> Record:
        """Make it a checkpoint: the record, as far as it was true, in the tiers that took it."""
        try:
            kept = rank_sync.on_first(lambda: self._records.write(record), group=self._group)
        except rank_sync.RankError as error:
            raise NotSaved(rank_sync.cause(error)) from error
        reach("save:committed")
        return kept

    def _prune(self, newest: int) -> str | None:
        """Delete what is older than the newest of S3 to be kept. The daemon does so by itself in its memory."""
        config = self._run.config.checkpoint
        try:
            gone = rank_sync.on_first(
                lambda: self._records.drop_old(keep=config.keep, keep_every=config.keep_every_steps, newest=newest),
                group=self._group,
            )
            mine = gone[dist.get_rank() :: dist.get_world_size()]
            rank_sync.on_all(lambda: self._records.delete(mine), group=self._group)
        except rank_sync.RankError as error:
            return f"old checkpoints could not be deleted: {error}"
        reach("save:pruned")
        return None

    def _where(self, tier: Tier, step: int) -> str:
        """For people. The library's own layout has a step in as many folders as there were ranks."""
        base = self._library.daemon if tier == "memory" else self._config.s3.rstrip("/")
        return f"{base}/{self._config.namespace} step {step}"
