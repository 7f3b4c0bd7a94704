"""Bandwidth curves in findings: measurements by message size, with their baselines.

A finding of any check holds a curve in its values:

    collective   all_reduce (else the check's name is shown)
    busbw_gbps   {"1048576": 38.1, …}: GB/s, decimal, as nccl-tests counts, by message size in bytes
    compared     [{"size_bytes": 1073741824, "baseline_gbps": 442.0, "source": "…"}, …], where a baseline is known

or, with latencies, `points` and `baseline` as lists of {"size_bytes", "busbw_gbps", "latency_us", "source"}. `results`
for points, and `bandwidth_gbps` and `latency_ms` in them, are read too (names of the SageMaker metrics file).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.report.health import sanitise
from trainmaster.report.health.view import Row

# Larger values are no measurement and fit no axis. They stay in the finding's values.
MAX_BYTES, MAX_GBPS = 2.0**60, 1e9
_POINTS = ("points", "results", "busbw_gbps")
_BASELINES = ("baseline", "compared")
_RATES = ("busbw_gbps", "bandwidth_gbps", "baseline_gbps", "algbw_gbps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One message size."""

    size_bytes: float
    gbps: float
    latency_us: float | None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One collective, measured by one node or by all together (`where` is then "cluster")."""

    collective: str
    where: str
    node: str | None
    points: tuple[Point, ...]
    baseline: tuple[Point, ...]
    ranks: int | None
    row: Row

    @property
    def peak(self) -> Point:
        return max(self.points, key=lambda point: point.gbps)


def find(rows: Iterable[Row]) -> list[Curve]:
    """Every curve in the findings, in order."""
    curves = []
    for row in rows:
        points = _first(row, _POINTS)
        if not points:
            continue
        ranks = sanitise.number(row.values.get("ranks", row.values.get("world_size")))
        curves.append(
            Curve(
                collective=str(row.values.get("collective") or row.check),
                where=row.where,
                node=row.node,
                points=points,
                baseline=_first(row, _BASELINES),
                ranks=int(ranks) if ranks is not None else None,
                row=row,
            )
        )
    return curves


def _first(row: Row, names: tuple[str, ...]) -> tuple[Point, ...]:
    return next((points for name in names if (points := _points(row.values.get(name)))), ())


def _points(value: object) -> tuple[Point, ...]:
    if isinstance(value, Mapping):
        value = [
            {"size_bytes": int(size), "busbw_gbps": rate}
            for size, rate in value.items()
            if re.fullmatch(r"\d{1,18}", size, flags=re.ASCII)
        ]
    items = value if isinstance(value, list) else []
    points = [point for item in items if isinstance(item, Mapping) and (point := _point(item)) is not None]
    return tuple(sorted(points, key=lambda point: point.size_bytes))


def _point(item: Mapping[str, Any]) -> Point | None:
    size = sanitise.number(item.get("size_bytes"))
    rate = next((rate for name in _RATES if (rate := sanitise.number(item.get(name))) is not None), None)
    if size is None or rate is None or not 1 <= size <= MAX_BYTES or not 0 <= rate <= MAX_GBPS:
        return None
    latency_us, latency_ms = sanitise.number(item.get("latency_us")), sanitise.number(item.get("latency_ms"))
    if latency_us is None and latency_ms is not None:
        latency_us = latency_ms * 1000
    return Point(size_bytes=size, gbps=rate, latency_us=latency_us, source=sanitise.line(str(item.get("source") or "")))
