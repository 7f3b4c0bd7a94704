"""Objects of an attempt: plan, Secret, Service and the job as one of four kinds. Pure: no cluster is asked."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.core.container import RegistryLogin
from trainmaster.core.plan import Plan
from trainmaster.targets.kubernetes import hyperpod, kueue, names, pods
from trainmaster.targets.kubernetes.pods import Object, PodPlan
from trainmaster.targets.kubernetes.settings import Kind

HIDDEN = "(not shown)"
_NODE_TTL_S = 3600  # of the Jobs of nodes but the first, at least
# Annotations of the registry's Secret: where its value comes from.
REGISTRY, USER, PASSWORD_FROM = "trainmaster/registry", "trainmaster/user", "trainmaster/password-from"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A kind of object, as the API addresses it."""

    api: str  # group/version
    plural: str
    kind: str
    container: str  # name of the container, which the operator prescribes


RESOURCES: Mapping[Kind, Resource] = {
    "job": Resource(api="batch/v1", plural="jobs", kind="Job", container="trainmaster"),
    "pytorchjob": Resource(api="kubeflow.org/v1", plural="pytorchjobs", kind="PyTorchJob", container="pytorch"),
    "trainjob": Resource(api="trainer.kubeflow.org/v1alpha1", plural="trainjobs", kind="TrainJob", container="node"),
    "hyperpod": Resource(
        api="sagemaker.amazonaws.com/v1", plural="hyperpodpytorchjobs", kind="HyperPodPyTorchJob", container="pytorch"
    ),
}


def build(plan: Plan, made: PodPlan) -> list[Object]:
    """Objects to apply, in this order. Secrets are not among them: their values come from the server's environment."""
    settings, marks = made.settings, pods.labels(made)
    files = {"plan.json": plan.to_json() + "\n"}
    if made.package:
        files["start.py"] = pods.START_SCRIPT
    if settings.kind == "hyperpod":
        files |= hyperpod.plan_files(plan.spec, settings)
    objects = [pods.config_map(made.name, marks, files)]
    if settings.kind == "job" and plan.spec.resources.nodes > 1:
        objects.append(_service(made))
    if plan.spec.resources.spares:
        objects += [_node_job(made, node) for node in range(plan.spec.resources.machines)]
    else:
        objects.append(_JOBS[settings.kind](made))
    for item in objects:
        item["metadata"]["namespace"] = settings.namespace
    return objects


def _head(made: PodPlan, annotations: Mapping[str, str] | None = None) -> Object:
    resource = RESOURCES[made.settings.kind]
    metadata: Object = {"name": made.name, "labels": {**pods.labels(made), **kueue.labels(made.settings)}}
    if merged := {**made.settings.annotations, **(annotations or {})}:
        metadata["annotations"] = merged
    return {"apiVersion": resource.api, "kind": resource.kind, "metadata": metadata}


def _job(made: PodPlan) -> Object:
    nodes, template = made.spec.resources.nodes, pods.template(made)
    if nodes > 1:
        template["spec"]["subdomain"] = made.name  # the service's name: pod 0 is found as NAME-0.NAME
    spec: Object = {
        "completions": nodes,
        "parallelism": nodes,
        **kueue.suspended(made.settings),
        "backoffLimit": 0,  # another try is another attempt
        "ttlSecondsAfterFinished": made.settings.ttl_s,
        "template": template,
    }
    if nodes > 1:
        spec["completionMode"] = "Indexed"  # Kubernetes 1.24; older servers refuse the field
    return {**_head(made), "spec": spec}


def _node_job(made: PodPlan, node: int) -> Object:
    """The Job of one node of an attempt with spares: the loss of a pod ends a Job, and so must not be that of all."""
    template = pods.template(made)
    inner, mark = template["spec"], {names.NODE_LABEL: str(node)}
    template["metadata"]["labels"] |= mark
    inner |= {"hostname": f"{made.name}-{node}", "subdomain": made.name}  # the names that pods of an indexed Job have
    inner["containers"][0]["env"].append({"name": names.INDEX_VARIABLE, "value": str(node)})
    spec: Object = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0,
        # Node 0 may end later, and the record of this node is read then. A release deletes all Jobs at once.
        "ttlSecondsAfterFinished": max(made.settings.ttl_s, _NODE_TTL_S) if node else made.settings.ttl_s,
        "template": template,
    }
    head = _head(made)
    head["metadata"] |= {"name": names.node_name(made.name, node), "labels": head["metadata"]["labels"] | mark}
    return {**head, "spec": spec}


def _pytorchjob(made: PodPlan) -> Object:
    nodes, resumes = made.spec.resources.nodes, made.settings.hyperpod.auto_resume
    restart = "OnFailure" if resumes else "Never"
    template = pods.template(made)
    del template["spec"]["restartPolicy"]  # the operator sets it from the replica's
    replicas = {"Master": {"replicas": 1, "restartPolicy": restart, "template": template}}
    if nodes > 1:
        replicas["Worker"] = {"replicas": nodes - 1, "restartPolicy": restart, "template": template}
    policy = {
        **kueue.suspended(made.settings),
        "cleanPodPolicy": "None",
        "backoffLimit": made.settings.hyperpod.restart.job_retries if resumes else 0,
        "ttlSecondsAfterFinished": made.settings.ttl_s,
    }
    spec: Object = {"runPolicy": policy, "pytorchReplicaSpecs": replicas}
    spec["nprocPerNode"] = str(made.spec.resources.processes_per_node)
    return {**_head(made, hyperpod.auto_resume(made.settings)), "spec": spec}


def _trainjob(made: PodPlan) -> Object:
    """TrainJob of Kubeflow Trainer 2.1 and newer. User and grace period are the runtime's: it lets no job set them."""
    container, inner = pods.container(made), pods.template(made)["spec"]
    env = container["env"]
    env = env + [_from_secret(made.name, name) for name in made.secrets]  # a TrainJob has no envFrom
    trainer: Object = {
        "image": container["image"],
        "command": container["command"],
        "env": env,
        "numNodes": made.spec.resources.nodes,
        "numProcPerNode": made.spec.resources.processes_per_node,
        "resourcesPerNode": container["resources"],
    }
    copied = ("volumes", "tolerations", "nodeSelector", "affinity", "serviceAccountName", "imagePullSecrets")
    override: Object = {name: inner[name] for name in copied if name in inner}
    override["containers"] = [{"name": container["name"], "volumeMounts": container["volumeMounts"]}]
    metadata: Object = {"labels": pods.labels(made)}
    if annotations := pods.template(made)["metadata"].get("annotations"):
        metadata["annotations"] = annotations
    spec: Object = {
        **kueue.suspended(made.settings),
        "runtimeRef": {"name": made.settings.runtime},
        "trainer": trainer,
        "podTemplateOverrides": [{"targetJobs": [{"name": "node"}], "metadata": metadata, "spec": override}],
    }
    return {**_head(made), "spec": spec}


def _hyperpod(made: PodPlan) -> Object:
    template = pods.template(made)
    del template["spec"]["restartPolicy"]
    for volume in template["spec"]["volumes"]:
        if volume["name"] == "plan":
            volume["configMap"]["defaultMode"] = 0o755  # hyperpodrun executes the pre-flight
    return {**_head(made), "spec": hyperpod.job_spec(made.spec, made.settings, template)}


_JOBS = {"job": _job, "pytorchjob": _pytorchjob, "trainjob": _trainjob, "hyperpod": _hyperpod}


def _service(made: PodPlan) -> Object:
    """Names for the pods, before they are ready: the ranks meet before they work."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {names.ATTEMPT_LABEL: made.attempt},
        "ports": [{"name": "rendezvous", "port": names.MASTER_PORT, "protocol": "TCP"}],
    }
    metadata = {"name": made.name, "labels": pods.labels(made)}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _from_secret(secret: str, name: str) -> Object:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}


def secret(made: PodPlan) -> Object:
    """Secret with the environment variables that the operator gives to every job; values are put in when it is sent."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": made.name, "namespace": made.settings.namespace, "labels": pods.labels(made)},
        "type": "Opaque",
        "data": dict.fromkeys(made.secrets, HIDDEN),
    }


def pull_secret(made: PodPlan, registry: str, login: RegistryLogin) -> Object:
    """Secret with the login at the image's registry; the password is put in when it is sent."""
    notes = {REGISTRY: registry, USER: login.user, PASSWORD_FROM: login.password_from}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": made.pull_secret,
            "namespace": made.settings.namespace,
            "labels": pods.labels(made),
            "annotations": notes,
        },
        "type": "kubernetes.io/dockerconfigjson",
        "data": {".dockerconfigjson": HIDDEN},
    }


def docker_config(registry: str, user: str, password: str) -> dict[str, str]:
    """Data of a Secret with a registry login."""
    login = {"username": user, "password": password, "auth": encode(f"{user}:{password}")}
    address = "https://index.docker.io/v1/" if registry == "docker.io" else registry
    return {".dockerconfigjson": encode(json.dumps({"auths": {address: login}}))}


def pod_metadata(item: Object) -> list[Object]:
    """Metadata of every pod template of a job of any kind."""
    spec = item.get("spec", {})
    replicas = [*spec.get("pytorchReplicaSpecs", {}).values(), *spec.get("replicaSpecs", [])]
    holders = [replica["template"] for replica in replicas] + spec.get("podTemplateOverrides", [])
    if item.get("kind") == "Job":
        holders.append(spec["template"])
    return [holder.setdefault("metadata", {}) for holder in holders]


def render(objects: list[Any]) -> str:
    """Objects as one YAML document each."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Scripts and plans as blocks, and nothing as a reference to another place."""

        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 (PyYAML's signature)
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return "---\n".join(yaml.dump(item, Dumper=Dumper, sort_keys=False, width=120) for item in objects)


def encode(text: str) -> str:
    """Text as the data of a Secret."""
    return base64.b64encode(text.encode()).decode()
