"""Why a pod waits, in words: devices, taints, quota, images, volumes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_COUNT = re.compile(r"0/(\d+) nodes are available: (.*)", re.DOTALL)
_PART = re.compile(r"^(\d+) (.+)$", re.DOTALL)
_TAINT = re.compile(r"node\(s\) had (?:untolerated )?taint \{([^}:]*)(?::[^}]*)?\}")
_QUOTA = re.compile(r"exceeded quota: ([^,]+), requested: ([^,]+), used: ([^,]+), limited: (.+?)\.?$")
# Words of the scheduler (kube-scheduler's plugins) and ours.
_PARTS = (
    (re.compile(r"Insufficient (\S+)"), "too little free {0}"),
    (re.compile(r"node\(s\) didn't match (?:Pod's )?node affinity.*"), "labels that node_labels and not_nodes exclude"),
    (re.compile(r"node\(s\) didn't match node selector.*"), "labels that node_labels exclude"),
    (re.compile(r"node\(s\) didn't match pod (?:anti-)?affinity.*"), "a pod of this job already (spread: true)"),
    (re.compile(r"node\(s\) didn't (?:match|satisfy) .*anti-affinity.*"), "a pod of this job already (spread: true)"),
    (re.compile(r"node\(s\) were unschedulable"), "been cordoned"),
    (re.compile(r"node\(s\) (?:had|were) .*volume.*"), "no access to a volume"),
)
IMAGE_FAULTS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")


def explain_unscheduled(message: str) -> str:
    """The scheduler's sentence in short: how many nodes lack what."""
    match = _COUNT.match(message)
    if match is None:
        return message[:500] or "no node was chosen yet"
    total, rest = match[1], match[2].partition(" preemption:")[0]
    # Newer schedulers end the list with a sentence about preemption.
    parts = [_explain_part(part.strip().rstrip(".")) for part in re.split(r", (?=\d+ )", rest)]
    return f"none of {total} nodes fits: " + "; ".join(part for part in parts if part)


def _explain_part(part: str) -> str:
    counted = _PART.match(part)
    if counted is None:
        return part
    count, text = counted.groups()
    verb = "has" if count == "1" else "have"
    if taint := _TAINT.search(text):
        key = taint[1].strip()
        word = {"node.kubernetes.io/unreachable": "no contact", "node.kubernetes.io/not-ready": "not become ready"}.get(
            key
        )
        return f"{count} {verb} {word or f'the taint {key}, which tolerations do not name'}"
    for pattern, words in _PARTS:
        if match := pattern.fullmatch(text):
            return f"{count} {verb} {words.format(*match.groups())}"
    return f"{count} {text}"


def explain_pod(pod: Mapping[str, Any]) -> str:
    """Why one pod does not run yet."""
    status = pod.get("status") or {}
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, text = waiting.get("reason"), str(waiting.get("message") or "")[:300]
        if reason in IMAGE_FAULTS:
            return f"image {container.get('image')} cannot be pulled ({reason}): {text}"
        if reason == "CrashLoopBackOff":
            return f"the container ends again and again: {text}"
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            return f"{reason}: {text}"
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return explain_unscheduled(str(condition.get("message") or ""))
    if (pod.get("spec") or {}).get("nodeName"):
        return f"starting on {pod['spec']['nodeName']}"
    return "no node was chosen yet"


def explain_events(events: Sequence[Mapping[str, Any]]) -> str:
    """Why a job has no pods: its newest event that is a warning."""
    warnings = [event for event in events if event.get("type") == "Warning"]
    if not warnings:
        return ""
    newest = max(warnings, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    text = str(newest.get("message") or "")
    if match := _QUOTA.search(text):
        name, requested, used, limited = match.groups()
        return f"quota {name} is used up: requested {requested}, used {used}, limit {limited}"
    return f"{newest.get('reason')}: {text[:500]}"
