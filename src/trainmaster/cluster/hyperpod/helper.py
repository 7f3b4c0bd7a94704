"""A pod like those of a job: image, mounts, environment and user, without their devices and their placement. Pure."""

from __future__ import annotations

import json

from trainmaster.cluster.hyperpod.manifest import pod_template
from trainmaster.targets.kubernetes.pods import Object

_PLACEMENT = (
    "affinity",
    "initContainers",
    "nodeSelector",
    "nodeName",
    "priority",
    "schedulerName",
    "hostname",
    "subdomain",
)
_TOKENS = ("default-token-", "kube-api-access-")  # volumes that the cluster adds to every pod by itself

_READ_CHECKPOINT = """\
import json, pathlib, shutil, sys
from trainmaster.train.checkpoint import manifest
path, deep = pathlib.Path(sys.argv[2]), sys.argv[3] == "deep"
try:
    fault = manifest.find_fault(path, manifest.read(path).files, deep=deep) or ""
except Exception as error:
    fault = f"{type(error).__name__}: {error}"
print(json.dumps({"checkpoint": str(path), "fault": fault}))
if path.parent.name == sys.argv[1]:
    shutil.rmtree(path.parent)
"""


def helper_pod(spec: Object, name: str, namespace: str, *, plan: bool = False) -> Object:
    """A pod from the spec of another one, or of a template. `plan`: with the job's ConfigMaps, where they are there."""
    made: Object = json.loads(json.dumps(spec))
    container = {
        key: value
        for key, value in made["containers"][0].items()
        if key not in ("resources", "args", "livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "ports")
    }
    kept = [volume for volume in made.get("volumes") or () if _is_kept(volume, plan=plan)]
    for volume in kept:
        if "configMap" in volume:
            volume["configMap"]["optional"] = True  # the plan is removed with its job
    names = {volume["name"] for volume in kept}
    container["volumeMounts"] = [mount for mount in container.get("volumeMounts") or () if mount["name"] in names]
    for key in _PLACEMENT:
        made.pop(key, None)
    made |= {"containers": [container], "volumes": kept, "restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    metadata = {"name": name, "namespace": namespace, "labels": {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": made}


def reading_pod(
    job: Object, job_name: str, namespace: str, checkpoint: str, *, folder: str, deep: bool = True
) -> Object:
    """Pod that reads a checkpoint: image, mounts and user of the job, no GPU. It removes `folder`, the test's own."""
    made = helper_pod(pod_template(job)["spec"], f"{job_name}-read", namespace)
    (container,) = made["spec"]["containers"]
    container["command"] = ["python3", "-c", _READ_CHECKPOINT, folder, checkpoint, "deep" if deep else "sizes"]
    return made


def _is_kept(volume: Object, *, plan: bool) -> bool:
    return not str(volume["name"]).startswith(_TOKENS) and (plan or "configMap" not in volume)
