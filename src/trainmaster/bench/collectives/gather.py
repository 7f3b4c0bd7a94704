"""Rows from the ranks' progress: the figures of a point once every rank has finished it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainmaster.bench.collectives.result import Lost, Member, Row, Timing
from trainmaster.bench.collectives.sweep import FACTORS, Point
from trainmaster.core import schema
from trainmaster.core.errors import SpecError


@dataclass(slots=True)
class RankRecords:
    """Records of one rank so far."""

    rank: int
    member: Member | None = None
    met: bool = False
    points: int | None = None
    note: str = ""
    timings: dict[int, Timing] = field(default_factory=dict)
    error: str | None = None
    failed_at: float | None = None
    done: bool = False

    def take(self, line: Mapping[str, Any]) -> None:
        """Add one line; a malformed one is ignored."""
        match line.get("what"):
            case "here":
                self.member = schema.build(
                    Member, {"rank": self.rank, **{key: line[key] for key in ("host", "pid", "device", "local_rank")}}
                )
            case "met":
                self.met, self.points, self.note = True, int(line["points"]), str(line.get("note", ""))
            case "left":
                try:
                    timing = schema.build(Timing, line["timing"])
                except SpecError:
                    return
                self.timings[timing.seq] = timing
            case "failed":
                self.error, self.failed_at = str(line.get("why")), float(line.get("at", 0.0))
            case "done":
                self.done = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Outcome of all ranks of a run."""

    members: tuple[Member, ...]
    rows: tuple[Row, ...]
    partial: tuple[Row, ...]
    lost: tuple[Lost, ...]
    planned: int  # points
    notes: tuple[str, ...]
    timings: tuple[Timing, ...]


def row_of(point: Point, timings: Iterable[Timing], world: int) -> Row:
    """The row of a point; its times are those of the slowest rank."""
    ordered = sorted(timings, key=lambda timing: timing.rank)
    slowest = max(ordered, key=lambda timing: timing.mean_us)
    algbw = slowest.bytes / slowest.mean_us / 1e3  # bytes per µs is MB/s
    return Row(
        seq=point.seq,
        collective=point.collective,
        size_bytes=point.size_bytes,
        ranks=world,
        heard=tuple(timing.rank for timing in ordered),
        repeats=slowest.repeats,
        time_us=slowest.mean_us,
        algbw_gbps=algbw,
        busbw_gbps=algbw * FACTORS[point.collective](world),
        median_us=max(timing.median_us for timing in ordered),
        p95_us=max(timing.p95_us for timing in ordered),
        slowest_rank=slowest.rank,
        wrong=tuple(timing.wrong for timing in ordered if timing.wrong is not None),
    )


def sum_up(ranks: Sequence[RankRecords], points: Sequence[Point], lost: Sequence[Lost]) -> RunOutcome:
    """Summary of all ranks: points finished by all, and points finished by some."""
    whole: list[Row] = []
    partial: list[Row] = []
    timings: list[Timing] = []
    for point in points:
        finished = tuple(rank.timings[point.seq] for rank in ranks if point.seq in rank.timings)
        if finished:
            (whole if len(finished) == len(ranks) else partial).append(row_of(point, finished, len(ranks)))
            timings += finished
    return RunOutcome(
        members=tuple(rank.member for rank in ranks if rank.member is not None),
        rows=tuple(whole),
        partial=tuple(partial),
        lost=tuple(lost),
        planned=len(points),
        notes=tuple(dict.fromkeys(rank.note for rank in ranks if rank.note)),
        timings=tuple(timings),
    )
