"""Curves of a job: any metric that it wrote, over steps or time, downsampled; or points of one, few enough to draw."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from trainmaster.api.compare import RunCurve
from trainmaster.api.curves import Axis, CurvesPage
from trainmaster.pages import compare
from trainmaster.web import dependencies
from trainmaster.web.routes import TRAINING, group, reply

router = group("curves", prefix=TRAINING)
_MOST = 64  # metrics of one answer
Metrics = Annotated[
    list[Annotated[str, Query(max_length=105)]] | None,
    Query(max_length=_MOST, description="names of metrics; default: loss and eval_loss"),
]


@router.get("/jobs/{uuid}/curve", response_model=RunCurve)
def find_curve(
    job: dependencies.Job,
    db: dependencies.Db,
    metric: Annotated[
        str, Query(min_length=1, max_length=200, description="field of STEP metrics; eval/… of evaluations")
    ] = "loss",
    points: Annotated[int, Query(ge=8, le=1000, description="about how many points")] = compare.POINTS,
) -> Response:
    """Points of a metric: step, seconds since the first, value (null: not a number)."""
    return reply(compare.read_curve(db, job.id, metric=metric, points=points))


@router.get("/jobs/{uuid}/curves", response_model=CurvesPage)
def read_curves(
    *,
    job: dependencies.Job,
    curves: dependencies.Curves,
    metric: Metrics = None,
    axis: Annotated[Axis, Query(description="steps, or seconds since the first one")] = "step",
    low: Annotated[float | None, Query(ge=0, le=1e15, description="first place of the axis")] = None,
    high: Annotated[float | None, Query(ge=0, le=1e15, description="last place of the axis")] = None,
    points: Annotated[int, Query(ge=10, le=5000, description="points of each curve, about")] = 1000,
) -> Response:
    """Curves between two places of the axis, in segments: one for each attempt and each step back."""
    names = metric or ["loss", "eval_loss"]
    return reply(curves.read(job.id, names, axis=axis, low=low, high=high, points=points))
