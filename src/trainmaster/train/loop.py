"""The training run. Reading order is running order.

Sample numbers come from one cursor over all ranks, first weights from the seed alone, and every loss is a mean over the
whole batch: how many ranks share the work changes the speed, not the curve.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its name everywhere)

from trainmaster import datasets
from trainmaster.core.errors import Fault, SpecError, TrainmasterError
from trainmaster.core.schema import to_plain
from trainmaster.core.train_config import TrainConfig
from trainmaster.datasets import Source
from trainmaster.models.llama import Llama, count_parameters, flops_per_token
from trainmaster.train import agree
from trainmaster.train.checkpoint.load import load_newest, load_weights
from trainmaster.train.checkpoint.save import SaveError, prune, save
from trainmaster.train.evaluate import evaluate
from trainmaster.train.optimizer import build_optimizer, configure, learning_rate, update
from trainmaster.train.rate import Meter, peak_flops
from trainmaster.train.report import Report
from trainmaster.train.shard import Precision, World, pick_precision, shard
from trainmaster.train.state import State, seed_step
from trainmaster.train.stop import Stop

_MAX_SKIPPED = 5  # steps in a row without a finite gradient: by then it is the weights, not the samples


class TrainingFailed(TrainmasterError):
    """The run cannot go on, or its result could not be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended: at its last step, or on request before that."""

    state: State
    stopped: bool


def run(config: TrainConfig, world: World, *, folder: Path, stop: Stop, report: Report) -> Outcome:
    """Train to the last step, or until told to stop; whatever it ends with is saved."""
    trainer = Trainer(config, world, folder=folder, stop=stop, report=report)
    trainer.resume()
    trainer.announce()
    stopped = trainer.train()
    trainer.finish(stopped)
    return Outcome(state=trainer.state, stopped=stopped)


class Trainer:
    """The parts of one run and how far it is."""

    def __init__(self, config: TrainConfig, world: World, *, folder: Path, stop: Stop, report: Report) -> None:
        self.config, self.world, self.folder, self.stop, self.report = config, world, folder, stop, report
        self.state = State()
        self.resumed_from: int | None = None
        self.newest: Path | None = None  # checkpoint of this run
        self.saved_step: int | None = None
        self.started = time.perf_counter()
        self.source = _open_source(config)
        self.precision = pick_precision(config, world.device)
        self.model = _build_model(config, world, self.precision)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.parameters = count_parameters(self.model)
        self.meter = Meter(
            flops_per_token=flops_per_token(
                config.model, parameters=self.parameters, sequence_tokens=config.sequence_tokens
            ),
            peak=peak_flops(world.device_name, self.precision),
            devices=world.place.world_size,
        )
        # What a checkpoint must share with the run that reads it.
        self.identity: Mapping[str, Any] = {"model": to_plain(config.model), "data": to_plain(config.data)}

    def resume(self) -> None:
        """Go on from the newest good checkpoint, if there has ever been one."""

        def rejected(path: Path, why: str) -> None:
            self.report.event("CHECKPOINT", "rejected", path=str(path), why=why)
            self.report.line(f"checkpoint {path} rejected: {why}")

        found = load_newest(
            self.folder, run=self.identity, model=self.model, optimizer=self.optimizer, rejected=rejected
        )
        if found is None:
            self.start()
            return
        configure(self.optimizer, self.config.optimizer)
        self.state, self.newest = found.state, found.path
        self.resumed_from = self.saved_step = found.state.step
        self.report.event(
            "CHECKPOINT", "loaded", step=found.state.step, path=str(found.path), seconds=round(found.seconds, 3)
        )
        self.report.line(f"resumed from step {found.state.step} ({found.path}, {found.seconds:.1f} s)")

    def start(self) -> None:
        """A new run: with first weights, or with those of the checkpoint that the config names."""
        if self.config.init_from is not None:
            path = Path(self.config.init_from).absolute()
            seconds = load_weights(path, config=self.config.model, model=self.model)
            self.report.line(f"starting at step 0 with the weights of {path} ({seconds:.1f} s)")

    def announce(self) -> None:
        config, place = self.config, self.world.place
        self.report.event(
            "TRAINING",
            "start",
            steps=config.steps,
            parameters=self.parameters,
            ranks=place.world_size,
            device=self.world.device.type,
            device_name=self.world.device_name,
            precision=self.precision,
            batch_sequences=config.batch_sequences,
            sequence_tokens=config.sequence_tokens,
            resumed_from=self.resumed_from,
            torch=torch.__version__,
            data_source=config.data.source,
        )
        self.report.line(
            f"training {self.parameters:,} parameters on {place.world_size} rank(s) ({self.world.device_name}, "
            f"{self.precision}), {config.batch_sequences} × {config.sequence_tokens} tokens a step"
        )

    def train(self) -> bool:
        """Step after step to the last one; True if it was told to stop before the end."""
        skipped = 0
        self.meter.resume()
        # A run that was stopped inside an evaluation resumes into that evaluation.
        if self.epoch_is_over() and not self.close_epoch():
            return True
        while self.state.step < self.config.steps:
            if agree.any_rank(self.stop.asked() is not None):
                return True
            skipped = 0 if self.step() else skipped + 1
            if skipped == _MAX_SKIPPED:
                raise TrainingFailed(
                    f"{skipped} steps in a row had no finite gradient, up to sample {self.state.cursor - 1}; "
                    "lower optimizer.lr, or look at these samples"
                )
            if self.epoch_is_over():
                if not self.close_epoch():
                    return True
            elif self.save_is_due():
                self.save()
        return False

    def step(self) -> bool:
        """One batch over all ranks, one update; False if the update was skipped."""
        config, place, state = self.config, self.world.place, self.state
        seed_step(config.seed, state.step, place.rank)
        mine = place.share(config.batch_sequences)
        rows = datasets.batch(
            self.source, state.cursor + mine.start, len(mine), sequence_tokens=config.sequence_tokens
        ).to(self.world.device, non_blocking=True)
        logits = self.model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        lr = learning_rate(config.optimizer, step=state.step, steps=config.steps)
        grad_norm = update(self.model, self.optimizer, lr=lr, grad_clip=config.optimizer.grad_clip)
        mean_loss = agree.mean(loss)
        moved = math.isfinite(grad_norm) and math.isfinite(mean_loss)
        self.state = state.after_step(mean_loss if moved else None, samples=config.batch_sequences)
        self.meter.count(config.batch_sequences * config.sequence_tokens)
        if not moved:
            self.report.line(
                f"step {self.state.step} skipped: loss {mean_loss}, gradient norm {grad_norm} "
                f"(samples {state.cursor} to {self.state.cursor - 1})"
            )
        if self.state.step % config.log_every_steps == 0 or self.state.step == config.steps or not moved:
            self.report_step(loss=mean_loss, lr=lr, grad_norm=grad_norm)
        return moved

    def report_step(self, *, loss: float, lr: float, grad_norm: float) -> None:
        reading, device = self.meter.read(), self.world.device
        memory_gib = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
        self.report.event(
            "STEP",
            "metrics",
            step=self.state.step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens_per_s=round(reading.tokens_per_s, 1),
            step_s=round(reading.step_s, 6),
            mfu=reading.mfu,
            memory_gib=memory_gib,
        )
        mfu = f" mfu {reading.mfu:.1%}" if reading.mfu is not None else ""
        self.report.line(
            f"step {self.state.step}/{self.config.steps} loss {loss:.4f} lr {lr:.1e} gnorm {grad_norm:.2f} "
            f"{reading.tokens_per_s:,.0f} tok/s{mfu}"
        )

    def epoch_is_over(self) -> bool:
        """Whether an epoch has had its steps and is not closed yet; the run's end closes a short one."""
        step = self.state.step
        return step > self.state.epoch_end and (step % self.config.epoch_steps == 0 or step == self.config.steps)

    def close_epoch(self) -> bool:
        """Evaluate, save if due, say so; False if told to stop on the way: the epoch is then still open."""
        if not self.evaluate():
            return False
        avg_loss = self.state.epoch_mean
        # Before the save: a run resumed from it must not close this epoch again.
        self.state = self.state.after_epoch()
        if self.save_is_due():
            self.save()
        newest = str(self.newest) if self.newest else None
        self.report.event(
            "TRAINING",
            "epoch_complete",
            epoch=self.state.epoch,
            step=self.state.step,
            avg_loss=avg_loss,
            model_path=newest,
            optimizer_path=newest,
            tokens_per_s=round(self.meter.mean_tokens_per_s, 1),
        )
        return True

    def evaluate(self) -> bool:
        if self.config.eval_sequences == 0:
            return True
        step, started = self.state.step, time.perf_counter()
        self.meter.pause()
        self.report.event("EVAL_TRAINING", "start", step=step)
        loss = evaluate(self.model, self.source, self.config, self.world, self.stop)
        if loss is not None:
            perplexity = math.exp(loss) if loss < 700 else math.inf
            self.report.event("EVAL_MODEL", "metrics", step=step, loss=loss, perplexity=perplexity)
            self.report.line(f"eval at step {step}: loss {loss:.4f} perplexity {perplexity:.2f}")
        self.report.event("EVAL_TRAINING", "end", step=step, duration=round(time.perf_counter() - started, 3))
        self.meter.resume()
        return loss is not None

    def save_is_due(self) -> bool:
        step = self.state.step
        return step != self.saved_step and (step % self.config.checkpoint.every_steps == 0 or step == self.config.steps)

    def save(self) -> str | None:
        """Save this step. A failure is reported and returned; training can go on, the last one is still there."""
        self.meter.pause()
        try:
            saved = save(self.folder, state=self.state, run=self.identity, model=self.model, optimizer=self.optimizer)
        except SaveError as wrong:
            self.report.event("CHECKPOINT", "failed", step=self.state.step, why=str(wrong))
            self.report.line(f"checkpoint of step {self.state.step} failed: {wrong}")
            return str(wrong)
        finally:
            self.meter.resume()
        self.newest, self.saved_step = saved.path, saved.step
        self.report.event(
            "CHECKPOINT",
            "saved",
            step=saved.step,
            path=str(saved.path),
            seconds=round(saved.seconds, 3),
            bytes=saved.size_bytes,
        )
        self.report.line(f"saved step {saved.step} ({saved.path}, {saved.size_bytes:,} bytes, {saved.seconds:.2f} s)")
        try:
            prune(self.folder, keep=self.config.checkpoint.keep, newest=saved.step)
        except SaveError as wrong:
            self.report.line(str(wrong))
        return None

    def finish(self, stopped: bool) -> None:
        """Keep what was reached and say how it went; a result that cannot be kept is a failed run."""
        fault = self.save() if self.state.step != self.saved_step else None
        if fault is not None:
            raise TrainingFailed(f"step {self.state.step} could not be saved at the end: {fault}")
        state = self.state
        self.report.event(
            "TRAINING",
            "end",
            step=state.step,
            loss_first=state.loss_first,
            loss_last=state.loss_last,
            tokens_per_s=round(self.meter.mean_tokens_per_s, 1),
            duration=round(time.perf_counter() - self.started, 3),
            stopped=stopped,
        )
        why = f"stopped ({self.stop.asked() or 'asked on another rank'})" if stopped else "done"
        self.report.line(f"{why} at step {state.step}/{self.config.steps}, loss {state.loss_first} → {state.loss_last}")


def _open_source(config: TrainConfig) -> Source:
    source = datasets.load(config.data)
    if source.vocab > config.model.vocab:
        message = (
            f"{config.model.vocab} is less than the {source.vocab} tokens of {config.data.source}; use {source.vocab}"
        )
        raise SpecError([Fault(path="model.vocab", message=message)])
    return source


def _build_model(config: TrainConfig, world: World, precision: Precision) -> Llama:
    """Sharded before it has memory: no rank ever holds more than its part."""
    with torch.device("meta"):
        model = Llama(config.model, max_tokens=config.sequence_tokens)
    shard(model, world, precision)
    model.to_empty(device=world.device)
    model.init_weights(config.seed)
    return model
