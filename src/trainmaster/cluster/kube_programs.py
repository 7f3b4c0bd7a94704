"""Programs in pods of a Kubernetes cluster, by the contract of `cluster/launch.py`: exec instead of SSH.

Each node gets one pod, which asks for all its GPUs and waits until `close` deletes it: between two programs no other
pod may get the GPUs. A pod is an ordinary submission of the target, so `trainmaster reap` finds it should this process
be killed; it also ends by itself. Cordoned nodes, and nodes that `trainmaster remedy` has tainted, are measured too.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import secrets
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from trainmaster import targets
from trainmaster.cluster.exchange import Program, ProgramResult, find_answer, unwrap_runs
from trainmaster.cluster.kube_nodes import NO_GPU, KubeNode, KubeNodes
from trainmaster.cluster.schedulers import KEY
from trainmaster.core.errors import TargetError, TrainmasterError
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.spec import JobSpec, Limits, Preflight, Resources
from trainmaster.core.states import TargetState
from trainmaster.remote.bootstrap import MAX_ANSWER_BYTES
from trainmaster.targets import Handle, Placement, Submission
from trainmaster.targets.kubernetes import names, planning
from trainmaster.targets.kubernetes.client import path_of
from trainmaster.targets.kubernetes.commands import Place, run_command
from trainmaster.targets.kubernetes.errors import Denied
from trainmaster.targets.kubernetes.kubeconfig import load_access
from trainmaster.targets.kubernetes.session import Session, open_session
from trainmaster.targets.kubernetes.settings import Settings, Toleration
from trainmaster.targets.ssh.connect import NodeUnavailable
from trainmaster.targets.ssh.hosts import SshHost

log = logging.getLogger(__name__)
AT_ONCE = 64  # pods that start at the same time
_START_S = 600.0  # for a pod to start: an image of 20 GB is pulled in minutes
_FREE_S = 30.0  # for GPUs that are in use to become free
_EXTRA_S = 30.0  # for exec itself, beside its program
_END_S = 5.0  # for the end of a pod to be seen, after a program in it broke off
_LOOK_S = 0.5
_MAX_SAID_BYTES = 8192  # of standard error
_KIND: Literal["job"] = "job"
_PACKAGE = f"{names.RUN_FOLDER}/package"
# The container's own PYTHONPATH stays as it is: it may be where torch comes from.
_START = (
    "import runpy, sys; sys.path[:0] = sys.argv[2:]; sys.argv[2:] = []; "
    "runpy.run_module('trainmaster.remote.bootstrap', run_name='__main__')"
)


class _Broken(NodeUnavailable):
    """A program gave no answer: by itself, or because its pod ended."""


class KubeLink:
    """Way to start programs on the nodes of a cluster."""

    def __init__(self, cluster: KubeNodes, *, limit_s: float) -> None:
        self._cluster, self._limit_s = cluster, limit_s
        self._nodes = {node.name: node for node in cluster.nodes}
        self._gates = {node.name: asyncio.Lock() for node in cluster.nodes}
        self._starting = asyncio.Semaphore(AT_ONCE)
        self._places: dict[str, Place] = {}
        self._addresses: dict[str, str] = {}
        self._handles: dict[str, Handle] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="trainmaster-pods-")

    async def start(self, host: SshHost, runs: Sequence[Program], *, timeout_s: float) -> Sequence[ProgramResult]:
        """Run modules of the node half on a node, all at once, until the last has ended or the time is over."""
        order = {"runs": [{"module": run.module, "words": list(run.words), "env": dict(run.env)} for run in runs]}
        return unwrap_runs(await self.ask(host.name, order, timeout_s=timeout_s), len(runs))

    async def ask(self, name: str, order: Mapping[str, Any], *, timeout_s: float) -> bytes:
        """The answer of the bootstrap in a node's pod. NodeUnavailable where there is none."""
        try:
            async with self._gates[name]:
                if name not in self._places:
                    async with self._starting:
                        self._places[name] = await self._hold(self._nodes[name])
            return await self._run(self._places[name], order, timeout_s=timeout_s)
        except _Broken as wrong:
            if end := await self._find_end(name):
                raise NodeUnavailable(f"its pod ended: {end}", action=f"see `kubectl describe node {name}`") from None
            raise NodeUnavailable(wrong.reason, action=wrong.action) from None
        except NodeUnavailable:
            raise
        except TrainmasterError as wrong:
            raise NodeUnavailable(str(wrong), action=f"see `kubectl describe node {name}`") from None

    def address(self, name: str) -> str | None:
        return self._addresses.get(name)

    async def close(self) -> None:
        """Delete the pods."""
        try:
            target = self._cluster.target
            ended = await asyncio.gather(
                *(target.release(handle) for handle in self._handles.values()), return_exceptions=True
            )
            for node, wrong in zip(self._handles, ended, strict=True):
                if isinstance(wrong, BaseException):
                    log.warning("the pod on %s may be left; `trainmaster reap` deletes it: %s", node, wrong)
        finally:
            await targets.close()
            self._folder.cleanup()

    async def _hold(self, node: KubeNode) -> Place:
        """The container in which programs of this node run."""
        if node.closed:
            raise NodeUnavailable(
                node.closed,
                action="see the device plugin's log on it"
                if node.closed == NO_GPU
                else "bring it back, add its toleration, or leave it out with not_nodes, in the cluster file",
            )
        submission = plan_pod(self._cluster.settings, node, Path(self._folder.name), lasts_s=self._limit_s + _START_S)
        self._handles[node.name] = submission.handle
        handle = self._handles[node.name] = await self._cluster.target.submit(submission)
        await self._wait(handle)
        (pod,) = self._session().pods_of(str(handle["attempt"]))
        namespace, name = self._cluster.settings.namespace, str(pod["metadata"]["name"])
        whole = await self._session().client.get(path_of("v1", "pods", namespace=namespace, name=name))
        self._addresses[node.name] = str(whole["status"]["podIP"])
        return Place(namespace=namespace, pod=name, container=str(pod["spec"]["container"]))

    async def _wait(self, handle: Handle) -> None:
        began = time.monotonic()
        while True:
            poll = await self._cluster.target.poll(handle)
            waited = time.monotonic() - began
            if poll.state is TargetState.RUNNING and await self._has_begun(handle):
                return
            if poll.state.over:
                raise NodeUnavailable(f"its pod ended: {poll.note}", action="see `kubectl describe` of the node")
            if waited > _FREE_S and "too little free" in poll.note:
                raise NodeUnavailable(f"its GPUs are in use: {poll.note}", action="try again when its jobs have ended")
            if waited > _START_S:
                reason = f"its pod did not start within {_START_S:.0f} s: {poll.note}"
                raise NodeUnavailable(reason, action="see `kubectl describe` of the pod")
            await asyncio.sleep(_LOOK_S)

    async def _has_begun(self, handle: Handle) -> bool:
        """Whether the agent speaks: by then the node half is unpacked."""
        return bool(await self._cluster.target.read(handle, EVENTS_FILE, offset=0, limit=1))

    async def _find_end(self, name: str) -> str:
        """How the pod of a node ended while a program ran in it; empty where it goes on."""
        until = time.monotonic() + _END_S
        with contextlib.suppress(TrainmasterError):  # the program's own end is told
            while time.monotonic() < until:
                poll = await self._cluster.target.poll(self._handles[name])
                if poll.state.over:
                    return poll.note or str(poll.state)
                await asyncio.sleep(_LOOK_S)
        return ""

    async def _run(self, place: Place, order: Mapping[str, Any], *, timeout_s: float) -> bytes:
        settings, nonce, said = self._cluster.settings, secrets.token_hex(16), bytearray()
        package = _PACKAGE if settings.package == "send" else None
        limit_s = timeout_s - min(3.0, timeout_s / 5)
        whole = {"nonce": nonce, "package": package, "watch": True, "deadline_s": limit_s, **order}
        text = base64.b64encode(json.dumps(whole).encode()).decode()
        words = [settings.python, "-c", _START, text, *([package] if package else [])]
        body = bytearray()

        def keep(data: bytes) -> None:
            body.extend(data)
            if len(body) > MAX_ANSWER_BYTES + (1 << 20):
                raise TargetError("its answer is too long")

        def keep_end(data: bytes) -> None:
            said.extend(data)
            del said[:-_MAX_SAID_BYTES]

        try:
            async with asyncio.timeout(timeout_s + _EXTRA_S):
                code = await run_command(
                    self._session().client, place, words, out=keep, err=keep_end, keep_open=True,
                )  # fmt: skip
        except TimeoutError:
            reason = f"it gave no answer in {timeout_s:.0f} s"
            raise NodeUnavailable(reason, action="see what hangs there: `trainmaster cluster shell --node`") from None
        except Denied:
            raise
        except TargetError as wrong:
            raise _Broken(str(wrong), action="see `kubectl describe` of the node") from None
        data = find_answer(bytes(body), nonce)
        if data is None:
            nothing = f"{len(body):,} bytes were printed, no answer among them"
            end = " ".join(said.decode(errors="replace").split())[-300:]
            raise _Broken(
                f"{settings.python} in its pod ended with {code}: {end or nothing}",
                action="is Python 3.11 or newer in the image? see `python:` of the cluster file",
            )
        return data

    def _session(self) -> Session:
        settings = self._cluster.settings
        return open_session(load_access(settings.kubeconfig, settings.context), settings.namespace, _KIND)


def plan_pod(settings: Settings, node: KubeNode, folder: Path, *, lasts_s: float) -> Submission:
    """The pod of one node: all its GPUs, and a program that waits."""
    wait = f"import time; time.sleep({int(lasts_s)})"
    spec = JobSpec(
        name="trainmaster-nodes",
        target="kubernetes",
        resources=Resources(nodes=1, processes_per_node=1),
        preflight=Preflight(level=0),
        limits=Limits(stall_minutes=None, grace_s=1.0),
        command=(settings.python, "-c", wait),
    )
    ours = (Toleration(key=KEY), Toleration(key="node.kubernetes.io/unschedulable"))
    own = replace(
        settings, kind=_KIND, spread=False, gpus=0 if settings.gpus == 0 else node.gpus,
        queue=None, queue_priority=None,
        node_labels={**settings.node_labels, "kubernetes.io/hostname": node.hostname or node.name},
        tolerations=(*settings.tolerations, *ours),
    )  # fmt: skip
    attempt = f"{uuid.uuid4()}.1"
    return planning.plan(Placement(attempt=attempt, spec=spec, job_folder=folder / attempt), own)
