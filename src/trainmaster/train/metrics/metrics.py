"""Metrics of a run: speed, memory, shares of time, stragglers; and the heartbeat line."""

from __future__ import annotations

import math
import time

import torch

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.heartbeat import At
from trainmaster.models import family
from trainmaster.train.metrics.async_scalars import StepInFlight
from trainmaster.train.metrics.rate import Meter, Reading, peak_flops, thread_busy_s
from trainmaster.train.parallel import rank_sync
from trainmaster.train.parallel.shard import World
from trainmaster.train.run_log import RunLog
from trainmaster.train.watch.stragglers import EXCHANGE_S, Exchange, Persistent, score

_BEAT_S = 5.0  # between heartbeats where there are no steps


class Metrics:
    """Measures on every rank and writes to the run log."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        run_log: RunLog,
        *,
        precision: str,
        peak: float | None,  # of this rank's GPU, as measured
    ) -> None:
        self._config, self._world, self._run_log = config, world, run_log
        self.meter = Meter(
            flops_per_token=family.of(config.model).flops_per_token(
                config.model, sequence_tokens=config.sequence_tokens
            ),
            peak=peak_flops(world.device_name, precision),
            devices=world.rank_info.ranks,
            measured=None if peak is None else rank_sync.total(peak) * world.rank_info.groups,
            busy=thread_busy_s if world.device.type == "cpu" else lambda: None,
        )
        self._exchange, self._exchange_at = Exchange(world), 0
        self._slow = Persistent(share=config.watch.straggler_share, readings=config.watch.straggler_readings)
        self._reading = Reading(tokens_per_s=0.0, step_s=0.0)
        self._step, self._loss, self._grad_norm = 0, math.nan, math.nan  # of the newest step that is accounted for
        self._beaten = time.monotonic()

    def tell(self, flight: StepInFlight, *, loss: float, grad_norm: float) -> None:
        """Log the metrics of a step, with rates since the last call."""
        self._step, self._loss, self._grad_norm = flight.step, loss, grad_norm
        reading = self._reading = self.meter.read()
        self._run_log.step_metrics(
            step=flight.step,
            loss=loss,
            lr=flight.lr,
            grad_norm=grad_norm,
            reading=reading,
            sequence_tokens=self._config.sequence_tokens,
            memory=read_memory(self._world.device),
        )
        self.beat("train", force=True)
        if self._world.rank_info.rank == 0:
            shares = (("mfu", reading.mfu), ("of measured peak", reading.mfu_measured), ("data", reading.data_share))
            shown = "".join(f" {name} {share:.1%}" for name, share in shares if share is not None)
            self._run_log.line(
                f"step {flight.step}/{self._config.steps} Loss: {loss:.4f} lr {flight.lr:.1e} gnorm {grad_norm:.2f} "
                f"{reading.tokens_per_s:,.0f} tok/s{shown}"
            )
        if self._world.rank_info.world_size > 1 and flight.step >= self._exchange_at:
            self._name_stragglers(reading)

    def beat(self, at: At, *, force: bool = False) -> None:
        """Print the heartbeat: at every log interval, and every few seconds between steps."""
        now = time.monotonic()
        if not force and now - self._beaten < _BEAT_S:
            return
        self._beaten = now
        self._run_log.beat(
            step=self._step,
            steps=self._config.steps,
            loss=self._loss,
            grad_norm=self._grad_norm,
            tokens_per_s=self._reading.tokens_per_s,
            step_s=self._reading.step_s,
            at=at,
        )

    def _name_stragglers(self, reading: Reading) -> None:
        everyone = self._exchange.run(reading)
        # From what all ranks know alike, so that they meet at the same step again; their clocks differ.
        self._exchange_at = self._step + math.ceil(EXCHANGE_S / max(1e-3, min(rank.step_s for rank in everyone)))
        for slow in self._slow.add(score(everyone)):
            self._run_log.straggler_found(
                step=self._step, name=slow.name, rank=slow.rank, node=slow.node, score=slow.score, what=slow.what
            )


def read_memory(device: torch.device) -> dict[str, float | None]:
    """GPU memory of this rank: peak since the start, allocated now, reserved by the allocator now."""
    if device.type != "cuda":
        return {"memory_gib": None}
    return {
        "memory_gib": torch.cuda.max_memory_allocated(device) / 2**30,
        "memory_allocated_gib": torch.cuda.memory_allocated(device) / 2**30,
        "memory_reserved_gib": torch.cuda.memory_reserved(device) / 2**30,
    }
