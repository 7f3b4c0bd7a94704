"""Stand-in of Kueue's controller on a real API server: it queues, admits and preempts a job when a test says so.

Written after Kueue's documentation; it is not Kueue: it has no quota, and one Workload for one job.
"""

from __future__ import annotations

from typing import Any

from kube import Kube

_MERGE = "application/merge-patch+json"
_TIME = "2026-03-01T12:00:00Z"


class Kueue:
    """Workload and `suspend` of one job."""

    def __init__(self, kube: Kube, job_path: str, *, suspend: tuple[str, ...] = ("spec", "suspend")) -> None:
        self._kube, self._job_path, self._suspend = kube, job_path, suspend
        namespace = job_path.partition("/namespaces/")[2].partition("/")[0]
        self._workloads = f"/apis/kueue.x-k8s.io/v1beta1/namespaces/{namespace}/workloads"

    def job(self) -> Any:
        return self._kube.call("GET", self._job_path)

    def is_suspended(self) -> bool:
        value: Any = self.job()
        for name in self._suspend:
            value = value.get(name) or {}
        return value is True

    def queue(self, message: str) -> None:
        """Make the Workload, without quota."""
        job = self.job()
        labels = job["metadata"]["labels"]
        metadata = {"name": job["metadata"]["name"], "labels": {"kueue.x-k8s.io/job-uid": job["metadata"]["uid"]}}
        spec = {"active": True, "queueName": labels["kueue.x-k8s.io/queue-name"]}
        body = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "Workload", "metadata": metadata, "spec": spec}
        self._kube.call("POST", self._workloads, body)
        self._conditions(QuotaReserved=("False", "Pending", message))

    def admit(self) -> None:
        """Reserve quota and let the job go."""
        self._conditions(
            QuotaReserved=("True", "QuotaReserved", "Quota reserved in ClusterQueue lab"),
            Admitted=("True", "Admitted", "The workload is admitted"),
        )
        self._set_suspend(False)

    def preempt(self, message: str) -> None:
        """Take the quota back; the operator then deletes the pods, which is the test's part here."""
        self._conditions(
            QuotaReserved=("False", "Pending", message),
            Admitted=("False", "NoReservation", "The workload has no reservation"),
            Evicted=("True", "Preempted", message),
            Preempted=("True", "InClusterQueue", message),
        )
        self._set_suspend(True)

    def _conditions(self, **conditions: tuple[str, str, str]) -> None:
        name = self.job()["metadata"]["name"]
        listed = [
            {"type": word, "status": status, "reason": reason, "message": message, "lastTransitionTime": _TIME}
            for word, (status, reason, message) in conditions.items()
        ]
        self._kube.call("PATCH", f"{self._workloads}/{name}/status", {"status": {"conditions": listed}}, kind=_MERGE)

    def _set_suspend(self, value: bool) -> None:
        body: Any = value
        for name in reversed(self._suspend):
            body = {name: body}
        self._kube.call("PATCH", self._job_path, body, kind=_MERGE)
