"""A job with its iterations, their phases and their numbers of epochs."""

from __future__ import annotations

from trainmaster.api.codec import fill
from trainmaster.api.iterations import Details, Iteration, Step
from trainmaster.pages.parts import shapes
from trainmaster.store import jobs
from trainmaster.store.database import Database
from trainmaster.store.page_rows import iterations


def read(db: Database, job_id: str) -> Details | None:
    """The iterations of a job; None if there is no such job."""
    with db.read():  # one snapshot for all queries
        job = jobs.find_job(db, job_id)
        if job is None:
            return None
        rows, epochs = iterations.list_iterations(db, job_id), iterations.count_epochs_by_iteration(db, job_id)
        steps: dict[int, list[Step]] = {}
        for step in iterations.list_steps(db, job_id):
            steps.setdefault(step.iteration_id, []).append(fill(Step, step, step_config=step.config))
    return Details(
        job=shapes.job(job),
        iterations=tuple(
            fill(
                Iteration,
                row,
                epochs=epochs.get(row.id, 0),
                steps=tuple(steps.get(row.id, ())),
                iteration_number=row.number,
            )
            for row in rows
        ),
    )
