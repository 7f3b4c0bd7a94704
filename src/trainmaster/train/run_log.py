"""Log of one rank: events (rank 0 writes them) and lines on standard output. One method per event.

Local rank 0 of every node prints: an operator watches one process per node, and a silent node looks hung. The events
and their fields are in core/event_catalog.py.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster.core import heartbeat
from trainmaster.core.heartbeat import LEVELS, At, Level
from trainmaster.node.emit import Emitter
from trainmaster.train.metrics.rate import Reading
from trainmaster.train.metrics.trackers import Tracker
from trainmaster.train.parallel.rank_info import RankInfo

# Log readers on nodes may accept ASCII only, and HyperPod's stops at the first byte it cannot decode.
_ASCII = str.maketrans({"×": "x", "→": "to", "–": "-", "…": "..."})

_RESULTS = ("STEP", "EVAL_MODEL", "TRAINING")  # phases whose events are of the run and not of one group's process

_BEGAN = ("TRAINING", "start")  # what was told before it may be told again: its steps are made again


class RunLog:
    """Events, lines and tracker metrics of one rank."""

    def __init__(self, rank_info: RankInfo, emitter: Emitter | None, *, level: Level = "INFO") -> None:
        self._rank_info, self._least = rank_info, LEVELS.index(level)
        self._emitter = emitter if rank_info.rank == 0 else None
        self._trackers: list[Tracker] = []
        self._leads = True  # of the replica groups one writes the events
        self._unsaid: list[tuple[str, str, int | None, dict[str, Any]]] = []  # the last step and what followed it

    def track(self, trackers: list[Tracker]) -> None:
        """Send metrics to these trackers from now on (rank 0 only)."""
        self._trackers = trackers if self._rank_info.rank == 0 else []

    def lead(self, leads: bool) -> None:
        """Write events, or leave them to another group. Who takes over says the last step, where nobody has."""
        unsaid, self._unsaid, self._leads = self._unsaid, [], leads
        for phase, event, epoch, data in unsaid if leads else ():
            same = {name: data[name] for name in ("step", "loss") if name in data}  # times are each group's own
            if not (same and self._emitter is not None and self._emitter.holds(phase, event, since=_BEGAN, **same)):
                self._emit(phase, event, epoch=epoch, **data)

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers:
            self._guarded(tracker, tracker.close)
        self._trackers = []

    # Lines.

    def line(self, text: str, level: Level = "INFO", *, always: bool = False) -> None:
        """Print a line on local rank 0 of each node. `always`: whatever the level, since log rules match it."""
        if self._rank_info.prints and (always or LEVELS.index(level) >= self._least):
            self.alarm(text, level)

    def warning(self, text: str) -> None:
        """Print a warning on local rank 0 of each node."""
        self.line(text, "WARNING")

    def alarm(self, text: str, level: Level = "ERROR") -> None:
        """Print a line on this rank, whichever it is, in one write: log readers take half a line for a whole one."""
        plain = text.translate(_ASCII).encode("ascii", "backslashreplace").decode()
        prefix = heartbeat.prefix(self._rank_info.number, self._rank_info.node_rank, level=level)
        # A full disk under the log, or a reader that is gone, costs the line and not the run.
        with contextlib.suppress(OSError):
            sys.stdout.write(prefix + plain + "\n")
            sys.stdout.flush()

    def beat(
        self, *, step: int, steps: int, loss: float, grad_norm: float, tokens_per_s: float, step_s: float, at: At
    ) -> None:
        """Print the heartbeat line that log rules match, on local rank 0 of each node."""
        beat = heartbeat.Beat(
            rank=self._rank_info.number,
            node=self._rank_info.node_rank,
            step=step,
            steps=steps,
            loss=loss,
            grad_norm=grad_norm,
            tokens_per_s=tokens_per_s,
            step_s=step_s,
            at=at,
        )
        self.line(heartbeat.words(beat), always=True)

    # START, RECOVERY.

    def start_part(self, *, part: str, seconds: float, restart: int) -> None:
        """START part."""
        self._emit("START", "part", part=part, seconds=seconds, restart=restart)

    def start_done(self, *, step: int, seconds: float, parts: Mapping[str, float], restart: int) -> None:
        """START done."""
        self._emit("START", "done", step=step, seconds=seconds, parts=dict(parts), restart=restart)
        self.line(f"first step after {seconds:.1f} s ({render_parts(parts)})")

    def recovered(
        self,
        *,
        how: str,
        restart: int,
        step: int,
        resumed_from: int | None,
        tier: str | None,
        seconds: float,
        parts: Mapping[str, float],
    ) -> None:
        """RECOVERY done."""
        self._emit(
            "RECOVERY",
            "done",
            how=how,
            restart=restart,
            step=step,
            resumed_from=resumed_from,
            tier=tier,
            seconds=seconds,
            parts=dict(parts),
        )
        words = how.replace("_", " ")
        self.line(f"recovered {words} in {seconds:.1f} s, at step {step} ({render_parts(parts)})")

    def survived(self, *, groups: int, of: int, step: int, seconds: float, parts: Mapping[str, float]) -> None:
        """RECOVERY survived; the group that leads says it."""
        self._emit("RECOVERY", "survived", groups=groups, of=of, step=step, seconds=seconds, parts=dict(parts))
        self.line(f"{groups} of {of} groups go on after {seconds:.1f} s, at step {step} ({render_parts(parts)})")

    # TRAINING, EVAL_TRAINING, EVAL_MODEL, STEP.

    def training_started(self, **data: Any) -> None:
        """TRAINING start."""
        self._emit("TRAINING", "start", **data)
        ranks = "rank" if data["ranks"] == 1 else "ranks"
        self.line(
            f"training {data['parameters']:,} parameters on {data['ranks']} {ranks} ({data['device_name']}, "
            f"{data['precision']}), {data['batch_sequences']} × {data['sequence_tokens']} tokens a step"
        )

    def training_ended(
        self,
        *,
        step: int,
        steps: int,
        loss_first: float | None,
        loss_last: float | None,
        tokens_per_s: float,
        seconds: float,
        stopped: str | None,  # the request to stop; None: the last step is done
        idle: bool = False,  # it resumed at this step and did none
    ) -> None:
        """TRAINING end."""
        self._emit(
            "TRAINING",
            "end",
            step=step,
            loss_first=loss_first,
            loss_last=loss_last,
            tokens_per_s=round(tokens_per_s, 1),
            duration=round(seconds, 3),
            stopped=stopped is not None,
        )
        how = "done" if stopped is None else f"stopped ({stopped})"
        if idle and step >= steps:
            # "done" is what restart watchers look for (core/heartbeat.py)
            self.line(f"done: already at step {step} of {steps}; nothing to do", always=True)
            return
        if loss_first is not None and loss_last is not None:
            how += f" at step {step}/{steps}, loss {loss_first:.4g} → {loss_last:.4g}"
        else:
            how += f" at step {step}/{steps}"
        self.line(how, always=True)

    def epoch_completed(
        self, *, epoch: int, step: int, avg_loss: float | None, checkpoint: str | None, tokens_per_s: float
    ) -> None:
        """TRAINING epoch_complete. A checkpoint holds model and optimizer: both paths are the same."""
        self._emit(
            "TRAINING",
            "epoch_complete",
            epoch=epoch,
            step=step,
            avg_loss=avg_loss,
            model_path=checkpoint,
            optimizer_path=checkpoint,
            tokens_per_s=round(tokens_per_s, 1),
        )

    def evaluation_started(self, *, step: int) -> None:
        """EVAL_TRAINING start."""
        self._emit("EVAL_TRAINING", "start", step=step)

    def evaluated(self, *, step: int, loss: float, perplexity: float) -> None:
        """EVAL_MODEL metrics."""
        self._emit("EVAL_MODEL", "metrics", step=step, loss=loss, perplexity=perplexity)
        self._track("eval", step, {"loss": loss, "perplexity": perplexity})
        self.line(f"eval at step {step}: Loss: {loss:.4f} perplexity {perplexity:.2f}")

    def evaluation_ended(self, *, step: int, seconds: float) -> None:
        """EVAL_TRAINING end."""
        self._emit("EVAL_TRAINING", "end", step=step, duration=round(seconds, 3))

    def step_metrics(
        self,
        *,
        step: int,
        loss: float,
        lr: float,
        grad_norm: float,
        reading: Reading,
        sequence_tokens: int,
        memory: Mapping[str, float | None],
    ) -> None:
        """STEP metrics."""
        data: dict[str, Any] = {
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens_per_s": round(reading.tokens_per_s, 1),
            "tokens_per_s_per_gpu": round(reading.tokens_per_s / self._rank_info.ranks, 1),
            "samples_per_s": round(reading.tokens_per_s / sequence_tokens, 3),
            "step_s": round(reading.step_s, 6),
            "mfu": reading.mfu,
            "mfu_measured": reading.mfu_measured,
            "data_share": _rounded(reading.data_share),
            "compute_share": _rounded(reading.compute_share),
            "comm_share": _rounded(reading.comm_share),
            **memory,
        }
        self._emit("STEP", "metrics", step=step, **data)
        self._track("train", step, data)

    # CHECKPOINT.

    def checkpoint_saved(
        self, *, step: int, path: str, tier: str, size_bytes: int, seconds: float, stall_s: float
    ) -> None:
        """CHECKPOINT saved."""
        self._emit(
            "CHECKPOINT",
            "saved",
            step=step,
            path=path,
            seconds=round(seconds, 3),
            bytes=size_bytes,
            tier=tier,
            stall_s=round(stall_s, 4),
        )
        self.line(
            f"saved step {step} ({tier}: {path}, {size_bytes:,} bytes, {seconds:.2f} s, training held {stall_s:.3f} s)"
        )

    def checkpoint_loaded(self, *, step: int, path: str, tier: str, seconds: float) -> None:
        """CHECKPOINT loaded."""
        self._emit("CHECKPOINT", "loaded", step=step, path=path, seconds=round(seconds, 3), tier=tier)
        self.line(f"resumed from step {step} ({tier}: {path}, {seconds:.1f} s)")

    def checkpoint_failed(self, *, step: int, tier: str, why: str) -> None:
        """CHECKPOINT failed."""
        self._emit("CHECKPOINT", "failed", step=step, why=why, tier=tier)
        self.warning(f"checkpoint of step {step} failed ({tier}): {why}")

    def checkpoint_rejected(self, path: str, why: str, tier: str = "disk") -> None:
        """CHECKPOINT rejected."""
        self._emit("CHECKPOINT", "rejected", path=path, why=why, tier=tier)
        self.warning(f"checkpoint {path} rejected: {why}")

    def loss_bounded(self, data: Mapping[str, Any], lines: Sequence[str]) -> None:
        """CHECKPOINT bound, with the lines that state it."""
        self._emit("CHECKPOINT", "bound", **data)
        for line in lines:
            self.line(line)

    # WATCH.

    def step_skipped(self, *, step: int, samples: range, loss: float, grad_norm: float, why: str | None) -> None:
        """WATCH skipped."""
        first, last = samples[0], samples[-1]
        self._emit(
            "WATCH",
            "skipped",
            step=step,
            first_sample=first,
            last_sample=last,
            loss=loss,
            grad_norm=grad_norm,
            why=why,
        )
        self.warning(f"step {step} skipped: {why} (samples {first} to {last})")

    def rolled_back(self, *, step: int, to_step: int, samples: range, rollbacks: int, why: str) -> None:
        """WATCH rollback."""
        self._emit(
            "WATCH",
            "rollback",
            step=step,
            to_step=to_step,
            first_sample=samples[0],
            last_sample=samples[-1],
            rollbacks=rollbacks,
            why=why,
        )
        self.warning(f"rolled back from step {step} to {to_step} and past these samples: {why}")

    def straggler_found(self, *, step: int, name: str, rank: int | None, node: int, score: float, what: str) -> None:
        """WATCH straggler."""
        self._emit("WATCH", "straggler", step=step, rank=rank, node=node, score=round(score, 3), what=what)
        self.warning(f"straggler: {name} takes {score:.0%} of a step more than the median: {what}")

    def hang_found(self, *, ranks: Sequence[int], nodes: Sequence[int], collective: str, why: str) -> None:
        """WATCH hang. The caller prints the line: it differs between a warning and the end of the run."""
        self._emit("WATCH", "hang", ranks=list(ranks), nodes=list(nodes), collective=collective, why=why)

    def _emit(self, phase: str, event: str, *, epoch: int | None = None, **data: Any) -> None:
        """Write an event on rank 0, at DEBUG as a line too. A file that cannot be written does not stop training."""
        if self._least == 0 and self._rank_info.rank == 0:
            self.line(f"event {phase} {event} {json.dumps({'epoch': epoch, **data}, default=str)}", "DEBUG")
        if not self._leads and data.get("how") != "group":  # who comes back says itself how long it took
            kept = [] if phase == "STEP" else self._unsaid
            self._unsaid = [*kept, (phase, event, epoch, data)] if phase in _RESULTS else kept
            return
        if self._emitter is None:
            return
        try:
            self._emitter.emit(phase, event, epoch=epoch, **data)
        except OSError as error:
            self.alarm(f"event {phase} {event} could not be written: {error}")

    def _track(self, group: str, step: int, data: Mapping[str, Any]) -> None:
        scalars = {f"{group}/{name}": float(value) for name, value in data.items() if value is not None}
        for tracker in list(self._trackers):
            self._guarded(tracker, lambda tracker=tracker: tracker.log(step, scalars))

    def _guarded(self, tracker: Tracker, act: Any) -> None:
        try:
            act()
        except Exception as error:  # a foreign library and a network; training must not end for a chart
            self._trackers = [other for other in self._trackers if other is not tracker]
            self.alarm(f"{tracker.name} is left out from here on: {type(error).__name__}: {error}", "WARNING")


def print_traceback() -> None:
    """Print the exception that is being handled, if standard error can be written."""
    with contextlib.suppress(OSError):
        traceback.print_exc()


def flush_output() -> None:
    """Flush what was printed, as far as it can be written: the exit code must not depend on it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def render_parts(parts: Mapping[str, float]) -> str:
    """Parts of a start in words; what took no time is left out."""
    return ", ".join(f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05)


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)
