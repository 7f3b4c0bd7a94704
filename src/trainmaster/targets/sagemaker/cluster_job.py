"""A program on all hosts of a SageMaker training job: a process per GPU of the instance type.

An ordinary submission, so that `trainmaster reap` finds it should this process be killed. What the program printed
comes from the log of rank 0 in CloudWatch. An interrupt stops the job.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from trainmaster.core.errors import TargetError, UsageError
from trainmaster.core.spec import JobSpec, Limits, Preflight, Resources
from trainmaster.targets import Placement, Submission, Target
from trainmaster.targets._cluster_job import ClusterJob, ClusterJobEnd, Note
from trainmaster.targets._submission_run import run_submission
from trainmaster.targets.sagemaker.aws import open_aws
from trainmaster.targets.sagemaker.logs import GROUP
from trainmaster.targets.sagemaker.planning import REQUEST_FILE
from trainmaster.targets.sagemaker.settings import Settings
from trainmaster.targets.sagemaker.states import billing, is_over, render_cost, render_stop

_DRY_RUN = "00000000-0000-4000-8000-000000000000.1"


class SageMakerClusterJob:
    """One training job."""

    def __init__(self, target: Target, settings: Settings, job: ClusterJob, folder: Path) -> None:
        self._target, self._settings, self._job, self._folder = target, settings, job, folder
        self._nodes = job.nodes or 1
        self._per_node = job.processes or _count_gpus(settings, job)
        self.missing: Mapping[str, tuple[str, str]] = {}
        self.world = self._nodes * self._per_node

    def render(self) -> str:
        return json.dumps(json.loads(self._plan(_DRY_RUN, Path()).files[REQUEST_FILE]), indent=2) + "\n"

    async def run(self, on_note: Note) -> ClusterJobEnd:
        settings, submission = self._settings, self._plan(f"{uuid.uuid4()}.1", self._folder)
        name, what = str(submission.handle["name"]), f"{self._nodes} x {settings.instance_type}"
        on_note(f"training job {name} on {what} in {settings.region}; Ctrl-C stops it")
        try:
            return await run_submission(
                self._target, submission, limit_s=self._job.limit_s, poll_s=settings.poll_s,
                action=f"read the log streams {name}/… in CloudWatch, group {GROUP}",
            )  # fmt: skip
        finally:
            on_note(await _describe_cost(settings, name, what))

    def _plan(self, attempt: str, folder: Path) -> Submission:
        job, settings = self._job, self._settings
        spec = JobSpec(
            name=job.name,
            target="sagemaker",
            resources=Resources(nodes=self._nodes, processes_per_node=self._per_node),
            preflight=Preflight(level=0),
            limits=Limits(timeout_s=min(job.limit_s, settings.max_runtime_s), stall_minutes=None, grace_s=10.0),
            command=(settings.python, "-m", job.module, *job.words),
        )
        return self._target.plan(Placement(attempt=attempt, spec=spec, job_folder=folder / attempt))


def adapt(settings: Settings) -> Settings:
    """Settings of a job as those of this run: our agent starts the ranks, and all hosts stay to the end."""
    return replace(settings, start="agent", distribution="auto", spot=False)


async def _describe_cost(settings: Settings, name: str, what: str) -> str:
    try:
        aws = open_aws(settings.region, settings.endpoint)
        described = await aws.call("sagemaker", "describe_training_job", TrainingJobName=name)
    except TargetError as error:
        return f"training job {name}: its end and cost were not reached: {error}"
    facts, status = billing(described, settings.price_per_hour), described.get("TrainingJobStatus")
    if not is_over(described):
        words = render_stop(name, settings.region)
        return f"training job {name}: {status}; it may still run and cost money; stop it: {words}"
    return render_cost(name, str(status), facts, what=what)


def _count_gpus(settings: Settings, job: ClusterJob) -> int:
    kind = settings.instance_type
    if (gpus := job.gpus_of(kind)) is None:
        raise UsageError(f"{kind} is not in the table of instance types: state its GPUs with --processes")
    return gpus
