"""Iterations of a job for its page: phases, newest epochs and evaluations of the newest iterations."""

from __future__ import annotations

from collections.abc import Sequence

from trainmaster.api.run import EpochLoss, EvaluationResult, IterationPhase, IterationSummary
from trainmaster.store.database import Database
from trainmaster.store.page_rows import iterations
from trainmaster.store.rows import IterationRow, StepRow

MOST_ITERATIONS, MOST_EPOCHS, MOST_EVALUATIONS = 20, 10, 200


def read(db: Database, job_id: str, *, over: bool) -> tuple[IterationSummary, ...]:
    """The newest iterations, oldest first; `over`: the job has ended. A run that names none has one, number 1."""
    rows = iterations.list_iterations(db, job_id)
    if not rows:
        return ()
    counts = iterations.count_epochs_by_iteration(db, job_id)
    steps: dict[int, list[StepRow]] = {}
    for step in iterations.list_steps(db, job_id):
        steps.setdefault(step.iteration_id, []).append(step)
    evaluations: dict[int, list[EvaluationResult]] = {}
    for found in iterations.list_evals(db, job_id=job_id, limit=MOST_EVALUATIONS):
        result = EvaluationResult(model_id=found.model_id, metrics=dict(found.metrics or {}))
        evaluations.setdefault(found.iteration_id, []).append(result)
    summaries = []
    for row in rows[-MOST_ITERATIONS:]:
        phases = steps.get(row.id, [])
        completed, seconds = _measure(row, phases if over else ())
        summaries.append(
            IterationSummary(
                number=row.number,
                completed=completed,
                seconds=seconds,
                phases=tuple(IterationPhase(kind=step.kind, seconds=step.step_time) for step in phases),
                epochs=counts.get(row.id, 0),
                newest_epochs=_newest(db, row.id, counts.get(row.id, 0)),
                evaluations=tuple(evaluations.get(row.id, ())),
            )
        )
    return tuple(summaries)


def _measure(row: IterationRow, phases: Sequence[StepRow]) -> tuple[bool, float | None]:
    """Whether an iteration is complete, and its seconds: as stated, else from its start to its end.

    One that no line opened or closed, as of our own trainer, is as long as its phases, once no more can come.
    """
    began, ended = row.started_at, row.completed_at
    if began is None and ended is None:
        starts = [step.started_at for step in phases if step.started_at is not None]
        ends = [step.completed_at for step in phases if step.completed_at is not None]
        if phases and len(starts) == len(ends) == len(phases):
            began, ended = min(starts), max(ends)
    if row.time_taken is not None or began is None or ended is None:
        return ended is not None, row.time_taken
    stated = [step.step_time for step in phases if step.step_time is not None]  # a clock of the program's own
    return True, max([(ended - began).total_seconds(), *stated])


def _newest(db: Database, iteration: int, count: int) -> tuple[EpochLoss, ...]:
    rows = iterations.list_epochs(db, iteration, limit=MOST_EPOCHS, offset=max(0, count - MOST_EPOCHS))
    return tuple(EpochLoss(number=row.number, avg_loss=row.avg_loss) for row in rows)
