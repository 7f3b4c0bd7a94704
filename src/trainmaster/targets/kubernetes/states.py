"""Job and pods of an attempt as a target state of ours. Pure: objects in, a poll out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from trainmaster.core.plan import ExitRecord
from trainmaster.core.states import Reason, TargetState
from trainmaster.targets import Handle, Poll
from trainmaster.targets.kubernetes.kueue import QUEUE_LABEL
from trainmaster.targets.kubernetes.names import NODE_LABEL
from trainmaster.targets.kubernetes.pending import IMAGE_FAULTS, explain_pod

Object = Mapping[str, Any]

_INDEX = "batch.kubernetes.io/job-completion-index"
_ROLE, _REPLICA = "training.kubeflow.org/replica-type", "training.kubeflow.org/replica-index"
# Conditions of the four kinds that end a job. Others (Created, Running, Restarting, Suspended, …) do not.
SUCCEEDED = frozenset({"Complete", "Succeeded", "Completed", "SuccessCriteriaMet"})
FAILED = frozenset({"Failed", "FailureTarget"})
# `status.reason` of a pod that ended without a word of its own.
POD_REASONS = {
    "Evicted": Reason.PREEMPTED, "Preempting": Reason.PREEMPTED, "NodeLost": Reason.NODE_LOST,
    "NodeShutdown": Reason.NODE_LOST, "Shutdown": Reason.NODE_LOST, "Terminated": Reason.NODE_LOST,
    "NodeAffinity": Reason.TARGET_ERROR, "UnexpectedAdmissionError": Reason.TARGET_ERROR,
    "DeadlineExceeded": Reason.TIMED_OUT, "OutOfcpu": Reason.NO_CAPACITY, "OutOfmemory": Reason.NO_CAPACITY,
}  # fmt: skip
JOB_REASONS = {"DeadlineExceeded": Reason.TIMED_OUT, "BackoffLimitExceeded": Reason.CRASHED}
_FATAL_IMAGE = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEnd:
    """How the container of a pod ended: with a record of ours, or as the cluster describes it."""

    node: int
    record: ExitRecord | None
    lost: Reason | None = None
    text: str = ""


def trim_pod(pod: Object) -> Object:
    """The parts of a pod that are judged: thousands are kept in memory."""
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    return {
        "metadata": {
            name: metadata.get(name)
            for name in ("name", "uid", "labels", "annotations", "deletionTimestamp", "creationTimestamp")
        },
        "spec": {"nodeName": spec.get("nodeName"), "container": _container(spec)},
        "status": {
            name: status.get(name)
            for name in ("phase", "reason", "message", "conditions", "containerStatuses", "initContainerStatuses")
        },
    }


def _container(spec: Object) -> str:
    return str((spec.get("containers") or [{}])[0].get("name") or "")


def trim_job(job: Object) -> Object:
    metadata, status = job["metadata"], job.get("status") or {}
    spec = job.get("spec") or {}
    suspended = spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend")
    return {
        "metadata": {"name": metadata["name"], "uid": metadata.get("uid"), "labels": metadata.get("labels")},
        "suspended": bool(suspended),
        "conditions": [
            condition
            for condition in status.get("conditions") or ()
            if condition.get("type") and condition.get("status") == "True"
        ],
    }


def node_rank(pod: Object, nodes: int) -> int:
    """Node rank of a pod, from the labels of its controller; else from the number at the end of its name."""
    if nodes == 1:
        return 0
    metadata = pod["metadata"]
    marks = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
    if str(marks.get(NODE_LABEL, "")).isdecimal():
        return int(marks[NODE_LABEL])
    if str(marks.get(_INDEX, "")).isdecimal():
        return int(marks[_INDEX])
    if str(marks.get(_REPLICA, "")).isdecimal():
        return int(marks[_REPLICA]) + (marks.get(_ROLE) != "master")
    match = re.search(r"-(\d{1,6})(?:-[a-z0-9]{5})?$", str(metadata["name"]))
    return int(match[1]) if match else 0


def newest_by_node(pods: Sequence[Object], nodes: int) -> dict[int, Object]:
    """The newest pod of each node."""
    newest: dict[int, Object] = {}
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp") or "")):
        newest[node_rank(pod, nodes)] = pod
    return newest


def container_state(pod: Object) -> tuple[Mapping[str, Any], int]:
    """State of the pod's container, and how often it was restarted."""
    for container in pod["status"].get("containerStatuses") or ():
        if container.get("name") == pod["spec"]["container"]:
            return container.get("state") or {}, int(container.get("restartCount") or 0)
    return {}, 0


def find_end(pod: Object, node: int, attempt: str) -> PodEnd | None:
    """How the pod ended; None while it may go on."""
    state, _ = container_state(pod)
    name, where = pod["metadata"]["name"], pod["spec"].get("nodeName")
    ended = state.get("terminated")
    word = pod["status"].get("reason")
    if ended and (record := _read_record(ended.get("message"), attempt)) is not None:
        return PodEnd(node=node, record=record)
    if pod["status"].get("phase") not in ("Failed", "Succeeded") and not ended:
        return None
    if word in POD_REASONS:
        text = f"pod {name} on {where}: {word}: {pod['status'].get('message') or ''}".rstrip(": ")
        return PodEnd(node=node, record=None, lost=POD_REASONS[word], text=text)
    init = _failed_init(pod)
    code = (ended or {}).get("exitCode")
    reason = Reason.OUT_OF_MEMORY if (ended or {}).get("reason") == "OOMKilled" else Reason.CRASHED
    if init:
        return PodEnd(node=node, record=_made(attempt, Reason.CHECK_FAILED, f"{where}: {init}", ended))
    if code in (126, 127, 128) or (ended or {}).get("reason") in ("StartError", "ContainerCannotRun"):
        reason = Reason.IMAGE_ERROR
    text = f"pod {name} on {where} ended with {code} and left no exit record"
    if reason is Reason.OUT_OF_MEMORY:
        text = f"pod {name} on {where} was killed for lack of memory (limit of `memory:`)"
    message = str((ended or {}).get("message") or "").strip()
    return PodEnd(node=node, record=_made(attempt, reason, f"{text}{': ' + message[-300:] if message else ''}", ended))


def _failed_init(pod: Object) -> str:
    for container in pod["status"].get("initContainerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            return str(
                ended.get("message") or f"init container {container.get('name')} ended with {ended['exitCode']}"
            ).strip()
    return ""


def _read_record(message: object, attempt: str) -> ExitRecord | None:
    """The exit record in a termination message; None where it is something else."""
    if not isinstance(message, str) or not message.startswith("{"):
        return None
    try:
        document = json.loads(message)
    except ValueError:
        return None
    if not isinstance(document, dict) or document.get("attempt") != attempt:
        return None
    return ExitRecord.read(message.encode(), attempt=attempt)


def _made(attempt: str, reason: Reason, message: str, ended: Object | None) -> ExitRecord:
    when = (ended or {}).get("finishedAt") or datetime.now(UTC).isoformat(timespec="seconds")
    return ExitRecord(attempt=attempt, ok=False, ended_at=str(when), reason=reason, message=message)


def judge(
    job: Object | None, pods: Sequence[Object], handle: Handle, *, not_ready: frozenset[str], why: str = ""
) -> Poll:
    """The poll of a submitted attempt. `not_ready` are nodes without contact; `why`: an event that explains no pods."""
    nodes, attempt = int(handle["nodes"]), str(handle["attempt"])
    newest = newest_by_node(pods, nodes)
    restarts = bool(handle.get("restarts"))  # the operator restarts pods: only its own word ends the job
    over = job is None or any(condition["type"] in SUCCEEDED | FAILED for condition in job["conditions"])
    ends = [end for node, pod in newest.items() if (end := find_end(pod, node, attempt)) is not None]
    if not restarts or over:
        failed = [end for end in ends if end.record is not None and not end.record.ok]
        if failed:
            first = min(failed, key=lambda end: end.record.ended_at if end.record else "")
            assert first.record is not None
            return Poll(state=TargetState.FAILED, exit=first.record, note=first.record.message)
        for end in ends:
            if end.record is None:
                return Poll(state=TargetState.LOST, reason=end.lost, note=end.text)
        if len(ends) == nodes:
            first = min(ends, key=lambda end: end.node)
            return Poll(
                state=TargetState.SUCCEEDED, exit=first.record, note=first.record.message if first.record else ""
            )
    if not restarts and (replaced := _find_replaced(pods, newest, nodes)) is not None:
        return given_up(replaced, not_ready)
    for pod in newest.values():
        if pod["spec"].get("nodeName") in not_ready and pod["metadata"].get("deletionTimestamp"):
            return given_up(pod, not_ready)
    if job is None:
        return Poll(state=TargetState.LOST, note=f"{handle['name']} was deleted")
    if ended := next((condition for condition in job["conditions"] if condition["type"] in FAILED), None):
        return _failed_job(ended, attempt)
    if not ends and (image := _image_fault(newest.values())):
        return Poll(state=TargetState.FAILED, exit=_made(attempt, Reason.IMAGE_ERROR, image, None), note=image)
    return _alive(job, newest, nodes, not_ready, why)


def has_started(pods: Sequence[Object]) -> bool:
    """Whether a container of any pod runs or has run: then its agent sees a stop request and answers it."""
    return any({"running", "terminated"} & set(container_state(pod)[0]) for pod in pods)


def stopped_early(attempt: str, stop: str) -> Poll:
    """The end of an attempt that was asked to stop while it waited."""
    word = stop.partition(":")[0]
    reason = Reason(word) if word in list(Reason) else Reason.USER_CANCELLED
    record = _made(attempt, reason, "stopped before any of its pods started", None)
    return Poll(state=TargetState.FAILED, exit=record, note=record.message)


def _find_replaced(pods: Sequence[Object], newest: Mapping[int, Object], nodes: int) -> Object | None:
    """A pod whose place another one has taken: Jobs do that for pods that were deleted or given up."""
    for pod in pods:
        if pod is not newest[node_rank(pod, nodes)]:
            return pod
    return None


def given_up(pod: Object, not_ready: frozenset[str]) -> Poll:
    """The end of an attempt one of whose pods was replaced: another try is another attempt."""
    name, where = pod["metadata"]["name"], pod["spec"].get("nodeName")
    if where in not_ready:
        text = f"node {where} has no contact with the cluster; pod {name} was given up"
        return Poll(state=TargetState.LOST, reason=Reason.NODE_LOST, note=text)
    return Poll(state=TargetState.LOST, reason=Reason.PREEMPTED, note=f"pod {name} on {where} was ended by the cluster")


def without_contact(where: str) -> Poll:
    """The state while a pod's machine is silent, and the pod not given up: it may be there again."""
    return Poll(state=TargetState.UNKNOWN, note=f"node {where} has no contact with the cluster")


def _failed_job(condition: Object, attempt: str) -> Poll:
    word, text = str(condition.get("reason") or ""), str(condition.get("message") or "")
    reason = JOB_REASONS.get(word, Reason.TARGET_ERROR)
    record = _made(attempt, reason, f"{word}: {text}", {"finishedAt": condition.get("lastTransitionTime")})
    return Poll(state=TargetState.FAILED, exit=record, note=record.message)


def _image_fault(pods: Any) -> str:
    """Why an image cannot be had at all; one failed pull alone is tried again by the cluster."""
    for pod in pods:
        status = pod["status"]
        for container in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
            if ((container.get("state") or {}).get("waiting") or {}).get("reason") in _FATAL_IMAGE:
                return explain_pod(pod)
    return ""


def _alive(job: Object, newest: Mapping[int, Object], nodes: int, not_ready: frozenset[str], why: str) -> Poll:
    running = {node for node, pod in newest.items() if "running" in container_state(pod)[0]}
    if lost := sorted({str(pod["spec"]["nodeName"]) for pod in newest.values()} & not_ready):
        return without_contact(lost[0])
    ended = {node for node, pod in newest.items() if "terminated" in container_state(pod)[0]}
    if len(running | ended) == nodes:
        leaving = [pod for pod in newest.values() if pod["metadata"].get("deletionTimestamp")]
        text = f"pod {leaving[0]['metadata']['name']} is being ended by the cluster" if leaving else ""
        return Poll(state=TargetState.RUNNING, note=text)
    if job["suspended"]:
        queue = find_queue(job)
        text = f"suspended, waits in Kueue queue {queue}{': ' if why else ''}{why}" if queue else "suspended"
        return Poll(state=TargetState.WAITING, note=text)
    if not newest:
        return Poll(state=TargetState.WAITING, note=why or "no pod was created yet")
    for node, pod in sorted(newest.items()):
        if node not in running | ended:
            which = f"node {node} of {nodes}: " if nodes > 1 else ""
            return Poll(state=TargetState.WAITING, note=which + explain_pod(pod))
    return Poll(state=TargetState.WAITING, note=why or f"{len(newest)} of {nodes} pods were created")


def find_queue(job: Object) -> str | None:
    """The Kueue queue of a job that is suspended."""
    return (job["metadata"].get("labels") or {}).get(QUEUE_LABEL) if job["suspended"] else None


def is_complete(job: Object) -> bool:
    return any(condition["type"] in SUCCEEDED for condition in job["conditions"])


def is_ready(node: Object) -> bool:
    """Whether the condition Ready of a node is True. `NotReady` is another word of the same table, not this one."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return any(condition.get("type") == "Ready" and condition.get("status") == "True" for condition in conditions)


assert not set(_FATAL_IMAGE) - set(IMAGE_FAULTS)
