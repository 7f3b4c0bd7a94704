"""Acceptance training on the hosts of a SageMaker training job: one rank per GPU of the instance type, one verdict.

An ordinary submission through the SageMaker target, so that `trainmaster reap` finds it should this process be killed.
The document of the run comes from the log of rank 0 in CloudWatch. An interrupt stops the job.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainmaster.bench.accept.options import Options, words
from trainmaster.checks.profiles import find_instance
from trainmaster.cluster.acceptance import MODULE, limit_s, run_job
from trainmaster.cluster.acceptance_files import JOB
from trainmaster.cluster.termination import run
from trainmaster.core.errors import TargetError, UsageError
from trainmaster.core.spec import JobSpec, Limits, Preflight, Resources
from trainmaster.targets import Placement, Submission
from trainmaster.targets.sagemaker.aws import open_aws
from trainmaster.targets.sagemaker.logs import GROUP
from trainmaster.targets.sagemaker.planning import REQUEST_FILE
from trainmaster.targets.sagemaker.settings import Settings
from trainmaster.targets.sagemaker.states import billing, is_over, render_cost, render_stop
from trainmaster.targets.sagemaker.target import SageMaker

DRY_RUN = "00000000-0000-4000-8000-000000000000.1"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The training job of a run, and how many ranks it has."""

    target: SageMaker
    settings: Settings
    submission: Submission
    world: int


def accept(path: Path, nodes: int, options: Options, *, on_note: Say) -> dict[str, Any]:
    """Train on all hosts; the document of the run. Ctrl-C and SIGTERM stop the job."""
    with tempfile.TemporaryDirectory(prefix="trainmaster-accept-") as folder:
        job = _plan(path, nodes, options, attempt=f"{uuid.uuid4()}.1", folder=Path(folder))
        return run(_accept(job, options, on_note))


def dry_run(path: Path, nodes: int, options: Options) -> str:
    """The CreateTrainingJob request of `accept`, as JSON. Asks nobody."""
    job = _plan(path, nodes, options, attempt=DRY_RUN, folder=Path())
    return json.dumps(json.loads(job.submission.files[REQUEST_FILE]), indent=2) + "\n"


async def _accept(job: _Job, options: Options, on_note: Say) -> dict[str, Any]:
    settings, name = job.settings, str(job.submission.handle["name"])
    what = f"{job.submission.handle['nodes']} x {settings.instance_type}"
    on_note(f"training job {name} on {what} in {settings.region}; Ctrl-C stops it")
    try:
        return await run_job(
            job.target, job.submission, options, world=job.world, poll_s=settings.poll_s,
            action=f"read the log streams {name}/… in CloudWatch, group {GROUP}",
        )  # fmt: skip
    finally:
        on_note(await _describe_cost(settings, name, what))


async def _describe_cost(settings: Settings, name: str, what: str) -> str:
    try:
        aws = open_aws(settings.region, settings.endpoint)
        found = await aws.call("sagemaker", "describe_training_job", TrainingJobName=name)
    except TargetError as wrong:
        return f"training job {name}: its end and cost were not reached: {wrong}"
    facts, status = billing(found, settings.price_per_hour), found.get("TrainingJobStatus")
    if not is_over(found):
        words = render_stop(name, settings.region)
        return f"training job {name}: {status}; it may still run and cost money; stop it: {words}"
    return render_cost(name, str(status), facts, what=what)


def _plan(path: Path, nodes: int, options: Options, *, attempt: str, folder: Path) -> _Job:
    target = SageMaker(path, _adapt)
    settings = target.settings()
    per_node = options.processes or _count_gpus(settings)
    # Files of this machine mean nothing there.
    given = [*words(replace(options, processes=None, baselines=None, log_dir=None)), "--out", "-"]
    spec = JobSpec(
        name=JOB,
        target="sagemaker",
        resources=Resources(nodes=nodes, processes_per_node=per_node),
        preflight=Preflight(level=0),
        limits=Limits(timeout_s=min(limit_s(options), settings.max_runtime_s), stall_minutes=None, grace_s=10.0),
        command=(settings.python, "-m", MODULE, *given),
    )
    submission = target.plan(Placement(attempt=attempt, spec=spec, job_folder=folder / attempt))
    return _Job(target=target, settings=settings, submission=submission, world=nodes * per_node)


def _adapt(settings: Settings) -> Settings:
    """Settings of a job as those of this run: our agent starts the ranks, and all hosts stay to the end."""
    return replace(settings, start="agent", distribution="auto", spot=False)


def _count_gpus(settings: Settings) -> int:
    found = find_instance(settings.instance_type)
    if found is None:
        kind = settings.instance_type
        raise UsageError(f"{kind} is not in the table of instance types: state its GPUs with --processes")
    return found.gpus
