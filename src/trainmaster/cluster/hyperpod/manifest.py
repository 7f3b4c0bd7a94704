"""Manifest of the test job: Llama 3.1 8B with FSDP as a HyperPodPyTorchJob. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainmaster.core.errors import UsageError
from trainmaster.core.spec import parse_spec
from trainmaster.targets.kubernetes import manifests, names
from trainmaster.targets.kubernetes.planning import build, pod_plan
from trainmaster.targets.kubernetes.pods import EFA_RESOURCE, Object
from trainmaster.targets.kubernetes.settings import parse_settings

JOB_NAME = "llama3-1-8b-fsdp-hpto"
JOB_LABEL = "job-name"
CHECKPOINTS = "/fsx/checkpoints"
HEADER = """\
# Training job of the HyperPod tests (make test-quick, make test-cluster, make run). Edit it: image, replicas, GPUs,
# node selectors, the model in train.json. Written by: trainmaster cluster test --dry-run
"""
_ATTEMPT = "00000000-0000-4000-8000-000000000000.1"
_OWN_LABELS = (names.MANAGED_BY, names.ATTEMPT_LABEL)  # of jobs that a server follows; this one has no server

_TRAINER = "trainmaster.train"
_BANDWIDTH = (
    "trainmaster.bench.collectives", "--collective", "all_reduce", "--min-size", "64M", "--max-size", "256M",
    "--min-busbw", "1.25",
)  # fmt: skip
NODES = 8
SEQUENCE_TOKENS = 8192
TRAIN: dict[str, Any] = {
    "model": {"preset": "llama3.1-8b"},
    "data": {"source": "synthetic"},
    "sequence_tokens": SEQUENCE_TOKENS,
    "batch_tokens": NODES * SEQUENCE_TOKENS,  # one sequence a GPU: four steps fit the minute of the quick test
    "micro_sequences": 1,
    "steps": 100,
    "epoch_steps": 50,
    "parallel": {"recompute": "full"},  # 25.3 GiB a GPU on 8 (trainmaster plan); with `ops` 46.3, over the limit of 32
    "checkpoint": {"folder": CHECKPOINTS, "every_steps": 20, "keep": 2},
}
_SETTINGS = {
    "kind": "hyperpod",
    "image": "trainmaster:latest",
    "package": "image",
    "volumes": [{"mount": "/fsx", "claim": "fsx-claim"}],
    "folder": "/fsx/trainmaster",
    "env": {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"},
}


def make(
    job_name: str = JOB_NAME, *, nodes: int = NODES, gpus: int = 1, efa: int = 1, train: Mapping[str, Any] | None = None
) -> list[Object]:
    """Objects of the test job, made as `submit --on hyperpod --dry-run` makes them, with a fixed name.

    `train`: fields of the training config in place of the shipped ones.
    """
    config = {**TRAIN, **(train or {})}
    spec = parse_spec({"name": job_name, "resources": {"nodes": nodes, "processes_per_node": gpus}, "train": config})
    settings = parse_settings({**_SETTINGS, "efa": efa, "labels": {JOB_LABEL: job_name}})
    pod = replace(pod_plan(_ATTEMPT, spec, settings), name=job_name, secrets=())
    return [_relabel(item, job_name) for item in build(pod)]


def render(objects: list[Object]) -> str:
    """The manifest as a file."""
    return HEADER + manifests.render(objects)


def find_job(objects: list[Object]) -> Object | None:
    """The training job among the objects of a manifest."""
    kinds = {resource.kind for resource in manifests.RESOURCES.values()}
    return next((item for item in objects if item.get("kind") in kinds), None)


def find_checked_job(objects: Sequence[Object]) -> Object:
    """The training job; UsageError where an object lacks what a test reads, with its place."""
    for item in objects:
        metadata = item.get("metadata")
        if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
            raise UsageError(f"the manifest's {item.get('kind')} has no metadata.name; write one")
        for name in ("labels", "annotations"):
            if not isinstance(metadata.get(name) or {}, Mapping):
                raise UsageError(f"the manifest's {item.get('kind')}: metadata.{name} is no mapping")
    job = find_job(list(objects))
    if job is None:
        raise UsageError("the manifest has no training job (HyperPodPyTorchJob, PyTorchJob or Job)")
    if fault := _find_shape_fault(job):
        raise UsageError(
            f"the manifest's {job['kind']}: {fault}; a whole one prints: trainmaster cluster test --dry-run"
        )
    return job


def _find_shape_fault(job: Object) -> str:
    spec = job.get("spec")
    if not isinstance(spec, Mapping):
        return "no spec"
    if job["kind"] == "TrainJob":
        return "a TrainJob has no pod template of its own, and a test reads it; write a HyperPodPyTorchJob"
    replicas = spec.get("pytorchReplicaSpecs", spec.get("replicaSpecs"))
    places: list[tuple[str, Any]] = [("spec", spec)]
    if isinstance(replicas, Mapping):
        places = [(f"spec.pytorchReplicaSpecs.{name}", replica) for name, replica in replicas.items()]
    elif replicas is not None:
        listed = replicas if isinstance(replicas, list) else []
        places = [(f"spec.replicaSpecs[{number}]", replica) for number, replica in enumerate(listed)]
    for place, replica in places:
        counts = (
            [replica.get(name, 1) for name in ("replicas", "parallelism")] if isinstance(replica, Mapping) else [None]
        )
        if not all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in counts):
            return f"{place} asks for no whole number of pods from 1 on"
        pod = (
            (replica.get("template") or {}).get("spec") if isinstance(replica.get("template") or {}, Mapping) else None
        )
        containers = pod.get("containers") if isinstance(pod, Mapping) else None
        if not isinstance(containers, list) or not containers or not all(isinstance(c, Mapping) for c in containers):
            return f"{place}.template.spec.containers is no list of containers"
    return "" if places else "no replicas"


def count_pods(job: Object) -> int:
    """Pods that the job asks for."""
    spec = job["spec"]
    if "pytorchReplicaSpecs" in spec:
        return sum(int(replica.get("replicas", 1)) for replica in spec["pytorchReplicaSpecs"].values())
    if "replicaSpecs" in spec:
        return sum(int(replica.get("replicas", 1)) for replica in spec["replicaSpecs"])
    return int(spec.get("parallelism") or spec.get("trainer", {}).get("numNodes") or 1)


def pod_template(job: Object) -> Object:
    """Template of the job's first pod."""
    spec = job["spec"]
    if "pytorchReplicaSpecs" in spec:
        return dict(next(iter(spec["pytorchReplicaSpecs"].values()))["template"])
    return dict(spec["replicaSpecs"][0]["template"] if "replicaSpecs" in spec else spec["template"])


def uses_efa(job: Object) -> bool:
    """Whether the job's pods ask for EFA devices."""
    containers = pod_template(job)["spec"]["containers"]
    return any(EFA_RESOURCE in ((container.get("resources") or {}).get("limits") or {}) for container in containers)


def bandwidth_job(objects: list[Object]) -> list[Object] | None:
    """The manifest with an all-reduce between its pods in place of the trainer; None where it has another trainer."""
    made = copy.deepcopy(objects)
    job = find_job(made)
    if job is None or "replicaSpecs" not in job["spec"]:
        return None
    for replica in job["spec"]["replicaSpecs"]:
        (container, *_) = replica["template"]["spec"]["containers"]
        words = list(container.get("command") or ())
        if _TRAINER not in words:
            return None
        kept = [word for word in words[: words.index(_TRAINER)] if not word.startswith("--pre-train-script")]
        container["command"] = [*kept, *_BANDWIDTH]
    job["spec"].get("runPolicy", {}).pop("logMonitoringConfiguration", None)  # it prints no heartbeat
    return made


def _relabel(value: Any, job_name: str) -> Any:
    """The object with the job's name as the label that its pods are found by."""
    if isinstance(value, dict):
        kept = {key: _relabel(item, job_name) for key, item in value.items() if key not in _OWN_LABELS}
        if names.ATTEMPT_LABEL in value:
            kept[JOB_LABEL] = job_name
        return kept
    return [_relabel(item, job_name) for item in value] if isinstance(value, list) else value
