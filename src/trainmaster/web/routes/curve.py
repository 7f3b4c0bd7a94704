"""Curves: points of one metric of a job, few enough to draw."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from starlette.responses import Response

from trainmaster.api.compare import RunCurve
from trainmaster.pages import compare
from trainmaster.web import dependencies
from trainmaster.web.routes import TRAINING, group, reply

router = group("curves")


@router.get(f"{TRAINING}/jobs/{{uuid}}/curve", response_model=RunCurve)
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
