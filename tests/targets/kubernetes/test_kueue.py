"""Kueue: labels and `suspend` of a job, its Workload as a reason, and a preempted job that is admitted again.

The life cycle runs on a real API server with a stand-in of Kueue's controller (sims/kubernetes/kueue.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kube import Kube
from sims.kubernetes.kueue import Kueue
from targets.kubernetes.test_life_cycle import container, ended, make_pod, path_of, record, set_status, until
from targets.kubernetes.test_manifests import KINDS, job, plan
from trainmaster import targets
from trainmaster.core.errors import SpecError
from trainmaster.core.states import TargetState
from trainmaster.targets.kubernetes import kueue
from trainmaster.targets.kubernetes.errors import Missing
from trainmaster.targets.kubernetes.session import Session

SHARED = {"folder": "/fsx/runs", "volumes": [{"mount": "/fsx", "claim": "fsx"}]}
SHORT = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor a, 4 more needed"
FOR = "Preempted to accommodate a workload (UID: a, JobUID: b) due to prioritization in the ClusterQueue"


@pytest.mark.parametrize("kind", KINDS)
def test_a_queue_is_two_labels_and_a_job_that_is_made_suspended(kind: str) -> None:
    made = job(plan(kind, queue={"name": "team-a", "priority": "high"}))
    labels = made["metadata"]["labels"]
    assert (labels[kueue.QUEUE_LABEL], labels[kueue.PRIORITY_LABEL]) == ("team-a", "high")
    policy = made["spec"]["runPolicy"] if kind in ("pytorchjob", "hyperpod") else made["spec"]
    assert policy["suspend"] is True
    plain = job(plan(kind))
    assert "kueue" not in str(plain) and "suspend" not in str(plain)
    # The settings file states the queue of every job; a spec's own goes first.
    defaults = {"queue": "all", "queue_priority": "usual"}
    labels = job(plan(kind, settings=defaults, queue={"name": "mine"}))["metadata"]["labels"]
    assert (labels[kueue.QUEUE_LABEL], labels[kueue.PRIORITY_LABEL]) == ("mine", "usual")


@pytest.mark.parametrize(
    ("settings", "queue", "path", "words"),
    [
        ({}, {"priority": "high"}, "queue.priority", "write queue.name"),
        (SHARED, {"preemptible": True}, "queue.preemptible", "write queue.name"),
        ({}, {"name": "a", "preemptible": True}, "queue.preemptible", "end with the pod"),
        ({}, {"name": "Team_A"}, "queue.name", "no name of Kubernetes"),
    ],
)
def test_what_kueue_cannot_do_is_refused(settings: Any, queue: Any, path: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        plan("job", settings=settings, queue=queue)
    (fault,) = refused.value.faults
    assert fault.path == path and words in fault.message


def workload(active: bool = True, **conditions: tuple[str, str, str]) -> Any:
    listed = [
        {"type": word, "status": status, "reason": reason, "message": message}
        for word, (status, reason, message) in conditions.items()
    ]
    item = {"metadata": {"name": "w"}, "spec": {"active": active}, "status": {"conditions": listed}}
    return kueue.trim_workload(item)


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        ([], "Kueue has made no Workload for it yet"),
        ([workload()], "not admitted"),
        ([workload(QuotaReserved=("False", "Pending", SHORT))], f"not admitted (Pending): {SHORT}"),
        ([workload(QuotaReserved=("False", "Inadmissible", "LocalQueue a doesn't exist"))],
         "not admitted (Inadmissible): LocalQueue a doesn't exist"),
        ([workload(QuotaReserved=("True", "QuotaReserved", "yes"))],
         "quota is reserved; it waits for admission checks"),
        ([workload(QuotaReserved=("True", "QuotaReserved", "yes"), Admitted=("True", "Admitted", "yes"))],
         "admitted; its pods are not created yet"),
        ([workload(QuotaReserved=("False", "Pending", FOR), Evicted=("True", "Preempted", FOR))],
         f"preempted (Preempted): {FOR}; it waits to be admitted again"),
        ([workload(QuotaReserved=("False", "Pending", SHORT), Evicted=("True", "PodsReadyTimeout", "too slow"))],
         f"evicted (PodsReadyTimeout): too slow; it waits to be admitted again: {SHORT}"),
        ([workload(active=False, Evicted=("True", "Deactivated", "by an admin"))],
         "deactivated, and not admitted until its spec.active is true again (Deactivated): by an admin"),
    ],
)  # fmt: skip
def test_a_workload_says_why(seen: list[Any], text: str) -> None:
    assert kueue.explain(seen) == text


def test_a_cluster_without_kueue_is_named() -> None:
    async def get(path: str) -> Any:
        raise Missing(path)

    session: Any = SimpleNamespace(_workloads=None, client=SimpleNamespace(get=get))
    text = asyncio.run(Session.why_queued(session, {"metadata": {"uid": "u"}}))
    assert "has no Kueue" in text and "name no queue" in text


@pytest.mark.spawns
def test_a_job_waits_is_admitted_preempted_and_admitted_again(
    kube: Kube, settings_file: Callable[..., Path], place: Any, run: Any, namespace: str
) -> None:
    target: Any = targets.load(f"kubernetes:{settings_file(kind='pytorchjob', gpus=0, **SHARED)}")
    submission = target.plan(place(queue={"name": "team-a", "priority": "low", "preemptible": True}))
    running = container({"running": {}}, name="pytorch")

    async def go() -> None:
        handle = await target.submit(submission)
        path = path_of("pytorchjob", namespace, handle["name"])
        engine = Kueue(kube, path, suspend=("spec", "runPolicy", "suspend"))
        assert engine.is_suspended()
        await until(target, handle, TargetState.WAITING, "waits in Kueue queue team-a: Kueue has made no Workload")
        engine.queue(SHORT)
        await until(target, handle, TargetState.WAITING, f"not admitted (Pending): {SHORT}")
        engine.admit()
        first = make_pod(kube, submission)
        set_status(kube, namespace, first, phase="Running", containerStatuses=running)
        await until(target, handle, TargetState.RUNNING)
        assert await target.submit(submission) == handle
        assert not engine.is_suspended(), "a repeated submit does not suspend what Kueue has admitted"
        engine.preempt(FOR)
        kube.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{first}?gracePeriodSeconds=0")
        await until(target, handle, TargetState.WAITING, f"preempted (Preempted): {FOR}")
        engine.admit()
        second = make_pod(kube, submission, suffix="-b")
        set_status(kube, namespace, second, phase="Running", containerStatuses=running)
        await until(target, handle, TargetState.RUNNING)
        ok = container(ended(record(handle["attempt"])), name="pytorch")
        set_status(kube, namespace, second, phase="Succeeded", containerStatuses=ok)
        condition = {"type": "Succeeded", "status": "True"}
        status = {"status": {"conditions": [condition]}}
        kube.call("PATCH", f"{path}/status", status, kind="application/merge-patch+json")
        assert (await until(target, handle, TargetState.SUCCEEDED)).exit is not None
        await target.release(handle)

    run(go())
