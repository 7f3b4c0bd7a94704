"""Iterations of a job for its page: phases, newest epochs and evaluations of the newest iterations."""

from __future__ import annotations

from trainmaster.api.run import EpochLoss, EvaluationResult, IterationPhase, IterationSummary
from trainmaster.store.database import Database
from trainmaster.store.page_rows import iterations

MOST_ITERATIONS, MOST_EPOCHS, MOST_EVALUATIONS = 20, 10, 200


def read(db: Database, job_id: str) -> tuple[IterationSummary, ...]:
    """The newest iterations, oldest first. A job that names none has at most one, without phases: it is left out."""
    rows = iterations.list_iterations(db, job_id)
    if not rows:
        return ()
    counts = iterations.count_epochs_by_iteration(db, job_id)
    phases: dict[int, list[IterationPhase]] = {}
    for step in iterations.list_steps(db, job_id):
        phases.setdefault(step.iteration_id, []).append(IterationPhase(kind=step.kind, seconds=step.step_time))
    evaluations: dict[int, list[EvaluationResult]] = {}
    for row in iterations.list_evals(db, job_id=job_id, limit=MOST_EVALUATIONS):
        result = EvaluationResult(model_id=row.model_id, metrics=dict(row.metrics or {}))
        evaluations.setdefault(row.iteration_id, []).append(result)
    return tuple(
        IterationSummary(
            number=row.number,
            completed=row.completed_at is not None,
            seconds=row.time_taken,
            phases=tuple(phases.get(row.id, ())),
            epochs=counts.get(row.id, 0),
            newest_epochs=_newest(db, row.id, counts.get(row.id, 0)),
            evaluations=tuple(evaluations.get(row.id, ())),
        )
        for row in rows[-MOST_ITERATIONS:]
    )


def _newest(db: Database, iteration: int, count: int) -> tuple[EpochLoss, ...]:
    rows = iterations.list_epochs(db, iteration, limit=MOST_EPOCHS, offset=max(0, count - MOST_EPOCHS))
    return tuple(EpochLoss(number=row.number, avg_loss=row.avg_loss) for row in rows)
