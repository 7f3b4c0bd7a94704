"""The manifest as the cluster found can run it, and the time that a test of it takes, by `trainmaster plan`. Pure.

The shipped manifest asks for 8 pods of one GPU and trains Llama 3.1 8B. A field that still has its shipped value
follows the nodes: pods, GPUs and EFA devices of a pod, and the largest model that `plan` lets fit and step fast enough.
A field that a user has written stays as it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmaster.bench import bus_baselines
from trainmaster.checks import profiles
from trainmaster.cluster.hyperpod import manifest
from trainmaster.cluster.hyperpod.indicators import MEMORY_LIMIT_GIB, MIN_LOSSES, NETWORK_LIMIT_GBPS
from trainmaster.core import gpus
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import SpecError
from trainmaster.core.gpus import GpuModel
from trainmaster.core.schema import build
from trainmaster.estimate import Cluster, Estimate, calibration, estimate, faults_on
from trainmaster.targets.kubernetes.pods import EFA_RESOURCE, Object

GPU_RESOURCE = "nvidia.com/gpu"
PRODUCT_LABEL = "nvidia.com/gpu.product"  # written by NVIDIA's GPU feature discovery
TYPE_LABEL = "node.kubernetes.io/instance-type"
_KIND = "HyperPodPyTorchJob"
PRESETS = ("llama3.1-8b", "llama3.2-3b", "llama3.2-1b", "qwen2.5-0.5b")
_MINUTE_S = 60.0  # of the quick test
_MOST_PODS = 8
_SPARE_LOSSES = 2
_TEST_STEPS = 10_000  # the test ends the job
_READ_GBPS = 0.1  # of a shared file system, at the least
_ROOM_SHARE = 0.95  # of a GPU's memory: a plan is no measurement
_WHOLE = ("model",)  # half of one model and half of another is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """GPU nodes of a cluster; of unlike ones the smallest of each figure."""

    gpu: GpuModel | None  # None: not known here
    nodes: int
    gpus_per_node: int
    efa_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Seconds that a test of a job takes, by plan."""

    step_s: float
    checkpoint_s: float  # until the first is committed
    read_s: float  # to read it back
    least_every_steps: int

    def watch_s(self, planned: Sequence[str]) -> float:
        """From the first loss until everything that is judged has been seen."""
        losses = (MIN_LOSSES + _SPARE_LOSSES) * self.step_s
        return max(losses, 1.5 * self.checkpoint_s if "checkpoint" in planned else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Objects to deploy, what was changed in words, and the time. No budget: nothing is known of it."""

    objects: list[Object]
    note: str
    budget: Budget | None = None


def find(nodes: Sequence[Object]) -> Found | None:
    """GPUs of these nodes, by their labels and capacities; None where no node has any."""
    rows = []
    for node in nodes:
        capacity = (node.get("status") or {}).get("capacity") or {}
        if count := int(capacity.get(GPU_RESOURCE, 0)):
            rows.append((find_model(node["metadata"].get("labels") or {}), count, int(capacity.get(EFA_RESOURCE, 0))))
    if not rows:
        return None
    models = [model for model, _, _ in rows if model is not None]
    smallest = min(models, key=lambda model: model.memory_gb) if len(models) == len(rows) else None
    return Found(
        gpu=smallest,
        nodes=len(rows),
        gpus_per_node=min(count for _, count, _ in rows),
        efa_per_node=min(efa for _, _, efa in rows),
    )


def find_model(labels: Mapping[str, str]) -> GpuModel | None:
    """GPU model of a node, by the label of GPU feature discovery, else by its instance type."""
    product = _bare(labels.get(PRODUCT_LABEL) or "")
    for model in gpus.gpus().values():
        if product and product in map(_bare, model.names):
            return model
    instance = profiles.find_instance(labels.get(TYPE_LABEL) or "")
    return gpus.find_gpu(instance.gpu) if instance is not None else None


def _bare(name: str) -> str:
    """`NVIDIA-H100-80GB-HBM3` and `H100 80GB HBM3` alike: a label has no spaces."""
    return re.sub(r"[\s_-]+", "", name.lower()).removeprefix("nvidia").removeprefix("tesla")


def fit(objects: list[Object], found: Found | None, *, ends: bool = True) -> Fit:
    """The manifest for the nodes found. `ends`: a test ends the job, so its steps need not end by themselves."""
    config = read_config(objects)
    if config is None:
        return Fit(objects=objects, note="")
    if found is None or found.gpu is None:
        what = "no node with GPUs was seen" if found is None else "the GPU model of the nodes is not known here"
        return Fit(objects=objects, note=f"{what}: the manifest is taken as it is")
    job = manifest.find_checked_job(objects)
    if job["kind"] != _KIND or sum(item["kind"] == "ConfigMap" for item in objects) != 1:
        return Fit(objects=objects, note=f"it is not the shipped {_KIND} with its ConfigMap: taken as it is")
    name, shipped = str(job["metadata"]["name"]), manifest.make(str(job["metadata"]["name"]))
    (container, *_) = manifest.pod_template(job)["spec"]["containers"]
    asked = (container.get("resources") or {}).get("limits") or {}
    pods, per_pod, efa = manifest.count_pods(job), int(asked.get(GPU_RESOURCE, 0)), int(asked.get(EFA_RESOURCE, 0))
    pods = min(_MOST_PODS, found.nodes) if pods == manifest.NODES else pods
    per_pod, efa = (found.gpus_per_node, found.efa_per_node) if (per_pod, efa) == (1, 1) else (per_pod, efa)
    cluster = make_cluster(found.gpu, pods=pods, per_pod=max(1, per_pod))
    fields = _choose(cluster, ends=ends)
    fitted = manifest.make(name, nodes=pods, gpus=max(1, per_pod), efa=efa, train=fields)
    bases = {item["kind"]: item for item in _parsed(shipped)}
    ours = {item["kind"]: item for item in _parsed(fitted)}
    merged = [
        _printed(_follow(item, bases[item["kind"]], ours[item["kind"]])) if item["kind"] in bases else item
        for item in _parsed(objects)
    ]
    final = read_config(merged)
    assert final is not None
    return Fit(objects=merged, **_judge(final, cluster))


def make_cluster(gpu: GpuModel, *, pods: int, per_pod: int) -> Cluster:
    """The GPUs of the job; where no bandwidth between such nodes is published, the least that a test passes."""
    published = bus_baselines.find(gpu, nodes=pods, fabric="efa" if pods > 1 else None) if pods * per_pod > 1 else None
    slowest = NETWORK_LIMIT_GBPS / 8 if pods > 1 else None
    bus = published.gbps if published is not None else slowest
    return Cluster(gpu=gpu, gpus=pods * per_pod, gpus_per_node=per_pod, bus_gbps=bus)


def read_config(objects: Sequence[Object]) -> TrainConfig | None:
    """Config of trainmaster's trainer in a manifest; None where it has another trainer, or none that can be read."""
    for item in objects:
        text = (item.get("data") or {}).get("train.json") if item.get("kind") == "ConfigMap" else None
        if text is not None:
            try:
                return build(TrainConfig, json.loads(text))
            except (SpecError, ValueError):  # the trainer says what is wrong
                return None
    return None


def make_budget(config: TrainConfig, cluster: Cluster, planned: Estimate) -> Budget | None:
    """Times of this job; None where the speed of its GPUs is not known."""
    if planned.speed is None:
        return None
    step_s, size = planned.speed.step_s, planned.memory.checkpoint
    write_s = size / (1e9 * calibration.load().save_gbps * cluster.nodes)
    return Budget(
        step_s=step_s,
        checkpoint_s=config.checkpoint.every_steps * step_s + write_s,
        read_s=_MINUTE_S + size / (1e9 * _READ_GBPS),
        least_every_steps=max(MIN_LOSSES, math.ceil(max(_MINUTE_S, 1.5 * write_s) / step_s)),
    )


def _choose(cluster: Cluster, *, ends: bool) -> dict[str, Any]:
    """Fields of the training config that follow the cluster: the largest model within memory and minute."""
    fields: dict[str, Any] = {}
    for preset in PRESETS:
        batch = {"batch_tokens": manifest.SEQUENCE_TOKENS * cluster.gpus, "eval_sequences": cluster.gpus}
        fields = {"model": {"preset": preset}, **batch}
        config = build(TrainConfig, {**manifest.TRAIN, **fields})
        planned = estimate(config, cluster)
        budget = make_budget(config, cluster, planned)
        in_time = budget is None or (MIN_LOSSES + _SPARE_LOSSES) * budget.step_s <= _MINUTE_S
        room = min(MEMORY_LIMIT_GIB * 2**30, _ROOM_SHARE * (planned.gpu_bytes or 0))
        if planned.memory.needed < room and in_time:
            if budget is not None and ends:
                saves = {**manifest.TRAIN["checkpoint"], "every_steps": budget.least_every_steps}
                fields |= {"checkpoint": saves, "steps": _TEST_STEPS}
            return fields
    return fields


def _judge(config: TrainConfig, cluster: Cluster) -> dict[str, Any]:
    """What plan says of the final job, in words, and its times."""
    assert cluster.gpu is not None
    where = f"{cluster.gpus} × {cluster.gpu.name} on {cluster.nodes} nodes"
    if faults := list(faults_on(config, ranks=cluster.gpus, ranks_per_node=cluster.gpus_per_node)):
        return {"note": f"the job cannot run on {where}: {faults[0].path}: {faults[0].message}"}
    planned = estimate(config, cluster)
    budget = make_budget(config, cluster, planned)
    needs = f"{planned.memory.needed / 2**30:.1f} GiB a GPU"
    if planned.fits is False:
        room = (planned.gpu_bytes or 0) / 2**30
        return {
            "note": f"{config.model.name} on {where} needs {needs} of {room:.1f}: it will not fit",
            "budget": budget,
        }
    speed = f", {budget.step_s:.1f} s a step" if budget is not None else ""
    return {"note": f"{config.model.name} on {where}: {needs}{speed} (trainmaster plan)", "budget": budget}


def _follow(given: Any, shipped: Any, fitted: Any) -> Any:
    """The value as given; where it is still the shipped one, the fitted one."""
    if given == shipped:
        return fitted
    if all(isinstance(value, dict) for value in (given, shipped, fitted)):
        return {
            key: value
            if key not in shipped or key not in fitted or (key in _WHOLE and value != shipped[key])
            else _follow(value, shipped[key], fitted[key])
            for key, value in given.items()
            if key in fitted or value != shipped.get(key)  # what the cluster does not have is left out
        }
    if all(isinstance(value, list) for value in (given, shipped, fitted)) and len(shipped) == len(fitted):
        if len(given) == len(shipped):
            return [_follow(*values) for values in zip(given, shipped, fitted, strict=True)]
        # Words were added or removed: the others are found by what they say.
        return [fitted[shipped.index(value)] if value in shipped else value for value in given]
    return given


def _parsed(objects: Sequence[Object]) -> list[Object]:
    """Objects whose JSON files are values."""
    return [_with_files(item, json.loads) if item.get("kind") == "ConfigMap" else item for item in objects]


def _printed(item: Object) -> Object:
    return _with_files(item, lambda value: json.dumps(value, indent=2, sort_keys=True) + "\n")


def _with_files(item: Object, change: Any) -> Object:
    if item.get("kind") != "ConfigMap":
        return item
    files = {name: change(text) if name.endswith(".json") else text for name, text in (item.get("data") or {}).items()}
    return {**item, "data": files}
