"""Stand-in of the training operators on a real API server: pods, their states and the job's conditions, with faults."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sims.kubernetes import script
from sims.kubernetes.kubelet import Kubelet
from trainmaster.core.errors import TrainmasterError
from trainmaster.targets.kubernetes.client import Client, Object, path_of
from trainmaster.targets.kubernetes.errors import Missing, Taken
from trainmaster.targets.kubernetes.kubeconfig import Access
from trainmaster.targets.kubernetes.manifests import RESOURCES

_KINDS = (RESOURCES["hyperpod"], RESOURCES["pytorchjob"])
_LOOK_S = 0.1
_BANDWIDTH = "trainmaster.bench.collectives"
_MASTER = {"masterAddr": "10.2.8.64", "masterPort": "1234"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One simulated cluster."""

    access: Access
    namespace: str
    certificate: Path  # of the kubelets
    key: Path
    nodes: int = 2
    gpus_per_node: int = 1
    step_s: float = 0.1
    checkpoints: str = "/fsx/checkpoints/test-sim"
    faults: frozenset[str] = frozenset()


class Operator:
    """The controllers of one namespace, in a thread of their own."""

    def __init__(self, settings: Settings) -> None:
        if unknown := settings.faults - set(script.FAULTS):
            raise ValueError(f"unknown faults: {', '.join(sorted(unknown))}")
        self._settings = settings
        self._client = Client(settings.access)
        self._begun: dict[
            str, tuple[int, datetime, str]
        ] = {}  # pod: node rank, start, its work where that is not training
        self._kubelet = Kubelet(settings.certificate, settings.key, self._log, self._answer)
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._wrong: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="operator", daemon=True)

    def __enter__(self) -> Operator:
        self._thread.start()
        self._ready.wait()
        if self._wrong is not None:
            raise self._wrong
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:  # shown by the thread that waits
            self._wrong = error
            raise
        finally:
            self._ready.set()

    async def _run(self) -> None:
        port = await self._kubelet.start()
        try:
            for number in range(self._settings.nodes):
                await self._make_node(number, port)
            self._ready.set()
            while not self._stop.is_set():
                with contextlib.suppress(Missing, Taken):  # changed in between; seen again in the next round
                    await self._reconcile()
                await asyncio.sleep(_LOOK_S)
        finally:
            with contextlib.suppress(TrainmasterError):
                for number in range(self._settings.nodes):
                    await self._client.delete(path_of("v1", "nodes", name=self._node(number)))
            self._kubelet.close()
            await self._client.close()

    async def _reconcile(self) -> None:
        jobs: dict[str, Object] = {}
        for resource in _KINDS:
            path = path_of(resource.api, resource.plural, namespace=self._settings.namespace)
            for job in (await self._client.list(path))["items"]:
                jobs[job["metadata"]["uid"]] = {**job, "apiVersion": resource.api, "kind": resource.kind, "path": path}
        pods = (await self._client.list(self._pods()))["items"]
        for pod in pods:  # what the garbage collector does
            owners = [owner["uid"] for owner in pod["metadata"].get("ownerReferences") or ()]
            if pod["metadata"].get("deletionTimestamp") or (owners and not set(owners) & jobs.keys()):
                await self._client.delete(f"{self._pods()}/{pod['metadata']['name']}", grace_s=0)
            elif not owners:
                await self._run_helper(pod)
        for job in jobs.values():
            await self._run_job(job, {str(pod["metadata"]["name"]) for pod in pods})

    async def _run_job(self, job: Object, present: set[str]) -> None:
        name, templates = job["metadata"]["name"], _templates(job["spec"])
        for rank, (template, marks) in enumerate(templates):
            pod = f"{name}-pods-{rank}" if job["kind"] == "HyperPodPyTorchJob" else f"{name}-{rank}"
            if pod not in present:
                await self._make_pod(job, pod, rank, template, marks)
        running = not self._settings.faults & {"image-pull", "crash-loop"}
        conditions = [
            {"type": word, "status": "True", "reason": word, "lastTransitionTime": _now()}
            for word in ("Created", *(("PodsRunning", "Running") if running else ()))
        ]
        seen = [condition["type"] for condition in (job.get("status") or {}).get("conditions") or ()]
        if seen != [condition["type"] for condition in conditions]:
            await self._client.merge(f"{job['path']}/{name}/status", {"status": {"conditions": conditions, **_MASTER}})

    async def _make_pod(self, job: Object, name: str, rank: int, template: Object, marks: Mapping[str, str]) -> None:
        owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "controller": True}
        owner |= {"name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
        given = template.get("metadata") or {}
        spec = {**template["spec"], "nodeName": self._node(rank % self._settings.nodes), "restartPolicy": "Always"}
        metadata = {**given, "name": name, "labels": {**(given.get("labels") or {}), **marks}}
        await self._client.post(self._pods(), {"metadata": {**metadata, "ownerReferences": [owner]}, "spec": spec})
        words = spec["containers"][0].get("command") or [""]
        self._begun[name] = (rank, datetime.now(UTC), _BANDWIDTH if _BANDWIDTH in words else "")
        await self._set_state(name, spec, self._state())

    async def _run_helper(self, pod: Object) -> None:
        """A pod without a job: scheduled, and ended at once with its output in the log."""
        name = str(pod["metadata"]["name"])
        if pod["status"].get("phase") == "Succeeded":  # by its state: a later pod may have the same name
            return
        self._begun[name] = (0, datetime.now(UTC), str(pod["spec"]["containers"][0]["command"][-1]))
        bind = {"target": {"apiVersion": "v1", "kind": "Node", "name": self._node(0)}, "metadata": {"name": name}}
        if not pod["spec"].get("nodeName"):
            await self._client.post(f"{self._pods()}/{name}/binding", {"apiVersion": "v1", "kind": "Binding", **bind})
        ended = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": _now(), "finishedAt": _now()}}
        await self._set_state(name, pod["spec"], ended, phase="Succeeded")

    def _state(self) -> Object:
        if "image-pull" in self._settings.faults:
            return {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image: not found"}}
        if "crash-loop" in self._settings.faults:
            return {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
        return {"running": {"startedAt": _now()}}

    async def _set_state(self, pod: str, spec: Mapping[str, Any], state: Object, *, phase: str = "") -> None:
        running = "running" in state
        (container,) = spec["containers"]
        container_status = {
            "name": container["name"], "image": container["image"], "imageID": "", "ready": running, "state": state,
            "restartCount": 2 if "crash-loop" in self._settings.faults else 0,
        }  # fmt: skip
        if "restart" in self._settings.faults and pod.endswith("-1") and running:
            ended = {"exitCode": 137, "reason": "OOMKilled", "startedAt": _now(), "finishedAt": _now()}
            container_status |= {"restartCount": 1, "lastState": {"terminated": ended}}
        status = {"phase": phase or ("Running" if running else "Pending"), "containerStatuses": [container_status]}
        await self._client.merge(f"{self._pods()}/{pod}/status", {"status": status})

    async def _make_node(self, number: int, port: int) -> None:
        ready = "False" if "not-ready" in self._settings.faults and number == 0 else "True"
        name, gpus = self._node(number), {"nvidia.com/gpu": str(self._settings.gpus_per_node), "pods": "110"}
        labels = {"sagemaker.amazonaws.com/node-health-status": "Schedulable"}
        await self._client.post("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        condition = {
            "type": "Ready",
            "status": ready,
            "reason": "KubeletReady" if ready == "True" else "KubeletNotReady",
        }
        status = {
            "capacity": gpus,
            "allocatable": gpus,
            "conditions": [condition],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        }
        await self._client.merge(f"/api/v1/nodes/{name}/status", {"status": status})

    def _node(self, number: int) -> str:
        return f"{self._settings.namespace}-node-{number}"

    def _pods(self) -> str:
        return path_of("v1", "pods", namespace=self._settings.namespace)

    def _answer(self, program: str) -> bytes | None:
        return script.gpu_answer(self._settings.faults) if program == "nvidia-smi" else None

    def _log(self, namespace: str, pod: str) -> list[tuple[datetime, bytes]] | None:
        begun = self._begun.get(pod)
        if begun is None or namespace != self._settings.namespace:
            return None
        rank, begin, work = begun
        if work == _BANDWIDTH:
            faults = self._settings.faults
            return script.bandwidth_lines(node=rank, nodes=self._settings.nodes, begin=begin, faults=faults)
        if work:
            return [(begin, script.read_answer(work, self._settings.faults))]
        return script.lines(
            node=rank, begin=begin, now=datetime.now(UTC), step_s=self._settings.step_s,
            checkpoints=self._settings.checkpoints, faults=self._settings.faults,
        )  # fmt: skip


def _templates(spec: Mapping[str, Any]) -> list[tuple[Object, Mapping[str, str]]]:
    """Pod template and labels of each pod, as the operators number them."""
    templates: list[tuple[Object, Mapping[str, str]]] = []
    for replica in spec.get("replicaSpecs") or ():
        templates += [(replica["template"], {}) for _ in range(int(replica.get("replicas", 1)))]
    for role in ("Master", "Worker"):
        replica = (spec.get("pytorchReplicaSpecs") or {}).get(role) or {"replicas": 0}
        for index in range(int(replica.get("replicas", 1))):
            marks = {"training.kubeflow.org/replica-type": role.lower()}
            templates.append((replica["template"], {**marks, "training.kubeflow.org/replica-index": str(index)}))
    return templates


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
