"""What the events of a job say: one pass over them, in order, into figures, checks, checkpoints and curves.

Everything in an event was written by a node and may be wrong or hostile. A number that is not one becomes None, a
an unknown verdict becomes `error`, a check that was planned and never spoke is shown as not measured.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmaster.api.events import Event
from trainmaster.api.run import Checkpoint, Curves, Garbage, Preflight, Run
from trainmaster.core.events import Phase
from trainmaster.core.results import CheckResult
from trainmaster.pages.parts import preflights
from trainmaster.pages.parts.downsample import Curve, number, sick_text, text, whole
from trainmaster.store.capacity.event_quota import CUT
from trainmaster.store.events import ScannedEvent

_LOSS_POINTS = 600  # of the large chart; a screen shows no more
_SIDE_POINTS = 300  # of each other one
_CHECKPOINTS_KEPT = 500  # the newest
_RATE_WINDOW = 50  # steps whose median is "the rate now": one slow step (a save, a first compile) does not move it
_GARBAGE_SHOWN = 20
_WARNINGS_KEPT = 5
_PARTS_KEPT = 16  # of a start; our trainer has seven
_TEXT_SHOWN = 400  # characters of a garbage line


def progress(step: int | None, steps: int | None) -> float | None:
    """Share of the planned steps, at most 1; None where either is unknown."""
    return None if step is None or not steps else min(1.0, step / steps)


_PER_STEP = ("loss", "tokens_per_s", "lr", "grad_norm")
_LIMITS = tuple((name, _LOSS_POINTS if name == "loss" else _SIDE_POINTS) for name in (*_PER_STEP, "eval_loss"))


@dataclass(slots=True)
class RunSummary:
    """Takes events one by one, in (attempt, offset) order; `run` says what they came to.

    It can go on later from `cursor`, so that a page that refreshes reads only what is new.
    """

    cursor: tuple[int, int] | None = None
    _events: int = 0
    _attempt: int = 0
    _step: int | None = None
    _first_step: int | None = None
    _last: Mapping[str, Any] = field(default_factory=dict)  # data of the newest STEP
    _start: Mapping[str, Any] = field(default_factory=dict)  # of the newest TRAINING start
    _start_of: int = 0  # and its attempt
    _end: Mapping[str, Any] = field(default_factory=dict)  # of the newest TRAINING end
    _eval: Mapping[str, Any] = field(default_factory=dict)
    _project: Mapping[str, Any] = field(default_factory=dict)
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=_RATE_WINDOW))
    _losses: list[float] = field(default_factory=list)  # the first and the last
    _sick_steps: int = 0
    _sick_since: int | None = None
    _loss_step: int | None = None  # of the last of `_losses`
    _watch_events: Counter[str] = field(default_factory=Counter)
    _warnings: deque[str] = field(default_factory=lambda: deque(maxlen=_WARNINGS_KEPT))
    _curves: dict[str, Curve] = field(default_factory=lambda: {name: Curve(limit=limit) for name, limit in _LIMITS})
    _planned: list[str] = field(default_factory=list)
    _checks: dict[str, tuple[CheckResult, float | None]] = field(default_factory=dict)
    _checks_of: int = 0  # the attempt whose checks are held; 0: none began
    _checks_over: bool = False
    _checkpoints: deque[Checkpoint] = field(default_factory=lambda: deque(maxlen=_CHECKPOINTS_KEPT))
    _checkpoint_events: Counter[str] = field(default_factory=Counter)
    _bound: Mapping[str, Any] = field(default_factory=dict)
    _started: Mapping[str, Any] = field(default_factory=dict)  # data of the newest START done
    _recoveries: int = 0
    _recovered: Mapping[str, Any] = field(default_factory=dict)  # data of the newest RECOVERY done
    _skipped: set[int] = field(default_factory=set)  # steps, each once: an attempt that resumes goes over some again
    _garbage_lines: int = 0
    _garbage: list[Garbage] = field(default_factory=list)

    def add(self, row: Event | ScannedEvent) -> None:
        """One row of an event stream."""
        self.cursor = row.cursor
        self._attempt = self.cursor[0]
        if row.phase is None:
            self._add_garbage(row)
            return
        self._events += 1
        match row.phase, row.event:
            case Phase.STEP, "metrics":
                self._add_step(row.data)
            case Phase.EVAL_MODEL, "metrics":
                self._add_eval(row.data)
            case Phase.TRAINING, "start":
                self._begin(row.data)
            case Phase.TRAINING, "end":
                self._end = row.data
            case Phase.START, "done":
                self._started = row.data
            case Phase.RECOVERY, "start":
                self._recoveries += 1
            case Phase.RECOVERY, "done":
                self._recovered = row.data
            case Phase.WATCH, _:
                self._add_watch(row)
            case Phase.CHECKPOINT, _:
                self._add_checkpoint(row)
            case Phase.PREFLIGHT, _:
                self._add_preflight(row)
            case Phase.PROJECT, "start":
                self._project = row.data

    def run(self, *, steps: int | None = None, over: bool = False) -> Run:
        """The figures so far. `steps` is what the spec planned; `over`: no more events will come."""
        first, last = self._losses or (number(self._end, "loss_first"), number(self._end, "loss_last"))
        rate = number(self._end, "tokens_per_s") or (statistics.median(self._rates) if self._rates else None)
        step = whole(self._end, "step") if self._end else self._step
        steps = whole(self._start, "steps") or steps
        per_step = (number(self._start, "batch_sequences") or 0) * (number(self._start, "sequence_tokens") or 0)
        left = steps - step if not over and not self._end and step is not None and steps is not None else 0
        return Run(
            events=self._events,
            step=step,
            steps=steps,
            progress=progress(step, steps),
            loss_first=first,
            loss_last=last,
            loss_ratio=last / first if last is not None and first else None,
            eval_loss=number(self._eval, "loss"),
            perplexity=number(self._eval, "perplexity"),
            sick_steps=self._sick_steps,
            sick_since=self._sick_since,
            loss_last_step=self._loss_step,
            loss_text=sick_text(self._last, "loss"),
            tokens_per_s=rate,
            left_s=left * per_step / rate if left > 0 and rate and per_step else None,
            mfu=number(self._last, "mfu"),
            mfu_measured=number(self._last, "mfu_measured"),
            data_share=number(self._last, "data_share"),
            compute_share=number(self._last, "compute_share"),
            comm_share=number(self._last, "comm_share"),
            skipped_steps=len(self._skipped),
            rollbacks=self._watch_events["rollback"],
            warnings=tuple(self._warnings),
            memory_gib=number(self._last, "memory_gib"),
            ranks=whole(self._start, "ranks"),
            device=text(self._start, "device"),
            device_name=text(self._start, "device_name"),
            precision=text(self._start, "precision"),
            parameters=whole(self._start, "parameters"),
            sequence_tokens=whole(self._start, "sequence_tokens"),
            batch_sequences=whole(self._start, "batch_sequences"),
            data_source=text(self._start, "data_source"),
            resumed_from=whole(self._start, "resumed_from"),
            first_step=self._first_step,
            host=text(self._project, "host"),
            agent_version=text(self._project, "version"),
            torch=text(self._start, "torch"),
            preflight=self._preflight(over=over),
            checkpoints=tuple(self._checkpoints),
            checkpoint_events=dict(self._checkpoint_events),
            lost_steps_max=whole(self._bound, "lost_steps"),
            lost_s_max=number(self._bound, "lost_s"),
            loss_bound_missed=text(self._bound, "missed"),
            start_s=number(self._started, "seconds"),
            start_parts=_seconds(self._started.get("parts")),
            recoveries=self._recoveries,
            recovery_s=number(self._recovered, "seconds"),
            garbage_lines=self._garbage_lines,
            garbage=tuple(self._garbage),
            curves=Curves(**{name: curve.points() for name, curve in self._curves.items()}),
        )

    def _begin(self, data: Mapping[str, Any]) -> None:
        self._start, self._start_of, self._end = data, self._attempt, {}
        if self._first_step is None and (before := whole(data, "resumed_from")) is not None:
            self._first_step = before + 1
        self._rates.clear()

    def _add_step(self, data: Mapping[str, Any]) -> None:
        step = whole(data, "step")
        if step is None:
            return
        self._step, self._last = step, data
        self._first_step = step if self._first_step is None else self._first_step
        # A loss that is there and is no number is a gap in the curve; one that was never written is no point at all.
        values = {name: number(data, name) for name in _PER_STEP if data.get(name) is not None}
        for name, value in values.items():
            self._curves[name].add(step, value)
        rate, loss = values.get("tokens_per_s"), values.get("loss")
        if rate is not None:
            self._rates.append(rate)
        if loss is not None:
            self._losses = [self._losses[0] if self._losses else loss, loss]
            self._loss_step, self._sick_since = step, None
        elif "loss" in values:
            self._sick_steps += 1
            self._sick_since = step if self._sick_since is None else self._sick_since

    def _add_eval(self, data: Mapping[str, Any]) -> None:
        self._eval, step = data, whole(data, "step")
        if step is not None:
            self._curves["eval_loss"].add(step, number(data, "loss"))

    def _add_watch(self, row: Event | ScannedEvent) -> None:
        self._watch_events[str(row.event)] += 1
        step, why = whole(row.data, "step"), text(row.data, "why")
        if row.event == "skipped" and step is not None:
            self._skipped.add(step)
        if row.event == "rollback":
            self._warnings.append(f"went back from step {step} to {whole(row.data, 'to_step')}: {why}")
        elif row.event == "straggler":
            rank, score = whole(row.data, "rank"), number(row.data, "score")
            name = f"node {whole(row.data, 'node')}" if rank is None else f"rank {rank}"
            share = "" if score is None else f" by {score:.0%} of a step"
            self._warnings.append(f"{name} is slow{share} ({text(row.data, 'what')}), since step {step}")
        elif row.event in ("stopped", "continued"):
            pid = whole(row.data, "pid")
            told = f"rank {whole(row.data, 'rank')} is stopped (process {pid}); `kill -CONT {pid}` lets it go on"
            if told in self._warnings:
                self._warnings.remove(told)
            if row.event == "stopped":
                self._warnings.append(told)
        elif row.event == "hang" and why is not None and why not in self._warnings:  # told early, and again at the end
            self._warnings.append(why)

    def _add_checkpoint(self, row: Event | ScannedEvent) -> None:
        if row.event == "bound":  # states what a loss would cost now: a figure, and no checkpoint
            self._bound = row.data
            return
        self._checkpoint_events[str(row.event)] += 1
        self._checkpoints.append(
            Checkpoint(
                attempt=self._attempt,
                event=str(row.event),
                step=whole(row.data, "step"),
                path=text(row.data, "path"),
                seconds=number(row.data, "seconds"),
                size_bytes=number(row.data, "bytes"),
                why=text(row.data, "why"),
            )
        )

    def _add_preflight(self, row: Event | ScannedEvent) -> None:
        if self._attempt != self._checks_of:
            self._checks_of, self._planned, self._checks, self._checks_over = self._attempt, [], {}, False
        if row.event == "start":
            planned = row.data.get("planned")
            self._planned += [str(name) for name in planned] if isinstance(planned, list) else []
        elif row.event == "end":
            self._checks_over = True
        elif row.event == "check":
            name = text(row.data, "check") or "(unnamed)"
            took_s = number(row.data, "took_s")
            result = CheckResult(
                check=name, findings=preflights.read_findings(row.data.get("findings")), took_s=took_s or 0.0
            )
            self._checks[name] = (result, took_s)

    def _preflight(self, *, over: bool) -> Preflight | None:
        if not self._checks_of:
            return None
        over = over or self._checks_over or self._checks_of < self._attempt or self._start_of == self._checks_of
        return preflights.shape(self._checks_of, self._checks, planned=self._planned, over=over)

    def _add_garbage(self, row: Event | ScannedEvent) -> None:
        self._garbage_lines += 1
        if row.fault == CUT:
            self._warnings.append(CUT)
        if len(self._garbage) < _GARBAGE_SHOWN:
            self._garbage.append(
                Garbage(
                    attempt=self._attempt, offset=row.offset, fault=row.fault or "", text=(row.text or "")[:_TEXT_SHOWN]
                )
            )


def _seconds(parts: object) -> dict[str, float]:
    """Parts of a start that are numbers, in their order."""
    known = parts if isinstance(parts, Mapping) else {}
    values = {str(name): number(known, name) for name in list(known)[:_PARTS_KEPT]}
    return {name: value for name, value in values.items() if value is not None}
