"""CreateTrainingJob request of an attempt. Pure; nothing secret is in it."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from trainmaster.core.errors import Fault, SpecError
from trainmaster.core.secret import in_spec
from trainmaster.core.spec import JobSpec
from trainmaster.targets.kubernetes import names
from trainmaster.targets.kubernetes.pods import EFA_ENVIRONMENT
from trainmaster.targets.sagemaker.settings import Distribution, Settings

Request = dict[str, Any]

CHANNEL = "trainmaster"
INPUT_FOLDER = f"/opt/ml/input/data/{CHANNEL}"
CHECKPOINT_FOLDER = "/opt/ml/checkpoints"
ATTEMPT_TAG = "trainmaster:attempt"
MAX_GRACE_S = 100.0  # SIGTERM delays the end by 120 s (documentation of StopTrainingJob in botocore)
# Types that get an EFA device in a training job: SM_EFA_NCCL_INSTANCES of the SageMaker Python SDK 2
# (src/sagemaker/modules/train/container_drivers/common/utils.py, commit 684d5b5).
EFA_TYPES = frozenset(
    f"ml.{name}"
    for name in (
        "g4dn.8xlarge", "g4dn.12xlarge", "g5.48xlarge", "p3dn.24xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge",
        "trn1.32xlarge",
    )
)  # fmt: skip
# Unverified: newer types with EFA in EC2, of which no source says that training jobs get the device.
UNVERIFIED_EFA_TYPES = frozenset(
    f"ml.{name}"
    for name in (
        "p5e.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge", "p6-b300.48xlarge", "trn1n.32xlarge", "trn2.48xlarge",
    )
)  # fmt: skip


def job_folder(settings: Settings, job: str) -> str:
    """S3 folder of a job."""
    return f"{settings.storage.rstrip('/')}/jobs/{job}"


def input_folder(settings: Settings, attempt: str) -> str:
    """S3 folder of an attempt's inputs."""
    return f"{job_folder(settings, names.job_of(attempt))}/attempts/{attempt.rpartition('.')[2]}/input"


def output_folder(settings: Settings, attempt: str) -> str:
    """S3 folder below which SageMaker puts the outputs, in a folder with the name of the training job."""
    return f"{job_folder(settings, names.job_of(attempt))}/output"


def build(attempt: str, spec: JobSpec, settings: Settings) -> Request:
    """The request. SpecError with everything that SageMaker or this target cannot do."""
    if faults := list(find_faults(spec, settings)):
        raise SpecError(faults)
    image = spec.container.image if spec.container is not None else settings.image
    runtime_s = math.ceil(spec.limits.timeout_s or settings.max_runtime_s)
    request: Request = {
        "TrainingJobName": names.object_name(attempt),  # unique in the account: a second create is refused
        "AlgorithmSpecification": {"TrainingImage": image, "TrainingInputMode": "File"},
        "RoleArn": settings.role,
        "InputDataConfig": [_channel(input_folder(settings, attempt))],
        "OutputDataConfig": {"S3OutputPath": output_folder(settings, attempt), "CompressionType": "NONE"},
        "ResourceConfig": {
            "InstanceType": settings.instance_type,
            "InstanceCount": spec.resources.nodes,
            "VolumeSizeInGB": settings.volume_gib,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": runtime_s},
        "CheckpointConfig": {
            "S3Uri": f"{job_folder(settings, spec.resume_from or names.job_of(attempt))}/checkpoints",
            "LocalPath": CHECKPOINT_FOLDER,
        },
        "EnableManagedSpotTraining": settings.spot,
        "EnableInterContainerTrafficEncryption": settings.encrypt_traffic,
        "Environment": environment(settings),
        "Tags": _tags(attempt, spec, settings),
    }
    if settings.start == "agent":
        entry = [settings.python, f"{INPUT_FOLDER}/start.py"]
        request["AlgorithmSpecification"]["ContainerEntrypoint"] = entry
    else:
        request["HyperParameters"] = hyperparameters(attempt, spec, settings)
    if settings.subnets:
        request["VpcConfig"] = {"Subnets": list(settings.subnets), "SecurityGroupIds": list(settings.security_groups)}
    if settings.spot:
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = runtime_s + settings.max_wait_s
    if settings.keep_alive_s:
        request["ResourceConfig"]["KeepAlivePeriodInSeconds"] = settings.keep_alive_s
    if settings.training_plan is not None:
        request["ResourceConfig"]["TrainingPlanArn"] = settings.training_plan
    return request


def find_faults(spec: JobSpec, settings: Settings) -> Any:
    """Everything that keeps an attempt from running there."""
    if spec.container is None and settings.image is None:
        yield Fault(path="container.image", message="no image; write `image:` in the settings file or this field")
    if spec.container is not None and spec.container.login is not None:
        yield Fault(path="container.login", message="SageMaker takes images from ECR by its role; leave the login out")
    if spec.train is None and spec.command is None:
        yield Fault(path="command", message="write the program; the agent starts it, not the image by itself")
    if settings.distribution == "none" and spec.resources.nodes > 1:
        message = "ranks on several nodes need a launcher: write distribution: torchrun or mpi in the settings file"
        yield Fault(path="resources.nodes", message=message)
    if spec.limits.grace_s > MAX_GRACE_S:
        message = f"SageMaker kills 120 s after the request to stop; write at most {MAX_GRACE_S:g}"
        yield Fault(path="limits.grace_s", message=message)
    if settings.efa and not has_efa(settings.instance_type):
        yield Fault(path="target", message=f"efa: SageMaker attaches no EFA device to {settings.instance_type}")
    if settings.start == "toolkit" and find_program(spec) is None:
        message = 'the toolkit starts a Python program; write ["python", "train.py", "--name", "value"]'
        yield Fault(path="command", message=message)
    yield from in_spec.find_in_spec(spec)


def has_efa(instance_type: str) -> bool:
    """Whether SageMaker attaches EFA devices to this type."""
    return instance_type in EFA_TYPES | UNVERIFIED_EFA_TYPES


def environment(settings: Settings) -> dict[str, str]:
    """Plain environment of the containers: everybody who may describe the job can read it."""
    efa = settings.efa if settings.efa is not None else has_efa(settings.instance_type) and not settings.encrypt_traffic
    return {**(EFA_ENVIRONMENT if efa else {}), **settings.env, "PYTHONUNBUFFERED": "1"}


def find_distribution(spec: JobSpec, settings: Settings) -> Distribution:
    """Launcher of the ranks. One rank needs none; ranks on several nodes need one."""
    if settings.distribution != "auto":
        return settings.distribution
    return "none" if spec.resources.ranks == 1 else "torchrun"


def hyperparameters(attempt: str, spec: JobSpec, settings: Settings) -> dict[str, str]:
    """Hyperparameters that the SageMaker Training Toolkit reads, as JSON values."""
    program, words = find_program(spec) or ("", {})
    parameters: dict[str, Any] = {
        "sagemaker_program": program,
        "sagemaker_submit_directory": f"{input_folder(settings, attempt)}/sourcedir.tar.gz",
        "sagemaker_region": settings.region,
        **words,
    }
    match find_distribution(spec, settings):
        case "torchrun":
            parameters |= {
                "sagemaker_torch_distributed_enabled": True,
                "sagemaker_instance_type": settings.instance_type,
            }
        case "mpi":
            parameters |= {
                "sagemaker_mpi_enabled": True,
                "sagemaker_mpi_num_of_processes_per_host": spec.resources.processes_per_node,
            }
    return {name: json.dumps(value) for name, value in parameters.items()}


def find_program(spec: JobSpec) -> tuple[str, dict[str, str]] | None:
    """Python program of a command and its `--name value` options; None where it is something else."""
    words = list(spec.command or ())
    if len(words) < 2 or not re.fullmatch(r"python[0-9.]*", words[0]) or not words[1].endswith(".py"):
        return None
    options, values = words[2::2], words[3::2]
    if len(options) != len(values) or not all(re.fullmatch(r"--[A-Za-z][\w-]*", option) for option in options):
        return None
    return words[1], {option[2:]: value for option, value in zip(options, values, strict=True)}


def _channel(uri: str) -> Request:
    source = {"S3DataType": "S3Prefix", "S3Uri": f"{uri}/", "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": CHANNEL, "DataSource": {"S3DataSource": source}, "InputMode": "File"}


def _tags(attempt: str, spec: JobSpec, settings: Settings) -> list[dict[str, str]]:
    ours = {ATTEMPT_TAG: attempt, "trainmaster:job-name": spec.name, "trainmaster:project": spec.project}
    return [{"Key": key, "Value": value} for key, value in {**settings.tags, **ours}.items()]
