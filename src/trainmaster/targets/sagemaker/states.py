"""Status words of SageMaker as our states. Each word of the API's own lists is here; an unknown word is `unknown`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from trainmaster.core.plan import ExitRecord
from trainmaster.core.states import Reason, TargetState
from trainmaster.targets import Poll

_WAITING, _RUNNING = TargetState.WAITING, TargetState.RUNNING
# SecondaryStatus of a job whose TrainingJobStatus is InProgress or Stopping.
SECONDARY = {
    "Starting": _WAITING,
    "Pending": _WAITING,
    "LaunchingMLInstances": _WAITING,
    "PreparingTrainingStack": _WAITING,
    "Downloading": _WAITING,
    "DownloadingTrainingImage": _WAITING,
    "Interrupted": _WAITING,  # spot: the instances were taken back; SageMaker starts the job again
    "Restarting": _WAITING,
    "Training": _RUNNING,
    "Updating": _RUNNING,
    "Uploading": _RUNNING,
    "Stopping": _RUNNING,
    "Completed": _RUNNING,  # the status itself follows
    "Failed": _RUNNING,
    "Stopped": _RUNNING,
    "MaxRuntimeExceeded": _RUNNING,
    "MaxWaitTimeExceeded": _RUNNING,
}
LIVE = ("InProgress", "Stopping")
OVER = ("Completed", "Failed", "Stopped", "Deleting")
# Beginnings of FailureReason. The API's own documents list none; these were seen in the field, in issues of GitHub:
# CapacityError DIAGNijmegen/rse-grand-challenge#2631, InternalServerError aws/sagemaker-python-sdk#70,
# AlgorithmError aws/amazon-sagemaker-examples#1224, ClientError aws/sagemaker-python-sdk#57 (an image that cannot be
# pulled). InsufficientCapacityError is unverified: it was seen of Studio only (aws/amazon-sagemaker-feedback#99).
_FAILURES = {
    "CapacityError": (TargetState.LOST, Reason.NO_CAPACITY),
    "InsufficientCapacityError": (TargetState.LOST, Reason.NO_CAPACITY),
    "InternalServerError": (TargetState.LOST, Reason.NODE_LOST),
    "AlgorithmError": (TargetState.FAILED, Reason.SCRIPT_FAILED),
    "ClientError": (TargetState.FAILED, Reason.TARGET_ERROR),
}


def is_over(job: Mapping[str, Any]) -> bool:
    return job.get("TrainingJobStatus") in OVER


def judge(job: Mapping[str, Any], *, record: ExitRecord | None, stop: str | None, attempt: str,
          price_per_hour: float | None, whole: bool = True) -> Poll:  # fmt: skip
    """State of an attempt from the answer of DescribeTrainingJob and the agent's record, where there is one.

    `whole`: every node left a record. One that is ok tells of its own node only.
    """
    status, secondary = str(job.get("TrainingJobStatus", "")), str(job.get("SecondaryStatus", ""))
    if status in LIVE:
        return Poll(state=SECONDARY.get(secondary, TargetState.UNKNOWN), note=_note(job))
    if status not in OVER:
        return Poll(state=TargetState.UNKNOWN, note=f"SageMaker's status {status!r} is not known")
    evidence = billing(job, price_per_hour)
    speaks = whole or status == "Completed" if record is not None and record.ok else stop is None
    if record is not None and speaks:
        state = TargetState.SUCCEEDED if record.ok else TargetState.FAILED
        return Poll(state=state, exit=_with(record, evidence), note=record.message)
    state, reason, text = _end(job, stop)
    if state is TargetState.LOST:
        return Poll(state=state, reason=reason, note=text)
    made = record or ExitRecord(attempt=attempt, ok=reason is None, ended_at=_ended_at(job), message=text)
    made = replace(made, ok=reason is None, reason=reason, message=text)
    return Poll(state=state, exit=_with(made, evidence), note=text)


def _end(job: Mapping[str, Any], stop: str | None) -> tuple[TargetState, Reason | None, str]:
    """State, reason and text of a job that is over, without the agent's word."""
    status, secondary = job["TrainingJobStatus"], str(job.get("SecondaryStatus", ""))
    failure = str(job.get("FailureReason", ""))
    if status == "Completed":
        return TargetState.SUCCEEDED, None, "SageMaker: Completed"
    if secondary == "MaxRuntimeExceeded":
        return TargetState.FAILED, Reason.TIMED_OUT, "SageMaker stopped it at MaxRuntimeInSeconds"
    if secondary == "MaxWaitTimeExceeded":
        return TargetState.LOST, Reason.NO_CAPACITY, "no spot capacity within MaxWaitTimeInSeconds"
    if stop is not None:
        word, _, text = stop.partition(":")
        reason = Reason(word.strip()) if word.strip() in list(Reason) else Reason.USER_CANCELLED
        return TargetState.FAILED, reason, text.strip() or f"stopped: {reason}"
    if status == "Stopped":
        return TargetState.FAILED, Reason.USER_CANCELLED, "stopped at SageMaker, not by trainmaster"
    if status == "Deleting":
        return TargetState.LOST, Reason.TARGET_ERROR, "the training job is being deleted"
    if "image" in failure.lower() and failure.startswith("ClientError"):
        return TargetState.FAILED, Reason.IMAGE_ERROR, failure
    for word, (state, reason) in _FAILURES.items():
        if failure.startswith(word):
            return state, reason, failure
    return TargetState.FAILED, Reason.TARGET_ERROR, failure or "SageMaker: Failed, without a reason"


def billing(job: Mapping[str, Any], price_per_hour: float | None) -> dict[str, Any]:
    """Billable time of a job, and its cost where the price of an instance is known."""
    facts: dict[str, Any] = {}
    for field, name in (("BillableTimeInSeconds", "billable_s"), ("TrainingTimeInSeconds", "training_s")):
        if job.get(field) is not None:
            facts[name] = int(job[field])
    if "billable_s" in facts and price_per_hour is not None:
        count = int((job.get("ResourceConfig") or {}).get("InstanceCount") or 1)
        facts["cost_usd"] = round(facts["billable_s"] * count * price_per_hour / 3600.0, 4)
    return facts


def _note(job: Mapping[str, Any]) -> str:
    transitions = job.get("SecondaryStatusTransitions") or ()
    message = str(transitions[-1].get("StatusMessage") or "") if transitions else ""
    secondary = str(job.get("SecondaryStatus", ""))
    return f"{secondary}: {message}" if message else secondary


def _ended_at(job: Mapping[str, Any]) -> str:
    when = job.get("TrainingEndTime") or job.get("LastModifiedTime") or datetime.now(UTC)
    return str(when.astimezone(UTC).isoformat(timespec="microseconds"))


def _with(record: ExitRecord, evidence: Mapping[str, Any]) -> ExitRecord:
    return replace(record, evidence={**record.evidence, **evidence}) if evidence else record


def render_cost(name: str, status: str, facts: Mapping[str, Any], *, what: str) -> str:
    """The end of a training job and its cost, for people. `facts`: as `billing` gives them; `what`: its machines."""
    billed = facts.get("billable_s")
    if billed is None:
        return f"training job {name}: {status}; SageMaker states no billable seconds"
    cost = f"{facts['cost_usd']:.2f} USD" if "cost_usd" in facts else "no price_per_hour in the file"
    return f"training job {name}: {status}; {billed} billable seconds of {what}; {cost}"


def render_stop(name: str, region: str) -> str:
    """The command by which a person stops a training job."""
    return f"aws sagemaker stop-training-job --region {region} --training-job-name {name}"
