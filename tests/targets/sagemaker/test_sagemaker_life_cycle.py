"""Life of a training job against moto's server: S3, CloudWatch Logs, Secrets Manager and SageMaker on this machine.

The server runs no containers. The test does: it lays the input channel out as SageMaker does, runs start.py, and writes
its output to CloudWatch and S3.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from sagemaker_server import BUCKET, Relay, run_container, write_log
from trainmaster import targets
from trainmaster.control.budget import price_of
from trainmaster.core.errors import Unreachable
from trainmaster.core.plan import EVENTS_FILE, rank_log
from trainmaster.core.states import Reason, TargetState

pytestmark = pytest.mark.spawns


@pytest.mark.proof
def test_a_job_runs_and_its_bytes_arrive_once(
    client: Any, endpoint: str, account: Path, place: Any, run: Any, tmp_path: Path
) -> None:
    if not client("secretsmanager").list_secrets()["SecretList"]:
        client("secretsmanager").create_secret(Name="team/token", SecretString="very-secret-value")
    script = 'echo "${#MY_TOKEN} letters"; seq 1 50; cd "$TRAINMASTER_OUTPUTS"; printf 12345 > b; '
    script += "mkfifo pipe; ln -s /etc/passwd link; truncate -s 17M large"
    target = targets.load(f"sagemaker:{account}")
    submission = target.plan(place(script))
    name = submission.handle["name"]

    async def go() -> None:
        assert (await target.poll(submission.handle)).state is TargetState.WAITING
        handles = [await target.submit(submission) for _ in range(3)]
        assert handles[0] == handles[1] == handles[2]
        jobs = client("sagemaker").list_training_jobs(NameContains=name)["TrainingJobSummaries"]
        assert len(jobs) == 1
        lines = await asyncio.to_thread(run_container, client, endpoint, name, tmp_path / "ml")
        assert "very-secret-value" not in "\n".join(lines)
        # The stand-in has ended the job at once; its lines come in two parts, mixed and some of them twice.
        half = len(lines) // 2
        write_log(client, f"{name}/algo-1-1", ["not a frame", *lines[:half]])
        assert (await target.poll(handles[0])).state is TargetState.RUNNING, "the last lines are on their way"
        write_log(client, f"{name}/algo-1-1", lines[half - 2 :])
        poll = await target.poll(handles[0])
        assert poll.state is TargetState.SUCCEEDED and poll.exit is not None and poll.exit.ok
        whole = "17 letters\n" + "".join(f"{number}\n" for number in range(1, 51))
        assert await target.read(handles[0], rank_log(0), offset=0, limit=1 << 20) == whole.encode()
        assert await target.read(handles[0], rank_log(0), offset=3, limit=4) == whole.encode()[3:7]
        events = await target.read(handles[0], EVENTS_FILE, offset=0, limit=1 << 20)
        written = next((tmp_path / "ml").glob("trainmaster/attempts/*/events.jsonl")).read_bytes()
        assert events == written
        await target.release(handles[0])
        keys = [one["Key"] for one in client("s3").list_objects_v2(Bucket=BUCKET)["Contents"]]
        assert keys and not any("/input/" in key for key in keys)
        found = await target.list_files(handles[0])
        listed = {file.name: file.size_bytes for file in found if not file.fault}
        assert listed["outputs/b"] == 5 and listed[rank_log(0)] == len(whole)
        assert listed["outputs/large"] == 17 << 20, "S3 has it, the log has not"
        assert {file.name: file.fault for file in found if file.fault} == {
            "outputs/link": "symbolic link, not a plain file",
            "outputs/pipe": "named pipe, not a plain file",
        }
        assert await target.read(handles[0], "outputs/b", offset=1, limit=3) == b"234"
        assert await target.submit(submission) == handles[0]
        assert (await target.poll(handles[0])).state is TargetState.SUCCEEDED

    run(go())


def test_stopped_before_the_start_it_creates_nothing(client: Any, account: Path, place: Any, run: Any) -> None:
    target = targets.load(f"sagemaker:{account}")
    submission = target.plan(place())

    async def go() -> None:
        await target.cancel(submission.handle, reason="over_budget: enough")
        handle = await target.submit(submission)
        poll = await target.poll(handle)
        assert poll.state is TargetState.FAILED
        assert poll.exit is not None and poll.exit.reason is Reason.OVER_BUDGET
        name = submission.handle["name"]
        assert client("sagemaker").list_training_jobs(NameContains=name)["TrainingJobSummaries"] == []

    run(go())


def test_released_before_the_start_it_creates_nothing(client: Any, account: Path, place: Any, run: Any) -> None:
    target = targets.load(f"sagemaker:{account}")
    submission = target.plan(place())

    async def go() -> None:
        await target.release(submission.handle)
        handle = await target.submit(submission)
        assert (await target.poll(handle)).state is TargetState.LOST
        name = submission.handle["name"]
        assert client("sagemaker").list_training_jobs(NameContains=name)["TrainingJobSummaries"] == []

    run(go())


def test_without_an_answer_the_state_is_unknown(client: Any, account: Path, place: Any, run: Any) -> None:
    document = yaml.safe_load(account.read_text())
    account.write_text(yaml.safe_dump({**document, "endpoint": "http://127.0.0.1:9"}))
    target = targets.load(f"sagemaker:{account}")
    handle = target.plan(place()).handle
    assert run(target.poll({**handle, "submitted": True})).state is TargetState.UNKNOWN


# --- several hosts, and a package that is sent -----------------------------------------------------------------------


@pytest.mark.proof
def test_two_hosts_run_the_package_that_was_sent_and_each_has_its_files(
    client: Any, endpoint: str, account: Path, place: Any, run: Any, tmp_path: Path
) -> None:
    document = {**yaml.safe_load(account.read_text()), "package": "send", "secrets": {}, "price_per_hour": 2.5}
    account.write_text(yaml.safe_dump(document))
    script = (
        'echo "$RANK $WORLD_SIZE $GROUP_RANK $MASTER_ADDR"; echo "$RANK" > "$TRAINMASTER_OUTPUTS/rank-$RANK"; '
        "tr '\\0' '\\n' < /proc/$PPID/environ | grep ^PYTHONPATH="
    )
    made = place(script, resources={"nodes": 2})
    target = targets.load(f"sagemaker:{account}")
    submission = target.plan(made)
    name = submission.handle["name"]

    async def go() -> None:
        handle = await target.submit(submission)
        assert client("sagemaker").describe_training_job(TrainingJobName=name)["ResourceConfig"]["InstanceCount"] == 2
        lines = await asyncio.gather(
            *(
                asyncio.to_thread(
                    run_container, client, endpoint, name, tmp_path / f"host-{here}", hosts=("algo-1", "algo-2"),
                    here=here,
                )
                for here in (0, 1)
            )
        )  # fmt: skip
        write_log(client, f"{name}/algo-1-1", lines[0])
        assert (await target.poll(handle)).state is TargetState.RUNNING, "the lines of the second host are missing"
        write_log(client, f"{name}/algo-2-1", lines[1])
        poll = await target.poll(handle)
        assert poll.state is TargetState.SUCCEEDED, poll
        for rank in (0, 1):
            words = (await target.read(handle, rank_log(rank), offset=0, limit=1 << 20)).decode().splitlines()
            assert words[0] == f"{rank} 2 {rank} algo-1"
            assert words[1].startswith(f"PYTHONPATH={tmp_path}/host-{rank}/trainmaster/package"), words
        listed = {file.name for file in await target.list_files(handle)}
        assert {"outputs/rank-0", "outputs/node-1/rank-1", rank_log(0), rank_log(1)} <= listed
        assert await target.read(handle, "outputs/node-1/rank-1", offset=0, limit=9) == b"1\n"
        await target.release(handle)

    run(go())
    assert price_of(made.spec, submission.handle) == 500.0, "two instances of 2.50 dollars"


def test_without_a_price_the_cost_is_unknown(account: Path, place: Any) -> None:
    target = targets.load(f"sagemaker:{account}")
    made = place(target=f"sagemaker:{account}")
    assert price_of(made.spec, target.plan(made).handle) is None


# --- answers that are lost -------------------------------------------------------------------------------------------


def test_a_create_whose_answer_was_lost_is_found_by_its_name_and_not_sent_again(
    relay: Relay, account: Path, place: Any, run: Any
) -> None:
    target = targets.load(f"sagemaker:{account}")
    submission = target.plan(place())
    name = submission.handle["name"]

    async def go() -> None:
        relay.lose = "CreateTrainingJob"
        with pytest.raises(Unreachable, match="create_training_job: no answer"):
            await target.submit(submission)
        relay.set(name, "InProgress", "Training")
        handle = await target.submit(submission)
        assert handle["submitted"] and relay.seen["CreateTrainingJob"] == 1
        assert (await target.poll(handle)).state is TargetState.RUNNING
        (owned,) = [one for one in await target.list_owned() if one.attempt == handle["attempt"]]
        assert owned.what == f"training job {name}"
        await target.cancel(handle, reason="user_cancelled: not today")
        await target.cancel(handle, reason="over_budget: the first reason counts")
        assert relay.seen["StopTrainingJob"] == 1, "one that stops already is not asked again"
        poll = await target.poll(handle)
        assert poll.state is TargetState.FAILED and poll.exit is not None
        assert (poll.exit.reason, poll.exit.message) == (Reason.USER_CANCELLED, "not today")
        assert not [one for one in await target.list_owned() if one.attempt == handle["attempt"]]

    run(go())


def test_what_the_listing_owns_can_be_released_without_the_files_of_its_attempt(
    relay: Relay, account: Path, place: Any, run: Any
) -> None:
    target = targets.load(f"sagemaker:{account}")
    submission = target.plan(place(number=2))
    name = submission.handle["name"]

    async def go() -> None:
        await target.submit(submission)
        relay.set(name, "InProgress", "Training")
        (owned,) = [one for one in await target.list_owned() if one.attempt == submission.handle["attempt"]]
        relay.lose = "StopTrainingJob"
        await target.release(owned.handle)
        assert relay.job(name).training_job_status == "Stopped"
        assert not [one for one in await target.list_owned() if one.attempt == submission.handle["attempt"]]

    run(go())
