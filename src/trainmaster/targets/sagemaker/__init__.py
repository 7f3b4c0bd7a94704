"""Target `sagemaker:account.yaml`: attempts run as SageMaker training jobs.

settings.py  the settings file            request.py  the CreateTrainingJob request, and its refusals
start.py     first program in a container planning.py the plan, and the text of --dry-run
target.py    the target                   aws.py      the AWS APIs, with errors as ours
states.py    status words as our states   logs.py     CloudWatch lines as files of the attempt
inputs.py    objects in S3
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.core.errors import UsageError
from trainmaster.targets._queueing import MAX_WAIT
from trainmaster.targets._traits import Account, Traits

if TYPE_CHECKING:
    from trainmaster.targets.sagemaker.target import SageMaker

TRAITS = Traits(
    title="SageMaker training jobs",
    option="file",
    example="account.yaml",
    starts="the top of docs/how/sagemaker-target.md shows it: region, role, image",
    required=True,
    one_job=frozenset({"check", "accept"}),
    instead={
        "isolate": "its nodes cannot be chosen: submit a job of two nodes that runs `bandwidth`, again and again",
        "remedy": "its machines are SageMaker's, a new job gets others: report the bad ones to AWS support",
    },
    queue={"max_wait_s": MAX_WAIT},
    no_queue={
        "name": "a training job names no queue",
        "priority": "training jobs have no priority",
        "preemptible": "SageMaker stops no training job for another; `spot:` of its settings file buys spot machines",
    },
    no_spares="SageMaker replaces no machine of a training job; `limits.attempts` brings a new one, which resumes",
)


def create(options: str) -> SageMaker:
    """The target with the settings of a file."""
    from trainmaster.targets.sagemaker.target import SageMaker

    if not options:
        raise UsageError("target: write sagemaker:account.yaml; the file names the role, the image and the bucket")
    return SageMaker(Path(options))


def runs_as(options: str, user: str | None) -> Account:  # noqa: ARG001 (the role of the file is the only one)
    """The execution role of the training jobs, and the folder in S3 that all of them share."""
    from trainmaster.targets.sagemaker.settings import load_settings

    create(options)
    settings = load_settings(Path(options))
    return Account(name=settings.role, places=frozenset({settings.role}))
