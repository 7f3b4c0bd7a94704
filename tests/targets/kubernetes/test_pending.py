"""Why a job waits: sentences of schedulers old and new, quota, queues; and nodes that are ready or not."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.core.states import Reason, TargetState
from trainmaster.targets.kubernetes.pending import explain_events, explain_unscheduled
from trainmaster.targets.kubernetes.states import FAILED, SUCCEEDED, is_ready, judge, node_rank

HANDLE = {"attempt": "a.1", "name": "tm-a-1", "nodes": 1, "kind": "job"}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.",
         "none of 2 nodes fits: 2 have too little free nvidia.com/gpu"),
        ("0/4 nodes are available: 1 Insufficient memory, 3 Insufficient nvidia.com/gpu. preemption: 0/4 nodes are "
         "available: 4 No preemption victims found for incoming pod.",
         "none of 4 nodes fits: 1 has too little free memory; 3 have too little free nvidia.com/gpu"),
        ("0/1 nodes are available: 1 node(s) had taint {nvidia.com/gpu: }, that the pod didn't tolerate.",
         "none of 1 nodes fits: 1 has the taint nvidia.com/gpu, which tolerations do not name"),
        ("0/2 nodes are available: 1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }, 1 node(s) "
         "didn't match pod anti-affinity rules.",
         "none of 2 nodes fits: 1 has no contact; 1 has a pod of this job already (spread: true)"),
        ("0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.",
         "none of 3 nodes fits: 3 have labels that node_labels and not_nodes exclude"),
        ("0/1 nodes are available: 1 node(s) were unschedulable.", "none of 1 nodes fits: 1 has been cordoned"),
        ("a word of tomorrow", "a word of tomorrow"),
    ],
)  # fmt: skip
def test_the_schedulers_sentence_in_short(message: str, words: str) -> None:
    assert explain_unscheduled(message) == words


def test_a_job_without_pods_tells_its_quota() -> None:
    text = (
        'Error creating: pods "x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8, '
        "used: requests.nvidia.com/gpu=4, limited: requests.nvidia.com/gpu=8"
    )
    event = {"type": "Warning", "reason": "FailedCreate", "message": text, "lastTimestamp": "2026-01-01T00:00:00Z"}
    assert explain_events([event, {"type": "Normal", "message": "x"}]) == (
        "quota gpus is used up: requested requests.nvidia.com/gpu=8, used requests.nvidia.com/gpu=4, "
        "limit requests.nvidia.com/gpu=8"
    )
    assert explain_events([]) == ""


def job(*conditions: str, suspended: bool = False, **more: Any) -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": "team"} if suspended else {}
    found = [{"type": one, "status": "True", **more} for one in conditions]
    return {"metadata": {"name": "tm-a-1", "labels": labels}, "suspended": suspended, "conditions": found}


def test_a_queue_is_named() -> None:
    poll = judge(job(suspended=True), [], HANDLE, not_ready=frozenset())
    assert (poll.state, poll.note) == (TargetState.WAITING, "suspended, waits in Kueue queue team")


def test_conditions_of_all_kinds_have_a_meaning() -> None:
    """Job, PyTorchJob, TrainJob and HyperPodPyTorchJob; an unknown condition ends nothing."""
    assert {"Complete", "Completed", "Succeeded", "SuccessCriteriaMet"} == SUCCEEDED
    assert {"Failed", "FailureTarget"} == FAILED
    assert judge(job("Unheard"), [], HANDLE, not_ready=frozenset()).state is TargetState.WAITING
    poll = judge(job("Failed", reason="DeadlineExceeded", message="too long"), [], HANDLE, not_ready=frozenset())
    assert (poll.state, poll.exit and poll.exit.reason) == (TargetState.FAILED, Reason.TIMED_OUT)
    assert judge(None, [], HANDLE, not_ready=frozenset()).state is TargetState.LOST


def pod(name: str = "x", *, node: str = "n1", deleted: bool = False, **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "uid": name, "labels": {}, "annotations": {}, "creationTimestamp": "1"}
    metadata["deletionTimestamp"] = "2" if deleted else None
    running = [{"name": "t", "state": {"running": {}}}]
    return {
        "metadata": metadata, "spec": {"nodeName": node, "container": "t"},
        "status": {"phase": "Running", "containerStatuses": running, **status},
    }  # fmt: skip


def test_a_node_without_contact_is_unknown_and_a_pod_given_up_there_is_lost() -> None:
    poll = judge(job(), [pod()], HANDLE, not_ready=frozenset({"n1"}))
    assert (poll.state, poll.note) == (TargetState.UNKNOWN, "node n1 has no contact with the cluster")
    poll = judge(job(), [pod(deleted=True)], HANDLE, not_ready=frozenset({"n1"}))
    assert (poll.state, poll.reason) == (TargetState.LOST, Reason.NODE_LOST)
    assert "node n1" in poll.note
    assert judge(job(), [pod(deleted=True)], HANDLE, not_ready=frozenset()).state is TargetState.RUNNING
    # A Job makes a new pod at once; for us the attempt is over, for operators that restart it goes on.
    both = [pod("old", deleted=True), pod("young", node="n2")]
    both[1]["metadata"]["creationTimestamp"] = "2"
    poll = judge(job(), both, HANDLE, not_ready=frozenset({"n1"}))
    assert (poll.state, poll.reason) == (TargetState.LOST, Reason.NODE_LOST)
    assert judge(job(), both, HANDLE, not_ready=frozenset()).reason is Reason.PREEMPTED
    restarted = judge(job(), both, {**HANDLE, "restarts": True}, not_ready=frozenset())
    assert restarted.state is TargetState.RUNNING
    assert judge(job(), [pod()], HANDLE, not_ready=frozenset({"n2"})).state is TargetState.RUNNING


@pytest.mark.parametrize(
    ("conditions", "ready"),
    [
        ([{"type": "Ready", "status": "True"}], True),
        ([{"type": "Ready", "status": "False", "reason": "KubeletNotReady"}], False),
        ([{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}], False),
        ([{"type": "NotReady", "status": "True"}], False),
        ([{"type": "MemoryPressure", "status": "True"}], False),
        ([], False),
    ],
)
def test_not_ready_is_not_ready(conditions: list[dict[str, str]], ready: bool) -> None:
    assert is_ready({"status": {"conditions": conditions}}) is ready


@pytest.mark.parametrize(
    ("labels", "name", "rank"),
    [
        ({"batch.kubernetes.io/job-completion-index": "3"}, "x-3-abcde", 3),
        ({"training.kubeflow.org/replica-type": "master", "training.kubeflow.org/replica-index": "0"}, "x-master-0", 0),
        ({"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "1"}, "x-worker-1", 2),
        ({}, "x-pods-2", 2),
        ({}, "x-pods-2-8fk2d", 2),
    ],
)
def test_the_rank_of_a_pod(labels: dict[str, str], name: str, rank: int) -> None:
    assert node_rank({"metadata": {"name": name, "labels": labels}}, 4) == rank
    assert node_rank({"metadata": {"name": name, "labels": labels}}, 1) == 0
