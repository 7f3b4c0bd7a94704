"""Checks on the hosts of a SageMaker training job: the health check of `sagemaker_job/`, submitted, watched, read back.

The job is a submission of the target as any other, so that `trainmaster reap` finds it should this process be killed.
Each host leaves its capture and then its answer in S3, under the name of the job, which no other job has; the first
host leaves the results between hosts. The job is stopped where this process is interrupted or gives up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from trainmaster import __version__
from trainmaster.cluster.health.gather import Answer, CheckRequest, QueryNode, Watch, gather_by
from trainmaster.cluster.sagemaker import results as sagemaker_results
from trainmaster.core.clean_text import clean
from trainmaster.core.errors import NodeUnavailable, TargetError, TrainmasterError, Unreachable
from trainmaster.core.health import ClusterHealth
from trainmaster.core.spec import JobSpec, Limits, Preflight, Resources
from trainmaster.core.states import TargetState
from trainmaster.remote.bootstrap import MAX_ANSWER_BYTES
from trainmaster.targets import Node, Placement, Poll, Submission, check_files
from trainmaster.targets.kubernetes import names
from trainmaster.targets.sagemaker import inputs, request
from trainmaster.targets.sagemaker.aws import Missing, open_aws
from trainmaster.targets.sagemaker.logs import GROUP
from trainmaster.targets.sagemaker.settings import Settings
from trainmaster.targets.sagemaker.states import billing, render_cost, render_stop
from trainmaster.targets.sagemaker.target import SageMaker

PROGRAM = ("-m", "trainmaster.sagemaker_job")  # installed in the image of the stage `sagemaker`
RUN_S = {1: 3600.0, 2: 10_800.0, 3: 18_000.0}  # of the job, by level: above the limits in sagemaker_job/host.py
DRY_RUN = "00000000-0000-4000-8000-000000000000.1"
_BLIND_S = 900.0  # without an answer of AWS the job is given up: it costs money that nobody watches
_TRIES = 3  # of requests that create and stop the job
_AGAIN_S = 1.0
_READ_S = 180.0  # results that S3 does not give at the moment are asked for again: the job has been paid for

Say = Callable[[str], None]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerNodes:
    """Hosts of a training job that is yet to be made. SageMaker names them algo-1, algo-2, …"""

    target: SageMaker
    settings: Settings
    count: int

    @property
    def nodes(self) -> list[Node]:
        return [Node(name=f"algo-{number + 1}") for number in range(self.count)]


def load_nodes(path: Path, count: int) -> SageMakerNodes:
    """The hosts that a settings file describes."""
    target = SageMaker(path, _adapt)
    return SageMakerNodes(target=target, settings=target.settings(), count=count)


def _adapt(settings: Settings) -> Settings:
    """Settings of a job as those of the health check, which starts its ranks itself and is part of its image."""
    return replace(
        settings, image=settings.check_image or settings.image, start="agent", package="image", distribution="auto",
        spot=False,  # after an interruption the answers of two sets of machines would be mixed
    )  # fmt: skip


def plan(nodes: SageMakerNodes, check_request: CheckRequest, *, tests: bool, attempt: str, folder: Path) -> Submission:
    """The training job. `tests`: EFA, nccl-tests and collectives after the checks of each host."""
    settings, expect = nodes.settings, check_request.expect
    words = ["--own-ranks", "--level", str(check_request.level), "--to", _results(settings, attempt), "--out", "health"]
    words += [
        "--expect-json",
        json.dumps(expect),
        *(word for name in check_request.planned for word in ("--only", name)),
    ]
    words += [] if tests else ["--alone"]
    for option, name in (("--expect-transport", "transport"), ("--min-busbw", "busbw_gbps")):
        words += [option, str(expect[name])] if expect.get(name) is not None else []
    spec = JobSpec(
        name="trainmaster-check",
        target="sagemaker",
        resources=Resources(nodes=nodes.count, processes_per_node=1),
        preflight=Preflight(level=0),
        limits=Limits(timeout_s=min(check_request.timeout_s, settings.max_runtime_s), stall_minutes=None, grace_s=10.0),
        command=(settings.python, *PROGRAM, *words),
        env={"TRAINING_JOB_NAME": names.object_name(attempt)},
    )
    return nodes.target.plan(Placement(attempt=attempt, spec=spec, job_folder=folder / attempt))


def gather(
    nodes: SageMakerNodes,
    check_request: CheckRequest,
    *,
    tests: bool,
    watch: Watch,
    bundle: Path | None = None,
    on_state: Say | None = None,
    on_note: Say | None = None,
) -> ClusterHealth:
    """Health of every host and the results between them. `on_state`: what the job does now; `on_note`: to be kept."""
    with tempfile.TemporaryDirectory(prefix="trainmaster-sagemaker-") as folder:
        submission = plan(nodes, check_request, tests=tests, attempt=f"{uuid.uuid4()}.1", folder=Path(folder))
        job = _Job(nodes, submission, captures=bundle is not None, on_state=on_state, on_note=on_note)
        health = gather_by(_open(job, nodes.nodes), check_request, bundle=bundle, watch=watch)
        watch.transfer.received_bytes += job.received_bytes
    assert job.end is not None
    answered = [node.node for node in health.nodes]
    between = sagemaker_results.between(job.found, answered, level=check_request.level, tests=tests)
    health = replace(health, cluster=(*health.cluster, *between))
    end = sagemaker_results.end(job.end, job.found, health, job.facts)
    return replace(health, cluster=(*health.cluster, end))


def _results(settings: Settings, attempt: str) -> str:
    return f"{request.job_folder(settings, names.job_of(attempt))}/check"


@contextlib.asynccontextmanager
async def _open(job: _Job, nodes: list[Node]) -> AsyncIterator[tuple[list[Node], QueryNode]]:
    watching: asyncio.Task[None] | None = None
    try:
        await job.submit()
        watching = asyncio.create_task(job.watch())
        yield nodes, job.query
        await watching
        await job.finish()
    finally:
        if watching is not None:
            watching.cancel()
            await asyncio.wait([watching])
        if job.end is None and not job.refused:
            await job.stop()


class _Job:
    """One training job: its creation, the answers of its hosts, its end."""

    def __init__(
        self,
        nodes: SageMakerNodes,
        submission: Submission,
        *,
        captures: bool,
        on_state: Say | None,
        on_note: Say | None,
    ) -> None:
        self._target, self._settings, self._submission = nodes.target, nodes.settings, submission
        self._captures = captures
        self._on_state, self._on_note = on_state or (lambda _: None), on_note or (lambda _: None)
        self._aws = open_aws(nodes.settings.region, nodes.settings.endpoint)
        self._handle, self.name = submission.handle, str(submission.handle["name"])
        self._bucket, self._prefix = inputs.split(_results(nodes.settings, str(self._handle["attempt"])))
        self._hosts = [node.name for node in nodes.nodes]
        self._sizes: dict[str, int] = {}  # of the answers, by host
        self._changed: asyncio.Event = asyncio.Event()
        self._creating: asyncio.Task[Any] | None = None
        self._lost = ""  # why no more answers come
        self.received_bytes = 0
        self.refused = False  # no job was created
        self.end: Poll | None = None
        self.found: ClusterHealth | str = "it was not read"  # results of the first host, or why there are none
        self.facts: dict[str, Any] = {"job": self.name}

    async def submit(self) -> None:
        """Create the job. A request without an answer is repeated: the target never creates a second one."""
        for left in reversed(range(_TRIES)):
            # A request that is under way cannot be taken back: `stop` waits for it, so that no job is left behind.
            self._creating = asyncio.ensure_future(self._target.submit(self._submission))
            try:
                self._handle = await asyncio.shield(self._creating)
                break
            except Unreachable:
                if not left:
                    raise
            except TrainmasterError:
                self.refused = True
                with contextlib.suppress(TrainmasterError):
                    await self._remove_inputs()
                raise
            await asyncio.sleep(_AGAIN_S)
        count, kind = len(self._hosts), self._settings.instance_type
        self._on_note(f"training job {self.name} on {count} x {kind} in {self._settings.region}; Ctrl-C stops it")

    async def watch(self) -> None:
        """Poll until the job is over, and note each answer as it comes."""
        last_answer_at, shown, lost = time.monotonic(), "", "the watch over its training job was given up"
        try:
            while True:
                poll = await self._poll()
                if poll.state is not TargetState.UNKNOWN:
                    last_answer_at = time.monotonic()
                elif time.monotonic() - last_answer_at > _BLIND_S:
                    raise Unreachable(f"no state of training job {self.name} for {_BLIND_S:g} s: {poll.note}")
                if poll.state.over:
                    self.end = poll
                    lost = f"the training job {poll.state} without an answer of this host: {poll.note}"
                    return
                if (step := poll.note.partition(":")[0]) != shown and poll.state is not TargetState.UNKNOWN:
                    shown = step
                    self._on_note(f"training job {self.name}: {step}")
                self._on_state(f"{len(self._sizes)}/{len(self._hosts)} answered; {poll.state}: {poll.note}")
                await asyncio.sleep(self._settings.poll_s)
        finally:
            self._lost = lost[:400]
            self._changed.set()

    async def _poll(self) -> Poll:
        """State of the job; then the answers that are there, so that none is missed at the end."""
        poll = await self._target.poll(self._handle)
        folder = f"{self._prefix}/answers/{self.name}/"
        try:
            sizes = dict(await inputs.list_objects(self._aws, self._bucket, folder))
        except Unreachable as error:
            return Poll(state=TargetState.UNKNOWN, note=str(error))
        written = {host: sizes[f"{folder}{host}.json"] for host in self._hosts if f"{folder}{host}.json" in sizes}
        if written.keys() > self._sizes.keys():
            self._sizes = written
            self._changed.set()
            self._changed = asyncio.Event()
        return poll

    async def query(self, host: Node) -> Answer:
        """The answer of a host, once it is there. NodeUnavailable where none comes any more."""
        action = f"read its log stream {self.name}/{host.name}-… in CloudWatch, group {GROUP}"
        while host.name not in self._sizes:
            if self._lost:
                raise NodeUnavailable(self._lost, action=action)
            await self._changed.wait()
        try:
            files = await self._read_capture(host.name) if self._captures else {}
            key = f"{self._prefix}/answers/{self.name}/{host.name}.json"
            health = await self._read(key, self._sizes[host.name])
        except TargetError as error:
            raise NodeUnavailable(f"its answer cannot be read: {error}", action=action) from None
        # Over SSH and in a pod a random mark ties an answer to its node; an object in S3 has only its name.
        if (claimed := _find_word(health, "node")) not in (None, host.name):
            raise NodeUnavailable(f"its answer is that of {clean(claimed)[:60]}", action=action)
        if (version := _find_word(health, "version")) not in (None, __version__):
            reason = f"its image has Trainmaster {version[:40]!r}, and this is {__version__}"
            raise NodeUnavailable(reason, action="build the image of this version: deploy/sagemaker/create-image.sh")
        self.received_bytes += len(health) + sum(map(len, files.values()))
        return Answer(health=health, files=check_files(files))

    async def finish(self) -> None:
        """Read the results between hosts and the cost, and remove the inputs of the job."""
        key = f"{self._prefix}/health.json"
        try:
            sizes = dict(await self._list(key))
            text = await self._read(key, sizes[key]) if key in sizes else None
            self.found = sagemaker_results.parse(text, self._hosts)
        except TargetError as error:
            self.found = f"health.json of the first host cannot be read: {error}"
        try:
            job = await self._describe()
            self.facts |= billing(job, self._settings.price_per_hour)
            what = f"{len(self._hosts)} x {self._settings.instance_type}"
            self._on_note(render_cost(self.name, str(job.get("TrainingJobStatus")), self.facts, what=what))
            await self._target.release(self._handle)
        except (TargetError, TimeoutError) as error:
            self._on_note(f"training job {self.name} is over; its cost or its inputs were not reached: {error}")

    async def stop(self) -> None:
        """Request the end of the job, which SageMaker kills after 120 s. None is made after this."""
        for left in reversed(range(_TRIES)):
            try:
                await self._target.cancel(self._handle, reason="user_cancelled: the check was interrupted")
                if self._creating is not None:
                    await asyncio.gather(self._creating, return_exceptions=True)
                    await self._target.cancel(self._handle, reason="user_cancelled: the check was interrupted")
                self._on_note(f"training job {self.name}: {(await self._describe()).get('TrainingJobStatus')}")
                break
            except Missing:
                return
            except TargetError as error:
                if not left:
                    words = render_stop(self.name, self._settings.region)
                    self._on_note(f"training job {self.name} may still run and cost money ({error}); stop it: {words}")
                    return
            await asyncio.sleep(_AGAIN_S)
        try:
            await self._remove_inputs()
        except TargetError as error:
            self._on_note(f"the inputs of training job {self.name} were not removed: {error}")

    async def _remove_inputs(self) -> None:
        await inputs.remove(self._aws, request.input_folder(self._settings, str(self._handle["attempt"])))

    async def _describe(self) -> dict[str, Any]:
        return await self._aws.call("sagemaker", "describe_training_job", TrainingJobName=self.name)

    async def _read_capture(self, host: str) -> dict[str, str]:
        folder = f"{self._prefix}/nodes/{host}/"
        objects = await self._list(folder)
        if sum(size for _, size in objects) > MAX_ANSWER_BYTES:
            raise TargetError("its capture is too long")
        return {key.removeprefix(folder): await self._read(key, size) for key, size in objects}

    async def _read(self, key: str, size: int) -> str:
        if size > MAX_ANSWER_BYTES:
            raise TargetError(f"s3://{self._bucket}/{key} has {size:,} bytes, which is too long")
        data = await _insist(lambda: inputs.read_whole(self._aws, self._bucket, key, size))
        return data.decode("utf-8", errors="replace")

    async def _list(self, prefix: str) -> list[tuple[str, int]]:
        return await _insist(lambda: inputs.list_objects(self._aws, self._bucket, prefix))


async def _insist(work: Callable[[], Awaitable[Made]]) -> Made:
    """A request that reads, again while AWS is throttling or away."""
    until = time.monotonic() + _READ_S
    while True:
        try:
            return await work()
        except Unreachable:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(_AGAIN_S)


def _find_word(health: str, name: str) -> str | None:
    """A text of an answer; None where it cannot be read, which `accept` of cluster/health/gather.py judges."""
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        word = json.loads(health).get(name)
        return word if isinstance(word, str) else None
    return None
