"""The slurm target: one Slurm job per attempt, one agent per node, records and logs by offset from the shared folder.

Slurm says whether the attempt goes on; the agents' exit records say how it ended. An attempt is over only when its job
is: until then nodes may be in use, and Slurm may restart it.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmaster.core.errors import Fault, SpecError, TargetError, Unreachable
from trainmaster.core.plan import (
    AGENT_LOG,
    EVENTS_FILE,
    EXIT_FILE,
    OUTPUTS_FOLDER,
    PLAN_FILE,
    WORK_FOLDER,
    Plan,
    rank_log,
)
from trainmaster.core.states import Reason, TargetState
from trainmaster.core.workdir import find_digest
from trainmaster.remote import job_user
from trainmaster.remote.attempt_host import check_range
from trainmaster.remote.members import SPARES, count_places, find_members
from trainmaster.remote.slurm import layout
from trainmaster.remote.slurm.parse import expand_tasks
from trainmaster.remote.slurm.states import translate
from trainmaster.targets import FileSize, Handle, NodeAccess, Owned, Placement, Poll, Submission
from trainmaster.targets._cluster_job import ClusterJob, PlannedClusterJob
from trainmaster.targets._node_files import find_spare_log, name_spare_log
from trainmaster.targets.slurm import leftovers
from trainmaster.targets.slurm.outcome import has_lost_first, judge
from trainmaster.targets.slurm.queue import Queue, queue
from trainmaster.targets.slurm.queue_options import apply_queue
from trainmaster.targets.slurm.script import Job, holds_node_program, job_name, render_script
from trainmaster.targets.slurm.settings import SlurmSettings, package_digest

_RANK_LOG = re.compile(r"rank-([0-9]{1,6})\.log")
_OF_NODE = re.compile(rf"{OUTPUTS_FOLDER}/node-([0-9]{{1,6}})/(.+)", re.DOTALL)
_OWN = (AGENT_LOG, EVENTS_FILE, EXIT_FILE)
_MAX_TASKS = 1000
_RESTS = "BeginTime"  # why a job waits that was requeued, for its first two minutes


class Slurm:
    """Runs attempts as Slurm jobs."""

    def __init__(self, settings: SlurmSettings) -> None:
        self.settings = settings

    def plan(self, placement: Placement) -> Submission:
        spec, words = placement.spec, dict(self.settings.priorities)
        options = apply_queue(spec.slurm.over(self.settings.defaults), spec.queue, stated=spec.slurm, words=words)
        tasks = expand_tasks(options.array) if options.array is not None else None
        if tasks is not None and len(tasks) > _MAX_TASKS:
            raise TargetError(f"slurm: an array of {len(tasks):,} tasks; at most {_MAX_TASKS:,} are one job")
        if tasks is not None and spec.resources.spares:
            message = "each task of slurm.array is a run of its own, and a spare is of one; leave out one of the two"
            raise SpecError([Fault(path="resources.spares", message=message)])
        base, checkpoints, package = self._folders(placement)
        plan = Plan(
            attempt=placement.attempt,
            spec=replace(spec, container=None) if holds_node_program(options) else spec,
            folder=base,
            checkpoints=checkpoints,
            master_addr="ADDRESS-OF-NODE-0" if spec.resources.nodes > 1 else "127.0.0.1",
            master_port=1 if spec.resources.nodes > 1 else None,
        )
        job = Job(
            attempt=placement.attempt, spec=spec, options=options, settings=self.settings, base=base,
            checkpoints=checkpoints, package=package,
        )  # fmt: skip
        script = f"{base}/{layout.BATCH_SCRIPT}"
        login = ("ssh", self.settings.login.name) if self.settings.login else ()
        return Submission(
            handle={
                "attempt": placement.attempt,
                "base": base,
                "name": job_name(spec, placement.attempt),
                "package": package,
                "nodes": spec.resources.machines,
                **({SPARES: spec.resources.spares} if spec.resources.spares else {}),
                "tasks": tasks,
                "ranks_per_node": spec.resources.processes_per_node,
            },
            files={f"{base}/{PLAN_FILE}": plan.to_json() + "\n", script: render_script(job)},
            commands=((*login, "sbatch", "--parsable", script),),
            work=placement.job_folder / WORK_FOLDER if find_digest(spec.workdir) is not None else None,
        )

    async def submit(self, submission: Submission) -> Handle:
        handle = submission.handle
        texts = {Path(path).name: text for path, text in submission.files.items()}
        secrets = job_user.find_secrets(Plan.from_json(texts[PLAN_FILE]).spec)
        if submission.work is not None:
            await self._send_work(submission.work, handle)
        jobs = queue(self.settings)
        result, _ = await jobs.request(
            "submit", base=handle["base"], name=handle["name"], package=handle["package"], files=texts, secrets=secrets
        )
        jobs.forget(str(result["job"]))
        return {**handle, "slurm_job": str(result["job"]), "submitted": True}

    async def poll(self, handle: Handle) -> Poll:
        where = queue(self.settings)
        try:
            job = handle.get("slurm_job") or (await self._facts(where, handle))["job"]
            if job is None or job == layout.NEVER:
                return judge([], await self._facts(where, handle, end=job is not None), attempt=str(handle["attempt"]))
            rows = [row for row in await where.find(str(job)) if row.belongs(str(handle["name"]))]
            over = all(translate(row.state).state.over for row in rows)
            rests = any(row.reason == _RESTS for row in rows)
            watched = SPARES in handle and not over
            facts = await self._facts(where, handle, end=over) if over or rests or watched else {}
        except Unreachable as error:
            return judge(None, {}, attempt=str(handle["attempt"]), note=str(error))
        except TargetError as error:
            return judge(None, {}, attempt=str(handle["attempt"]), note=str(error))
        result = judge(rows, facts, attempt=str(handle["attempt"]))
        if watched and result.state is TargetState.RUNNING and has_lost_first(facts):
            note = f"node 0 of Slurm job {job} is lost, and its batch script with it; the other nodes have ended"
            return Poll(state=TargetState.LOST, reason=Reason.NODE_LOST, note=note)
        if result.state is TargetState.LOST and not rows and where.accounting and not facts.get("released"):
            return judge(None, {}, attempt=str(handle["attempt"]), note=where.accounting)  # sacct may know how it ended
        return result

    async def read(self, handle: Handle, stream: str, *, offset: int, limit: int) -> bytes:
        check_range(stream, offset, limit)
        unit, name = _find_stream(stream, handle)
        _, body = await self._request(handle, unit, "read", stream=name, offset=offset, limit=limit)
        return body

    async def list_files(self, handle: Handle) -> list[FileSize]:
        files: list[FileSize] = []
        for unit in range(_units(handle)):
            result, _ = await self._request(handle, unit, "list_files")
            files += [
                FileSize(name=_rename(str(name), unit, handle), size_bytes=int(size), fault=str(fault))
                for name, size, fault in result["files"]
            ]
        return sorted(files, key=lambda file: file.name)

    async def cancel(self, handle: Handle, *, reason: str) -> None:
        await queue(self.settings).request(
            "cancel", base=handle["base"], nodes=handle["nodes"], tasks=handle["tasks"], job=handle.get("slurm_job"),
            reason=reason,
        )  # fmt: skip

    async def release(self, handle: Handle) -> None:
        where = queue(self.settings)
        if "run" in handle:
            await leftovers.remove(where, handle)
            return
        await where.request("release", base=handle["base"], name=handle["name"], job=handle.get("slurm_job"))
        if job := handle.get("slurm_job"):
            where.forget(str(job))

    async def list_owned(self, *, partial: bool = False) -> list[Owned]:  # noqa: ARG002 (one controller: all or nothing)
        where = queue(self.settings)
        result, _ = await where.request("listing", wanted=[])
        owned: dict[str, Owned] = {}
        for row in result["jobs"]:
            attempt = str(row["comment"]).removeprefix(layout.COMMENT)
            if attempt == row["comment"] or translate(str(row["state"])).state.over:
                continue
            number = str(row["id"]).partition("_")[0]
            handle = {"attempt": attempt, "base": row["folder"], "name": row["name"], "slurm_job": number,
                      "package": "", "nodes": 0, "tasks": None, "ranks_per_node": 1, "submitted": True}  # fmt: skip
            what = f"Slurm job {number}, {str(row['state']).lower()}" + (f" on {row['nodes']}" if row["nodes"] else "")
            owned[attempt] = Owned(attempt=attempt, handle=handle, what=what)
        return [*owned.values(), *await leftovers.list_runs(where, result["jobs"])]

    def open_nodes(self, *, limit_s: float, home: Path, retest: bool = False) -> NodeAccess:
        from trainmaster.targets.slurm.nodes import SlurmNodes

        return SlurmNodes(self, self.settings, limit_s=limit_s, home=home, retest=retest)

    async def plan_cluster_job(self, job: ClusterJob, *, home: Path, folder: Path) -> PlannedClusterJob:  # noqa: ARG002
        from trainmaster.targets.slurm import cluster_job

        return await cluster_job.plan(self, self.settings, job, home=home)

    def _folders(self, placement: Placement) -> tuple[str, str, str]:
        """Base folder of the attempt, folder of the checkpoints, and that of the node half."""
        job, _, number = placement.attempt.partition(".")
        shared = self.settings.folder
        if shared is None:
            folder = placement.job_folder.absolute()
            jobs, own = str(folder.parent), folder.name
            packages = folder.parent.parent / "packages"
        else:
            jobs, own, packages = f"{shared.rstrip('/')}/jobs", job, Path(shared) / "packages"
        checkpoints = f"{jobs}/{placement.spec.resume_from or own}/checkpoints"
        return f"{jobs}/{own}/attempts/{number}", checkpoints, f"{packages}/{package_digest()}"

    async def _facts(self, where: Queue, handle: Handle, *, end: bool = False) -> Mapping[str, Any]:
        facts, _ = await where.request(
            "facts", base=handle["base"], nodes=handle["nodes"], tasks=handle["tasks"], end=end
        )
        if SPARES not in handle or not end:
            return facts
        members = find_members(facts.get("members"), places=count_places(handle), nodes=int(handle["nodes"]))
        return {**facts, "records": [facts["records"][number] for number in members]}

    async def _request(self, handle: Handle, unit: int, call: str, **params: Any) -> tuple[Mapping[str, Any], bytes]:
        tasks, nodes = handle["tasks"], int(handle["nodes"])
        task = tasks[unit // nodes] if tasks is not None else None
        return await queue(self.settings).request(call, base=handle["base"], task=task, node=unit % nodes, **params)

    async def _send_work(self, work: Path, handle: Handle) -> None:
        """Bring the uploaded working folder to the shared folder; it is there already where both are one."""
        if self.settings.login is not None:
            from trainmaster.targets.ssh import transfer
            from trainmaster.targets.ssh.hosts import read_known_hosts
            from trainmaster.targets.ssh.session import session

            assert self.settings.known_hosts is not None
            node = session(self.settings.login, read_known_hosts(self.settings.known_hosts))
            await transfer.upload_work(work, [node], str(handle["attempt"]))
            return
        place = Path(str(handle["base"])).parent.parent / WORK_FOLDER
        if place != work and not place.exists():
            draft = place.with_name(f".{WORK_FOLDER}-{handle['attempt']}")
            await asyncio.to_thread(shutil.copytree, work, draft, symlinks=True, dirs_exist_ok=True)
            draft.rename(place)


def _units(handle: Handle) -> int:
    """Node folders of an attempt: nodes, for each task of an array."""
    return int(handle["nodes"]) * (len(handle["tasks"]) if handle["tasks"] is not None else 1)


def _find_stream(stream: str, handle: Handle) -> tuple[int, str]:
    """The node folder that has a stream, and its name there."""
    units, per_node, nodes = _units(handle), int(handle["ranks_per_node"]), int(handle["nodes"])
    if units > 1 and (inner := _OF_NODE.fullmatch(stream)) and 0 < int(inner[1]) < units:
        return int(inner[1]), inner[2] if inner[2] in _OWN else f"{OUTPUTS_FOLDER}/{inner[2]}"
    if SPARES in handle and (spare := find_spare_log(stream, nodes=nodes)):
        return spare
    if units > 1 and (log := _RANK_LOG.fullmatch(stream)):
        # Ranks of the second and later tasks of an array are counted on from those of the first.
        unit = min(int(log[1]) // per_node, units - 1)
        return unit, rank_log(int(log[1]) - unit // nodes * nodes * per_node)
    return 0, stream


def _rename(name: str, unit: int, handle: Handle) -> str:
    """Name of a file among those of all nodes, the other way round."""
    if SPARES in handle and unit >= count_places(handle) and _RANK_LOG.fullmatch(name):
        return name_spare_log(name, unit)
    if log := _RANK_LOG.fullmatch(name):
        nodes, per_node = int(handle["nodes"]), int(handle["ranks_per_node"])
        return rank_log(int(log[1]) + unit // nodes * nodes * per_node)
    return name if unit == 0 else f"{OUTPUTS_FOLDER}/node-{unit}/{name.removeprefix(f'{OUTPUTS_FOLDER}/')}"
