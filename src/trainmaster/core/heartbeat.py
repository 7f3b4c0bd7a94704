"""Heartbeat line of a training node, and the log rules that match it. Both are defined here only.

SageMaker HyperPod's agent reads the standard output of local rank 0 on every node and holds each line against the
`logMonitoringConfiguration` of the job. How it reads (hyperpod-elastic-agent 1.1.3, logagent/log_agent.py) makes the
format: `re.match`, so the pattern begins where the line begins; half a line is taken for a whole one, so no number ends
it; the first group goes through `float`, so no thousands commas; a byte outside ASCII may end the reading for good.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from trainmaster.core.compat import UTC

At = Literal["train", "eval", "save", "load"]

# Time (UTC), level, rank and node: every line of the trainer begins with them.
LINE_PREFIX = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ \[rank \d+ node \d+\] "
PATTERN = re.compile(
    r"^\S+ [A-Z]+ \[rank (?P<rank>\d+) node (?P<node>\d+)\] heartbeat step=(?P<step>\d+) steps=(?P<steps>\d+) "
    r"loss=(?P<loss>\S+) grad_norm=(?P<grad_norm>\S+) tokens_per_s=(?P<tokens_per_s>\d+\.\d+) "
    r"step_s=(?P<step_s>\d+\.\d+) at=(?P<at>train|eval|save|load)$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Progress of a node. Loss and norm are of the last step whose values are known, and may be NaN."""

    rank: int
    node: int
    step: int
    steps: int
    loss: float
    grad_norm: float
    tokens_per_s: float
    step_s: float
    at: At


Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
LEVELS: tuple[Level, ...] = ("DEBUG", "INFO", "WARNING", "ERROR")


def prefix(rank: int, node: int, *, level: Level = "INFO", at: datetime | None = None) -> str:
    """Prefix of every line of a rank: time, level, rank, node."""
    stamp = (at or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return f"{stamp} {level} [rank {rank} node {node}] "


def words(beat: Beat) -> str:
    """The line without its prefix."""
    return (
        f"heartbeat step={beat.step} steps={beat.steps} loss={beat.loss:.6f} grad_norm={beat.grad_norm:.6f} "
        f"tokens_per_s={beat.tokens_per_s:.1f} step_s={beat.step_s:.4f} at={beat.at}"
    )


def parse(line: str) -> Beat | None:
    """Parse a heartbeat line; None for any other line."""
    match = PATTERN.match(line)
    if match is None:
        return None
    try:
        return Beat(
            rank=int(match["rank"]),
            node=int(match["node"]),
            step=int(match["step"]),
            steps=int(match["steps"]),
            loss=float(match["loss"]),
            grad_norm=float(match["grad_norm"]),
            tokens_per_s=float(match["tokens_per_s"]),
            step_s=float(match["step_s"]),
            at=match["at"],  # type: ignore[arg-type]  # the pattern holds it to the four words
        )
    except ValueError:
        return None


def hyperpod_rules(
    *,
    start_s: int = 1800,
    silent_s: int = 300,
    slow_tokens_per_s: int | None = None,
    slow_points: int = 5,
    fault_not_finite: bool = False,
) -> list[dict[str, Any]]:
    """`logMonitoringConfiguration`: the job is faulted when a node falls silent, and told slow below a rate.

    Thresholds are whole numbers: the agent reads them with `int`, and a "2.5" drops all rules of the job without a
    word. `fault_not_finite` ends a run that the trainer might mend by itself (it skips such steps and goes back).
    """
    numbers = (start_s, silent_s, slow_points, *(() if slow_tokens_per_s is None else (slow_tokens_per_s,)))
    if any(not isinstance(number, int) or isinstance(number, bool) or number < 1 for number in numbers):
        raise ValueError(f"{numbers}: log rules take whole numbers from 1 on")
    beat = f"{LINE_PREFIX}heartbeat "
    rules: list[dict[str, Any]] = [
        {
            "name": "TrainmasterAlive",
            "logPattern": beat + r"step=(\d+) ",
            "expectedStartCutOffInSeconds": start_s,
            "expectedRecurringFrequencyInSeconds": silent_s,
            # Without it the time between the last step and the end of the process counts as a hang.
            "stopPattern": LINE_PREFIX + r"(?:done|stopped)\b",
        }
    ]
    if slow_tokens_per_s is not None:
        rules.append(
            {
                "name": "TrainmasterSlow",
                "logPattern": beat + r".*\btokens_per_s=(\d+\.\d+) .*at=train",
                "metricThreshold": slow_tokens_per_s,
                "operator": "lt",
                "metricEvaluationDataPoints": slow_points,
            }
        )
    if fault_not_finite:
        rules.append(
            {
                "name": "TrainmasterNotFinite",
                "logPattern": beat + r".*\bloss=(?:nan|-?inf) ",
                "faultOnMatch": True,  # a boolean: any text is true to the agent, "false" too
            }
        )
    return rules
