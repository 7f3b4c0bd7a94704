"""Objects of a test in the cluster: an attempt like every other, made from a manifest that users edit.

They carry the labels of an attempt and, where a test removes them at its end, the marks of its home and run: should it
be killed, the next test, `cleanup` or `trainmaster reap` removes them. Their names are the manifest's, so each is
created by one POST: an object of that name that is there already is somebody else's.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainmaster import targets
from trainmaster.cluster.hyperpod.manifest import JOB_LABEL, find_checked_job
from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import Unreachable, UsageError
from trainmaster.targets.kubernetes import names
from trainmaster.targets.kubernetes.client import Client, path_of, path_of_object
from trainmaster.targets.kubernetes.errors import Missing, Taken
from trainmaster.targets.kubernetes.manifests import RESOURCES, pod_metadata
from trainmaster.targets.kubernetes.pods import Object

CREATE_S = 60.0  # for an outage of the API server
_GONE_S = 90.0
_LOOK_S = 0.3
_COLLECTIONS = (
    *((resource.api, resource.plural) for resource in RESOURCES.values()),
    ("v1", "pods"), ("v1", "configmaps"), ("v1", "services"), ("v1", "secrets"),
)  # fmt: skip


def make_marks(job_name: str, run: targets.Run | None) -> dict[str, str]:
    """Labels of one deployment. `run`: the test that removes it; None: it stays until `cleanup`."""
    marks = {names.MANAGED_BY: names.MANAGER, names.ATTEMPT_LABEL: f"{uuid.uuid4()}.1", JOB_LABEL: job_name}
    return marks if run is None else {**marks, **names.owner_labels(run.owner)}


def prepare(objects: Sequence[Object], namespace: str, marks: Mapping[str, str]) -> list[Object]:
    """The objects of a manifest as they are created: with marks, and in the namespace."""
    job, job_name = find_checked_job(objects), marks[JOB_LABEL]
    if job["metadata"].get("name") != job_name:
        raise UsageError(f"the manifest's job is {job['metadata'].get('name')}; write --job-name with that name")
    known = {"ConfigMap", "Secret", "Service", "Pod", job["kind"]}
    if strange := sorted({str(item.get("kind")) for item in objects} - known):
        raise UsageError(f"the manifest has a {strange[0]}; apply it by itself, a test would remove it at its end")
    return [mark(item, namespace, marks) for item in objects]


def mark(given: Object, namespace: str, marks: Mapping[str, str]) -> Object:
    """One object with marks, on its pods too. A test writes its checkpoints to a folder of its own."""
    made = copy.deepcopy(given)
    made["metadata"]["namespace"] = namespace
    for metadata in (made["metadata"], *pod_metadata(made)):
        metadata["labels"] = {**(metadata.get("labels") or {}), **marks}
    if made["kind"] == "ConfigMap" and names.RUN_LABEL in marks:
        _separate(made.get("data") or {}, checkpoint_folder(marks[names.RUN_LABEL]))
    return made


def checkpoint_folder(run: str) -> str:
    """Name of the folder in which a test writes its checkpoints, and which it removes."""
    return f"test-{run}"


def _separate(files: dict[str, str], folder: str) -> None:
    """Give the run of a test a checkpoint folder of its own: in the same one a second test would find it finished."""
    try:
        config = json.loads(files["train.json"])
        config["checkpoint"]["folder"] += f"/{folder}"
    except (KeyError, TypeError, ValueError):  # another trainer
        return
    files["train.json"] = json.dumps(config, indent=2, sort_keys=True) + "\n"


async def create(client: Client, objects: Sequence[Object]) -> None:
    """Create every object; one that is there already is somebody else's.

    A request without an answer may have been carried out: it is repeated only where the object is not there.
    """
    for item in objects:
        failures, until = 0, time.monotonic() + CREATE_S
        while not (failures and await _is_created(client, item)):
            try:
                await client.post(path_of_object(item).rpartition("/")[0], item)
                break
            except Taken:
                if failures and await _is_created(client, item):  # by a request that came late
                    break
                raise UsageError(
                    f"{item['kind']} {item['metadata']['name']} exists in {item['metadata']['namespace']} and was not "
                    "created by this test; nothing was changed there"
                ) from None
            except Unreachable:
                failures += 1
                rest_s = backoff_s(failures, first_s=0.5, longest_s=5.0)
                if time.monotonic() + rest_s > until:
                    raise
                await asyncio.sleep(rest_s)


async def _is_created(client: Client, item: Object) -> bool:
    """Whether the object is there, and of this deployment. By a list: a right to get is not needed else."""
    collection, _, name = path_of_object(item).rpartition("/")
    listed = (await client.list(collection, fieldSelector=f"metadata.name={name}"))["items"]
    mine = item["metadata"]["labels"][names.ATTEMPT_LABEL]
    return any(_labels(existing["metadata"]).get(names.ATTEMPT_LABEL) == mine for existing in listed)


async def find(client: Client, namespace: str, job_name: str) -> list[tuple[str, Object]]:
    """Path and metadata of everything that was deployed for this job; what the cluster makes of it is not listed."""
    listed_objects: list[tuple[str, Object]] = []
    selector = f"{names.SELECTOR},{names.ATTEMPT_LABEL},{JOB_LABEL}={job_name}"
    for api, plural in _COLLECTIONS:
        path = path_of(api, plural, namespace=namespace)
        try:
            listed = await client.list(path, labelSelector=selector)
        except Missing:  # this kind is not installed
            continue
        all_metadata = [item["metadata"] for item in listed["items"]]
        listed_objects += [
            (f"{path}/{metadata['name']}", metadata) for metadata in all_metadata if not metadata.get("ownerReferences")
        ]
    return listed_objects


async def remove(client: Client, namespace: str, job_name: str, *, attempt: str | None = None) -> list[str]:
    """Delete what was deployed, wait for its pods; paths of what was deleted. `attempt`: of this deployment alone."""
    owned = await find(client, namespace, job_name)
    if attempt is not None:
        owned = [item for item in owned if _labels(item[1])[names.ATTEMPT_LABEL] == attempt]
    for path, metadata in owned:
        try:
            await client.delete_by_uid(path, str(metadata["uid"]))
        except (Missing, Taken):  # gone, or another object of that name since
            continue
    if owned:
        await _wait_for_pods(
            client, namespace, job_name, {_labels(metadata)[names.ATTEMPT_LABEL] for _, metadata in owned}
        )
    return [path for path, _ in owned]


async def clear_leftovers(client: Client, namespace: str, job_name: str, home: Path) -> list[str]:
    """Remove what a killed test left; refuse where it lives or may live, or where the job is no test."""
    owned = await find(client, namespace, job_name)
    for path, metadata in owned:
        labels = _labels(metadata)
        owner = {"home": labels.get(names.HOME_LABEL), "run": labels.get(names.RUN_LABEL)}
        if owner["run"] is None:
            raise UsageError(f"{path.rpartition('/')[2]} runs (make run); end it first with: make stop")
        if not targets.is_left_over(home, owner):
            raise UsageError(
                f"a test of {job_name} is running (home {owner['home']}, run {owner['run']}); wait for its end, or end "
                "it with: make stop"
            )
    return await remove(client, namespace, job_name) if owned else []


async def _wait_for_pods(client: Client, namespace: str, job_name: str, attempts: set[str]) -> None:
    """Wait for the end of the pods of these deployments."""
    path, until = path_of("v1", "pods", namespace=namespace), time.monotonic() + _GONE_S
    selector = f"{names.ATTEMPT_LABEL} in ({','.join(sorted(attempts))})"
    while time.monotonic() < until:
        if not (await client.list(path, labelSelector=selector))["items"]:
            return
        await asyncio.sleep(_LOOK_S)
    raise UsageError(f"pods of {job_name} are still there after {_GONE_S:.0f} s; see: make check-job")


def _labels(metadata: Object) -> dict[str, str]:
    return metadata.get("labels") or {}
