"""Kueue: `queue:` of a spec as its labels, and its Workload as the reason why a job waits. Pure.

Kueue admits a job that names a LocalQueue: it makes a Workload, reserves quota, and takes `suspend` off the job. When
it preempts or evicts the job it sets `suspend` again, and the pods end with their grace period. Task governance of
HyperPod is Kueue with the same labels. Sources: kueue.sigs.k8s.io, "Run A Kubernetes Job", "Workload", "Preemption"
and "Troubleshooting Jobs" (labels queue-name, priority-class, job-uid; conditions and their reasons).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainmaster.core.config.queue import Queue
from trainmaster.core.errors import Fault, SpecError
from trainmaster.targets.kubernetes.settings import Settings

GROUP = "kueue.x-k8s.io"
QUEUE_LABEL, PRIORITY_LABEL = f"{GROUP}/queue-name", f"{GROUP}/priority-class"
JOB_LABEL = f"{GROUP}/job-uid"  # of a Workload: the job that it stands for
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_NO_QUEUE = "Kueue does this, and no queue of it is named; write queue.name, or `queue:` in the settings file"


def apply_queue(settings: Settings, queue: Queue) -> Settings:
    """The settings with the queue and the priority of a spec; SpecError for what Kueue cannot do."""
    faults = []
    name = queue.name or settings.queue
    for path, value in (("name", queue.name), ("priority", queue.priority)):
        if value is not None and not _NAME.fullmatch(value):
            message = f"{value!r} is no name of Kubernetes; write lower-case letters, digits, dots and dashes"
            faults.append(Fault(path=f"queue.{path}", message=message))
    if name is None and queue.priority != "normal":
        faults.append(Fault(path="queue.priority", message=f"{_NO_QUEUE}; `priority_class:` there is that of the pods"))
    if name is None and queue.preemptible:
        faults.append(Fault(path="queue.preemptible", message=_NO_QUEUE))
    if queue.preemptible and not _outlives_pods(settings):
        message = f"checkpoints in {settings.folder} end with the pod; write `folder:` below a volume with a claim"
        faults.append(Fault(path="queue.preemptible", message=message))
    if faults:
        raise SpecError(faults)
    priority = queue.priority if queue.priority != "normal" else settings.queue_priority
    return replace(settings, queue=name, queue_priority=priority)


def _outlives_pods(settings: Settings) -> bool:
    kept = [volume.mount.rstrip("/") for volume in settings.volumes if volume.size is None and not volume.read_only]
    return any(f"{settings.folder}/".startswith(f"{mount}/") for mount in kept)


def labels(settings: Settings) -> dict[str, str]:
    """Labels that Kueue reads from the job's own object."""
    stated = {QUEUE_LABEL: settings.queue, PRIORITY_LABEL: settings.queue_priority}
    return {name: value for name, value in stated.items() if value is not None}


def suspended(settings: Settings) -> dict[str, bool]:
    """`suspend` of a job for a queue: it waits from its creation on, also where Kueue's webhook is away just then."""
    return {"suspend": True} if settings.queue is not None else {}


def trim_workload(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parts of a Workload that are judged."""
    metadata, spec = item["metadata"], item.get("spec") or {}
    return {
        "metadata": {"name": metadata["name"], "labels": metadata.get("labels")},
        "active": spec.get("active") is not False,
        "conditions": {
            condition.get("type"): condition for condition in (item.get("status") or {}).get("conditions") or ()
        },
    }


def explain(workloads: Sequence[Mapping[str, Any]]) -> str:
    """Why a suspended job waits, with Kueue's own reason and message."""
    if not workloads:
        return "Kueue has made no Workload for it yet"
    workload = workloads[-1]
    evicted, quota, admitted = (_condition(workload, word) for word in ("Evicted", "QuotaReserved", "Admitted"))
    if not workload["active"]:
        cause = evicted or _condition(workload, "DeactivationTarget")
        return f"deactivated, and not admitted until its spec.active is true again{_because(cause)}"
    if _holds(admitted):
        return "admitted; its pods are not created yet"
    if _holds(quota):
        return f"quota is reserved; it waits for admission checks{_because(admitted)}"
    if _holds(evicted):
        word = "preempted" if evicted.get("reason") == "Preempted" else "evicted"
        text = f"{word}{_because(evicted)}; it waits to be admitted again"
        why = str(quota.get("message") or "")
        return f"{text}: {why}" if why and why != evicted.get("message") else text
    return f"not admitted{_because(quota)}"


def _condition(workload: Mapping[str, Any], word: str) -> Mapping[str, Any]:
    return workload["conditions"].get(word) or {}


def _holds(condition: Mapping[str, Any]) -> bool:
    return condition.get("status") == "True"


def _because(condition: Mapping[str, Any]) -> str:
    reason, message = str(condition.get("reason") or ""), " ".join(str(condition.get("message") or "").split())[:500]
    return f" ({reason}): {message}" if reason and message else f" ({reason or message})" if reason or message else ""
