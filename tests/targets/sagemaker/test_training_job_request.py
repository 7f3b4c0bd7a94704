"""CreateTrainingJob requests: botocore's own service model validates each, and secrets are refused."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator

from trainmaster import targets
from trainmaster.core.errors import NoCapacity, SpecError, UsageError
from trainmaster.core.schema import build as build_settings
from trainmaster.core.spec import JobSpec, parse_spec
from trainmaster.core.states import Reason, TargetState
from trainmaster.targets.sagemaker import request, states
from trainmaster.targets.sagemaker.aws import Missing, Taken, translate
from trainmaster.targets.sagemaker.settings import Settings

ATTEMPT = f"{uuid.uuid5(uuid.NAMESPACE_URL, 'sagemaker')}.1"
ACCOUNT = {
    "region": "us-east-1",
    "role": "arn:aws:iam::123456789012:role/SageMakerRole",
    "storage": "s3://bucket/trainmaster",
    "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1",
    "instance_type": "ml.g5.xlarge",
}
VPC = {"subnets": ["subnet-0a"], "security_groups": ["sg-0a"]}
MODEL = botocore.session.get_session().get_service_model("sagemaker")


def settings(**changes: Any) -> Settings:
    return build_settings(Settings, {**ACCOUNT, **changes})


def spec(**changes: Any) -> JobSpec:
    return parse_spec({"name": "a", "command": ["python", "entry.py", "--level", "2"], **changes})


def make(one: JobSpec, **changes: Any) -> dict[str, Any]:
    """A request that botocore accepts."""
    made = request.build(ATTEMPT, one, settings(**changes))
    report = ParamValidator().validate(made, MODEL.operation_model("CreateTrainingJob").input_shape)
    assert not report.has_errors(), report.generate_report()
    return made


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {name: one for key, inner in value.items() for name, one in flatten(inner, f"{path}.{key}").items()}
    return {path: value}


@pytest.mark.parametrize(
    "changes",
    [
        {}, VPC, {"spot": True, "max_wait_s": 600}, {"start": "toolkit"}, {"start": "toolkit", "distribution": "mpi"},
        {"start": "toolkit", "distribution": "torchrun"}, {"instance_type": "ml.p5.48xlarge", **VPC},
        {"keep_alive_s": 600}, {"tags": {"team": "a"}, "env": {"NCCL_DEBUG": "INFO"}}, {"encrypt_traffic": True},
        {"training_plan": "arn:aws:sagemaker:us-east-1:123456789012:training-plan/p"},
        {"secrets": {"HF_TOKEN": "team/hf"}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("nodes", [1, 2])
def test_botocore_accepts_every_request(changes: dict[str, Any], nodes: int) -> None:
    made = make(spec(resources={"nodes": nodes, "processes_per_node": 8}), **changes)
    assert made["ResourceConfig"]["InstanceCount"] == nodes


def test_botocore_refuses_a_request_without_a_role() -> None:
    made = make(spec())
    del made["RoleArn"]
    assert ParamValidator().validate(made, MODEL.operation_model("CreateTrainingJob").input_shape).has_errors()


def test_scenarios_of_the_health_check_differ_only_in_instances_and_launcher() -> None:
    def scenario(instance: str, nodes: int, gpus: int, distribution: str) -> dict[str, Any]:
        one = spec(resources={"nodes": nodes, "processes_per_node": gpus})
        return flatten(make(one, start="toolkit", instance_type=instance, distribution=distribution))

    single = scenario("ml.g5.xlarge", 1, 1, "none")
    assert not any("distributed" in name or "mpi" in name for name in single)
    instances = {".ResourceConfig.InstanceType", ".ResourceConfig.InstanceCount"}
    torchrun = {".HyperParameters.sagemaker_torch_distributed_enabled", ".HyperParameters.sagemaker_instance_type"}
    mpi = {".HyperParameters.sagemaker_mpi_enabled", ".HyperParameters.sagemaker_mpi_num_of_processes_per_host"}
    # g5.48xlarge and p4d have EFA, and with it its environment; the types here have none.
    for instance, nodes, gpus in (("ml.g5.12xlarge", 1, 4), ("ml.g5.8xlarge", 2, 1), ("ml.g5.12xlarge", 2, 4)):
        for launcher, marks in (("torchrun", torchrun), ("mpi", mpi)):
            other = scenario(instance, nodes, gpus, launcher)
            differ = {name for name in single.keys() | other.keys() if single.get(name) != other.get(name)}
            assert differ == marks | (instances if nodes > 1 else {".ResourceConfig.InstanceType"})
    assert scenario("ml.g5.12xlarge", 2, 4, "mpi")[".HyperParameters.sagemaker_mpi_num_of_processes_per_host"] == "4"
    # "Required" on several nodes, "No" for one rank:
    with pytest.raises(SpecError, match="several nodes need a launcher"):
        scenario("ml.g5.12xlarge", 2, 4, "none")
    assert request.find_distribution(spec(), settings()) == "none"
    assert request.find_distribution(spec(resources={"nodes": 2}), settings()) == "torchrun"


def test_efa_environment_follows_the_instance_type() -> None:
    assert make(spec(), instance_type="ml.p4d.24xlarge")["Environment"]["FI_PROVIDER"] == "efa"
    assert "FI_PROVIDER" not in make(spec(), instance_type="ml.g5.12xlarge")["Environment"]
    with pytest.raises(SpecError, match="no EFA device"):
        make(spec(), efa=True)


def test_spot_waits_longer_than_it_runs_and_has_checkpoints() -> None:
    made = make(spec(limits={"timeout_s": 100}), spot=True, max_wait_s=50)
    assert made["StoppingCondition"] == {"MaxRuntimeInSeconds": 100, "MaxWaitTimeInSeconds": 150}
    assert made["CheckpointConfig"]["S3Uri"].endswith(f"/jobs/{ATTEMPT.partition('.')[0]}/checkpoints")


@pytest.mark.parametrize(
    ("of_spec", "of_file", "text"),
    [
        ({"limits": {"grace_s": 300}}, {}, "120 s"),
        ({"command": ["sh", "-c", "x"]}, {"start": "toolkit"}, "Python program"),
        ({}, {"image": None}, "no image"),
        ({}, {"distribution": "mpi"}, "start: toolkit"),
        ({}, {"subnets": ["subnet-0a"]}, "security_groups"),
        ({}, {"env": {"HF_TOKEN": "hf_" + "a" * 34}}, "Secrets Manager"),
        ({"env": {"HF_TOKEN": "hf_" + "a" * 34}}, {}, "secret|token"),
    ],
)
def test_what_cannot_run_is_refused(of_spec: dict[str, Any], of_file: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        make(spec(**of_spec), **of_file)


def test_dry_run_prints_the_request_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "account.yaml"
    file.write_text(yaml.safe_dump(ACCOUNT))
    monkeypatch.setenv("TRAINMASTER_JOB_ENV", "MY_TOKEN")
    monkeypatch.setenv("MY_TOKEN", "very-secret-value")
    placement = targets.Placement(attempt=ATTEMPT, spec=spec(), job_folder=tmp_path / "job")
    with pytest.raises(UsageError, match="Secrets Manager") as wrong:
        targets.load(f"sagemaker:{file}").plan(placement)
    assert "very-secret-value" not in str(wrong.value)
    file.write_text(yaml.safe_dump({**ACCOUNT, "secrets": {"MY_TOKEN": "team/token"}}))
    shown = targets.load(f"sagemaker:{file}").plan(placement).render()
    assert '"TrainingJobName": "tm-' in shown and "team/token" in shown and "very-secret-value" not in shown
    assert "$ aws sagemaker create-training-job" in shown
    assert not (tmp_path / "job").exists()


def test_each_status_word_of_the_api_is_mapped() -> None:
    assert set(MODEL.shape_for("SecondaryStatus").enum) == states.SECONDARY.keys()
    assert set(MODEL.shape_for("TrainingJobStatus").enum) == {*states.LIVE, *states.OVER}


@pytest.mark.parametrize(
    ("job", "stop", "state", "reason"),
    [
        ({"TrainingJobStatus": "Completed"}, None, "succeeded", None),
        ({"TrainingJobStatus": "InProgress", "SecondaryStatus": "Interrupted"}, None, "waiting", None),
        ({"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"}, None, "running", None),
        ({"TrainingJobStatus": "InProgress", "SecondaryStatus": "NewWord"}, None, "unknown", None),
        ({"TrainingJobStatus": "NewWord"}, None, "unknown", None),
        ({"TrainingJobStatus": "Failed", "FailureReason": "CapacityError: Unable to provision"}, None, "lost",
         "no_capacity"),
        ({"TrainingJobStatus": "Failed", "FailureReason": "InternalServerError: We"}, None, "lost", "node_lost"),
        ({"TrainingJobStatus": "Failed", "FailureReason": "AlgorithmError: exit code: 1"}, None, "failed",
         "script_failed"),
        ({"TrainingJobStatus": "Failed", "FailureReason": "ClientError: Cannot pull image"}, None, "failed",
         "image_error"),
        ({"TrainingJobStatus": "Stopped", "SecondaryStatus": "MaxRuntimeExceeded"}, None, "failed", "timed_out"),
        ({"TrainingJobStatus": "Stopped", "SecondaryStatus": "MaxWaitTimeExceeded"}, None, "lost", "no_capacity"),
        ({"TrainingJobStatus": "Stopped"}, "over_budget: enough", "failed", "over_budget"),
        ({"TrainingJobStatus": "Stopped"}, None, "failed", "user_cancelled"),
    ],
)  # fmt: skip
def test_a_status_becomes_state_and_reason(job: Any, stop: str | None, state: str, reason: str | None) -> None:
    poll = states.judge(job, record=None, stop=stop, attempt=ATTEMPT, price_per_hour=None)
    found = poll.reason if poll.exit is None else poll.exit.reason
    assert (poll.state, found) == (TargetState(state), Reason(reason) if reason else None)


def test_cost_comes_from_billable_seconds() -> None:
    job = {"TrainingJobStatus": "Completed", "BillableTimeInSeconds": 1800, "TrainingTimeInSeconds": 3600,
           "ResourceConfig": {"InstanceCount": 2}}  # fmt: skip
    assert states.billing(job, 10.0) == {"billable_s": 1800, "training_s": 3600, "cost_usd": 10.0}
    assert "cost_usd" not in states.billing(job, None)


def test_types_with_efa_are_types_of_the_api_and_those_without_a_source_are_listed_apart() -> None:
    known = set(MODEL.shape_for("TrainingInstanceType").enum)
    assert known >= request.EFA_TYPES | request.UNVERIFIED_EFA_TYPES
    assert not request.EFA_TYPES & request.UNVERIFIED_EFA_TYPES
    assert not request.has_efa("ml.p5.4xlarge") and not request.has_efa("ml.g5.xlarge")


@pytest.mark.parametrize(("limit", "wanted", "waits"), [(0, 1, False), (2, 4, False), (4, 4, True), (8, 2, True)])
def test_a_quota_that_can_never_be_enough_is_no_lack_of_capacity(limit: int, wanted: int, waits: bool) -> None:
    text = (
        f"The account-level service limit 'ml.p3.2xlarge for training job usage' is {limit} Instances, with current "
        f"utilization of {limit} Instances and a request delta of {wanted} Instances. Please contact AWS support"
    )
    refused = translate("create_training_job", {"Error": {"Code": "ResourceLimitExceeded", "Message": text}})
    assert isinstance(refused, NoCapacity) is waits
    assert waits or "request a higher quota" in str(refused)


def test_every_error_of_the_create_request_has_a_meaning() -> None:
    kinds = {"ResourceNotFound": Missing, "ResourceInUse": Taken, "ResourceLimitExceeded": NoCapacity}
    assert {shape.name for shape in MODEL.operation_model("CreateTrainingJob").error_shapes} == set(kinds)
    for code, kind in kinds.items():
        assert isinstance(translate("x", {"Error": {"Code": code, "Message": "text"}}), kind)
