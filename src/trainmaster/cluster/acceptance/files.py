"""Files that start an acceptance test on a cluster: Kubernetes manifests, Slurm batch scripts, a loop for hosts.

`trainmaster accept --dry-run NAME` prints them with the given options; `examples/acceptance/` has them without any.
All start the same image with the same words: the program finds its rank in the variables of whatever started it.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainmaster.bench.accept.options import Options, words
from trainmaster.core.errors import UsageError

JOB = "gpu-cluster-acceptance-test"
APP = "gpu-acceptance-test"
IMAGE = "gpu_cluster_testing:latest"
ENTRYPOINT = "/workspace/scripts/entrypoint.sh"
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,500}")  # it is written into shell scripts
_RETRIES = 2  # a test that fails every time must end, or its clean-up never comes
# The name in the examples of NVIDIA's Network Operator (rdmaSharedDevicePlugin); a cluster may have another.
_RDMA = "rdma/rdma_shared_device_a"
_STANDARD = Options(batch_size=64)
_INFINIBAND = {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "INFO"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A PyTorchJob: one master and some workers with equal pods."""

    about: str  # comment above it
    gpus: int
    workers: int
    options: Options = _STANDARD
    env: Mapping[str, str] = field(default_factory=dict)
    shared_memory_gb: int | None = None
    check_limits: bool = False  # an init container that ends the pod early where limits are too low
    spread: bool = False  # one pod per node, on nodes with GPUs
    node_selector: Mapping[str, str] = field(default_factory=dict)
    keep_s: int | None = None  # after its end; None: until somebody deletes it


MANIFESTS: Mapping[str, Manifest] = {
    "pytorchjob.yaml": Manifest(
        about="ResNet-50 on 4 nodes with 8 GPUs each. Resources stay after the run, for their logs.",
        gpus=8, workers=3, node_selector={"accelerator": "nvidia-gpu"},
    ),
    "kubernetes-mixed-cluster.yaml": Manifest(
        about="For clusters with and without GPUs: affinity to nodes with GPUs, tolerations, one pod per node.",
        gpus=8, workers=1, spread=True, shared_memory_gb=32,
    ),
    "kubernetes-flexible-nebius-pattern.yaml": Manifest(
        about="ResNet-18 on FashionMNIST. Set nvidia.com/gpu of both replicas to the GPUs of a worker (1 to 8).",
        gpus=1, workers=1, shared_memory_gb=16, check_limits=True,
        options=Options(
            model="resnet18", batch_size=128, data_mode="fashion_mnist", num_classes=10, data_dir="/workspace/data"
        ),
    ),
    "kubernetes-multi-gpu-nebius-optimized.yaml": Manifest(
        about="8 GPUs per worker with InfiniBand: RDMA device, shared memory, IPC_LOCK, a check of the limits first.\n"
        f"{_RDMA} is the name in NVIDIA's Network Operator; put your device plugin's name in its place.",
        gpus=8, workers=1, env=_INFINIBAND, shared_memory_gb=64, check_limits=True, spread=True,
    ),
    "kubernetes-pytorch-multi-node.yaml": Manifest(
        about="Any cluster: one GPU per worker.", gpus=1, workers=3, options=Options(batch_size=32),
    ),
    "kubernetes-with-auto-cleanup.yaml": Manifest(
        about="As pytorchjob.yaml, and deleted with its pods one hour after its end.", gpus=8, workers=3, keep_s=3600,
    ),
}  # fmt: skip


def names() -> list[str]:
    """Names of all files."""
    return [*MANIFESTS, *_SCRIPTS]


def manifest(name: str, options: Options, *, image: str) -> tuple[str, dict[str, Any]] | None:
    """The comment and the PyTorchJob of a file; None for a name that is no manifest."""
    if not _IMAGE.fullmatch(image):
        raise UsageError(f"--image {image!r:.200}: write the name of an image, as registry/name:tag")
    if name not in MANIFESTS:
        return None
    chosen = MANIFESTS[name]
    chosen = replace(chosen, options=merge(chosen.options, options))
    return chosen.about, _job(chosen, image)


def script(name: str, options: Options, *, image: str) -> str:
    """The text of a batch script or of the loop."""
    if name not in _SCRIPTS:
        raise UsageError(f"--dry-run {name}: one of {', '.join(names())}")
    given = shlex.join(words(merge(_STANDARD, options)))
    return _SCRIPTS[name].format(image=image, words=given, entrypoint=ENTRYPOINT, sif=_sif(image))


def merge(example: Options, given: Options) -> Options:
    """The example's options, with those that the user states."""
    plain = Options()
    stated = {
        field.name: getattr(given, field.name)
        for field in dataclasses.fields(Options)
        if getattr(given, field.name) != getattr(plain, field.name) and field.name not in ("log_dir", "baselines")
    }
    return replace(example, **stated)


def _job(chosen: Manifest, image: str) -> dict[str, Any]:
    replica = {"restartPolicy": "OnFailure", "template": _template(chosen, image)}
    policy: dict[str, Any] = {"backoffLimit": _RETRIES, "cleanPodPolicy": "None"}
    if chosen.keep_s is not None:
        policy |= {"cleanPodPolicy": "All", "ttlSecondsAfterFinished": chosen.keep_s}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": JOB, "labels": {"app": APP}},
        "spec": {
            "runPolicy": policy,
            "pytorchReplicaSpecs": {
                "Master": {"replicas": 1, **replica},
                "Worker": {"replicas": chosen.workers, **replica},
            },
        },
    }


def _template(chosen: Manifest, image: str) -> dict[str, Any]:
    # NCCL_IB_HCA names adapters that a pod may only open where it asks for them.
    rdma = {_RDMA: 1} if "NCCL_IB_HCA" in chosen.env else {}
    resources = {"nvidia.com/gpu": chosen.gpus, **rdma}
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": image,
        "args": words(chosen.options),
        "resources": {"limits": dict(resources), "requests": dict(resources)},
    }
    if chosen.env:
        container["env"] = [{"name": name, "value": value} for name, value in chosen.env.items()]
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    spec: dict[str, Any] = {"containers": [container]}
    mounts, volumes = _volumes(chosen)
    if mounts:
        container["volumeMounts"], spec["volumes"] = mounts, volumes
    if chosen.check_limits:
        spec["initContainers"] = [_limits(image, mounts)]
    if chosen.node_selector:
        spec["nodeSelector"] = dict(chosen.node_selector)
    spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if chosen.spread:
        spec["affinity"] = _AFFINITY
    return {"metadata": {"labels": {"app": APP}}, "spec": spec}


def _volumes(chosen: Manifest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    mounts, volumes = [], []
    if chosen.shared_memory_gb is not None:
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 (of the pod)
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{chosen.shared_memory_gb}Gi"}})
    if chosen.options.data_mode != "synthetic":
        mounts.append({"name": "data", "mountPath": "/workspace/data"})
        volumes.append({"name": "data", "emptyDir": {}})
    return mounts, volumes


def _limits(image: str, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    """Limits of memory locking, open files and shared memory, as this pod has them."""
    return {
        "name": "limits",
        "image": image,
        "command": ["trainmaster", "check", "--only", "memlock,open_files,shm"],
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [mount for mount in mounts if mount["name"] == "shm"],
    }


_AFFINITY: dict[str, Any] = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [
                {"matchExpressions": [{"key": "nvidia.com/gpu.present", "operator": "In", "values": ["true"]}]},
                {"matchExpressions": [{"key": "accelerator", "operator": "In", "values": ["nvidia-gpu"]}]},
            ]
        }
    },
    "podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": {"matchLabels": {"app": APP}}, "topologyKey": "kubernetes.io/hostname"}
        ]
    },
}


def _sif(image: str) -> str:
    """The file that `singularity pull` makes of an image."""
    return image.rpartition("/")[2].replace(":", "_") + ".sif"


_SCRIPTS = {
    "acceptance_test.sh": """#!/bin/bash
#SBATCH --job-name=gpu-acceptance
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=acceptance-%j.out

module load singularity

# Once: singularity pull docker://{image}
srun singularity exec --nv \\
  {sif} \\
  {entrypoint} \\
  {words}
""",
    "slurm-acceptance-test.sh": """#!/bin/bash
# Acceptance training where Trainmaster is installed on the nodes: one task per GPU, no container.
# First: mkdir -p results
#SBATCH --job-name=gpu-acceptance
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=01:00:00
#SBATCH --output=results/acceptance-%j.out

srun trainmaster accept {words} --out "results/acceptance-$SLURM_JOB_ID.json"
""",
    "slurm-nccl-test.sh": """#!/bin/bash
# NCCL bandwidth: NVLink, forced network, several nodes, latency.
# First: mkdir -p results. Follow it with: tail -f results/nccl_bandwidth_*.out
#SBATCH --job-name=nccl-bandwidth
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=00:30:00
#SBATCH --output=results/nccl_bandwidth_%j.out

out=results/nccl_bandwidth_$SLURM_JOB_ID
worst=0 # 1 is FAIL
keep() {{ [ "$worst" -eq 1 ] || worst=$1; }}
measure() {{ # NAME WORDS...
  echo "== $1"
  srun "${{@:2}}" --out "$out/$1" || keep $?
}}

measure nvlink --nodes=1 --ntasks=8 trainmaster bandwidth --collective all_reduce
(
  export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_ALGO=Ring
  measure network --nodes=1 --ntasks=8 trainmaster bandwidth --collective all_reduce
  exit "$worst"
) || keep $?
measure nodes trainmaster bandwidth --collective all_reduce
measure latency trainmaster bandwidth --collective all_reduce --min 1K --max 8K
exit "$worst"
""",
    "bare-metal.sh": """#!/bin/bash
# Acceptance training with containers on bare metal. Run it on every machine:
#
#   bare-metal.sh MASTER_ADDR WORLD_SIZE FIRST_RANK      the second machine with 8 GPUs of 16 has FIRST_RANK 8
#
set -euo pipefail
: "${{2:?usage: bare-metal.sh MASTER_ADDR WORLD_SIZE FIRST_RANK}}"
MASTER_ADDR=$1 WORLD_SIZE=$2 FIRST_RANK=${{3:-0}}
MASTER_PORT=${{MASTER_PORT:-29500}}
GPUS=${{GPUS:-8}}
started=()

for ((i = 0; i < GPUS; i++)); do
  docker run --gpus "device=$i" --rm --ipc=host --network=host \\
    -e MASTER_ADDR="$MASTER_ADDR" \\
    -e MASTER_PORT="$MASTER_PORT" \\
    -e WORLD_SIZE="$WORLD_SIZE" \\
    -e RANK=$((FIRST_RANK + i)) \\
    -e LOCAL_RANK="$i" \\
    -e NCCL_SOCKET_IFNAME \\
    {image} \\
    {words} &
  started+=($!)
done
worst=0 # 1 is FAIL
for process in "${{started[@]}}"; do
  wait "$process" || {{ code=$? && [ "$worst" -eq 1 ] || worst=$code; }}
done
exit "$worst"
""",
}
