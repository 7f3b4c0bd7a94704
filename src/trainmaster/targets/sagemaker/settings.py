"""Settings file of the SageMaker target: account, image, instances, network, spot, secrets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainmaster.core.errors import Fault
from trainmaster.core.schema import build, field
from trainmaster.core.secret.in_spec import is_secret

Distribution = Literal["auto", "torchrun", "mpi", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One AWS account and region, and the training jobs that trainmaster makes there."""

    region: str = field(pattern=r"[a-z]{2}(-[a-z]+)+-[0-9]+", example="us-east-1", doc="AWS region")
    role: str = field(
        pattern=r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[\w+=,.@/-]{1,128}",
        example="arn:aws:iam::123456789012:role/SageMakerRole",
        doc="execution role of the training jobs",
    )
    storage: str = field(
        pattern=r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^?#@:\s]*)?",
        example="s3://my-bucket/trainmaster",
        doc="S3 folder for inputs, checkpoints and outputs",
    )
    image: str | None = field(
        default=None,
        pattern=r"\S+",
        example="123456789012.dkr.ecr.us-east-1.amazonaws.com/train:1",
        doc="image in ECR; container.image of the spec comes first",
    )
    check_image: str | None = field(
        default=None,
        pattern=r"\S+",
        example="123456789012.dkr.ecr.us-east-1.amazonaws.com/sagemaker-cluster-test:latest",
        doc="image of `trainmaster check`, as deploy/sagemaker builds it; not stated: image",
    )
    instance_type: str = field(
        pattern=r"ml\.[a-z0-9-]+\.[a-z0-9]+", example="ml.p5.48xlarge", doc="instance type of every node"
    )
    volume_gib: int = field(default=100, ge=1, le=16384, doc="size of the volume of every node")
    subnets: tuple[str, ...] = field(default=(), doc="subnets of the VPC")
    security_groups: tuple[str, ...] = field(
        default=(), doc="security groups of the VPC; EFA needs all traffic between members"
    )
    encrypt_traffic: bool = field(default=False, doc="encrypt traffic between nodes; EFA is not used then")
    start: Literal["agent", "toolkit"] = field(
        default="agent",
        doc="agent: trainmaster's agent starts the ranks; toolkit: the SageMaker Training Toolkit of the image does",
    )
    distribution: Distribution = field(
        default="auto",
        doc="launcher of the ranks; auto: none for one rank, torchrun for several; mpi needs start: toolkit",
    )
    python: str = field(default="python3", doc="Python 3.10 or newer in the image, with start: agent")
    package: Literal["send", "image"] = field(
        default="send", doc="send: trainmaster's node half comes from S3; image: it is installed there"
    )
    efa: bool | None = field(default=None, doc="EFA environment; not stated: where SageMaker attaches EFA to the type")
    spot: bool = field(default=False, doc="managed spot training; SageMaker restarts it from its checkpoints")
    max_runtime_s: int = field(default=86400, ge=1, le=2419200, doc="longest run where limits.timeout_s is not stated")
    max_wait_s: int = field(default=86400, ge=0, le=2419200, doc="longest wait for spot capacity, beside the run")
    keep_alive_s: int = field(default=0, ge=0, le=3600, doc="warm pool: instances are kept and paid for this long")
    training_plan: str | None = field(default=None, doc="ARN of a SageMaker training plan")
    tags: dict[str, str] = field(factory=dict, doc="further tags of the jobs")
    env: dict[str, str] = field(factory=dict, doc="environment of the containers; not for secrets")
    secrets: dict[str, str] = field(
        factory=dict, doc="variables from AWS Secrets Manager: {HF_TOKEN: name of the secret}; read in the container"
    )
    price_per_hour: float | None = field(default=None, ge=0, doc="dollars an hour of one instance, for the cost")
    endpoint: str | None = field(
        default=None, pattern=r"https?://.+", example="http://127.0.0.1:5000", doc="another address of the AWS APIs"
    )
    poll_s: float = field(default=10.0, gt=0, doc="least time between two requests for the state of a job")
    log_settle_s: float = field(default=60.0, ge=0, doc="longest wait for the last log lines of an ended job")

    def faults(self) -> Iterator[Fault]:
        if bool(self.subnets) != bool(self.security_groups):
            yield Fault(path="subnets", message="a VPC needs both: write subnets and security_groups")
        if self.distribution == "mpi" and self.start == "agent":
            yield Fault(path="distribution", message="the agent starts ranks itself; for MPI write start: toolkit")
        if self.start == "toolkit" and self.secrets:
            yield Fault(path="secrets", message="the toolkit reads no secrets; read them in the program")
        if self.spot and self.keep_alive_s:
            yield Fault(path="keep_alive_s", message="SageMaker has no warm pools for spot training")
        for name, value in self.env.items():
            if is_secret(name, value):
                yield Fault(path=f"env.{name}", message="looks like a secret; store it in AWS Secrets Manager and "
                            f"write secrets: {{{name}: name of the secret}}")  # fmt: skip


def load_settings(path: Path) -> Settings:
    """Settings of a YAML file."""
    from trainmaster.documents import yaml_file

    return yaml_file.load(path, what="target: settings file").read(lambda value: build(Settings, value))
