"""Status of a job as JSON, its description and events, and whether a cluster is ready for one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from trainmaster.cluster.hyperpod.manifest import find_checked_job, find_job, pod_template
from trainmaster.cluster.hyperpod.pods import is_running, list_pods
from trainmaster.core.errors import TrainmasterError, UsageError
from trainmaster.core.results import CheckResult, Finding, error, fail, ok, skip
from trainmaster.targets.kubernetes.client import Client, path_of
from trainmaster.targets.kubernetes.errors import Missing
from trainmaster.targets.kubernetes.manifests import RESOURCES
from trainmaster.targets.kubernetes.pending import explain_pod
from trainmaster.targets.kubernetes.pods import HEALTH_LABEL, Object
from trainmaster.targets.kubernetes.states import is_ready

GPU = "nvidia.com/gpu"


async def find_object(client: Client, namespace: str, job_name: str) -> Object | None:
    """The training job of that name, of whichever kind; None where there is none."""
    for resource in RESOURCES.values():
        try:
            return await client.get(path_of(resource.api, resource.plural, namespace=namespace, name=job_name))
        except Missing:
            continue
    return None


async def list_nodes(client: Client) -> list[Object]:
    """Nodes with GPUs; all nodes where none has any."""
    nodes: list[Object] = (await client.list("/api/v1/nodes"))["items"]
    with_gpus = [node for node in nodes if int((node.get("status") or {}).get("capacity", {}).get(GPU, 0))]
    return with_gpus or nodes


async def read_status(client: Client, namespace: str, job_name: str) -> dict[str, Any]:
    """Job, pods and nodes as plain values."""
    job = await find_object(client, namespace, job_name)
    status = (job or {}).get("status") or {}
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "job_exists": job is not None,
        "job_name": job_name,
        "namespace": namespace,
        "job_status": {
            "conditions": [
                {"type": condition.get("type") or "-", "status": condition.get("status")}
                for condition in status.get("conditions") or ()
            ],
            "masterAddr": status.get("masterAddr"),
            "masterPort": None if status.get("masterPort") is None else str(status["masterPort"]),
        },
        "pods": [_describe_pod(pod) for pod in await list_pods(client, namespace, job_name)],
        "nodes": await _describe_nodes(client),
    }


def _describe_pod(pod: Object) -> dict[str, Any]:
    status = pod.get("status") or {}
    running = is_running(pod)
    return {
        "name": pod["metadata"]["name"],
        "node": (pod.get("spec") or {}).get("nodeName"),
        "phase": status.get("phase"),
        "running": running,
        "restarts": sum(int(container.get("restartCount") or 0) for container in status.get("containerStatuses") or ()),
        "why": None if running or status.get("phase") == "Succeeded" else explain_pod(pod),
    }


async def _describe_nodes(client: Client) -> list[dict[str, Any]] | None:
    try:
        nodes = await list_nodes(client)
    except TrainmasterError:  # no right to see nodes
        return None
    return [
        {
            "name": node["metadata"]["name"],
            "ready": is_ready(node),
            "gpus": int((node.get("status") or {}).get("capacity", {}).get(GPU, 0)),
            "health": (node["metadata"].get("labels") or {}).get(HEALTH_LABEL),
        }
        for node in nodes
    ]


async def describe_job(client: Client, namespace: str, job_name: str) -> dict[str, Any]:
    """The job's whole object as the cluster has it, its pods in short, and the events about them, newest last."""
    job = await find_object(client, namespace, job_name)
    if job is None:
        raise UsageError(f"no job {job_name} in namespace {namespace}; deploy it with: make run")
    job["metadata"].pop("managedFields", None)
    listed = await list_pods(client, namespace, job_name)
    about = {job_name, *(str(pod["metadata"]["name"]) for pod in listed)}
    events = await list_events(client, namespace)
    return {
        "job": job,
        "pods": [_describe_pod(pod) for pod in listed],
        "events": [event for event in events if str(event["object"]).partition("/")[2] in about],
    }


async def list_events(client: Client, namespace: str) -> list[dict[str, Any]]:
    """Events of the namespace, newest last."""
    events = (await client.list(path_of("v1", "events", namespace=namespace)))["items"]
    rows = [
        {
            "at": event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp"),
            "type": event.get("type") or "-",
            "reason": event.get("reason") or "-",
            "object": f"{event['involvedObject'].get('kind')}/{event['involvedObject'].get('name')}",
            "count": int(event.get("count") or 1),
            "message": event.get("message"),
        }
        for event in events
    ]
    return sorted(rows, key=lambda row: str(row["at"] or ""))


async def check_cluster(client: Client, namespace: str, manifest: list[Object]) -> list[CheckResult]:
    """Access, the operator, GPU nodes, storage claims and service accounts that the manifest needs."""
    job = find_checked_job(manifest) if find_job(manifest) is not None else None
    spec = pod_template(job)["spec"] if job is not None else {}
    checks = {
        "cluster_access": _check_access(client),
        "operator": _check_operator(client, job),
        "gpu_nodes": _check_nodes(client),
        "storage_claims": _check_claims(client, namespace, spec),
        "service_account": _check_account(client, namespace, spec),
    }
    results = []
    for name, check in checks.items():
        try:
            finding = await check
        except TrainmasterError as exc:
            finding = error(str(exc), action="see the missing rights with: trainmaster cluster rights")
        results.append(CheckResult.of(name, [finding]))
    return results


async def _check_access(client: Client) -> Finding:
    return ok(f"Kubernetes {(await client.get('/version'))['gitVersion']} at {client.access.server}")


async def _check_operator(client: Client, job: Object | None) -> Finding:
    if job is None:
        return fail(
            "the manifest has no training job", action="print a whole one with: trainmaster cluster test --dry-run"
        )
    kind = str(job["kind"])
    try:
        listed = await client.get(path_of(job["apiVersion"], "").rstrip("/"))
    except Missing:
        return fail(f"{job['apiVersion']} {kind} is not installed", action="install the operator of this kind")
    if kind not in {resource["kind"] for resource in listed["resources"]}:
        return fail(f"{kind} is not installed", action="install the operator of this kind")
    return ok(f"{kind} is installed")


async def _check_nodes(client: Client) -> Finding:
    nodes = await list_nodes(client)
    gpus = sum(int((node.get("status") or {}).get("capacity", {}).get(GPU, 0)) for node in nodes)
    if not gpus:
        return fail(f"no node offers {GPU}", action="install NVIDIA's device plugin, or add GPU nodes")
    if away := [str(node["metadata"]["name"]) for node in nodes if not is_ready(node)]:
        return fail(f"not ready: {', '.join(away)}", action="see why with: kubectl describe node NAME")
    return ok(f"{len(nodes)} nodes ready, {gpus} GPUs", nodes=len(nodes), gpus=gpus)


async def _check_claims(client: Client, namespace: str, spec: Object) -> Finding:
    volumes = [volume.get("persistentVolumeClaim") for volume in spec.get("volumes") or ()]
    claims = [str(claim["claimName"]) for claim in volumes if claim]
    if not claims:
        return skip("the manifest uses no storage claim", proof="no persistentVolumeClaim in its pods")
    for name in claims:
        try:
            path = path_of("v1", "persistentvolumeclaims", namespace=namespace, name=name)
            phase = (await client.get(path)).get("status", {}).get("phase")
        except Missing:
            return fail(f"claim {name} does not exist in {namespace}", action="create it, or edit the manifest")
        if phase != "Bound":
            return fail(f"claim {name} is {phase}, not Bound", action=f"see: kubectl describe pvc {name}")
    return ok(f"bound: {', '.join(claims)}")


async def _check_account(client: Client, namespace: str, spec: Object) -> Finding:
    name = str(spec.get("serviceAccountName") or "default")
    try:
        await client.get(path_of("v1", "serviceaccounts", namespace=namespace, name=name))
    except Missing:
        return fail(f"service account {name} does not exist in {namespace}", action="create it, or edit the manifest")
    return ok(f"service account {name}")
