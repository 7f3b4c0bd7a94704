"""The SageMaker target: create a training job, describe it, copy its logs, stop it.

The name of the training job is made from the attempt and unique for ever in its account: a create request without an
answer is resolved by describing the job, never by a second job. Marks in the attempt's folder on this machine: `stop`
(requested, also before the start), `end` (how it ended), `released` (nothing may start any more).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainmaster.core.errors import TargetError, TrainmasterError, Unreachable
from trainmaster.core.plan import EXIT_FILE, ExitRecord
from trainmaster.core.states import TargetState
from trainmaster.remote.attempt_host import check_range
from trainmaster.targets import FileSize, Handle, Owned, Placement, Poll, Submission
from trainmaster.targets._cluster_job import ClusterJob, PlannedClusterJob
from trainmaster.targets._node_files import find_stream, rename
from trainmaster.targets._spool import Spool
from trainmaster.targets.sagemaker import inputs, planning, request
from trainmaster.targets.sagemaker.aws import Aws, Missing, Taken, open_aws
from trainmaster.targets.sagemaker.logs import JobLogs
from trainmaster.targets.sagemaker.settings import Settings, load_settings
from trainmaster.targets.sagemaker.states import is_over, judge

log = logging.getLogger(__name__)
_STOP, _END, _RELEASED = "stop", "end", "released"
_GONE_S = 600.0  # SageMaker gives a container 120 s, then uploads its checkpoints
_NAME = re.compile(r"tm-([0-9a-f]{32})-([0-9]{1,6})")


class _Followed:
    """Files of an attempt here, its position in the logs, and the newest state."""

    def __init__(self, handle: Handle) -> None:
        self.spool = Spool(Path(str(handle["folder"])) / "sagemaker")
        framed = handle["start"] == "agent"
        self.logs = JobLogs(str(handle["name"]), self.spool, nodes=int(handle["nodes"]), framed=framed)
        self.lock = asyncio.Lock()
        self.newest: tuple[float, Poll] | None = None


class SageMaker:
    """Runs attempts as SageMaker training jobs."""

    _followed: dict[tuple[int, str], _Followed] = {}  # noqa: RUF012 (shared by all instances: one per attempt and loop)

    def __init__(self, path: Path, change: Callable[[Settings], Settings] | None = None) -> None:
        self._path, self._change = path, change

    def plan(self, placement: Placement) -> Submission:
        return planning.plan(placement, self.settings())

    def count_nodes(self, handle: Handle) -> int:
        return int(handle["nodes"])

    async def submit(self, submission: Submission) -> Handle:
        handle, settings = submission.handle, self.settings()
        spool, submitted = self._follow(handle).spool, {**handle, "submitted": True}
        if spool.find(_RELEASED) is not None or spool.find(_END) is not None:
            return submitted
        aws, attempt = self._aws(settings), str(handle["attempt"])
        try:
            await self._describe(aws, handle)
            return submitted  # an earlier request without an answer has created it
        except Missing:
            pass
        if (stop := spool.find(_STOP)) is not None:
            self._save_end(spool, _stopped_before_start(attempt, stop))
            return submitted
        await inputs.upload(aws, submission, settings, request.input_folder(settings, attempt))
        try:
            await aws.call("sagemaker", "create_training_job", **json.loads(submission.files[planning.REQUEST_FILE]))
        except Taken:
            await self._describe(aws, handle)
        if spool.find(_RELEASED) is not None or spool.find(_STOP) is not None:  # meanwhile
            await self._stop(aws, handle)
        return submitted

    async def poll(self, handle: Handle) -> Poll:
        try:
            followed, settings = self._follow(handle), self.settings()
            if (ended := followed.spool.find(_END)) is not None:
                return Poll.from_json(ended)
            if followed.spool.find(_RELEASED) is not None and handle.get("submitted"):
                return Poll(state=TargetState.LOST, note="it was ended by force")
            async with followed.lock:
                newest = followed.newest
                if newest is not None and time.monotonic() - newest[0] < settings.poll_s:
                    return newest[1]
                poll = await self._poll(self._aws(settings), followed, handle, settings)
                followed.newest = (time.monotonic(), poll)
                return poll
        except TrainmasterError as error:
            return Poll(state=TargetState.UNKNOWN, note=str(error))

    async def read(self, handle: Handle, stream: str, *, offset: int, limit: int) -> bytes:
        nodes, ranks_per_node = int(handle["nodes"]), int(handle["ranks_per_node"])
        node, name = find_stream(stream, nodes=nodes, ranks_per_node=ranks_per_node)
        check_range(name, offset, limit)
        spool = self._follow(handle).spool
        if spool.find(_END) is not None and stream.startswith("outputs/"):
            aws = self._aws(self.settings())
            for where, file, key in await self._outputs(aws, handle):
                if (where, file.name) == (node, name):
                    bucket, _ = inputs.split(self.settings().storage)
                    return await inputs.read_object(aws, bucket, key, file.size_bytes, offset=offset, limit=limit)
        return spool.node(node).read(name, offset, limit)

    async def list_files(self, handle: Handle) -> list[FileSize]:
        spool, files = self._follow(handle).spool, {}
        for node in range(int(handle["nodes"])):
            for file in spool.node(node).list_files():
                renamed = rename(file, node)
                files[renamed.name] = renamed
        if spool.find(_END) is not None:
            for node, file, _ in await self._outputs(self._aws(self.settings()), handle):
                renamed = rename(file, node)
                files[renamed.name] = renamed  # S3 has every output, the log only small ones
        kept = {above for name, file in files.items() if not file.fault for above in _folders(name)}
        listed = (file for name, file in files.items() if not file.fault or name not in kept)  # too deep for a log only
        return sorted(listed, key=lambda file: file.name)

    async def cancel(self, handle: Handle, *, reason: str) -> None:
        self._follow(handle).spool.mark(_STOP, reason)
        await self._stop(self._aws(self.settings()), handle)

    async def release(self, handle: Handle) -> None:
        settings = self.settings()
        aws = self._aws(settings)
        if "folder" in handle:
            self._follow(handle).spool.mark(_RELEASED, "")
        await self._stop(aws, handle)
        async with asyncio.timeout(_GONE_S):
            while True:
                try:
                    if is_over(await self._describe(aws, handle)):
                        break
                except Missing:
                    break
                await asyncio.sleep(min(settings.poll_s, 5.0))
        if "folder" in handle:
            followed = self._follow(handle)
            if refused := await _copy_logs(aws, followed):
                log.warning("the last log lines of %s cannot be read: %s", handle["name"], refused)
            followed.logs.close()
            self._followed.pop(self._key(handle), None)
        await inputs.remove(aws, request.input_folder(settings, str(handle["attempt"])))

    async def list_owned(self, *, partial: bool = False) -> list[Owned]:  # noqa: ARG002 (one region: all or nothing)
        aws, owned, given = self._aws(self.settings()), [], {"NameContains": "tm-", "StatusEquals": "InProgress"}
        while True:
            page = await aws.call("sagemaker", "list_training_jobs", **given)
            for summary in page["TrainingJobSummaries"]:
                if match := _NAME.fullmatch(summary["TrainingJobName"]):
                    attempt = f"{uuid.UUID(match[1])}.{match[2]}"
                    handle = {"attempt": attempt, "name": summary["TrainingJobName"], "nodes": 1, "submitted": True}
                    owned.append(
                        Owned(attempt=attempt, handle=handle, what=f"training job {summary['TrainingJobName']}")
                    )
            if not page.get("NextToken"):
                return owned
            given["NextToken"] = page["NextToken"]

    async def plan_cluster_job(self, job: ClusterJob, *, home: Path, folder: Path) -> PlannedClusterJob:  # noqa: ARG002
        from trainmaster.targets.sagemaker import cluster_job

        own = SageMaker(self._path, cluster_job.adapt)
        return cluster_job.SageMakerClusterJob(own, own.settings(), job, folder)

    def settings(self) -> Settings:
        """Settings of the file, read again: a server picks up changes."""
        settings = load_settings(self._path)
        return self._change(settings) if self._change is not None else settings

    async def _poll(self, aws: Aws, followed: _Followed, handle: Handle, settings: Settings) -> Poll:
        try:
            job = await self._describe(aws, handle)
        except Missing:
            if not handle.get("submitted"):
                return Poll(state=TargetState.WAITING, note="not submitted yet")
            return Poll(state=TargetState.LOST, note="SageMaker has no such training job")
        try:
            refused = await _copy_logs(aws, followed)
        except Unreachable as error:
            if is_over(job):
                raise
            refused = str(error)
        records = _read_records(followed.spool, handle)
        whole = len(records) == int(handle["nodes"]) and followed.logs.is_whole()
        if is_over(job) and not whole and _waits_for_lines(job, handle, settings.log_settle_s):
            followed.logs.rewind()
            return Poll(state=TargetState.RUNNING, note="the job is over; its last log lines are on their way")
        record = next((record for record in records if not record.ok), records[0] if records else None)
        attempt, stop = str(handle["attempt"]), followed.spool.find(_STOP)
        result = judge(
            job,
            record=record,
            stop=stop,
            attempt=attempt,
            price_per_hour=settings.price_per_hour,
            whole=len(records) == int(handle["nodes"]),
        )
        if refused:
            result = replace(result, note=f"{result.note}; its logs cannot be read: {refused}".lstrip("; "))
        if not result.state.over:
            return result
        followed.logs.close()
        return self._save_end(followed.spool, result)

    def _save_end(self, spool: Spool, poll: Poll) -> Poll:
        return Poll.from_json(spool.mark(_END, poll.to_json()))

    async def _describe(self, aws: Aws, handle: Handle) -> dict[str, Any]:
        return await aws.call("sagemaker", "describe_training_job", TrainingJobName=str(handle["name"]))

    async def _stop(self, aws: Aws, handle: Handle) -> None:
        """Request the end of a job that runs; SageMaker sends SIGTERM."""
        try:
            if (await self._describe(aws, handle)).get("TrainingJobStatus") == "InProgress":
                await aws.call("sagemaker", "stop_training_job", TrainingJobName=str(handle["name"]))
        except Missing:
            return
        except TargetError:
            if not is_over(await self._describe(aws, handle)):  # it may have ended by itself
                raise

    async def _outputs(self, aws: Aws, handle: Handle) -> list[tuple[int, FileSize, str]]:
        folder = request.output_folder(self.settings(), str(handle["attempt"]))
        return await inputs.list_outputs(aws, f"{folder}/{handle['name']}")

    def _aws(self, settings: Settings) -> Aws:
        return open_aws(settings.region, settings.endpoint)

    def _key(self, handle: Handle) -> tuple[int, str]:
        return id(asyncio.get_running_loop()), str(handle["folder"])

    def _follow(self, handle: Handle) -> _Followed:
        key = self._key(handle)
        if key not in self._followed:
            self._followed[key] = _Followed(handle)
        return self._followed[key]


def _folders(name: str) -> Iterator[str]:
    while name := name.rpartition("/")[0]:
        yield name


async def _copy_logs(aws: Aws, followed: _Followed) -> str:
    """Copy new lines. The refusal where they cannot be read: the state of the job is known without them."""
    try:
        await followed.logs.copy(aws)
        return ""
    except Unreachable:
        raise
    except TargetError as error:
        return str(error)


def _read_records(spool: Spool, handle: Handle) -> list[ExitRecord]:
    """Records of the newest start of each node: SageMaker starts a container again when spot capacity is back."""
    nodes = [spool.node(number) for number in range(int(handle["nodes"]))]
    texts = [node.read(EXIT_FILE, node.newest_base(EXIT_FILE), 1 << 20) for node in nodes]
    return [ExitRecord.read(raw, attempt=str(handle["attempt"])) for raw in texts if raw]


def _waits_for_lines(job: Mapping[str, Any], handle: Handle, settle_s: float) -> bool:
    """Whether lines of the agents may still come: CloudWatch shows them seconds after they were written."""
    ended, started = job.get("TrainingEndTime"), job.get("TrainingStartTime")
    if handle["start"] != "agent" or started is None or ended is None:
        return False
    return bool((datetime.now(UTC) - ended).total_seconds() < settle_s)


def _stopped_before_start(attempt: str, stop: str) -> Poll:
    job = {"TrainingJobStatus": "Stopped"}
    return judge(job, record=None, stop=stop, attempt=attempt, price_per_hour=None)
