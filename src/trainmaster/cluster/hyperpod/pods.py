"""Pods of a job and their logs, read from the cluster."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainmaster.cluster.hyperpod.logs import PodLog
from trainmaster.cluster.hyperpod.manifest import JOB_LABEL
from trainmaster.core.errors import TrainmasterError
from trainmaster.remote.framed_lines import decode
from trainmaster.targets.kubernetes.client import Client, path_of
from trainmaster.targets.kubernetes.commands import Place, run_command
from trainmaster.targets.kubernetes.logs import LogReader
from trainmaster.targets.kubernetes.pending import explain_pod
from trainmaster.targets.kubernetes.pods import Object
from trainmaster.targets.kubernetes.states import container_state, node_rank, trim_pod

_FATAL = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "CrashLoopBackOff", "CreateContainerConfigError")
_GPU_METRIC = b"DCGM_FI_DEV_GPU_UTIL{"
_POD = re.compile(rb'[{,](?:exported_)?pod="([^"]*)"')
_SMI = ("nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
_SMI_S = 15.0
_EXPORTERS = ("app.kubernetes.io/name=dcgm-exporter", "app=nvidia-dcgm-exporter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A container that was started again, and how it had ended the last time."""

    pod: str
    container: str
    restarts: int
    exit_code: int | None
    reason: str | None


async def list_pods(client: Client, namespace: str, job_name: str, *, selector: str = "") -> list[Object]:
    """Pods of the job, by node rank. `selector`: by another label than the job's name."""
    path = path_of("v1", "pods", namespace=namespace)
    pods: list[Object] = (await client.list(path, labelSelector=selector or f"{JOB_LABEL}={job_name}"))["items"]
    return sorted(pods, key=lambda pod: (node_rank(pod, len(pods)), str(pod["metadata"]["name"])))


def is_running(pod: Object) -> bool:
    return "running" in container_state(trim_pod(pod))[0]


def started_at(pod: Object) -> datetime | None:
    """Start of the pod's container."""
    state, _ = container_state(trim_pod(pod))
    for word in ("running", "terminated"):
        if text := (state.get(word) or {}).get("startedAt"):
            return datetime.fromisoformat(text)
    return None


def find_fault(pod: Object) -> str:
    """Why the pod will not run by itself; "" where it runs or may still start."""
    state, restarts = container_state(trim_pod(pod))
    if (state.get("waiting") or {}).get("reason") in _FATAL:
        return explain_pod(pod)
    ended = state.get("terminated") or {}
    if ended.get("exitCode") or (pod.get("status") or {}).get("phase") == "Failed":
        return f"the container ended with {ended.get('exitCode')} {ended.get('reason') or ''}".rstrip()
    if restarts > 1:
        return "; ".join(map(describe_restart, find_restarts(pod)))
    return ""


def find_restarts(pod: Object) -> list[Restart]:
    """Containers of the pod that were started again. A restarted pod is Running like any other."""
    restarts = []
    for status in (pod.get("status") or {}).get("containerStatuses") or ():
        if count := int(status.get("restartCount") or 0):
            ended = (status.get("lastState") or {}).get("terminated") or {}
            restarts.append(
                Restart(
                    pod=str(pod["metadata"]["name"]), container=str(status.get("name")), restarts=count,
                    exit_code=ended.get("exitCode"), reason=ended.get("reason"),
                )
            )  # fmt: skip
    return restarts


def describe_restart(restart: Restart) -> str:
    """For a sentence, without the name of the pod."""
    times = "once" if restart.restarts == 1 else f"{restart.restarts} times"
    how = "how it had ended is not known"
    if restart.exit_code is not None:
        how = f"it had ended with {restart.exit_code} {restart.reason or ''}".rstrip()
    return f"container {restart.container} was restarted {times}; {how}"


async def collect(reader: LogReader, log: PodLog) -> bool:
    """Measure the new lines of a pod; False where its log cannot be read now."""
    log.whole = False
    try:
        async for line in reader.read():
            log.put(line)
        log.whole = True
    except TrainmasterError:  # a container that has not started has no log
        return False
    return True


async def sample_gpus(client: Client, namespace: str, pods: Sequence[Object]) -> list[float]:
    """Utilisation of the GPUs of these pods in percent: NVIDIA's dcgm-exporter, else nvidia-smi in the pods.

    Empty where the GPUs of one of the pods could not be read: a mean of the others would say too much.
    """
    names = {str(pod["metadata"]["name"]) for pod in pods}
    nodes: dict[str, list[float]] = {str((pod.get("spec") or {}).get("nodeName")): [] for pod in pods}
    for selector in _EXPORTERS:
        try:
            for pod in (await client.list("/api/v1/pods", labelSelector=selector))["items"]:
                if (where := (pod.get("spec") or {}).get("nodeName")) in nodes:
                    nodes[where] += await _read_exporter(client, pod, names)
        except TrainmasterError:
            continue
    percents = [value for values in nodes.values() for value in values]
    for pod in pods:
        if not nodes[str((pod.get("spec") or {}).get("nodeName"))]:
            values = await _run_nvidia_smi(client, namespace, pod)
            if not values:
                return []
            percents += values
    return percents


async def _run_nvidia_smi(client: Client, namespace: str, pod: Object) -> list[float]:
    """Utilisation of each GPU that the pod sees; empty where it cannot be asked."""
    if not is_running(pod):
        return []
    name, container = str(pod["metadata"]["name"]), str(pod["spec"]["containers"][0]["name"])
    output: list[bytes] = []
    try:
        async with asyncio.timeout(_SMI_S):
            place = Place(namespace=namespace, pod=name, container=container)
            code = await run_command(client, place, _SMI, out=output.append, err=lambda _: None)
    except (TrainmasterError, TimeoutError):
        return []
    return parse_smi(b"".join(output)) if code == 0 else []


def parse_smi(text: bytes) -> list[float]:
    """Percent of each line; nothing where one is no number (`[N/A]`): a mean of the others would say too much."""
    return _percents(text.split())


def _percents(words: Sequence[bytes]) -> list[float]:
    """Numbers from 0 to 100; nothing where one is none: NaN, or DCGM's blank value 9223372036854775794."""
    try:
        percents = [float(word) for word in words]
    except ValueError:
        return []
    return percents if all(0.0 <= value <= 100.0 for value in percents) else []


async def _read_exporter(client: Client, pod: Mapping[str, Any], names: set[str]) -> list[float]:
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    path = path_of("v1", "pods", namespace=namespace, name=f"{name}:9400") + "/proxy/metrics"
    return parse_gpu_metrics([line async for line in client.lines(path, {})], names)


def parse_gpu_metrics(lines: list[bytes], names: set[str]) -> list[float]:
    """Utilisation of each GPU of these pods in the text of dcgm-exporter; of all GPUs where it names no pods."""
    rows = [line for line in lines if line.startswith(_GPU_METRIC)]
    holders = [match[1].decode(errors="replace") if (match := _POD.search(row)) else "" for row in rows]
    if any(holders):
        rows = [row for row, holder in zip(rows, holders, strict=True) if holder in names]
    return _percents([(row.rpartition(b"} ")[2].split() or [b""])[0] for row in rows])


async def read_text(reader: LogReader, *, tail: int | None = None) -> AsyncIterator[str]:
    """New lines as the programs of the pod wrote them, without stamps and frames."""
    try:
        async for line in reader.read(tail=tail):
            body = line.partition(b" ")[2]
            frame = decode(body)
            if frame is None or not frame.stream.endswith(".jsonl"):
                yield (body if frame is None else frame.data).decode(errors="replace").rstrip("\n")
    except TrainmasterError as error:
        yield f"(no log: {error})"
