"""A shell in a pod of a job, by rank or node, or in a throw-away pod like those of the job."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from trainmaster.cluster.hyperpod import pods
from trainmaster.cluster.hyperpod.helper import helper_pod
from trainmaster.cluster.hyperpod.manifest import JOB_LABEL, pod_template
from trainmaster.core.errors import TargetError, UsageError
from trainmaster.core.ids import UUID_PATTERN
from trainmaster.targets.kubernetes import names
from trainmaster.targets.kubernetes.client import Client, path_of
from trainmaster.targets.kubernetes.commands import Place
from trainmaster.targets.kubernetes.errors import Denied, Missing, Taken
from trainmaster.targets.kubernetes.manifests import RESOURCES
from trainmaster.targets.kubernetes.pending import explain_pod
from trainmaster.targets.kubernetes.pods import Object
from trainmaster.targets.kubernetes.states import newest_by_node

SHELL = ("sh", "-c", "if command -v bash >/dev/null; then exec bash; fi; exec sh")
OWNER = "trainmaster/cluster-test-owner"  # annotation: HOST/PID/START of the process that removes the pod
UNTIL = "trainmaster/cluster-test-until"  # annotation: Unix time after which the pod has ended by itself
MARK = "trainmaster/cluster-shell"  # label of every throw-away pod; its value is the job's name
_LABELS = (JOB_LABEL, names.JOB_NAME_LABEL, "training.kubeflow.org/job-name", "batch.kubernetes.io/job-name")
_WAIT = "trap 'exit 0' TERM; sleep {seconds} & wait"
_START_S = 300.0
_GONE_S = 120.0  # a busy kubelet takes more than half a minute
_SILENT_S = 5.0
_LOOK_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which pod of a job: at most one of the three, else that of node 0."""

    rank: int | None = None
    node: str | None = None  # node rank, or name of the node
    pod: str | None = None


async def find_place(client: Client, namespace: str, job: str, choice: Choice) -> Place:
    """The running pod of a job that was chosen."""
    job_pods = await list_pods(client, namespace, job)
    if not job_pods:
        raise UsageError(f"no pod of {job} in namespace {namespace}; --new makes one of its own")
    chosen = choose(
        job_pods, choice, await _ranks_per_node(client, namespace, job_pods) if choice.rank is not None else 1
    )
    name = str(chosen["metadata"]["name"])
    if not pods.is_running(chosen):
        phase = (chosen.get("status") or {}).get("phase")
        raise TargetError(f"pod {name} does not run ({phase}): {explain_pod(chosen)}; --new makes one of its own")
    return Place(namespace=namespace, pod=name, container=str(chosen["spec"]["containers"][0]["name"]))


def choose(job_pods: Sequence[Object], choice: Choice, ranks_per_node: int) -> Object:
    """The pod by name, by node or by rank. Pure."""
    by_node = {node: dict(pod) for node, pod in sorted(newest_by_node(job_pods, len(job_pods)).items())}
    if choice.pod is not None:
        wanted, known = choice.pod, {str(pod["metadata"]["name"]): pod for pod in job_pods}
    elif choice.node is not None and not choice.node.isdecimal():
        wanted, known = choice.node, {str(pod["spec"].get("nodeName")): pod for pod in by_node.values()}
    else:
        number = int(choice.node or 0) if choice.rank is None else choice.rank // ranks_per_node
        wanted, known = str(number), {str(node): pod for node, pod in by_node.items()}
    if wanted in known:
        return known[wanted]
    which = "pod" if choice.pod is not None else "node" if choice.rank is None else f"rank {choice.rank}, node"
    raise UsageError(f"the job has no {which} {wanted}; it has {', '.join(sorted(known))}")


async def list_pods(client: Client, namespace: str, job: str) -> list[Object]:
    """Pods of the newest attempt of a job: by its name, its id, or the name of its object."""
    path = path_of("v1", "pods", namespace=namespace)
    if re.fullmatch(UUID_PATTERN, job):
        job_pods = (await client.list(path, labelSelector=names.SELECTOR))["items"]
        return _newest_attempt([pod for pod in job_pods if names.job_of(_attempt(pod)) == job])
    for label in _LABELS:
        selector = f"{label}={names.label_text(job)}"
        if job_pods := (await client.list(path, labelSelector=selector))["items"]:
            return _newest_attempt(job_pods)
    return []


def _newest_attempt(job_pods: list[Object]) -> list[Object]:
    if not job_pods:
        return []
    newest = max(job_pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp") or ""))
    return [pod for pod in job_pods if _attempt(pod) == _attempt(newest)]


def _attempt(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(names.ATTEMPT_LABEL, ""))


async def _ranks_per_node(client: Client, namespace: str, job_pods: Sequence[Object]) -> int:
    """Ranks of each pod: from the plan that it has mounted, else from its job."""
    for volume in job_pods[0]["spec"].get("volumes") or ():
        if volume["name"] == "plan" and "configMap" in volume:
            path = path_of("v1", "configmaps", namespace=namespace, name=volume["configMap"]["name"])
            with contextlib.suppress(Missing, ValueError, KeyError, TypeError):
                plan = json.loads((await client.get(path))["data"]["plan.json"])
                return int(plan["spec"]["resources"]["processes_per_node"])
    spec = (await _find_job(client, namespace, job_pods, "") or {}).get("spec") or {}
    count = str(spec.get("nprocPerNode") or (spec.get("trainer") or {}).get("numProcPerNode") or "")
    if count.isdecimal():
        return int(count)
    raise UsageError("the number of ranks of each pod is not known; write --node in place of --rank")


async def _find_job(client: Client, namespace: str, job_pods: Sequence[Object], job: str) -> Object | None:
    """The job's own object: the owner of its pods, else by its name or label."""
    owners = [owner for pod in job_pods for owner in pod["metadata"].get("ownerReferences") or ()]
    for resource in RESOURCES.values():
        path = path_of(resource.api, resource.plural, namespace=namespace)
        own = [str(owner["name"]) for owner in owners if owner.get("kind") == resource.kind]
        for name in own[:1] or ([job] if job else []):
            with contextlib.suppress(Missing, Denied):
                return await client.get(f"{path}/{name}")
        if job and not owners:
            with contextlib.suppress(Missing, Denied):
                listed = (await client.list(path, labelSelector=f"{names.JOB_NAME_LABEL}={names.label_text(job)}"))[
                    "items"
                ]
                if listed:
                    return dict(max(listed, key=lambda item: str(item["metadata"].get("creationTimestamp") or "")))
    return None


async def pod_spec_of(client: Client, namespace: str, job: str) -> Object:
    """Spec of the job's pods: its template, else a pod that it has."""
    job_pods = await list_pods(client, namespace, job)
    owner = await _find_job(client, namespace, job_pods, job)
    if owner is not None:
        with contextlib.suppress(KeyError, IndexError, StopIteration):
            return dict(pod_template(owner)["spec"])
    if job_pods:
        return dict(job_pods[0]["spec"])
    raise UsageError(f"no job {job} in namespace {namespace}; give its manifest with --manifest")


@asynccontextmanager
async def throw_away(
    client: Client,
    namespace: str,
    job: str,
    spec: Object,
    *,
    node: str | None,
    lasts_s: int,
    tell: Callable[[str], None],
) -> AsyncIterator[Place]:
    """A pod of its own with that spec, deleted whatever ends the block.

    After SIGKILL the next throw-away pod of this namespace deletes it; without one it ends after `lasts_s`.
    """
    for name in await clear_leftovers(client, namespace, tell):
        tell(f"removed what an earlier shell left: {name}")
    made = shell_pod(spec, job, namespace, node=node, lasts_s=lasts_s)
    name = str(made["metadata"]["name"])
    path = path_of("v1", "pods", namespace=namespace)
    try:
        await client.post(path, made)
        await _wait_for_start(client, f"{path}/{name}", tell)
        yield Place(namespace=namespace, pod=name, container=str(made["spec"]["containers"][0]["name"]))
    finally:
        await _delete(client, f"{path}/{name}", tell)
        tell(f"removed pod {name}")


def shell_pod(spec: Object, job: str, namespace: str, *, node: str | None, lasts_s: int) -> Object:
    """The throw-away pod. It ends by itself after `lasts_s`. Pure but for its name and the mark of this process."""
    made = helper_pod(spec, f"tm-shell-{secrets.token_hex(4)}", namespace, plan=True)
    made["metadata"]["labels"] = {names.MANAGED_BY: "trainmaster-shell", MARK: names.label_text(job)}
    made["metadata"]["annotations"] = {OWNER: _identity(), UNTIL: str(int(time.time() + lasts_s))}
    (container,) = made["spec"]["containers"]
    container |= {"name": "shell", "command": ["sh", "-c", _WAIT.format(seconds=lasts_s)]}
    made["spec"]["activeDeadlineSeconds"] = lasts_s
    if node is not None:
        made["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    return made


async def clear_leftovers(client: Client, namespace: str, tell: Callable[[str], None]) -> list[str]:
    """Delete the throw-away pods whose process is gone; their names."""
    path = path_of("v1", "pods", namespace=namespace)
    removed = []
    for pod in (await client.list(path, labelSelector=MARK))["items"]:
        if not _is_alive(pod["metadata"].get("annotations") or {}):
            removed.append(str(pod["metadata"]["name"]))
            await _delete(client, f"{path}/{removed[-1]}", tell)
    return removed


async def _wait_for_start(client: Client, path: str, tell: Callable[[str], None]) -> None:
    until, last_reason = time.monotonic() + _START_S, ""
    while True:
        pod = await client.get(path)
        if pods.is_running(pod):
            return
        why = explain_pod(pod)
        if fault := pods.find_fault(pod):
            raise TargetError(f"the pod does not start: {fault}")
        if time.monotonic() > until:
            raise TargetError(f"the pod did not start within {_START_S:.0f} s: {why}")
        if why != last_reason:
            tell(why)
            last_reason = why
        await asyncio.sleep(_LOOK_S)


async def _delete(client: Client, path: str, tell: Callable[[str], None]) -> None:
    """Delete a pod and wait until it is gone."""
    began, is_told = time.monotonic(), False
    while (waited_s := time.monotonic() - began) < _GONE_S:
        if waited_s > _SILENT_S and not is_told:
            tell(f"waiting until pod {path.rpartition('/')[2]} is gone")
            is_told = True
        try:
            await client.delete(path, grace_s=1)
            await asyncio.sleep(_LOOK_S)
            await client.get(path)
        except Missing:
            return
        except Taken:
            continue
    raise TargetError(f"pod {path.rpartition('/')[2]} was deleted and is still there after {_GONE_S:.0f} s")


def _identity() -> str:
    """This process, as the owner of what it creates: HOST/PID/START."""
    return f"{socket.gethostname()}/{os.getpid()}/{_started(os.getpid())}"


def _is_alive(notes: Mapping[str, str]) -> bool:
    """Whether the process that created a pod may still run. On another host only time tells."""
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
