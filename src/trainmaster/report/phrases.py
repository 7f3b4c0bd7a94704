"""A job page in words: its tone, title, one sentence, the figures in order, and the spec as text.

HTML and Markdown say the same because both take it from here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.api.jobs import Attempt, JobPage
from trainmaster.api.run import Check, Checkpoint, Preflight, Run
from trainmaster.core.money.cost import dollars, say_at_end
from trainmaster.core.results import Overall, Verdict
from trainmaster.core.states import CANCEL_REQUESTED, Stage, Status
from trainmaster.report.formats import count, duration, percent, short

TONES = {
    Status.COMPLETED: "good",
    Status.FAILED: "bad",
    Status.CANCELLED: "idle",
    Status.CANCELLING: "warn",
    Status.RUNNING: "live",
    Status.PENDING: "idle",
}
VERDICT_TONES = {
    Verdict.PASS: "good",
    Verdict.WARN: "warn",
    Verdict.FAIL: "bad",
    Verdict.ERROR: "bad",
    Verdict.SKIP: "idle",
}
OVERALL_TONES = {Overall.PASS: "good", Overall.WARN: "warn", Overall.FAIL: "bad", Overall.INCOMPLETE: "bad"}
_STAGES = {
    Stage.QUEUED: "Waiting for its turn.",
    Stage.PLACING: "Choosing where to run.",
    Stage.PROVISIONING: "Waiting for machines.",
    Stage.CONNECTING: "Connecting to the machines.",
    Stage.STAGING: "Copying what it needs to the machines.",
    Stage.CHECKING: "Checking the machines before the start.",
    Stage.RUNNING: "Running; no step has been reported yet.",
    Stage.COLLECTING: "Collecting logs and results.",
    Stage.RELEASING: "Giving the machines back.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of the summary: what it is, how much, and a short note under it."""

    name: str
    value: str
    note: str = ""
    share: float | None = None  # draws a bar


_SHOWN_S = 0.05  # shorter parts of a start are left out


def title(page: JobPage) -> str:
    """The verdict in a few words: "Failed: check failed"."""
    word = page.status.value.capitalize()
    reason = page.reason.value.replace("_", " ") if page.reason and page.status is Status.FAILED else ""
    return f"{word}: {reason}" if reason else word


def sentence(page: JobPage) -> str:
    """One sentence on the job's outcome or progress."""
    run = page.run
    done = ""
    if run.step is not None:
        done = f"{count(run.step)} of {count(run.steps)} steps" if run.steps else f"{count(run.step)} steps"
    if page.status is Status.COMPLETED:
        took = f" in {duration(page.duration_s)}" if page.duration_s is not None else ""
        if (page.spec or {}).get("resume_from") and run.step is not None and (run.first_step or 1) > 1:
            done = f"steps {count(run.first_step)} to {count(run.step)}"
        if page.continues is not None:
            took += f", on from {page.continues.name} {page.continues.id[:8]}"
        loss = f" Loss {loss_words(page)}." if run.loss_ratio is not None or run.sick_since is not None else ""
        return f"{done.capitalize() or 'Finished'}{took}.{loss}"
    if page.cancelled_by is not None and page.status in (Status.CANCELLING, Status.CANCELLED):
        word = "Cancelled" if page.status.final else "Asked to save and stop"
        more = "" if page.message in ("", CANCEL_REQUESTED) else f": {page.message}"
        return f"{word} by {page.cancelled_by}{more}" + ("" if more else ".")
    if page.status.final or page.message:
        return page.message or (f"Stopped after {done}." if done else "It left no message.")
    if page.status is Status.CANCELLING:
        return "Asked to save and stop."
    if done and page.stage is Stage.RUNNING:
        left = f", about {duration(math.ceil(run.left_s))} left" if run.left_s is not None else ""
        return f"{done.capitalize()}{left}."
    return _STAGES[page.stage] if page.stage else "Waiting."


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedCheck:
    """Findings of one check that say the same, and the devices they are of."""

    row: Check
    devices: tuple[str, ...]


def fold(rows: Iterable[Check]) -> list[FoldedCheck]:
    """Findings with one verdict and the same words together: 32 GPUs with one fault are one row."""
    groups: dict[tuple[str, Verdict, str, str | None], list[Check]] = {}
    for row in rows:
        groups.setdefault((row.check, row.verdict, _same_words(row), row.action), []).append(row)
    return [
        FoldedCheck(row=same[0], devices=tuple(row.device for row in same if row.device)) for same in groups.values()
    ]


def _same_words(row: Check) -> str:
    """A reason without the name of its device."""
    return row.reason.replace(row.device, "") if row.device else row.reason


def loss_words(page: JobPage) -> str:
    """First → last, with their ratio. The last number is not the end where what follows it is none."""
    run = page.run
    if run.sick_since is not None:
        last = f" (last number {_last_number(run)})" if run.loss_last_step is not None else " from the first step on"
        return f"{_loss_value(run)}{last}"
    ratio = f" (×{short(run.loss_ratio)})" if run.loss_ratio is not None else ""
    return f"{short(run.loss_first)} → {short(run.loss_last)}{ratio}"


def _loss_value(run: Run) -> str:
    if run.sick_since is None:
        return f"{short(run.loss_first)} → {short(run.loss_last)}"
    sick = run.loss_text or "no number"
    return sick if run.loss_last_step is None else f"{short(run.loss_first)} → {sick}"


def _last_number(run: Run) -> str:
    return f"{short(run.loss_last)} at step {count(run.loss_last_step)}"


def figures(page: JobPage) -> list[Figure]:
    """The summary, most important first; absent values are left out."""
    return list(_figures(page))


def _figures(page: JobPage) -> Iterator[Figure]:
    run = page.run
    if run.loss_first is not None or run.sick_since is not None:
        note = f"×{short(run.loss_ratio)} of the first step" if run.loss_ratio is not None else ""
        sick = f"{count(run.sick_steps)} steps without a number" if run.sick_steps else ""
        if run.sick_since is not None and run.loss_last_step is not None:
            sick += f"; last number {_last_number(run)}"
        yield Figure(name="Loss", value=_loss_value(run), note=sick or note)
    if run.eval_loss is not None:
        note = f"perplexity {short(run.perplexity)}" if run.perplexity is not None else ""
        yield Figure(name="Held-out loss", value=short(run.eval_loss), note=note)
    if run.tokens_per_s is not None:
        note = f"MFU {percent(run.mfu)}" if run.mfu is not None else "MFU unknown for this device"
        note += f", {percent(run.mfu_measured)} of the measured peak" if run.mfu_measured is not None else ""
        yield Figure(name="Tokens per second", value=short(run.tokens_per_s), note=note)
    if run.step is not None or run.steps is not None:
        value = f"{count(run.step or 0)} / {count(run.steps)}" if run.steps else count(run.step)
        left = f"about {duration(math.ceil(run.left_s))} left" if run.left_s is not None else percent(run.progress)
        yield Figure(name="Steps", value=value, note=left if run.progress is not None else "", share=run.progress)
    if run.compute_share is not None:
        parts = (("data", run.data_share), ("communication", run.comm_share))
        note = " · ".join(f"{name} {percent(share)}" for name, share in parts if share is not None)
        yield Figure(name="Time computing", value=percent(run.compute_share), note=note)
    if run.skipped_steps:
        note = (
            f"{count(run.rollbacks)} roll-back{'s' if run.rollbacks > 1 else ''}" if run.rollbacks else "no roll-back"
        )
        yield Figure(name="Skipped steps", value=count(run.skipped_steps), note=note)
    if page.duration_s is not None:
        yield Figure(
            name="Duration", value=duration(page.duration_s), note="from start to end" if page.ended_at else "so far"
        )
    if page.cost_cents:  # left out where it is free or unknown
        ahead = page.forecast_cents is not None and not page.status.final
        note = say_at_end(page.forecast_cents, page.forecast_bound) if ahead else ""
        yield Figure(name="Cost", value=dollars(page.cost_cents), note=note)
    if run.device is not None or run.ranks is not None:
        device = {"cpu": "CPU", "cuda": "GPU"}.get(run.device or "", run.device)
        value = f"{count(run.ranks)} × {device}" if device else count(run.ranks)
        note = " · ".join(word for word in (run.device_name, run.precision) if word and word != run.device)
        yield Figure(name="Ranks and device", value=value, note=note)
    if run.parameters is not None:
        note = (
            f"{short(run.memory_gib)} GiB of GPU memory"
            if run.memory_gib is not None
            else f"trained on {run.data_source}"
            if run.data_source
            else ""
        )
        yield Figure(name="Parameters", value=short(run.parameters), note=note)
    yield from _start_figures(page)
    yield from _checkpoint_figures(page)
    if page.attempts:
        resumed = f"resumed from step {count(run.resumed_from)}" if run.resumed_from is not None else ""
        yield Figure(name="Attempts", value=count(len(page.attempts)), note=resumed)


def _start_figures(page: JobPage) -> Iterator[Figure]:
    run = page.run
    if run.start_s is not None:
        slowest = sorted(run.start_parts.items(), key=lambda part: -part[1])[:3]
        note = " · ".join(f"{name.replace('_', ' ')} {short(took)} s" for name, took in slowest if took >= _SHOWN_S)
        yield Figure(name="Start to first step", value=f"{short(run.start_s)} s", note=note)
    if run.recoveries:
        note = f"the last took {short(run.recovery_s)} s" if run.recovery_s is not None else ""
        yield Figure(name="Recoveries in place", value=count(run.recoveries), note=note)


def _checkpoint_figures(page: JobPage) -> Iterator[Figure]:
    run = page.run
    saved = [checkpoint for checkpoint in run.checkpoints if checkpoint.event == "saved"]
    if run.checkpoints:
        events = run.checkpoint_events
        bad = events.get("failed", 0) + events.get("rejected", 0)
        last = f"last at step {count(saved[-1].step)}" if saved and saved[-1].step is not None else ""
        note = f"{bad} failed or rejected" if bad else last
        yield Figure(name="Checkpoints saved", value=count(events.get("saved", 0)), note=note)
    if run.lost_steps_max is not None and not page.status.final:
        seconds = f"about {duration(run.lost_s_max)} of work" if run.lost_s_max is not None else ""
        yield Figure(
            name="Lost with a node, at most",
            value=f"{count(run.lost_steps_max)} steps",
            note=run.loss_bound_missed or seconds,
        )


def is_kept(page: JobPage, checkpoint: Checkpoint) -> bool:
    """Whether a saved checkpoint is still there, by its spec: the newest `keep`, and each that is kept for good."""
    config = ((page.spec or {}).get("train") or {}).get("checkpoint") or {}
    keep, every = config.get("keep"), config.get("keep_every_steps")
    if keep is None or checkpoint.event != "saved" or checkpoint.step is None:
        return True
    steps = sorted({other.step for other in page.run.checkpoints if other.event == "saved" and other.step is not None})
    return checkpoint.step in steps[-keep:] or bool(every and checkpoint.step % every == 0)


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Measured values of an evaluation in one line."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in metrics.items() if value is not None)


def tally(preflight: Preflight) -> str:
    """How many of each verdict: "7 pass, 1 warn"."""
    verdicts = [row.verdict for row in preflight.checks]
    return ", ".join(f"{verdicts.count(word)} {word.value}" for word in Verdict if word in verdicts)


def evidence(attempt: Attempt, shown: Preflight | None = None) -> list[tuple[str, str]]:
    """Evidence of an attempt as (name, text), in its own order. `shown`: whose findings stand beside it as a table."""
    tabled = shown is not None and shown.attempt == attempt.number
    return [
        (name.replace("_", " "), _findings(value) if name == "findings" else _proof(value))
        for name, value in attempt.evidence.items()
        if value not in (None, [], "") and not (tabled and name == "findings")
    ]


def _findings(value: object) -> str:
    """A line for each finding of a check; what does not look like one as it is."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(row, Mapping) for row in value):
        return _proof(value)
    return "\n".join(map(_finding, value))


def _finding(row: Mapping[str, Any]) -> str:
    name = " ".join(str(row[key]) for key in ("check", "device") if row.get(key))
    words = ": ".join(filter(None, (name, *(str(row[key]) for key in ("verdict", "reason") if row.get(key)))))
    return f"{words} → {row['action']}" if row.get("action") else words


def _proof(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "\n".join(item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for item in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)


def value_text(value: object) -> str:
    """One measured value, short."""
    if isinstance(value, float):
        return short(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def spec_text(value: Mapping[str, Any]) -> str:
    """The spec as YAML that reads back to the same data."""
    return "\n".join(_yaml(value, 0)) + "\n"


def _yaml(value: Mapping[str, Any], depth: int) -> Iterator[str]:
    for key, item in value.items():
        head = "  " * depth + _scalar(key) + ":"
        if isinstance(item, Mapping) and item:
            yield head
            yield from _yaml(item, depth + 1)
        else:
            yield f"{head} {_scalar(item)}"


_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_WORDS = {"true", "false", "yes", "no", "on", "off", "null", "none", "y", "n"}


def _scalar(value: object) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)  # JSON is YAML
