"""Training loop. Reading order is running order.

Sample numbers come from one cursor over all ranks, initial weights from the seed alone, and every loss is a mean over
the whole batch: the number of ranks changes the speed, not the loss curve.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainmaster.core.config.schedule import learning_rate
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import CheckpointError, DataError, TrainmasterError
from trainmaster.core.schema import to_plain
from trainmaster.models.decoder import count_parameters
from trainmaster.train.checkpoint import open_checkpoints
from trainmaster.train.checkpoint.checkpointing import Checkpointing
from trainmaster.train.checkpoint.load import load_weights
from trainmaster.train.checkpoint.protocol import Run
from trainmaster.train.compute import build_model, forward_backward
from trainmaster.train.drill.failpoints import reach
from trainmaster.train.drill.sample_log import SampleLog
from trainmaster.train.evaluate import evaluate
from trainmaster.train.experiment import experiment_of, must_continue
from trainmaster.train.feed import Batch, Feed, StoppedWaiting
from trainmaster.train.metrics.async_scalars import PendingScalars, StepClock, StepInFlight
from trainmaster.train.metrics.metrics import Metrics
from trainmaster.train.metrics.rate import measure_peak
from trainmaster.train.metrics.trackers import open_trackers
from trainmaster.train.optimizer import build_optimizer, configure, update
from trainmaster.train.parallel import rank_sync
from trainmaster.train.parallel.blocks import count_compile_s
from trainmaster.train.parallel.shard import World, limit_collectives, pick_precision
from trainmaster.train.run_log import RunLog
from trainmaster.train.start_times import StartTimes
from trainmaster.train.state import State, seed_step
from trainmaster.train.warm_up import WarmUp
from trainmaster.train.watch.bad_steps import Decision, Diverged, Range, decide, limits, pass_over
from trainmaster.train.watch.stop import Stop
from trainmaster.train.watch.watchdog import Watchdog

_PATIENCE_S = 60.0  # for the others to end their part of a save, when training has failed


class TrainingFailed(TrainmasterError):
    """The run cannot continue, or its result could not be saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended: at its last step, or on request before that."""

    state: State
    stopped: bool


def run(
    config: TrainConfig,
    world: World,
    *,
    folder: Path,
    stop: Stop,
    run_log: RunLog,
    watchdog: Watchdog | None = None,
    resume_from: str | None = None,
    times: StartTimes | None = None,
    kind: type[Trainer] | None = None,
) -> Outcome:
    """Train to the last step or until a stop request; the state at the end is saved.

    `resume_from` names the job to continue: without a checkpoint of it, CheckpointError.
    """
    watchdog = watchdog or Watchdog(world.rank_info, stop=stop, run_log=run_log)
    times = times or StartTimes(run_log, {}, born=time.time())
    if world.rank_info.rank == 0 and world.rank_info.groups == 1:
        run_log.track(open_trackers(config.watch, to_plain(config), run_log.alarm))
    try:
        make = kind or Trainer
        trainer = make(config, world, folder=folder, stop=stop, run_log=run_log, watchdog=watchdog, times=times)
        times.done("build")
        trainer.resume(resume_from)
    except StoppedWaiting:
        return Outcome(state=State(), stopped=True)
    times.done("load", of_it={"compile": trainer.warm_up.beyond_s})
    trainer.compiled_before_s = count_compile_s()
    trainer.announce()
    # Until the first step is done there is nothing to save, and a compilation may take minutes.
    watchdog.open_window(lambda why: trainer.say_end(stopped=why))
    try:
        stopped = trainer.train()
    except DataError:
        trainer.save_after_data_error()
        raise
    except Exception:
        trainer.close_after_failure()
        raise
    trainer.finish(stopped)
    return Outcome(state=trainer.state, stopped=stopped)


class Trainer:
    """Parts and state of one run."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        *,
        folder: Path,
        stop: Stop,
        run_log: RunLog,
        watchdog: Watchdog,
        times: StartTimes,
    ) -> None:
        self.config, self.world, self.folder, self.stop, self.run_log = config, world, folder, stop, run_log
        self.watchdog, self.times = watchdog, times
        self.experiment = experiment_of(config)
        self.state = State(experiment=self.experiment)
        self.flight: StepInFlight | None = None
        self.resumed_from: int | None = None
        self.resumed_tier: str | None = None
        self.first_step_done, self.runs_ahead = False, world.device.type != "cpu"
        self.started = time.perf_counter()
        self.compiled_before_s = count_compile_s()  # by another run of this process
        self.feed = Feed(config, world, stop=stop, run_log=run_log)
        self.sample_log = SampleLog(world.rank_info, config)
        self.precision = pick_precision(config, world.device)
        peak = measure_peak(world.device, self.precision)  # before the model takes the memory
        self.model = build_model(config, world, self.precision)
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.parameters = count_parameters(self.model)
        self.metrics = Metrics(config, world, run_log, precision=self.precision, peak=peak)
        self.warm_up = WarmUp(config, world, self.model, self.feed)
        self.meter, self.clock = self.metrics.meter, StepClock(world.device)
        # What a checkpoint must share with the run that reads it.
        self.identity: Mapping[str, Any] = {"model": to_plain(config.model), "data": to_plain(config.data.identity)}
        saved_run = Run(
            config=config,
            world=world,
            model=self.model,
            optimizer=self.optimizer,
            feed=self.feed,
            identity=self.identity,
            rejected=run_log.checkpoint_rejected,
            say=run_log.line,
            beside_load=self.warm_up,
        )
        self.checkpointing = Checkpointing(open_checkpoints(saved_run, folder), run_log)

    def resume(self, job: str | None = None) -> None:
        """Resume from the newest good checkpoint, or start a new run. With a job named there must be a checkpoint."""
        loaded = self.checkpointing.load()
        if loaded is None and job is not None:
            raise CheckpointError(f"job {job} left no checkpoint; for a new run, submit without resume_from")
        if loaded is None:
            self.start()
            return
        allowed = job is not None or self.config.checkpoint.resume == "changed"
        must_continue(loaded.path, loaded.state.experiment, self.experiment, changes_allowed=allowed)
        configure(self.optimizer, self.config.optimizer)
        self.state, self.resumed_from = replace(loaded.state, experiment=self.experiment), loaded.state.step
        self.resumed_tier = loaded.tier
        self.run_log.checkpoint_loaded(
            step=loaded.state.step, path=loaded.path, tier=loaded.tier, seconds=loaded.seconds
        )

    def start(self) -> None:
        """Start a new run, with initial weights or with those of `init_from`."""
        if self.config.init_from is not None:
            path = Path(self.config.init_from).absolute()
            seconds = load_weights(
                path, config=self.config.model, model=self.model, timeout_s=self.config.timeouts.load_s
            )
            self.run_log.line(f"starting at step 0 with the weights of {path} ({seconds:.1f} s)")

    def announce(self) -> None:
        config, rank_info = self.config, self.world.rank_info
        self.run_log.training_started(
            steps=config.steps,
            parameters=self.parameters,
            ranks=rank_info.ranks,
            device=self.world.device.type,
            device_name=self.world.device_name,
            precision=self.precision,
            batch_sequences=config.batch_sequences,
            sequence_tokens=config.sequence_tokens,
            resumed_from=self.resumed_from,
            torch=torch.__version__,
            data_source=config.data.source,
        )

    def train(self) -> bool:
        """Run the steps; True if a stop request ended them early."""
        self.resume_meter()
        # A run that was stopped inside an evaluation resumes into that evaluation.
        if self.epoch_is_over() and not self.close_epoch():
            return True
        while self.state.step < self.config.steps:
            self.skip_excluded_samples()
            if not self.feed.ready(self.state.cursor):
                reach("stop:heard")
                return True
            self.step()
            if not self.first_step_done:
                self.end_start()
            self.watchdog.close_window()
            self.checkpointing.report_ended()
            if self.epoch_is_over():
                if not self.close_epoch():
                    return True
            else:
                self.save_if_due()
            self.checkpointing.hold_bound(self.state.step)
        return False

    def end_start(self) -> None:
        """The slow first step is done: its collectives had more time, and its end is the end of the start."""
        limit_collectives(self.config.timeouts.step_s)
        self.first_step_done = True
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)  # once, or the time would be that of the launches alone
        self.times.done("first_step", of_it={"compile": count_compile_s() - self.compiled_before_s})
        self.times.finish(step=self.state.step, resumed_from=self.resumed_from, tier=self.resumed_tier)

    def skip_excluded_samples(self) -> None:
        """Move the cursor to the next samples, past those that a rollback excluded."""
        state = self.state
        cursor = pass_over(state.cursor, self.config.batch_sequences, state.passed_over)
        self.state = replace(state, cursor=cursor)
        self.watchdog.step, self.watchdog.doing = state.step, "data"

    def step(self) -> None:
        """Start one step: a batch over all ranks and an update. Its scalars are read while the next step runs."""
        config, rank_info, state = self.config, self.world.rank_info, self.state
        self.watchdog.doing = "train"
        reach("step:start", step=state.step)
        seed_step(config.seed, state.step, rank_info.number)
        batches = self.feed.take(state.cursor)
        self.meter.wait_for_data(self.feed.own_waited_s)
        loss = self.compute(batches)
        reach("step:backward")
        self.checkpointing.before_update()
        lr = learning_rate(config.optimizer, step=state.step, steps=config.steps, plateau=state.plateau)
        bounds = limits(state.history, config.watch)
        grad_norm, sick = update(
            self.model,
            self.optimizer,
            loss=loss,
            lr=lr,
            grad_clip=config.optimizer.grad_clip,
            most_loss=bounds.loss,
            most_norm=bounds.norm,
        )
        reach("step:updated")
        samples = range(state.cursor, state.cursor + config.batch_sequences)
        scalars = PendingScalars(loss, grad_norm, sick)
        started = StepInFlight(step=state.step + 1, samples=samples, lr=lr, bounds=bounds, numbers=scalars)
        self.state = state.after_step(samples=config.batch_sequences)
        if not self.account_for_step():
            self.flight = started
        if not self.runs_ahead:
            self.account_for_step()  # nothing is under way there: it would only be counted with the next step's time

    def compute(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Gradients of the step; returns its loss."""
        self.sample_log.note(batches, step=self.state.step + 1, cursor=self.state.cursor)
        return rank_sync.mean(forward_backward(self.model, batches))

    def account_for_step(self) -> bool:
        """Account for the step in flight, if there is one. Required before a save or a summary.

        True if the run was rolled back: a step started after it is void.
        """
        flight, self.flight = self.flight, None
        if flight is None:
            return False
        config = self.config
        loss, grad_norm, _ = flight.numbers.read()
        self.meter.count(config.batch_sequences * config.sequence_tokens, at=self.clock.completed(flight.numbers))
        decision = decide(
            self.state.history, loss, grad_norm, cursor=flight.samples.start, config=config.watch, bounds=flight.bounds
        )
        self.state = replace(self.state, history=decision.history)
        if decision.act == "move":
            self.state = self.state.after_loss(loss)
        else:
            self.run_log.step_skipped(
                step=flight.step, samples=flight.samples, loss=loss, grad_norm=grad_norm, why=decision.why
            )
        if flight.step % config.log_every_steps == 0 or flight.step == config.steps or decision.act != "move":
            self.metrics.tell(flight, loss=loss, grad_norm=grad_norm)
        if decision.act == "roll back":
            self.roll_back(flight, decision)
            return True
        return False

    def roll_back(self, flight: StepInFlight, decision: Decision) -> None:
        """Roll back to the newest good checkpoint, or to the start, and skip the samples of the bad steps."""
        before, history = self.state, decision.history
        assert history.sick_from is not None, "only a row of bad steps leads here"
        bad = Range(first=history.sick_from, end=flight.samples.stop)
        what = (
            f"{history.sick_steps} bad steps in a row (samples {bad.first} to {bad.end - 1}), the last one's "
            f"{decision.why}"
        )
        if before.rollbacks >= self.config.watch.max_rollbacks:
            raise Diverged(
                f"{what}; the run has been rolled back {before.rollbacks} times: lower optimizer.lr or "
                "optimizer.grad_clip, raise optimizer.warmup_steps, or look at these samples"
            )
        self.meter.pause()
        self.checkpointing.finish()
        self.watchdog.doing = "load"
        loaded = self.checkpointing.load()
        if loaded is not None:
            configure(self.optimizer, self.config.optimizer)
            good = loaded.state
        else:
            self.model.init_weights(self.config.seed)
            self.optimizer.state.clear()
            good = State(experiment=self.experiment)
            self.start()
        self.state = replace(
            good,
            # A row that was under way when this checkpoint was saved lies inside the range.
            history=replace(good.history, sick_steps=0, sick_from=None),
            passed_over=(*before.passed_over, bad),
            rollbacks=before.rollbacks + 1,
        )
        self.run_log.rolled_back(
            step=flight.step,
            to_step=good.step,
            samples=range(bad.first, bad.end),
            rollbacks=self.state.rollbacks,
            why=what,
        )
        self.resume_meter()

    def resume_meter(self) -> None:
        """Time steps again, after a pause in which none was in flight."""
        self.meter.resume()
        self.clock.restart()

    def epoch_is_over(self) -> bool:
        """Whether an epoch is complete and not closed; the last step closes a short one."""
        step = self.state.step
        return step > self.state.epoch_end and (step % self.config.epoch_steps == 0 or step == self.config.steps)

    def close_epoch(self) -> bool:
        """Evaluate, save if due, log; False if a stop request came first: the epoch then stays open."""
        if self.account_for_step():
            return True  # back at an earlier step, where this epoch is still under way
        self.watchdog.close_window()
        if not self.evaluate():
            return False
        avg_loss = self.state.epoch_mean
        # Before the save: a run resumed from it must not close this epoch again.
        self.state = self.state.after_epoch()
        self.save_if_due()
        self.run_log.epoch_completed(
            epoch=self.state.epoch,
            step=self.state.step,
            avg_loss=avg_loss,
            checkpoint=self.checkpointing.newest,
            tokens_per_s=self.meter.mean_tokens_per_s,
        )
        return True

    def evaluate(self) -> bool:
        if self.config.eval_sequences == 0:
            return True
        step, started = self.state.step, time.perf_counter()
        self.meter.pause()
        self.run_log.evaluation_started(step=step)
        self.watchdog.doing = "eval"
        beat = partial(self.metrics.beat, "eval")
        loss = evaluate(self.model, self.feed, self.config, self.world, beat=beat)
        self.watchdog.doing = "train"
        if loss is not None:
            perplexity = math.exp(loss) if loss < 700 else math.inf
            self.run_log.evaluated(step=step, loss=loss, perplexity=perplexity)
            # Counted once: a run that is stopped in here has no loss yet, and evaluates again.
            self.state = self.state.after_evaluation(loss, self.config.optimizer)
        self.run_log.evaluation_ended(step=step, seconds=time.perf_counter() - started)
        self.resume_meter()
        return loss is not None

    def save_if_due(self) -> None:
        # Within a row of bad steps a rollback may follow, which must find a checkpoint from before them.
        wanted = self.checkpointing.wants(self.state.step, last=self.state.step == self.config.steps)
        if not wanted or self.state.history.sick_steps or self.account_for_step():
            return
        self.watchdog.doing = "save"
        self.meter.pause()
        self.checkpointing.begin(self.state)
        self.watchdog.doing = "train"
        self.resume_meter()

    def save_after_data_error(self) -> None:
        """Save the state after a data error, so that the run can continue when the data is back."""
        try:
            self.account_for_step()
            self.checkpointing.finish(patience_s=_PATIENCE_S)  # one save at a time
            if self.state.step != self.checkpointing.saved_step:
                self.checkpointing.begin(self.state)
        except Exception as error:  # must not hide that the data ended
            self.run_log.alarm(f"step {self.state.step} could not be saved: {error}")
        self.close_after_failure()

    def close_after_failure(self) -> None:
        """Finish a save in progress after a failure: it began before the failure and is good."""
        self.feed.close()
        try:
            self.checkpointing.finish(patience_s=_PATIENCE_S)
        except Exception as error:  # must not hide why training failed
            self.run_log.alarm(f"a save under way could not be finished: {error}")
        self.checkpointing.close()

    def finish(self, stopped: bool) -> None:
        """Save the last step and log the end; TrainingFailed if it cannot be saved."""
        self.watchdog.doing = "save"
        self.account_for_step()
        fault = self.checkpointing.keep_last(self.state)
        if fault is not None:
            raise TrainingFailed(f"step {self.state.step} could not be saved at the end: {fault}")
        self.checkpointing.close()
        self.feed.close()
        self.say_end(stopped=self.stop.asked() or "asked on another rank" if stopped else None)

    def say_end(self, *, stopped: str | None) -> None:
        state = self.state
        self.run_log.training_ended(
            step=state.step,
            steps=self.config.steps,
            loss_first=state.loss_first,
            loss_last=state.loss_last,
            tokens_per_s=self.meter.mean_tokens_per_s,
            seconds=time.perf_counter() - self.started,
            stopped=stopped,
            idle=self.resumed_from == state.step,
        )
        self.run_log.close()
