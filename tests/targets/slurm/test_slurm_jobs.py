"""Jobs on a real Slurm: arrays, cancels, lost answers, a login node, and one listing for all."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm import NODES, PATH, Cluster
from sshd import Lab, needs_sshd
from trainmaster import targets
from trainmaster.core.errors import TargetError, Unreachable
from trainmaster.core.plan import EVENTS_FILE, rank_log
from trainmaster.core.states import Reason, TargetState
from trainmaster.remote.slurm import login as login_module
from trainmaster.targets import Lists, Owned
from trainmaster.targets.slurm.queue import queue
from trainmaster.targets.slurm.settings import read_settings

pytestmark = [pytest.mark.spawns, pytest.mark.timeout(300)]


@pytest.fixture
def target(cluster_file: Path) -> Any:
    return targets.load(f"slurm:{cluster_file}")


async def owned_by(target: Any, attempt: str) -> list[Owned]:
    assert isinstance(target, Lists)
    return [one for one in await target.list_owned() if one.attempt == attempt]


def test_two_nodes_get_ranks_gpus_and_a_meeting_point(target: Any, place: Any, run: Any, end: Any) -> None:
    tell = (
        'echo "$RANK $WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT ${CUDA_VISIBLE_DEVICES:-}"; '
        'echo "$RANK" > "$TRAINMASTER_OUTPUTS/rank-$RANK"'
    )
    options = {"gpus_per_node": 2, "gpu_type": "h100", "exclude": ["n1"]}
    made = place(tell, resources={"nodes": 2, "processes_per_node": 2}, slurm=options)

    async def go() -> None:
        handle = await target.submit(target.plan(made))
        poll = await end(target, handle, limit_s=120)
        assert poll.state is TargetState.SUCCEEDED, poll
        lines = [
            (await target.read(handle, rank_log(rank), offset=0, limit=1000)).decode().split() for rank in range(4)
        ]
        assert [line[:3] for line in lines] == [[str(rank), "4", str(rank // 2)] for rank in range(4)]
        assert {line[3] for line in lines} == {"127.0.0.3"}, "the address of n2: n1 is excluded"
        assert len({line[4] for line in lines}) == 1 and {line[5] for line in lines} == {"0,1"}
        listed = {file.name for file in await target.list_files(handle)}
        assert {"outputs/rank-0", "outputs/rank-1", "outputs/node-1/rank-2", "outputs/node-1/exit.json"} <= listed
        assert {rank_log(rank) for rank in range(4)} <= listed
        assert await target.read(handle, "outputs/node-1/rank-3", offset=0, limit=9) == b"3\n"
        assert await owned_by(target, made.attempt) == []

    run(go())


@pytest.mark.proof
def test_no_secret_of_the_server_is_in_the_job(
    target: Any, place: Any, run: Any, end: Any, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2-hunter2")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2-hunter2")
    made = place("env")

    async def go() -> None:
        handle = await target.submit(target.plan(made))
        assert (await end(target, handle, limit_s=120)).state is TargetState.SUCCEEDED
        printed = (await target.read(handle, rank_log(0), offset=0, limit=1 << 20)).decode()
        assert "SLURM_JOB_ID=" in printed and "hunter2" not in printed
        job = handle["slurm_job"]
        assert "hunter2" not in slurm.call("scontrol", "show", "job", job) + slurm.call(
            "scontrol", "write", "batch_script", job, "-"
        )
        for path in Path(handle["base"]).parent.rglob("*"):
            assert path.is_dir() or b"hunter2" not in path.read_bytes(), path

    run(go())


@pytest.mark.proof
def test_an_array_runs_each_task_and_fails_with_the_one_that_failed(
    target: Any, place: Any, run: Any, end: Any
) -> None:
    script = 'echo "task $SLURM_ARRAY_TASK_ID in $TRAINMASTER_CHECKPOINTS"; [ "$SLURM_ARRAY_TASK_ID" != 5 ]'
    made = place(script, slurm={"array": "2,5,8%2"})

    async def go() -> None:
        handle = await target.submit(target.plan(made))
        assert handle["tasks"] == [2, 5, 8]
        poll = await end(target, handle, limit_s=120)
        assert poll.state is TargetState.FAILED and poll.exit is not None
        assert (poll.exit.reason, poll.exit.exit_codes) == (Reason.SCRIPT_FAILED, {"0": 1})
        for number, task in enumerate((2, 5, 8)):
            text = (await target.read(handle, rank_log(number), offset=0, limit=1000)).decode()
            assert text.startswith(f"task {task} in ") and text.strip().endswith(f"/task-{task}")
        listed = {file.name for file in await target.list_files(handle)}
        assert {rank_log(2), "outputs/node-2/exit.json", "outputs/node-1/events.jsonl"} <= listed

    run(go())


def test_a_pending_job_is_explained_and_cancelled_out_of_the_queue(
    target: Any, place: Any, run: Any, end: Any, slurm: Cluster
) -> None:
    slurm.call("scontrol", "update", "nodename=n3", "state=drain", "reason=test")
    made = place("echo up", slurm={"nodelist": ["n3"]})

    async def go() -> None:
        handle = await target.submit(target.plan(made))
        poll = await target.poll(handle)
        assert poll.state is TargetState.WAITING
        async with asyncio.timeout(60):
            while "a node that it names is down, drained or reserved" not in poll.note:
                await asyncio.sleep(0.3)
                poll = await target.poll(handle)
        assert [one.what for one in await owned_by(target, made.attempt)] == [
            f"Slurm job {handle['slurm_job']}, pending"
        ]
        await target.cancel(handle, reason="user_cancelled: not today")
        poll = await end(target, handle)
        assert poll.state is TargetState.FAILED and poll.exit is not None
        assert (poll.exit.reason, poll.exit.message) == (Reason.USER_CANCELLED, "not today; it had not started")
        assert await target.read(handle, EVENTS_FILE, offset=0, limit=10) == b""

    try:
        run(go())
    finally:
        slurm.call("scontrol", "update", "nodename=n3", "state=resume")


@pytest.mark.proof
def test_a_foreign_scancel_is_a_cancel_and_one_listing_serves_all_jobs(
    target: Any, place: Any, run: Any, printed: Any, end: Any, slurm: Cluster, cluster_file: Path
) -> None:
    settings = read_settings(cluster_file)
    made = [place("trap 'exit 75' TERM; echo up; while :; do sleep 0.1; done", number=number) for number in (1, 2, 3)]

    async def go() -> None:
        handles = [await target.submit(target.plan(one)) for one in made]
        for handle in handles:
            await printed(target, handle, limit_s=120)
        await asyncio.sleep(settings.poll_s)
        before = queue(settings).listings
        polls = await asyncio.gather(*(target.poll(handle) for handle in handles for _ in range(5)))
        assert {poll.state for poll in polls} == {TargetState.RUNNING}
        assert queue(settings).listings == before + 1
        slurm.call("scancel", handles[0]["slurm_job"])
        poll = await end(target, handles[0], limit_s=120)
        assert poll.exit is not None and poll.exit.reason is Reason.USER_CANCELLED, poll
        assert "cancelled in Slurm" in poll.exit.message and poll.exit.evidence["slurm"]["state"] == "CANCELLED"
        for handle in handles[1:]:
            await target.release(handle)
            assert (await target.poll(handle)).state in (TargetState.LOST, TargetState.FAILED)
            assert await owned_by(target, handle["attempt"]) == []

    run(go())


@pytest.mark.proof
def test_one_node_that_fails_ends_the_others(target: Any, place: Any, run: Any, end: Any) -> None:
    script = 'if [ "$RANK" = 1 ]; then echo broken; exit 3; fi; trap "exit 75" TERM; while :; do sleep 0.1; done'
    made = place(script, resources={"nodes": 2})

    async def go() -> None:
        handle = await target.submit(target.plan(made))
        poll = await end(target, handle, limit_s=120)
        assert poll.exit is not None and (poll.exit.reason, poll.exit.exit_codes) == (Reason.SCRIPT_FAILED, {"1": 3})
        assert poll.exit.evidence["last_lines"] == ["broken"]

    run(go())


@pytest.mark.proof
def test_near_the_time_limit_it_saves_and_can_be_resumed(
    target: Any, place: Any, run: Any, printed: Any, end: Any, slurm: Cluster
) -> None:
    made = place("trap 'echo saved; exit 75' TERM; echo up; while :; do sleep 0.1; done", resources={"nodes": 2})

    async def go() -> None:
        handle = await target.submit(target.plan(made))
        await printed(target, handle, limit_s=120)
        async with asyncio.timeout(120):
            while not await target.read(handle, rank_log(1), offset=0, limit=10):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        slurm.call("scancel", "--batch", "--signal=USR1", handle["slurm_job"])  # as Slurm does before the limit
        poll = await end(target, handle, limit_s=120)
        assert poll.exit is not None and (poll.exit.reason, poll.exit.resumable) == (Reason.TIMED_OUT, True), poll
        for rank in (0, 1):
            assert b"saved" in await target.read(handle, rank_log(rank), offset=0, limit=1000)

    run(go())


@pytest.mark.proof
def test_a_registry_password_is_a_closed_file_that_does_not_stay(
    target: Any, place: Any, run: Any, end: Any, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINMASTER_JOB_ENV", "REGISTRY_PASSWORD")
    monkeypatch.setenv("REGISTRY_PASSWORD", "hunter2-hunter2")
    login = {"user": "alice", "password_from": "REGISTRY_PASSWORD"}
    made = place(container={"image": "127.0.0.1:1/none:1", "login": login, "engine": "podman"})

    async def go() -> None:
        slurm.call("scontrol", "update", "partitionname=gpu", "state=down")  # the job waits: the file can be looked at
        try:
            handle = await target.submit(target.plan(made))
            secret = Path(handle["base"]) / "secrets" / "REGISTRY_PASSWORD"
            assert secret.read_text() == "hunter2-hunter2" and secret.stat().st_mode & 0o777 == 0o600
            assert secret.parent.stat().st_mode & 0o777 == 0o700
        finally:
            slurm.call("scontrol", "update", "partitionname=gpu", "state=up")
        assert (await end(target, handle, limit_s=120)).state is TargetState.FAILED  # there is no such registry
        await target.release(handle)
        for path in Path(handle["base"]).parent.rglob("*"):
            assert path.is_dir() or b"hunter2" not in path.read_bytes(), path

    run(go())


@pytest.mark.proof
def test_a_pipe_in_the_place_of_the_record_holds_nobody_up(target: Any, place: Any, run: Any, end: Any) -> None:
    made = place(
        'rm -f "$(dirname "$TRAINMASTER_EVENTS")"/exit.json*; mkfifo "$(dirname "$TRAINMASTER_EVENTS")/exit.json"'
    )

    async def go() -> None:
        handle = await target.submit(target.plan(made))
        assert (await end(target, handle, limit_s=120)).state.over

    run(go())


# --- an sbatch without an answer -------------------------------------------------------------------------------------


@pytest.fixture
def faulty(tmp_path: Path, cluster_file: Path) -> tuple[str, Path]:
    """A cluster file whose sbatch counts its calls and, by a file, loses its request or its answer."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("squeue", "sacct", "scancel", "sinfo", "scontrol", "sbatch"):
        real = shutil.which(name, path=PATH)
        lines = ["#!/bin/sh"]
        if name == "sbatch":
            lost = (
                "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
            )
            lines += [
                f"echo call >> {folder}/calls",
                f"if [ -e {folder}/lose-request ]; then {lost}; fi",
                f'if [ -e {folder}/lose-answer ]; then {real} "$@" >/dev/null; {lost}; fi',
            ]
        path = folder / name
        path.write_text("\n".join([*lines, f'exec {real} "$@"']) + "\n")
        path.chmod(0o755)
    document = {**yaml.safe_load(cluster_file.read_text()), "commands": str(folder)}
    other = tmp_path / "faulty.yaml"
    other.write_text(yaml.safe_dump(document))
    return f"slurm:{other}", folder


def test_a_lost_answer_is_resolved_by_the_name_and_never_by_a_second_sbatch(
    faulty: tuple[str, Path], place: Any, run: Any, end: Any
) -> None:
    word, folder = faulty
    target = targets.load(word)
    (folder / "lose-answer").touch()

    async def go() -> None:
        planned = target.plan(place("echo once"))
        handle = await target.submit(planned)
        assert handle["slurm_job"].isdecimal()
        assert await target.submit(planned) == handle
        assert (await end(target, handle, limit_s=120)).state is TargetState.SUCCEEDED
        assert await target.read(handle, rank_log(0), offset=0, limit=100) == b"once\n"
        assert (folder / "calls").read_text() == "call\n"

    run(go())


def test_a_lost_request_is_given_up_and_never_sent_again(
    faulty: tuple[str, Path], place: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    word, folder = faulty
    target = targets.load(word)
    (folder / "lose-request").touch()

    async def go() -> None:
        planned = target.plan(place("echo never"))
        for _ in range(2):
            with pytest.raises(Unreachable, match="looking for a job named"):
                await target.submit(planned)
        (folder / "lose-request").unlink()
        monkeypatch.setattr(login_module, "_SETTLE_S", 0.0)
        with pytest.raises(TargetError, match="was not started"):
            await target.submit(planned)
        assert (folder / "calls").read_text() == "call\n"
        assert (await target.poll(planned.handle)).state is TargetState.WAITING
        await target.release(planned.handle)
        handle = await target.submit(planned)
        assert (await target.poll(handle)).state is TargetState.LOST

    run(go())


def test_a_refusal_of_slurm_is_told_and_a_later_submit_may_try_again(
    target: Any, place: Any, run: Any, faulty: tuple[str, Path]
) -> None:
    async def go() -> None:
        with pytest.raises(TargetError, match="invalid partition") as refused:
            await target.submit(target.plan(place(slurm={"partition": "nowhere"})))
        assert not isinstance(refused.value, Unreachable)
        assert not (Path(target.plan(place()).handle["base"]) / "intent").exists()

    run(go())


def test_a_controller_that_cannot_be_asked_is_unknown_and_not_failed(
    place: Any, run: Any, tmp_path: Path, slurm: Cluster
) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(slurm.conf.read_text().replace("SlurmctldPort=", "MessageTimeout=2\nSlurmctldPort=1 #"))
    document = {"folder": str(tmp_path / "s"), "env": {"SLURM_CONF": str(conf)}, "poll_s": 0.1}
    (tmp_path / "off.yaml").write_text(yaml.safe_dump(document))
    target: Any = targets.load(f"slurm:{tmp_path / 'off.yaml'}")

    async def go() -> None:
        handle = {**target.plan(place()).handle, "slurm_job": "17"}
        poll = await target.poll(handle)
        assert poll.state is TargetState.UNKNOWN and "squeue" in poll.note

    run(go())


# --- over a login node -----------------------------------------------------------------------------------------------


@pytest.mark.proof
@needs_sshd
def test_a_login_node_over_ssh(
    machines: Lab, place: Any, run: Any, end: Any, printed: Any, tmp_path: Path, slurm: Cluster
) -> None:
    one = machines.hosts[0]
    login = {"host": "127.0.0.1", "port": one.port, "key": str(machines.key), "python": sys.executable}
    document = {
        "login": login, "known_hosts": str(machines.known_hosts), "python": sys.executable, "poll_s": 0.3,
        "env": {"SLURM_CONF": str(slurm.conf), "PATH": PATH}, "output": "json",
    }  # fmt: skip
    (tmp_path / "login.yaml").write_text(yaml.safe_dump(document))
    target: Any = targets.load(f"slurm:{tmp_path / 'login.yaml'}")
    made = place("echo over ssh; trap 'exit 75' TERM; while :; do sleep 0.1; done")

    async def go() -> None:
        planned = target.plan(made)
        assert planned.handle["base"].startswith("~/.trainmaster/jobs/")
        handle = await target.submit(planned)
        assert await printed(target, handle, limit_s=120) == b"over ssh\n"
        assert (one.home / ".trainmaster").is_dir()
        await target.cancel(handle, reason="over_budget: enough")
        poll = await end(target, handle, limit_s=120)
        assert poll.exit is not None and (poll.exit.reason, poll.exit.resumable) == (Reason.OVER_BUDGET, True), poll
        await target.release(handle)
        names = {file.name for file in await target.list_files(handle)}
        assert {EVENTS_FILE, "exit.json", rank_log(0)} <= names

    run(go())


def test_the_cluster_has_the_nodes_that_the_tests_count_on(slurm: Cluster) -> None:
    assert slurm.call("sinfo", "-h", "-N", "-o", "%N %G").split() == [
        word for name in NODES for word in (name, "gpu:h100:4")
    ]
