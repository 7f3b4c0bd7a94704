"""Stand-in of the training operators on a real API server: pods, their states and the job's conditions, with faults.

Nodes have the GPUs and EFA devices of an instance type. A pod that asks for more than a node has, or for a node of its
own where there is none left, stays Pending. What a job does is what `trainmaster plan` says of its config (script.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sims.kubernetes import script
from sims.kubernetes.clock import FastClock, SimulatedClock
from sims.kubernetes.kubelet import Kubelet
from trainmaster.checks import profiles
from trainmaster.core import gpus
from trainmaster.core.errors import TrainmasterError
from trainmaster.targets.kubernetes.client import Client, Object, path_of
from trainmaster.targets.kubernetes.errors import Missing, Taken
from trainmaster.targets.kubernetes.kubeconfig import Access
from trainmaster.targets.kubernetes.manifests import RESOURCES

_KINDS = (RESOURCES["hyperpod"], RESOURCES["pytorchjob"])
_LOOK_S, _WAKE_S = 0.1, 0.005
_GPU, _EFA = "nvidia.com/gpu", "vpc.amazonaws.com/efa"
_BANDWIDTH = "trainmaster.bench.collectives"
_MASTER = {"masterAddr": "10.2.8.64", "masterPort": "1234"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One simulated cluster."""

    access: Access
    namespace: str
    certificate: Path  # of the kubelets
    key: Path
    instance: str = "ml.p5.48xlarge"
    nodes: int = 2
    product_label: bool = True  # that of GPU feature discovery
    clock: SimulatedClock | FastClock = field(default_factory=SimulatedClock)
    faults: frozenset[str] = frozenset()


@dataclass(kw_only=True)
class _Pod:
    """A pod that has begun."""

    rank: int
    begin: datetime
    work: str = ""  # what it does where that is not training
    figures: script.Figures | None = None
    lines: script.Script | None = None


class Operator:
    """The controllers of one namespace, in a thread of their own."""

    def __init__(self, settings: Settings) -> None:
        if unknown := settings.faults - set(script.FAULTS):
            raise ValueError(f"unknown faults: {', '.join(sorted(unknown))}")
        self._settings = settings
        instance = profiles.find_instance(settings.instance)
        assert instance is not None
        self._instance, self._clock = instance, settings.clock
        self._client = Client(settings.access)
        self._begun: dict[str, _Pod] = {}
        self._read_s = 0.0
        self._checkpoints: dict[str, str] = {}  # read by pods of their own
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
                self._clock.wanted = False
                with contextlib.suppress(Missing, Taken):  # changed in between; seen again in the next round
                    await self._reconcile()
                self._clock.rounds += 1
                for _ in range(round(_LOOK_S / _WAKE_S)):
                    if self._clock.wanted or self._stop.is_set():
                        break
                    await asyncio.sleep(_WAKE_S)
        finally:
            with contextlib.suppress(TrainmasterError):
                for number in range(self._settings.nodes):
                    await self._client.delete(path_of("v1", "nodes", name=self._node(number)))
            await self._kubelet.close()
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
        pods = [
            f"{name}-pods-{rank}" if job["kind"] == "HyperPodPyTorchJob" else f"{name}-{rank}"
            for rank in range(len(templates))
        ]
        for rank, (template, marks) in enumerate(templates):
            if pods[rank] not in present:
                await self._make_pod(job, pods[rank], rank, template, marks)
        over = [await self._end_pod(pod, templates[rank][0]["spec"]) for rank, pod in enumerate(pods)]
        running = not self._settings.faults & {"image-pull", "crash-loop"}
        words = ("Created", *(("PodsRunning", "Running") if running else ()), *(("Completed",) if all(over) else ()))
        conditions = [
            {"type": word, "status": "True", "reason": word, "lastTransitionTime": self._now()} for word in words
        ]
        seen = [condition["type"] for condition in (job.get("status") or {}).get("conditions") or ()]
        if seen != list(words):
            await self._client.merge(f"{job['path']}/{name}/status", {"status": {"conditions": conditions, **_MASTER}})

    async def _make_pod(self, job: Object, name: str, rank: int, template: Object, marks: Mapping[str, str]) -> None:
        owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "controller": True}
        owner |= {"name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
        given = template.get("metadata") or {}
        lacks = self._find_lack(template["spec"], rank)
        where = {} if lacks else {"nodeName": self._node(rank)}
        spec = {**template["spec"], **where, "restartPolicy": "Always"}
        metadata = {**given, "name": name, "labels": {**(given.get("labels") or {}), **marks}}
        await self._client.post(self._pods(), {"metadata": {**metadata, "ownerReferences": [owner]}, "spec": spec})
        if lacks:
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": lacks}
            status = {"status": {"phase": "Pending", "conditions": [condition]}}
            await self._client.merge(f"{self._pods()}/{name}/status", status)
            return
        begun = _Pod(rank=rank, begin=self._clock.utc())
        begun.figures = await self._plan(spec, job)
        if _BANDWIDTH in (spec["containers"][0].get("command") or [""]):
            begun.work = _BANDWIDTH
        elif begun.figures is not None:
            begun.lines = script.Script(begun.figures, node=rank, begin=begun.begin, faults=self._settings.faults)
        self._begun[name] = begun
        await self._set_state(name, spec, self._state())

    def _find_lack(self, spec: Object, rank: int) -> str:
        """Why no node takes this pod; every pod has a node of its own."""
        asked = (spec["containers"][0].get("resources") or {}).get("limits") or {}
        has = {_GPU: self._instance.gpus, _EFA: self._instance.efa_devices}
        for name, count in has.items():
            if int(asked.get(name, 0)) > count:
                return f"0/{self._settings.nodes} nodes are available: {self._settings.nodes} Insufficient {name}."
        if rank >= self._settings.nodes:
            return f"0/{self._settings.nodes} nodes are available: pod anti-affinity rules were not satisfied."
        return ""

    async def _plan(self, spec: Object, job: Object) -> script.Figures | None:
        """What this job does here, by the config in its ConfigMap."""
        names = [volume["configMap"]["name"] for volume in spec.get("volumes") or () if "configMap" in volume]
        if not names:
            return None
        path = path_of("v1", "configmaps", namespace=self._settings.namespace, name=names[0])
        train = json.loads((await self._client.get(path))["data"]["train.json"])
        asked = (spec["containers"][0].get("resources") or {}).get("limits") or {}
        figures = script.plan_figures(
            train, gpu=self._instance.gpu, nodes=len(_templates(job["spec"])), per_node=int(asked.get(_GPU, 1))
        )
        self._read_s = figures.read_s
        return figures

    async def _end_pod(self, name: str, spec: Object) -> bool:
        """Whether the pod's training is over; its state is then that of an ended one."""
        begun = self._begun.get(name)
        if begun is None or begun.lines is None or self._settings.faults & {"image-pull", "crash-loop"}:
            return False
        begun.lines.read(self._clock.utc())
        if not begun.lines.over and not begun.lines.out_of_memory:
            return False
        code = 1 if begun.lines.out_of_memory else 0
        if begun.work != "ended":
            begun.work = "ended"
            ended = {"exitCode": code, "reason": "Error" if code else "Completed"}
            ended |= {"startedAt": _stamp(begun.begin), "finishedAt": self._now()}
            phase = "Failed" if code else "Succeeded"
            await self._set_state(name, spec, {"terminated": ended}, phase=phase)
        return code == 0

    async def _run_helper(self, pod: Object) -> None:
        """A pod without a job: scheduled, and ended with its output in the log when it has read the checkpoint."""
        name = str(pod["metadata"]["name"])
        if pod["status"].get("phase") == "Succeeded":  # by its state: a later pod may have the same name
            return
        if name not in self._begun or self._begun[name].work != pod["metadata"]["uid"]:
            self._begun[name] = _Pod(rank=0, begin=self._clock.utc(), work=pod["metadata"]["uid"])
            bind = {"target": {"apiVersion": "v1", "kind": "Node", "name": self._node(0)}, "metadata": {"name": name}}
            if not pod["spec"].get("nodeName"):
                binding = {"apiVersion": "v1", "kind": "Binding", **bind}
                await self._client.post(f"{self._pods()}/{name}/binding", binding)
            await self._set_state(name, pod["spec"], {"running": {"startedAt": self._now()}})
        words = pod["spec"]["containers"][0]["command"]
        read_s = self._read_s if words[-1] == "deep" else 1.0
        if self._clock.utc() - self._begun[name].begin < timedelta(seconds=read_s):
            return
        self._checkpoints[name] = str(words[-2])
        ended = {"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": self._now()}}
        ended["terminated"]["finishedAt"] = self._now()
        await self._set_state(name, pod["spec"], ended, phase="Succeeded")

    def _state(self) -> Object:
        if "image-pull" in self._settings.faults:
            return {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image: not found"}}
        if "crash-loop" in self._settings.faults:
            return {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
        return {"running": {"startedAt": self._now()}}

    async def _set_state(self, pod: str, spec: Mapping[str, Any], state: Object, *, phase: str = "") -> None:
        running = "running" in state
        (container,) = spec["containers"]
        container_status = {
            "name": container["name"], "image": container["image"], "imageID": "", "ready": running, "state": state,
            "restartCount": 2 if "crash-loop" in self._settings.faults else 0,
        }  # fmt: skip
        if "restart" in self._settings.faults and pod.endswith("-1") and running:
            ended = {"exitCode": 137, "reason": "OOMKilled", "startedAt": self._now(), "finishedAt": self._now()}
            container_status |= {"restartCount": 1, "lastState": {"terminated": ended}}
        status = {"phase": phase or ("Running" if running else "Pending"), "containerStatuses": [container_status]}
        await self._client.merge(f"{self._pods()}/{pod}/status", {"status": status})

    async def _make_node(self, number: int, port: int) -> None:
        ready = "False" if "not-ready" in self._settings.faults and number == 0 else "True"
        name, instance, model = self._node(number), self._instance, gpus.find_gpu(self._instance.gpu)
        assert model is not None
        has = {_GPU: str(instance.gpus), _EFA: str(instance.efa_devices), "pods": "110"}
        labels = {
            "sagemaker.amazonaws.com/node-health-status": "Schedulable",
            "node.kubernetes.io/instance-type": self._settings.instance,
        }
        if self._settings.product_label:
            labels["nvidia.com/gpu.product"] = f"NVIDIA-{model.names[0].replace(' ', '-')}"
        await self._client.post("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        condition = {
            "type": "Ready",
            "status": ready,
            "reason": "KubeletReady" if ready == "True" else "KubeletNotReady",
        }
        status = {
            "capacity": has,
            "allocatable": has,
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
        return script.gpu_answer(self._settings.faults, self._instance.gpus) if program == "nvidia-smi" else None

    def _log(self, namespace: str, pod: str) -> list[tuple[datetime, bytes]] | None:
        begun = self._begun.get(pod)
        if begun is None or namespace != self._settings.namespace:
            return None
        faults = self._settings.faults
        if begun.lines is not None:
            return begun.lines.read(self._clock.utc())
        if begun.work == _BANDWIDTH and begun.figures is not None:
            nodes = self._settings.nodes
            return script.bandwidth_lines(begun.figures, node=begun.rank, nodes=nodes, begin=begun.begin, faults=faults)
        if (checkpoint := self._checkpoints.get(pod)) is not None:
            return [(self._clock.utc(), script.read_answer(checkpoint, faults))]
        return []

    def _now(self) -> str:
        return _stamp(self._clock.utc())


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


def _stamp(at: datetime) -> str:
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")
