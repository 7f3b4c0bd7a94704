"""Jobs that have left the queue are found in accounting: a real slurmdbd over MariaDB."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import slurm as testbed
from slurm import PATH, Cluster
from trainmaster import targets
from trainmaster.core.states import Reason, TargetState
from trainmaster.remote.slurm.login import LoginNode

pytestmark = [pytest.mark.spawns, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def accounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with testbed.start(tmp_path_factory.mktemp("accounted"), accounting=True) as cluster:
        yield cluster


def load(cluster: Cluster, folder: Path, **more: Any) -> Any:
    document = {
        "folder": str(cluster.folder / "shared"),
        "env": {"SLURM_CONF": str(cluster.conf)},
        "poll_s": 0.3,
        **more,
    }
    path = folder / f"cluster-{len(list(folder.glob('*.yaml')))}.yaml"
    path.write_text(yaml.safe_dump(document))
    return targets.load(f"slurm:{path}")


@pytest.fixture
def purged(tmp_path: Path) -> str:
    """Slurm's commands, with a squeue that lists nothing: every job has left the queue."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("squeue", "sacct", "scancel", "sinfo", "scontrol", "sbatch"):
        (folder / name).write_text(
            "#!/bin/sh\n" + ("" if name == "squeue" else f'exec {shutil.which(name, path=PATH)} "$@"\n')
        )
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.proof
def test_a_job_that_has_left_the_queue_is_judged_by_accounting(
    accounted: Cluster, tmp_path: Path, purged: str, place: Any, run: Any, end: Any
) -> None:
    # The node program cannot start, so there is no exit record: all that is known is what Slurm keeps.
    there, gone = load(accounted, tmp_path, python="/bin/false"), load(accounted, tmp_path, commands=purged)
    arrays = place(number=2, slurm={"array": "0-1"})

    async def go() -> None:
        handle, array = [await there.submit(there.plan(one)) for one in (place(), arrays)]
        for one in (handle, array):
            seen = await end(there, one, limit_s=120)
            assert seen.state is TargetState.FAILED and seen.exit is not None
            assert seen.exit.reason is Reason.TARGET_ERROR
        await _settled(accounted, str(array["slurm_job"]))
        poll = await gone.poll(handle)
        assert poll.state is TargetState.FAILED and poll.exit is not None
        assert poll.exit.evidence["slurm"]["state"] == "FAILED" and poll.exit.evidence["slurm"]["exit_code"] == 1
        assert "exit code 1" in poll.exit.message
        assert (await gone.poll(array)).state is TargetState.FAILED
        assert (await gone.poll({**handle, "slurm_job": "99999"})).state is TargetState.LOST
        assert (await there.poll({**handle, "slurm_job": "99999"})).state is TargetState.LOST

    run(go())


@pytest.mark.proof
def test_text_and_json_of_this_slurm_are_the_same_jobs(
    accounted: Cluster, tmp_path: Path, place: Any, run: Any, end: Any
) -> None:
    target = load(accounted, tmp_path)
    made = place("exit 3", slurm={"array": "3-4"})
    env = {"SLURM_CONF": str(accounted.conf)}

    async def go() -> None:
        handle = await target.submit(target.plan(made))
        await end(target, handle, limit_s=120)
        number = str(handle["slurm_job"])
        await _settled(accounted, number)
        listed = {}
        for output in ("text", "json"):
            site = LoginNode(env=env, output=output)
            answers = (await site.listing(wanted=[]))[0]["jobs"]
            listed[output] = sorted(
                (row["id"], row["state"], row["name"], row["comment"], row["folder"])
                for row in answers
                if row["id"].startswith(f"{number}_")
            )
            kept = await site._account(f"--jobs={number}")
            assert {(job.id, job.state) for job in kept} == {(f"{number}_3", "FAILED"), (f"{number}_4", "FAILED")}
        assert listed["text"] == listed["json"] and len(listed["text"]) == 2

    run(go())


async def _settled(cluster: Cluster, job: str) -> None:
    """Until accounting has the end of both tasks of a job: slurmctld reports it a moment later."""
    async with asyncio.timeout(60):
        while cluster.call("sacct", "-n", "-X", "-j", job, "-o", "State").count("FAILED") < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.3)
