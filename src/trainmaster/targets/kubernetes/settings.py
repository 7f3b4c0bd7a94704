"""Settings file of the Kubernetes target: which cluster, which kind of object, what every pod gets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trainmaster.core.errors import Fault, UsageError
from trainmaster.core.schema import build, field
from trainmaster.targets import _yaml_file

Kind = Literal["job", "pytorchjob", "trainjob", "hyperpod"]

_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?"
_RESOURCE = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_PATH = r"/[^\x00]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A folder in every pod. Exactly one of `claim`, `host_path` and `size` says where it is."""

    mount: str = field(pattern=_PATH, example="/fsx", doc="path in the pod")
    claim: str | None = field(default=None, pattern=_NAME, example="fsx-claim", doc="PersistentVolumeClaim")
    host_path: str | None = field(default=None, pattern=_PATH, example="/opt/dlami/nvme", doc="folder of the node")
    size: str | None = field(
        default=None, pattern=_QUANTITY, example="100Gi", doc="empty folder that ends with the pod"
    )
    read_only: bool = field(default=False, doc="mount it read-only")
    sub_path: str | None = field(
        default=None, pattern=r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*", example="team-a", doc="folder of it to mount"
    )

    def faults(self) -> Iterator[Fault]:
        if sum(place is not None for place in (self.claim, self.host_path, self.size)) != 1:
            yield Fault(path="claim", message="write exactly one of claim, host_path and size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """A taint that the pods tolerate."""

    key: str | None = field(default=None, example="nvidia.com/gpu", doc="key of the taint; not stated: every taint")
    operator: Literal["Exists", "Equal"] = field(default="Exists", doc="Equal compares the value too")
    value: str | None = field(default=None, doc="value, with Equal")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = field(
        default=None, doc="effect; not stated: all"
    )

    def faults(self) -> Iterator[Fault]:
        if (self.operator == "Equal") != (self.value is not None):
            yield Fault(path="value", message="write `value` with operator Equal, and with Equal alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Restart policy of HyperPod's operator (`runPolicy.restartPolicy`)."""

    before_full: int = field(default=3, ge=0, doc="restarts of processes before the whole job is restarted")
    period_s: int = field(default=21600, ge=1, doc="time over which restarts are counted")
    full: int = field(default=1, ge=0, doc="restarts of the whole job")
    job_retries: int = field(default=10, ge=0, doc="restarts in all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Log monitoring rules of HyperPod, made from the trainer's heartbeat line."""

    start_s: int = field(default=1800, ge=1, doc="longest time from the start to the first heartbeat")
    silent_s: int = field(default=300, ge=1, doc="longest time between two heartbeats")
    slow_tokens_per_s: int | None = field(default=None, ge=1, doc="below it a node counts as slow; not stated: never")
    slow_points: int = field(default=5, ge=1, doc="heartbeats in a row below it")
    fault_not_finite: bool = field(default=False, doc="fault the job at a loss that is NaN or infinite")


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperPod:
    """What only SageMaker HyperPod has."""

    restart: Restart = field(factory=Restart, doc="restart policy of the operator")
    rules: Rules = field(factory=Rules, doc="log monitoring rules")
    spares: int = field(default=0, ge=0, doc="spare pods; they need a Kueue queue")
    auto_resume: bool = field(default=False, doc="auto-resume annotations of a PyTorchJob")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One cluster and the pods that trainmaster makes there."""

    kind: Kind = field(
        default="job",
        doc="object to create: job (batch/v1, indexed), pytorchjob (kubeflow.org/v1), trainjob "
        "(trainer.kubeflow.org/v1alpha1), hyperpod (sagemaker.amazonaws.com/v1)",
    )
    image: str | None = field(
        default=None,
        pattern=r"\S+",
        example="registry.example.org/team/train:1",
        doc="image of the pods; container.image comes first",
    )
    package: Literal["send", "image"] = field(
        default="send", doc="send: trainmaster's node half travels in a ConfigMap; image: it is installed there"
    )
    python: str = field(default="python3", doc="Python 3.10 or newer in the image")
    namespace: str = field(default="default", pattern=_NAME, example="training", doc="namespace of everything created")
    kubeconfig: str | None = field(
        default=None, doc="kubeconfig file; not stated: the pod's own account, else KUBECONFIG, else ~/.kube/config"
    )
    context: str | None = field(default=None, doc="context of the kubeconfig; not stated: its current one")
    runtime: str = field(default="torch-distributed", pattern=_NAME, doc="ClusterTrainingRuntime of a TrainJob")
    gpus: int | None = field(default=None, ge=0, doc="GPUs of a pod; not stated: one for each rank of a node; 0: none")
    gpu_resource: str = field(default="nvidia.com/gpu", doc="name of the GPU resource")
    cpus: str | None = field(default=None, pattern=_QUANTITY, example="96", doc="CPUs of a pod")
    memory: str | None = field(default=None, pattern=_QUANTITY, example="1000Gi", doc="memory of a pod")
    efa: int = field(default=0, ge=0, doc="EFA devices of a pod (vpc.amazonaws.com/efa), with their environment")
    resources: dict[str, str] = field(factory=dict, doc="further resources of a pod, as {rdma/hca: '8'}")
    shm: str | None = field(default="16Gi", pattern=_QUANTITY, doc="size of /dev/shm; null: the runtime's 64 MiB")
    ulimits: Literal["keep", "check", "raise"] = field(
        default="keep",
        doc="locked memory and open files: check: an init container refuses a node that limits them; raise: the pod "
        "starts as root with SYS_RESOURCE, raises them and then becomes `user`",
    )
    kernel_log: bool = field(
        default=False,
        doc="the pods may read the node's kernel log: they get CAP_SYSLOG, which only root has (`user: 0`), so that "
        "`xid` sees every fault; the namespace must admit it (docs/how/containers.md)",
    )
    user: int | None = field(default=1000, ge=0, doc="user of the pods; null: the image's own")
    group: int | None = field(default=None, ge=0, doc="group of the pods and of their volumes; not stated: user")
    node_labels: dict[str, str] = field(factory=dict, doc="labels that a node must have")
    not_nodes: tuple[str, ...] = field(default=(), doc="nodes that are left out, by name")
    tolerations: tuple[Toleration, ...] = field(default=(), doc="taints that the pods tolerate")
    spread: bool = field(default=True, doc="one pod of a job on each node")
    priority_class: str | None = field(default=None, pattern=_NAME, doc="PriorityClass of the pods")
    queue: str | None = field(default=None, pattern=_NAME, doc="Kueue queue (kueue.x-k8s.io/queue-name)")
    queue_priority: str | None = field(
        default=None, pattern=_NAME, doc="Kueue priority (kueue.x-k8s.io/priority-class)"
    )
    service_account: str | None = field(default=None, pattern=_NAME, doc="ServiceAccount of the pods")
    pull_secret: str | None = field(default=None, pattern=_NAME, doc="Secret with the registry login")
    ttl_s: int = field(default=86400, ge=0, doc="time after which the cluster removes an ended job by itself")
    lost_after_s: int = field(default=60, ge=1, doc="time after which a pod on a node without contact is given up")
    volumes: tuple[Volume, ...] = field(default=(), doc="folders of every pod")
    folder: str = field(
        default="/trainmaster/run",
        pattern=_PATH,
        doc="folder in the pods for checkpoints and records; below a shared volume a run resumes on any node",
    )
    labels: dict[str, str] = field(factory=dict, doc="further labels of the job and its pods")
    annotations: dict[str, str] = field(factory=dict, doc="further annotations of the job and its pods")
    env: dict[str, str] = field(factory=dict, doc="further environment of the pods; not for secrets")
    hyperpod: HyperPod = field(factory=HyperPod, doc="what only SageMaker HyperPod has")

    def faults(self) -> Iterator[Fault]:
        for name in self.resources:
            if not _RESOURCE.fullmatch(name):
                yield Fault(path=f"resources.{name}", message="not the name of a resource; write for example rdma/hca")
        if self.hyperpod.spares and self.queue is None:
            yield Fault(path="hyperpod.spares", message="spare pods need Kueue; write `queue:` too")
        if self.queue_priority is not None and self.queue is None:
            yield Fault(path="queue_priority", message="belongs to a Kueue queue; write `queue:` too")
        if self.ulimits == "raise" and self.user is None:
            yield Fault(path="user", message="the user to become after the limits are raised; write for example 1000")
        if self.kernel_log and self.user != 0 and self.ulimits != "raise":
            yield Fault(path="kernel_log", message="only root has CAP_SYSLOG in a pod; write `user: 0` too")
        if self.kernel_log and self.ulimits == "raise":
            yield Fault(
                path="kernel_log", message="`ulimits: raise` becomes `user` before the checks; write one of both"
            )
        mounts = [volume.mount for volume in self.volumes]
        for mount in sorted({mount for mount in mounts if mounts.count(mount) > 1}):
            yield Fault(path="volumes", message=f"{mount} is mounted twice")


def parse_settings(mapping: object, *, kind: Kind | None = None) -> Settings:
    """Settings from a plain mapping; `kind` is the default where the file states none."""
    if mapping is None:
        mapping = {}
    if kind is not None and isinstance(mapping, Mapping):
        mapping = {"kind": kind, **mapping}
    return build(Settings, mapping)


def with_account(settings: Settings, account: str | None) -> Settings:
    """The same cluster, with the namespace and the service account of a project: `lab`, or `lab/trainer`."""
    if account is None:
        return settings
    namespace, slash, name = account.partition("/")
    if not re.fullmatch(_NAME, namespace) or (slash and not re.fullmatch(_NAME, name)):
        raise UsageError(f"target: {account!r:.80}: write NAMESPACE or NAMESPACE/SERVICE-ACCOUNT")
    # All pods have one user number: a folder of the node that two projects can write to would be one for both.
    own = (
        replace(volume, sub_path="/".join(filter(None, (volume.sub_path, namespace))))
        if volume.host_path is not None and not volume.read_only
        else volume
        for volume in settings.volumes
    )
    return replace(settings, namespace=namespace, service_account=name or None, volumes=tuple(own))


def load_settings(path: Path | None, *, kind: Kind | None = None) -> Settings:
    """Settings of a YAML file; the defaults without one."""
    if path is None:
        return parse_settings({}, kind=kind)
    return _yaml_file.load(path, _parse, kind, what="target: settings file")


def _parse(document: Any, kind: Kind | None, _folder: Path) -> Settings:
    return parse_settings(document, kind=kind)
