"""Figures of a run, as its events report them: progress, loss, throughput, checks, checkpoints, curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmaster.core.results import Overall, Verdict

Point = tuple[float, float | None]  # (step, value); None is not a number and leaves a gap in the line


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding of one pre-flight check."""

    check: str
    device: str | None
    verdict: Verdict
    reason: str
    action: str | None
    values: Mapping[str, Any]
    took_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """Pre-flight checks of the newest attempt that started them. `overall` is computed by the server."""

    attempt: int
    overall: Overall | None  # None while they run
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint event: saved, loaded, rejected, failed."""

    attempt: int
    event: str
    step: int | None
    path: str | None
    seconds: float | None
    size_bytes: float | None
    why: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """A line of the event file that is not a valid event, kept as it was written."""

    attempt: int
    offset: int
    fault: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Points over steps, downsampled; minima and maxima are kept. A step back in x starts a new attempt."""

    loss: tuple[Point, ...] = ()
    eval_loss: tuple[Point, ...] = ()
    tokens_per_s: tuple[Point, ...] = ()
    lr: tuple[Point, ...] = ()
    grad_norm: tuple[Point, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationPhase:
    """One phase of an iteration (traj_gen, training, evaluation) and its seconds."""

    kind: str
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLoss:
    """One epoch of an iteration."""

    number: int
    avg_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """One evaluation of one model."""

    model_id: str | None
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSummary:
    """One iteration with its phases, its newest epochs and its evaluations."""

    number: int
    completed: bool
    seconds: float | None
    phases: tuple[IterationPhase, ...]
    epochs: int  # all of them
    newest_epochs: tuple[EpochLoss, ...]
    evaluations: tuple[EvaluationResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Figures of a job so far. None: not reported."""

    events: int
    step: int | None
    steps: int | None
    progress: float | None  # share of the planned steps
    loss_first: float | None
    loss_last: float | None
    loss_ratio: float | None  # last over first
    eval_loss: float | None
    perplexity: float | None
    sick_steps: int  # steps whose loss was not a number
    sick_since: int | None = None  # step since which no loss was a number; None where the newest one is
    loss_last_step: int | None = None  # step of `loss_last`
    loss_text: str | None = None  # NaN, Infinity or -Infinity, where the newest loss is no number
    tokens_per_s: float | None
    left_s: float | None  # to the last planned step, at this rate
    mfu: float | None  # against the datasheet
    mfu_measured: float | None  # against the burst rate measured at the start
    data_share: float | None  # of the time of a step
    compute_share: float | None
    comm_share: float | None
    skipped_steps: int  # bad steps whose update was skipped
    rollbacks: int
    warnings: tuple[str, ...]  # the newest: roll-backs, stragglers, hangs, ranks that are stopped
    memory_gib: float | None
    ranks: int | None
    device: str | None
    device_name: str | None
    precision: str | None
    parameters: int | None
    sequence_tokens: int | None
    batch_sequences: int | None
    data_source: str | None
    resumed_from: int | None
    first_step: int | None = None  # that this job trained; of one that goes on with checkpoints not 1
    host: str | None
    agent_version: str | None
    torch: str | None
    preflight: Preflight | None
    checkpoints: tuple[Checkpoint, ...]  # the newest, oldest first
    checkpoint_events: Mapping[str, int]  # number of each kind, all of them
    lost_steps_max: int | None = None  # steps that the loss of a node would cost now, at most; None: not stated
    lost_s_max: float | None = None
    loss_bound_missed: str | None = None  # why the stated limit is not held
    start_s: float | None = None  # of the newest start of the ranks, from their processes to the end of the first step
    start_parts: Mapping[str, float] = field(default_factory=dict)  # its parts in seconds, in order
    recoveries: int = 0  # times that ranks were started again inside an attempt
    recovery_s: float | None = None  # of the newest one, from the death of a rank to the end of the next step
    iterations: tuple[IterationSummary, ...] = ()  # the newest, oldest first
    garbage_lines: int
    garbage: tuple[Garbage, ...]
    curves: Curves
