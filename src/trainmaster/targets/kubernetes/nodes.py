"""Programs on the nodes of a Kubernetes cluster: the bootstrap, started by exec in a pod of each node.

The pod asks for all GPUs of its node and waits until `close` deletes it: between two programs no other pod may get the
GPUs. A pod is an ordinary submission of the target, with the mark of its home and run: should this process be killed,
the next run of the home or `trainmaster reap` deletes it; it also ends by itself. Cordoned nodes, and nodes that
`trainmaster remedy` has tainted, are measured too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from trainmaster import targets
from trainmaster.core.errors import NodeUnavailable, TargetError, TrainmasterError, UsageError
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.core.spec import JobSpec, Limits, Preflight, Resources
from trainmaster.core.states import TargetState
from trainmaster.remote.bootstrap import ADDRESS_VARIABLE, MAX_ANSWER_BYTES
from trainmaster.targets import Handle, Placement, Submission, Target
from trainmaster.targets._answers import deadline, encode_order, find_answer, make_order, parse_results
from trainmaster.targets._leftovers import remove_leftovers
from trainmaster.targets._nodes import Node, Program, Result, Transfer
from trainmaster.targets._runs import Owner, Run
from trainmaster.targets.kubernetes import names, planning
from trainmaster.targets.kubernetes.client import path_of
from trainmaster.targets.kubernetes.commands import Place, run_command
from trainmaster.targets.kubernetes.errors import Denied
from trainmaster.targets.kubernetes.kubeconfig import load_access
from trainmaster.targets.kubernetes.node_list import NO_GPU, KubeNode, list_nodes
from trainmaster.targets.kubernetes.session import Session, open_session
from trainmaster.targets.kubernetes.settings import Settings, Toleration

log = logging.getLogger(__name__)
_AT_ONCE = 64  # pods that start at the same time
_START_S = 600.0  # for a pod to start: an image of 20 GB is pulled in minutes
_FREE_S = 30.0  # for GPUs that are in use to become free
_EXTRA_S = 30.0  # for exec itself, beside its program
_END_S = 5.0  # for the end of a pod to be seen, after a program in it broke off
_POLL_S = 0.5
_MAX_STDERR_BYTES = 8192  # of standard error
_KIND: Literal["job"] = "job"
_PACKAGE = f"{names.RUN_FOLDER}/package"
# The container's own PYTHONPATH stays as it is: it may be where torch comes from.
_START = (
    "import runpy, sys; sys.path[:0] = sys.argv[2:]; sys.argv[2:] = []; "
    "runpy.run_module('trainmaster.remote.bootstrap', run_name='__main__')"
)


class _Broken(NodeUnavailable):
    """A program gave no answer: by itself, or because its pod ended."""


class KubeNodes:
    """The nodes of a cluster."""

    def __init__(self, target: Target, settings: Settings, *, limit_s: float, home: Path) -> None:
        self._target, self._settings, self._limit_s, self._home = target, settings, limit_s, home
        self._run = Run(home)
        self._nodes: dict[str, KubeNode] = {}
        self._gates: dict[str, asyncio.Lock] = {}
        self._starting = asyncio.Semaphore(_AT_ONCE)
        self._places: dict[str, Place] = {}
        self._addresses: dict[str, str] = {}
        self._handles: dict[str, Handle] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="trainmaster-pods-")
        self.transfer = Transfer()

    async def nodes(self) -> list[Node]:
        if not self._nodes:
            await remove_leftovers(self._target, self._home)
            self._nodes = {node.name: node for node in await list_nodes(self._settings)}
            self._gates = {name: asyncio.Lock() for name in self._nodes}
        if not self._nodes:
            raise UsageError("the cluster has no node that takes pods; see node_labels and not_nodes of its file")
        return [node.describe(self._settings) for node in self._nodes.values()]

    async def run(self, node: Node, programs: Sequence[Program], timeout_s: float) -> list[Result]:
        name = node.name
        try:
            async with self._gates[name]:
                if name not in self._places:
                    async with self._starting:
                        self._places[name] = await self._hold(self._nodes[name])
            data = await self._exec(name, programs, timeout_s=timeout_s)
            return parse_results(data, len(programs))
        except _Broken as error:
            if end := await self._find_end(name):
                raise NodeUnavailable(f"its pod ended: {end}", action=f"see `kubectl describe node {name}`") from None
            raise NodeUnavailable(error.reason, action=error.action) from None
        except NodeUnavailable:
            raise
        except TrainmasterError as error:
            raise NodeUnavailable(str(error), action=f"see `kubectl describe node {name}`") from None

    async def close(self) -> None:
        """Delete the pods."""
        try:
            ended = await asyncio.gather(
                *(self._target.release(handle) for handle in self._handles.values()), return_exceptions=True
            )
            for node, error in zip(self._handles, ended, strict=True):
                if isinstance(error, BaseException):
                    log.warning("the pod on %s may be left; `trainmaster reap` deletes it: %s", node, error)
        finally:
            self._run.close()
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
        owner, folder = self._run.owner, Path(self._folder.name)
        submission = plan_pod(self._settings, node, owner, folder, lasts_s=self._limit_s + _START_S)
        self._handles[node.name] = submission.handle
        handle = self._handles[node.name] = await self._target.submit(submission)
        await self._wait(handle)
        (pod,) = self._session().pods_of(str(handle["attempt"]))
        namespace, name = self._settings.namespace, str(pod["metadata"]["name"])
        whole = await self._session().client.get(path_of("v1", "pods", namespace=namespace, name=name))
        self._addresses[node.name] = str(whole["status"]["podIP"])
        return Place(namespace=namespace, pod=name, container=str(pod["spec"]["container"]))

    async def _wait(self, handle: Handle) -> None:
        began = time.monotonic()
        while True:
            poll = await self._target.poll(handle)
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
            await asyncio.sleep(_POLL_S)

    async def _has_begun(self, handle: Handle) -> bool:
        """Whether the agent speaks: by then the node half is unpacked."""
        return bool(await self._target.read(handle, EVENTS_FILE, offset=0, limit=1))

    async def _find_end(self, name: str) -> str:
        """How the pod of a node ended while a program ran in it; empty where it goes on."""
        until = time.monotonic() + _END_S
        with contextlib.suppress(TrainmasterError):  # the program's own end is told
            while time.monotonic() < until:
                poll = await self._target.poll(self._handles[name])
                if poll.state.over:
                    return poll.note or str(poll.state)
                await asyncio.sleep(_POLL_S)
        return ""

    async def _exec(self, name: str, programs: Sequence[Program], *, timeout_s: float) -> bytes:
        """The answer of the bootstrap in a node's pod."""
        settings, body, stderr = self._settings, bytearray(), bytearray()
        package = _PACKAGE if settings.package == "send" else None
        order = make_order(
            programs, deadline_s=deadline(timeout_s), package=package, watch=True,
            env={ADDRESS_VARIABLE: self._addresses[name]},
        )  # fmt: skip
        words = [settings.python, "-c", _START, encode_order(order), *([package] if package else [])]

        def keep(data: bytes) -> None:
            body.extend(data)
            if len(body) > MAX_ANSWER_BYTES + (1 << 20):
                raise TargetError("its answer is too long")

        def keep_end(data: bytes) -> None:
            stderr.extend(data)
            del stderr[:-_MAX_STDERR_BYTES]

        try:
            async with asyncio.timeout(timeout_s + _EXTRA_S):
                code = await run_command(
                    self._session().client, self._places[name], words, out=keep, err=keep_end, keep_open=True
                )
        except TimeoutError:
            reason = f"it gave no answer in {timeout_s:.0f} s"
            raise NodeUnavailable(reason, action="see what hangs there: `trainmaster cluster shell --node`") from None
        except Denied:
            raise
        except TargetError as error:
            raise _Broken(str(error), action="see `kubectl describe` of the node") from None
        data = find_answer(bytes(body), order["nonce"])
        if data is None:
            nothing = f"{len(body):,} bytes were printed, no answer among them"
            end = " ".join(stderr.decode(errors="replace").split())[-300:]
            raise _Broken(
                f"{settings.python} in its pod ended with {code}: {end or nothing}",
                action="is Python 3.10 or newer in the image? see `python:` of the cluster file",
            )
        self.transfer.received_bytes += len(data)
        return data

    def _session(self) -> Session:
        settings = self._settings
        return open_session(load_access(settings.kubeconfig, settings.context), settings.namespace, _KIND)


def plan_pod(settings: Settings, node: KubeNode, owner: Owner, folder: Path, *, lasts_s: float) -> Submission:
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
    ours = (Toleration(key=names.HEALTH_TAINT), Toleration(key="node.kubernetes.io/unschedulable"))
    own = replace(
        settings, kind=_KIND, spread=False, gpus=0 if settings.gpus == 0 else node.gpus,
        queue=None, queue_priority=None, labels={**settings.labels, **names.owner_labels(owner)},
        node_labels={**settings.node_labels, "kubernetes.io/hostname": node.hostname or node.name},
        tolerations=(*settings.tolerations, *ours),
    )  # fmt: skip
    attempt = f"{uuid.uuid4()}.1"
    return planning.plan(Placement(attempt=attempt, spec=spec, job_folder=folder / attempt), own)
