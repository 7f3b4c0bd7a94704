"""Pod of a job: container, volumes, environment, scheduling, security. The same for every kind of object."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmaster.core.errors import UsageError
from trainmaster.core.spec import JobSpec
from trainmaster.targets.kubernetes import names
from trainmaster.targets.kubernetes.settings import Settings, Volume

Object = dict[str, Any]

# Settings that NCCL over EFA needs on AWS; NCCL's own connections must not take a container's bridge.
EFA_RESOURCE = "vpc.amazonaws.com/efa"
EFA_ENVIRONMENT = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "NCCL_SOCKET_IFNAME": "^docker,lo,veth",
}
HEALTH_LABEL = "sagemaker.amazonaws.com/node-health-status"
_AFTER_GRACE_S = 30  # for the agent's sweep and its record, after the ranks' own time
# The pod's command where trainmaster is sent. The archive is unpacked: its data files are read by path.
START_SCRIPT = '''\
"""Unpack trainmaster's node half and start the agent of this pod."""
import gzip, io, os, sys, zipfile

folder = "/trainmaster/run/package"
with gzip.open("/trainmaster/package/package.zip.gz") as packed:
    zipfile.ZipFile(io.BytesIO(packed.read())).extractall(folder)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
os.execv(sys.executable, [sys.executable, "-m", "trainmaster.agent.pod", *sys.argv[1:]])
'''
# Limits come from the container runtime of the node, so every container of it has the same.
_CHECK_LIMITS = (
    "locked=$(ulimit -l); files=$(ulimit -n); "
    'if [ "$locked" != unlimited ] || { [ "$files" != unlimited ] && [ "$files" -lt 65536 ]; }; then '
    'echo "locked memory $locked KiB, open files $files: set LimitMEMLOCK=infinity and LimitNOFILE=1048576 for the '
    'container runtime of this node, or ulimits: raise" | tee /dev/termination-log; exit 1; fi'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlan:
    """What differs between the pods of two attempts."""

    name: str  # of the objects
    attempt: str
    spec: JobSpec
    settings: Settings
    container: str  # name of the container, which some operators prescribe
    launcher: Sequence[str] = ()  # in place of our agent: words of another launcher
    secrets: tuple[str, ...] = ()  # variables that a Secret of the same name holds
    package: str = ""  # ConfigMap of the node half; "": the image has it
    pull_secret: str | None = None


def labels(plan: PodPlan) -> dict[str, str]:
    """Labels of every object of an attempt."""
    settings = plan.settings
    ours = {
        names.MANAGED_BY: names.MANAGER,
        names.ATTEMPT_LABEL: plan.attempt,
        names.JOB_NAME_LABEL: names.label_text(plan.spec.name),
    }
    return {**settings.labels, **ours}


def template(plan: PodPlan) -> Object:
    """Pod template: metadata and spec."""
    metadata: Object = {"labels": labels(plan)}
    if plan.settings.annotations:
        metadata["annotations"] = dict(plan.settings.annotations)
    return {"metadata": metadata, "spec": pod_spec(plan)}


def pod_spec(plan: PodPlan) -> Object:
    settings = plan.settings
    spec: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(plan.spec.limits.grace_s) + _AFTER_GRACE_S,
        "enableServiceLinks": False,  # hundreds of services would fill the environment
        "automountServiceAccountToken": settings.service_account is not None,
        "containers": [container(plan)],
        "volumes": volumes(plan),
        **scheduling(plan),
    }
    if security := pod_security(settings):
        spec["securityContext"] = security
    if settings.ulimits == "check":
        spec["initContainers"] = [limits_container(plan)]
    if settings.service_account is not None:
        spec["serviceAccountName"] = settings.service_account
    if pull := plan.pull_secret or settings.pull_secret:
        spec["imagePullSecrets"] = [{"name": pull}]
    return spec


def container(plan: PodPlan) -> Object:
    """The container of the agent, and of the ranks it starts."""
    made: Object = {
        "name": plan.container,
        "image": image(plan),
        "command": command(plan),
        "env": environment(plan),
        "resources": resources(plan),
        "volumeMounts": mounts(plan),
        "terminationMessagePolicy": "File",
    }
    if plan.secrets:
        made["envFrom"] = [{"secretRef": {"name": plan.name}}]
    if security := container_security(plan.settings):
        made["securityContext"] = security
    return made


def image(plan: PodPlan) -> str:
    container = plan.spec.container
    name = container.image if container is not None else plan.settings.image
    if name is None:
        raise UsageError("kubernetes: no image; write `image:` in the settings file, or `container.image` in the spec")
    return name


def command(plan: PodPlan) -> list[str]:
    python, own = plan.settings.python, f"{names.PLAN_FOLDER}/plan.json"
    start = [f"{names.PLAN_FOLDER}/start.py"] if plan.package else ["-m", "trainmaster.agent.pod"]
    after = ["--", *plan.launcher] if plan.launcher else []
    return [python, *start, own, *after]


def environment(plan: PodPlan) -> list[Object]:
    """Plain environment of the container. Nothing secret is in it."""
    settings = plan.settings
    values = {**(EFA_ENVIRONMENT if settings.efa else {}), **settings.env, "PYTHONUNBUFFERED": "1", "HOME": "/tmp"}  # noqa: S108 (of the container)
    if settings.ulimits == "raise":
        values["TRAINMASTER_BECOME"] = f"{settings.user}:{_group(settings)}"
    fields = {"TRAINMASTER_POD": "metadata.name", "TRAINMASTER_NODE": "spec.nodeName"}
    return [{"name": name, "value": value} for name, value in values.items()] + [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]


def resources(plan: PodPlan) -> Object:
    """Requests and limits. Devices are never overcommitted: both are equal."""
    settings, wanted = plan.settings, {}
    gpus = plan.spec.resources.processes_per_node if settings.gpus is None else settings.gpus
    if gpus:
        wanted[settings.gpu_resource] = str(gpus)
    if settings.efa:
        wanted[EFA_RESOURCE] = str(settings.efa)
    wanted |= settings.resources
    for name, amount in (("cpu", settings.cpus), ("memory", settings.memory)):
        if amount is not None:
            wanted[name] = amount
    return {"requests": dict(wanted), "limits": dict(wanted)} if wanted else {}


def volumes(plan: PodPlan) -> list[Object]:
    settings = plan.settings
    listed: list[Object] = [
        {"name": "plan", "configMap": {"name": plan.name}},
        {"name": "run", "emptyDir": {}},
        {"name": "ask", "downwardAPI": {"items": _annotation_files()}},
    ]
    if plan.package:
        listed.append({"name": "package", "configMap": {"name": plan.package}})
    if settings.shm is not None:
        listed.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shm}})
    return listed + [_volume(number, volume) for number, volume in enumerate(settings.volumes)]


def _annotation_files() -> list[Object]:
    """Annotations of the pod as files: a request reaches a running agent without a right to run commands in the pod."""
    return [
        {"path": name.partition("/")[2], "fieldRef": {"fieldPath": f"metadata.annotations['{name}']"}}
        for name in (names.STOP_ANNOTATION, names.RESEND_ANNOTATION)
    ]


def _volume(number: int, volume: Volume) -> Object:
    name = f"volume-{number}"
    if volume.claim is not None:
        return {"name": name, "persistentVolumeClaim": {"claimName": volume.claim, "readOnly": volume.read_only}}
    if volume.host_path is not None:
        return {"name": name, "hostPath": {"path": volume.host_path}}
    return {"name": name, "emptyDir": {"sizeLimit": volume.size}}


def mounts(plan: PodPlan) -> list[Object]:
    listed: list[Object] = [
        {"name": "plan", "mountPath": names.PLAN_FOLDER, "readOnly": True},
        {"name": "run", "mountPath": names.RUN_FOLDER},
        {"name": "ask", "mountPath": names.ASK_FOLDER, "readOnly": True},
    ]
    if plan.package:
        listed.append({"name": "package", "mountPath": names.PACKAGE_FOLDER, "readOnly": True})
    if plan.settings.shm is not None:
        listed.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 (of the container)
    for number, volume in enumerate(plan.settings.volumes):
        read_only = {"readOnly": True} if volume.read_only else {}
        part = {"subPath": volume.sub_path} if volume.sub_path else {}
        listed.append({"name": f"volume-{number}", "mountPath": volume.mount, **part, **read_only})
    return listed


def scheduling(plan: PodPlan) -> Object:
    settings = plan.settings
    fields: Object = {"tolerations": tolerations(settings)}
    if settings.node_labels:
        fields["nodeSelector"] = dict(settings.node_labels)
    if settings.priority_class is not None:
        fields["priorityClassName"] = settings.priority_class
    if affinity := _affinity(plan):
        fields["affinity"] = affinity
    return fields


def tolerations(settings: Settings) -> list[Object]:
    listed: list[Object] = []
    for toleration in settings.tolerations:
        fields = {
            "key": toleration.key,
            "operator": toleration.operator,
            "value": toleration.value,
            "effect": toleration.effect,
        }
        listed.append({name: value for name, value in fields.items() if value is not None})
    # After this time the cluster gives up a pod on a node without contact; the default is five minutes.
    return listed + [
        {
            "key": f"node.kubernetes.io/{word}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": settings.lost_after_s,
        }
        for word in ("not-ready", "unreachable")
    ]


def _affinity(plan: PodPlan) -> Object:
    settings = plan.settings
    rules: Object = {}
    expressions: list[Object] = []
    if settings.not_nodes:
        nodes = list(settings.not_nodes)
        expressions.append({"key": "kubernetes.io/hostname", "operator": "NotIn", "values": nodes})
    if settings.kind == "hyperpod" or settings.hyperpod.auto_resume:
        expressions.append({"key": HEALTH_LABEL, "operator": "In", "values": ["Schedulable"]})
    if expressions:
        terms = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
        rules["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    if settings.spread and plan.spec.resources.nodes > 1:
        same = {"labelSelector": {"matchLabels": {names.ATTEMPT_LABEL: plan.attempt}}}
        apart = [{**same, "topologyKey": "kubernetes.io/hostname"}]
        rules["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": apart}
    return rules


def pod_security(settings: Settings) -> Object:
    context: Object = {"seccompProfile": {"type": "RuntimeDefault"}}
    if settings.user is not None and settings.ulimits != "raise":
        context |= {"runAsUser": settings.user, "runAsGroup": _group(settings)}
        context["runAsNonRoot"] = settings.user != 0
    if settings.user is not None:
        context["fsGroup"] = _group(settings)
        # A large shared volume is not walked at every start.
        context["fsGroupChangePolicy"] = "OnRootMismatch"
    return context


def container_security(settings: Settings) -> Object:
    if settings.ulimits == "raise":
        return {
            "runAsUser": 0,
            "capabilities": {"drop": ["ALL"], "add": ["SYS_RESOURCE", "IPC_LOCK", "SETUID", "SETGID"]},
        }
    rights: Object = {"drop": ["ALL"]}
    if settings.kernel_log:
        rights["add"] = ["SYSLOG"]
    return {"allowPrivilegeEscalation": False, "capabilities": rights}


def limits_container(plan: PodPlan) -> Object:
    """Init container that refuses a node whose limits are too low for RDMA."""
    return {
        "name": "ulimits",
        "image": image(plan),
        "command": ["sh", "-c", _CHECK_LIMITS],
        "securityContext": container_security(plan.settings),
    }


def _group(settings: Settings) -> int:
    group = settings.group if settings.group is not None else settings.user
    return group if group is not None else 0


def config_map(name: str, marks: Mapping[str, str], data: Mapping[str, str]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": dict(marks)},
        "data": dict(data),
    }
