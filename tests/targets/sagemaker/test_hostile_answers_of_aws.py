"""Refusals and gaps of AWS that moto does not make: logs without a right, hosts without a record, expired tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.errors import TargetError, Unreachable
from trainmaster.core.plan import ExitRecord
from trainmaster.core.states import Reason, TargetState
from trainmaster.targets import Poll
from trainmaster.targets.sagemaker import target as module
from trainmaster.targets.sagemaker.aws import Aws, translate

ATTEMPT = "00000000-0000-4000-8000-000000000000.1"
SETTINGS = """\
{region: us-east-1, role: "arn:aws:iam::123456789012:role/R", storage: "s3://bucket/x", image: i,
 instance_type: ml.p5.48xlarge, poll_s: 0.001, log_settle_s: 1}
"""


def refuse(code: str) -> Callable[..., Any]:
    def call(**_: Any) -> Any:
        raise translate("an operation", {"Error": {"Code": code, "Message": "text"}})

    return call


class Answers(Aws):
    """One answer for each operation."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.asked = answers, list[str]()

    async def call(self, service: str, operation: str, **given: Any) -> dict[str, Any]:
        del service
        self.asked.append(operation)
        found = self.answers.get(operation, {})
        return dict(found(**given) if callable(found) else found)


def job(status: str, **more: Any) -> dict[str, Any]:
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    times = {"TrainingStartTime": hour_ago, "TrainingEndTime": hour_ago}
    return {"TrainingJobStatus": status, "SecondaryStatus": "Training", **times, **more}


def record(**more: Any) -> list[dict[str, str]]:
    made = ExitRecord(attempt=ATTEMPT, ended_at="2026-01-01T00:00:00+00:00", message="m", **{"ok": True, **more})
    return [{"message": f"@tm exit.json 0 {json.dumps(json.loads(made.to_json()))}"}]


def streams(**events: Any) -> dict[str, Any]:
    """Log streams by name, oldest first, each with its events."""
    names = [name.replace("_", "-") for name in events]
    listed = [{"logStreamName": f"x/{name}", "creationTime": number} for number, name in enumerate(names)]

    def read(**given: Any) -> dict[str, Any]:
        name = given["logStreamName"].removeprefix("x/").replace("-", "_")
        return {"events": [] if "nextToken" in given else events[name], "nextForwardToken": "t"}

    return {"describe_log_streams": {"logStreams": listed}, "get_log_events": read}


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    def run(answers: Answers, verb: str = "poll", *, nodes: int = 1, times: int = 1) -> Any:
        monkeypatch.setattr(module, "open_aws", lambda *_: answers)
        (tmp_path / "account.yaml").write_text(SETTINGS)
        target = module.SageMaker(tmp_path / "account.yaml")
        handle = {
            "attempt": ATTEMPT, "name": "x", "nodes": nodes, "ranks_per_node": 1, "start": "agent",
            "folder": str(tmp_path / "attempt"), "submitted": True,
        }  # fmt: skip

        async def work() -> Any:
            for _ in range(times):
                found = await getattr(target, verb)(handle)
                await asyncio.sleep(0.01)
            return found

        return asyncio.run(work())

    return run


def test_the_record_of_one_host_does_not_speak_for_another(go: Any) -> None:
    """The first host ended well; the second was killed and left nothing, and SageMaker failed the job."""
    failed = job("Failed", FailureReason="AlgorithmError: exit code: 137")
    poll: Poll = go(Answers(describe_training_job=failed, **streams(algo_1_1=record())), nodes=2)
    assert (poll.state, poll.exit and poll.exit.reason) == (TargetState.FAILED, Reason.SCRIPT_FAILED)


def test_where_all_hosts_left_good_records_they_count(go: Any) -> None:
    answers = Answers(describe_training_job=job("Stopped"), **streams(algo_1_1=record(), algo_2_1=record()))
    assert go(answers, nodes=2).state is TargetState.SUCCEEDED


def test_after_a_spot_interruption_the_newest_record_counts(go: Any) -> None:
    """The interrupted container left a record too; the files of the second follow those of the first."""
    both = streams(algo_1_1=record(ok=False, reason=Reason.PREEMPTED), algo_1_2=record())
    assert go(Answers(describe_training_job=job("Completed"), **both)).state is TargetState.SUCCEEDED
    assert "cannot be read" not in go(Answers(describe_training_job=job("Completed"), **both)).note


@pytest.mark.parametrize(("status", "state"), [("InProgress", "running"), ("Completed", "succeeded")])
def test_without_a_right_to_the_logs_the_state_is_still_known(go: Any, status: str, state: str) -> None:
    answers = Answers(describe_training_job=job(status), describe_log_streams=refuse("AccessDeniedException"))
    poll = go(answers)
    assert (poll.state, "lacks this right" in poll.note) == (TargetState(state), True)


def test_without_a_right_to_the_logs_a_job_is_released(go: Any) -> None:
    denied = refuse("AccessDeniedException")
    answers = Answers(describe_training_job=job("Completed"), describe_log_streams=denied)
    go(answers, "release")
    assert answers.asked[-1] == "list_objects_v2", "its inputs were removed"


def test_throttled_logs_hide_no_running_job_and_end_none(go: Any) -> None:
    slow = refuse("ThrottlingException")
    assert go(Answers(describe_training_job=job("InProgress"), describe_log_streams=slow)).state is TargetState.RUNNING
    assert go(Answers(describe_training_job=job("Completed"), describe_log_streams=slow)).state is TargetState.UNKNOWN


def test_a_position_in_a_log_that_is_a_day_old_is_given_up(go: Any) -> None:
    read = streams(algo_1_1=[])["get_log_events"]

    def forget(**given: Any) -> Any:
        return refuse("InvalidParameterException")() if "nextToken" in given else read(**given)

    answers = Answers(describe_training_job=job("InProgress"), **{**streams(algo_1_1=[]), "get_log_events": forget})
    poll = go(answers, times=3)
    assert poll.state is TargetState.RUNNING


def test_odd_log_lines_are_survived(go: Any) -> None:
    lines = [{"message": "\ud800 half a pair"}, {}, {"message": '@tm events.jsonl 0 {"v":1}'}]
    assert go(Answers(describe_training_job=job("InProgress"), **streams(algo_1_1=lines))).state is TargetState.RUNNING


def test_expired_credentials_are_read_again_and_fail_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.exceptions import ClientError  # type: ignore[import-untyped]

    aws, made = Aws("us-east-1", None), list[str]()

    class Old:
        def describe_training_job(self) -> None:
            raise ClientError({"Error": {"Code": "ExpiredTokenException", "Message": "expired"}}, "describe")

    class New:
        def describe_training_job(self) -> dict[str, str]:
            return {"TrainingJobStatus": "InProgress"}

    def client(service: str) -> Any:
        made.append(service)
        return aws._clients.setdefault(service, Old() if len(made) == 1 else New())

    monkeypatch.setattr(aws, "_client", client)
    with pytest.raises(Unreachable, match="renew the AWS credentials"):
        asyncio.run(aws.call("sagemaker", "describe_training_job"))
    assert asyncio.run(aws.call("sagemaker", "describe_training_job")) == {"TrainingJobStatus": "InProgress"}


def test_a_refusal_stays_a_refusal() -> None:
    for code in ("AccessDeniedException", "UnrecognizedClientException", "ValidationException"):
        found = translate("x", {"Error": {"Code": code, "Message": "text"}})
        assert isinstance(found, TargetError) and not isinstance(found, Unreachable)
