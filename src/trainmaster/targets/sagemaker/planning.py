"""Plan of an attempt on SageMaker: the files of its input channel, the request, and the text of `--dry-run`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from trainmaster.core.errors import UsageError
from trainmaster.core.plan import WORK_FOLDER, Plan
from trainmaster.core.spec import JobSpec
from trainmaster.core.workdir import find_digest
from trainmaster.remote import job_user, sagemaker_start
from trainmaster.targets import Placement, Submission
from trainmaster.targets.kubernetes import names
from trainmaster.targets.sagemaker import request
from trainmaster.targets.sagemaker.settings import Settings

REQUEST_FILE = "create-training-job.json"
_START = Path(sagemaker_start.__file__)


def plan(placement: Placement, settings: Settings) -> Submission:
    """The submission: the request, and the objects that the containers find in their input channel."""
    attempt, spec = placement.attempt, placement.spec
    given = job_user.find_given(os.environ)
    if missing := sorted(given.keys() - settings.secrets.keys()):
        raise UsageError(
            f"{', '.join(missing)}: given to jobs by {job_user.PASSED}, but everybody who may describe a training job "
            "can read its environment; store it in AWS Secrets Manager and write `secrets:` in the settings file"
        )
    made = request.build(attempt, spec, settings)
    folder = request.input_folder(settings, attempt)
    files = {REQUEST_FILE: _json(made)}
    if settings.start == "agent":
        files[f"{folder}/plan.json"] = node_plan(placement).to_json() + "\n"
        files[f"{folder}/start.py"] = _START.read_text()
        files[f"{folder}/secrets.json"] = _json({"region": settings.region, "secrets": settings.secrets})
    return Submission(
        handle={
            "attempt": attempt,
            "name": made["TrainingJobName"],
            "nodes": spec.resources.nodes,
            "ranks_per_node": spec.resources.processes_per_node,
            "start": settings.start,
            "folder": str(placement.job_folder.absolute() / "attempts" / attempt.rpartition(".")[2]),
            **_price(spec, settings),
        },
        files=files,
        commands=(("aws", "sagemaker", "create-training-job", "--cli-input-json", f"file://{REQUEST_FILE}"),),
        work=placement.job_folder / WORK_FOLDER if find_digest(spec.workdir) is not None else None,
    )


def _price(spec: JobSpec, settings: Settings) -> dict[str, float]:
    """Price of all instances, for `cost` and budgets; nothing where the settings file states none."""
    if settings.price_per_hour is None:
        return {}
    return {"price_cents_per_hour": 100 * settings.price_per_hour * spec.resources.nodes}


def node_plan(placement: Placement) -> Plan:
    """Plan that every container reads; start.py adds the node's rank and the address of the first host."""
    nodes = placement.spec.resources.nodes
    return Plan(
        attempt=placement.attempt,
        spec=replace(placement.spec, container=None),  # the training job is the container
        folder="/opt/ml/trainmaster/attempts/1",
        checkpoints=request.CHECKPOINT_FOLDER,
        master_addr="algo-1" if nodes > 1 else "127.0.0.1",
        master_port=names.MASTER_PORT if nodes > 1 else None,
    )


def _json(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
