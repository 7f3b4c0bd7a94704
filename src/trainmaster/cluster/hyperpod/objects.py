"""Objects of a test in the cluster: created once, found again by their label, removed with nothing beside them."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trainmaster.cluster.hyperpod.manifest import JOB_LABEL, find_checked_job
from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import Unreachable, UsageError
from trainmaster.targets.kubernetes.client import Client, path_of, path_of_object
from trainmaster.targets.kubernetes.errors import Missing, Taken
from trainmaster.targets.kubernetes.manifests import RESOURCES, pod_metadata
from trainmaster.targets.kubernetes.pods import Object

MARK = "trainmaster/cluster-test"  # label of everything that was created here; its value is the job's name
ROLE = "trainmaster/cluster-test-role"  # annotation: `test` is removed at its end, `run` by `cleanup` alone
OWNER = "trainmaster/cluster-test-owner"  # annotation: HOST/PID/START of the process that removes it
RUN = "trainmaster/cluster-test-run"  # of objects and pods: one test, where two run at once under one name
UNTIL = "trainmaster/cluster-test-until"  # annotation: Unix time after which the test cannot run any more
Role = Literal["test", "run"]
CREATE_S = 60.0  # for an outage of the API server
_GONE_S = 90.0
_LOOK_S = 0.3
_COLLECTIONS = (
    *((one.api, one.plural) for one in RESOURCES.values()),
    ("v1", "pods"), ("v1", "configmaps"), ("v1", "services"), ("v1", "secrets"),
)  # fmt: skip


def prepare(
    objects: Sequence[Object], job_name: str, namespace: str, *, role: Role, lasts_s: float, run: str = ""
) -> list[Object]:
    """The objects of a manifest as they are created: with marks, and in the namespace. `run` names a test."""
    job = find_checked_job(objects)
    if job["metadata"].get("name") != job_name:
        raise UsageError(f"the manifest's job is {job['metadata'].get('name')}; write --job-name with that name")
    known = {"ConfigMap", "Secret", "Service", "Pod", job["kind"]}
    if strange := sorted({str(one.get("kind")) for one in objects} - known):
        raise UsageError(f"the manifest has a {strange[0]}; apply it by itself, a test would remove it at its end")
    made = [copy.deepcopy(one) for one in objects]
    for one in made:
        metadata = one["metadata"]
        metadata["namespace"] = namespace
        metadata["labels"] = {**(metadata.get("labels") or {}), MARK: job_name}
        notes = {ROLE: role, OWNER: identity(), UNTIL: str(int(time.time() + lasts_s)), RUN: run}
        metadata["annotations"] = {**(metadata.get("annotations") or {}), **notes}
        if run:
            for pod in pod_metadata(one):
                pod["labels"] = {**(pod.get("labels") or {}), RUN: run}
        if run and one["kind"] == "ConfigMap":
            _separate(one.get("data") or {}, checkpoint_folder(run))
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
    for one in objects:
        failures, until = 0, time.monotonic() + CREATE_S
        while not (failures and await _is_created(client, one)):
            try:
                await client.post(path_of_object(one).rpartition("/")[0], one)
                break
            except Taken:
                if failures and await _is_created(client, one):  # by a request that came late
                    break
                raise UsageError(
                    f"{one['kind']} {one['metadata']['name']} exists in {one['metadata']['namespace']} and was not "
                    "created by this test; nothing was changed there"
                ) from None
            except Unreachable:
                failures += 1
                rest_s = backoff_s(failures, first_s=0.5, longest_s=5.0)
                if time.monotonic() + rest_s > until:
                    raise
                await asyncio.sleep(rest_s)


async def _is_created(client: Client, one: Object) -> bool:
    """Whether the object is there, and from this very request. By a list: a right to get is not needed else."""
    collection, _, name = path_of_object(one).rpartition("/")
    found = (await client.list(collection, fieldSelector=f"metadata.name={name}"))["items"]
    there = [other["metadata"].get("annotations") or {} for other in found]
    mine = one["metadata"]["annotations"]
    return any(all(notes.get(key) == mine[key] for key in (OWNER, UNTIL, RUN)) for notes in there)


async def find(client: Client, namespace: str, job_name: str) -> list[tuple[str, Object]]:
    """Path and metadata of everything that carries the mark of this job."""
    found: list[tuple[str, Object]] = []
    for api, plural in _COLLECTIONS:
        path = path_of(api, plural, namespace=namespace)
        try:
            listed = await client.list(path, labelSelector=f"{MARK}={job_name}")
        except Missing:  # this kind is not installed
            continue
        found += [(f"{path}/{one['metadata']['name']}", one["metadata"]) for one in listed["items"]]
    return found


async def remove(client: Client, namespace: str, job_name: str, *, run: str | None = None) -> list[str]:
    """Delete what carries the mark, wait for its pods; paths of what was deleted. `run`: of this test alone."""
    found = await find(client, namespace, job_name)
    if run is not None:
        found = [one for one in found if (one[1].get("annotations") or {}).get(RUN) == run]
    for path, metadata in found:
        try:
            await client.delete_by_uid(path, str(metadata["uid"]))
        except (Missing, Taken):  # gone, or another object of that name since
            continue
    if found:
        await _wait_for_pods(client, namespace, job_name, {str(metadata["uid"]) for _, metadata in found})
    return [path for path, _ in found]


async def clear_leftovers(client: Client, namespace: str, job_name: str) -> list[str]:
    """Remove what a killed test left; refuse where its process lives, or where the job is no test."""
    found = await find(client, namespace, job_name)
    for path, metadata in found:
        notes = metadata.get("annotations") or {}
        if notes.get(ROLE) != "test":
            raise UsageError(f"{path.rpartition('/')[2]} runs (make run); end it first with: make stop")
        if is_alive(notes):
            raise UsageError(f"a test of {job_name} is running ({notes.get(OWNER)}); wait for its end")
    return await remove(client, namespace, job_name) if found else []


async def _wait_for_pods(client: Client, namespace: str, job_name: str, owners: set[str]) -> None:
    """Wait for the end of the pods that the deleted objects own."""
    path, until = path_of("v1", "pods", namespace=namespace), time.monotonic() + _GONE_S
    while time.monotonic() < until:
        pods = (await client.list(path, labelSelector=f"{JOB_LABEL}={job_name}"))["items"]
        if not any(is_owned(pod, owners) for pod in pods):
            return
        await asyncio.sleep(_LOOK_S)
    raise UsageError(f"pods of {job_name} are still there after {_GONE_S:.0f} s; see: make check-job")


def is_owned(pod: Mapping[str, Any], owners: set[str]) -> bool:
    return any(one.get("uid") in owners for one in pod["metadata"].get("ownerReferences") or ())


def identity() -> str:
    """This process, as the owner of what it creates: HOST/PID/START."""
    return f"{socket.gethostname()}/{os.getpid()}/{_started(os.getpid())}"


def is_alive(notes: Mapping[str, str]) -> bool:
    """Whether the process that created an object may still run. On another host only time tells."""
    host, _, rest = str(notes.get(OWNER, "")).partition("/")
    pid, _, started = rest.partition("/")
    if host == socket.gethostname() and pid.isdecimal():
        return _started(int(pid)) == started != ""
    until = str(notes.get(UNTIL, ""))
    return until.isdecimal() and time.time() < int(until)


def _started(pid: int) -> str:
    """Start time of a process in clock ticks; "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
