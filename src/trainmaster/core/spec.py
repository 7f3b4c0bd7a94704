"""Job spec: target, pre-flight checks, workload, limits."""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta, timezone, tzinfo
from typing import ClassVar, Literal

from trainmaster.core.compat import UTC
from trainmaster.core.config.cron import list_zones
from trainmaster.core.config.queue import After, Queue
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.container import Container
from trainmaster.core.errors import Fault, SpecError
from trainmaster.core.expect import Expect
from trainmaster.core.ids import UUID_PATTERN
from trainmaster.core.schema import YEAR_S, build, build_new, field
from trainmaster.core.states import Reason
from trainmaster.core.vendors.slurm import SlurmOptions

GLOBAL_FILE = "global.json"  # event file of programs that write Indian time without an offset
MAX_GRACE_S = 3600.0  # more would keep a job running, and paid for, after it was told to stop
GLOBAL_ZONE = timezone(timedelta(hours=5, minutes=30), "Asia/Kolkata")
_WORD = r"[A-Za-z0-9][A-Za-z0-9 ._:-]{0,127}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """How many machines and processes. A process is a rank."""

    HINTS: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("gpus", "gpu", "gpus_per_node"), "GPUs are not requested: set processes_per_node to their number"
    )

    nodes: int = field(default=1, ge=1, most=65_536, doc="machines, at most 65536")
    processes_per_node: int = field(default=1, ge=1, most=1024, doc="ranks on each machine, at most 1024")
    spares: int = field(
        default=0,
        ge=0,
        most=1024,
        doc="machines beside them that are checked and kept ready without ranks, each to take the place of a lost one; "
        "of our trainer on several nodes, on targets that can (ssh, slurm, kubernetes), at most 1024",
    )
    price_per_hour: float | None = field(
        default=None, ge=0, le=1_000_000, doc="dollars an hour for the whole job; not stated: what the target says"
    )

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def machines(self) -> int:
        return self.nodes + self.spares


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What must hold on every node before the workload may start."""

    level: int = field(default=1, ge=0, le=3, doc="0 none, 1 passive (seconds), 2 uses the GPU, 3 stress")
    profile: str | None = field(default=None, doc="instance type or GPU model each node should be, as ml.p5.48xlarge")
    expect: Expect = field(factory=Expect, doc="what each node should have, over what its profile says")
    skip: tuple[str, ...] = field(default=(), doc="checks to leave out, by name")
    require: tuple[str, ...] = field(
        default=(),
        doc="checks that must see everything: where rights hide faults from one (`xid` in a default pod, whose kernel "
        "log is closed), the job does not start; not stated: it starts, and the check warns of what it could not see",
    )
    allow_incomplete: bool = field(default=False, doc="start although something planned could not be measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Time limits, and the number of attempts."""

    timeout_s: float | None = field(
        default=None, gt=0, most=YEAR_S, doc="longest time of one attempt; not stated: none"
    )
    grace_s: float = field(
        default=30.0, ge=0, most=MAX_GRACE_S, doc="time to save between the stop request and the kill, at most 3600"
    )
    attempts: int = field(default=1, ge=1, le=100, doc="attempts in all, where the reason allows another")
    retry: dict[str, bool] = field(
        factory=dict,
        doc="by reason, whether another attempt may follow, over the defaults in docs/how/control.md: "
        "{script_failed: true, node_lost: false}",
    )
    stall_minutes: float | None = field(
        default=30.0,
        gt=0,
        most=YEAR_S / 60,
        doc="no event for so long is a stall; null: never. Heartbeats do not count",
    )
    on_stall: Literal["tell", "stop"] = field(
        default="tell", doc="tell people, or also stop the attempt (it may retry)"
    )
    max_cost: float | None = field(
        default=None,
        gt=0,
        le=1_000_000_000,
        doc="dollars the job may cost, all attempts together; then it saves and stops",
    )


# Credentials and signatures of a URL (@, ?) have no place here: it is stored and shown.
_PLACE = r"((s3|gs|az)://[^/@?#:\s]+/|/)?[^/@?#:\s][^@?#:\s]*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Where the data of your own program lies, for its project file. Our trainer's own are in `train.data`."""

    train: str | None = field(
        default=None,
        pattern=_PLACE,
        example="datasets/tales/train.jsonl",
        doc="training data: s3://bucket/path, an absolute path, or a path in the server's storage",
    )
    eval: str | None = field(default=None, pattern=_PLACE, example="datasets/tales/eval.jsonl", doc="evaluation data")
    config: str | None = field(default=None, pattern=_PLACE, example="configs/tales.yaml", doc="the program's config")
    script: str | None = field(default=None, pattern=_PLACE, example="scripts/train.py", doc="the program itself")
    sha256: dict[str, str] = field(
        factory=dict, doc="checksums of inputs by field, compared where the machine has them: {train: 9f86d0…}"
    )

    def faults(self) -> Iterator[Fault]:
        for name, digest in self.sha256.items():
            if getattr(self, name, None) is None or not re.fullmatch(r"[0-9a-f]{64}", digest):
                yield Fault(path=f"sha256.{name}", message="write a field of `inputs` and its SHA-256 in hex")
        for name in ("train", "eval", "config", "script"):
            if ".." in (getattr(self, name) or "").split("/"):
                yield Fault(path=name, message="a path with `..` may lead anywhere; write it without")


DEFAULT_PROJECT = "default"
_EXACTLY_ONE = "write exactly one of `train:` (our trainer) or `command:` (your own), or `container:` (an image)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rent:
    """Requirements for each rented machine. The cheapest offer that meets all of them is taken."""

    gpus: int | None = field(
        default=None, ge=0, le=1024, doc="GPUs of each machine, at least", default_text="resources.processes_per_node"
    )
    gpu: str | None = field(default=None, pattern=_WORD, example="H100", doc="GPU model, as the provider describes it")
    gpu_memory_gib: float | None = field(default=None, gt=0, doc="memory of each GPU, at least")
    memory_gib: float | None = field(default=None, gt=0, doc="main memory of each machine, at least")
    types: tuple[str, ...] = field(default=(), doc="instance types to choose from; not stated: all")
    regions: tuple[str, ...] = field(default=(), doc="regions to choose from; not stated: all")
    max_price_per_hour: float | None = field(
        default=None, gt=0, le=1_000_000, doc="dollars an hour for one machine, at most"
    )
    file_systems: tuple[str, ...] = field(
        default=(), doc="file systems of the provider to attach; only regions that hold them are chosen"
    )
    image: str | None = field(default=None, pattern=_WORD, example="lambda-stack-24-04", doc="image family")
    boot_minutes: float = field(
        default=40.0, gt=0, le=1440, doc="longest time from launch until SSH answers; 8 H100 take over 20 minutes"
    )
    collect_minutes: float = field(
        default=60.0,
        gt=0,
        le=1440,
        doc="longest time that a machine is kept while its outputs cannot be stored; what is missing is then named",
    )
    wait_minutes: float | None = field(
        default=60.0,
        ge=0,
        most=525_600,
        doc="longest wait for capacity, then the attempt ends as no_capacity; null: for ever",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job. Exactly one of `train` and `command` says what it runs; a `container` runs its command, or its own."""

    name: str = field(
        pattern=r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?",
        allowed="1 to 63 lower-case letters, digits, dots and dashes; a letter or digit at both ends",
        example="llama-8b-trial",
        doc="lower-case letters, digits, dots and dashes",
    )
    project: str = field(
        default=DEFAULT_PROJECT,
        pattern=r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}",
        allowed="1 to 63 letters, digits, dots, dashes and underscores; a letter or digit first",
        example="my-lab",
        doc="group of jobs, for tokens and budgets",
    )
    target: str = field(
        default="local",
        pattern=r"[a-z][a-z0-9_-]*(:.+)?",
        example="local",
        doc="where to run: a target, or the name of one that `trainmaster target add` made known",
    )
    resources: Resources = field(factory=Resources, doc="how many machines and ranks")
    queue: Queue = field(factory=Queue, doc="how it waits for machines")
    after: After = field(factory=After, doc="jobs that it waits for before it starts; not stated: none")
    rent: Rent = field(factory=Rent, doc="which machines to rent, where the target rents them (lambda)")
    slurm: SlurmOptions = field(factory=SlurmOptions, doc="options of the Slurm job, where the target is slurm")
    preflight: Preflight = field(factory=Preflight, doc="checks before the start")
    train: TrainConfig | None = field(default=None, doc="our trainer, with this config")
    command: tuple[str, ...] | None = field(default=None, doc="your own program, as a list of words")
    container: Container | None = field(
        default=None, doc="image that `command`, or the image's own command, runs in; not stated: none"
    )
    inputs: Inputs = field(factory=Inputs, doc="where the data of your own program lies")
    workdir: str | None = field(
        default=None,
        pattern=r"/.*|sha256:[0-9a-f]{64}",
        example="/home/me/project",
        doc="files of the job's working folder: sha256:… is an uploaded snapshot, /… a folder on the node whose "
        "entries are linked; not stated: none. `trainmaster submit` takes a path relative to the spec file, uploads "
        "that folder (not stated: the one of the spec file) and writes its snapshot here",
    )
    env: dict[str, str] = field(
        factory=dict, doc="environment of every rank; not for secrets: it is stored, and what looks like one is refused"
    )
    allow: dict[str, str] = field(
        factory=dict,
        doc="places that look like a secret and are none, each with the reason: {'command[3]': id of the data set}",
    )
    limits: Limits = field(factory=Limits, doc="time, grace and attempts")
    resume_from: str | None = field(
        default=None,
        pattern=UUID_PATTERN,
        example="0b6c5c4e-53ad-4f0e-9c57-6a4f1f3c2d10",
        doc="a job that is over, whose checkpoints this one goes on with; `trainmaster submit` also takes its name or "
        "the beginning of its id; not stated: a run of its own",
    )
    zone: str | None = field(
        default=None,
        pattern=r"[A-Za-z0-9_+/-]+",
        example="Europe/Berlin",
        doc="time zone of timestamps without an offset; not stated: UTC, and Asia/Kolkata in a file named global.json",
    )

    def faults(self) -> Iterator[Fault]:
        for name in self.limits.retry:
            if name not in list(Reason):
                yield Fault(path=f"limits.retry.{name}", message=f"no reason; write one of {', '.join(Reason)}")
        if (self.train is None) == (self.command is None and self.container is None):
            yield Fault(path="train", message=_EXACTLY_ONE)
        if self.command is not None and not self.command:
            yield Fault(path="command", message='the list is empty; write for example ["python", "train.py"]')
        if self.train is not None and self.inputs != Inputs():
            yield Fault(path="inputs", message="belongs to a program of your own; our trainer reads train.data")
        if self.train is not None:
            for fault in self.train.faults_on(self.resources.ranks):
                yield Fault(path=f"train.{fault.path}", message=fault.message)
        yield from _spares_faults(self)
        yield from _groups_faults(self)
        for name in self.env:
            if not name or "=" in name:
                yield Fault(path=f"env.{name}", message="not a name for an environment variable; write NAME: value")
        for place, reason in self.allow.items():
            if not reason.strip():
                yield Fault(path=f"allow.{place}", message="write why this is no secret")
        # A node without a zone database reads no timestamps and need not know the zone.
        known = list_zones()
        if self.zone is not None and known and self.zone not in known:
            yield Fault(path="zone", message=f"{self.zone!r} is no time zone; write for example Europe/Berlin or UTC")


def zone_of(spec: JobSpec, file: str) -> tzinfo:
    """Time zone of timestamps without an offset in an event file of a job: as stated; else UTC, or global.json's."""
    if spec.zone is not None:
        return zoneinfo.ZoneInfo(spec.zone)
    return GLOBAL_ZONE if file == GLOBAL_FILE else UTC


def _spares_faults(spec: JobSpec) -> Iterator[Fault]:
    """Why a spare could never take a place."""
    message = None
    if spec.train is None or spec.container is not None:
        message = "a spare takes over ranks of our trainer (`train:`), outside containers; leave it out"
    elif not spec.train.recovery.in_place:
        message = "a spare takes over in the same attempt; leave out this, or train.recovery.in_place: false"
    elif spec.resources.nodes == 1:
        message = "a spare replaces any node but the first, and a job of one node has no other; leave it out"
    if spec.resources.spares and message is not None:
        yield Fault(path="resources.spares", message=message)


def _groups_faults(spec: JobSpec) -> Iterator[Fault]:
    """Why replica groups could never replace one of theirs."""
    if spec.train is None or spec.train.recovery.groups == 1:
        return
    message = None
    if spec.container is not None:
        message = "groups are kept by the agent outside containers; leave out this, or the container"
    elif spec.resources.nodes > 1:
        message = f"groups are ranks of one node so far, and the job has {spec.resources.nodes}; leave it out"
    if message is not None:
        yield Fault(path="train.recovery.groups", message=message)


_EARLIER = {"project_id": "project"}  # names that programs of earlier tools send


def parse_spec(mapping: object) -> JobSpec:
    """A JobSpec from a plain mapping; SpecError with every fault, those between fields too.

    Rows with older specs are read by `build`: a bound that was added later does not make them unreadable.
    """
    renamed = _rename(mapping)
    try:
        spec = build_new(JobSpec, renamed)
    except SpecError as error:
        faults = [_hint(fault, renamed) for fault in error.faults]
        listed = [*faults, *_faults_between(renamed, error.faults)]
        raise SpecError(_name_as_written(fault, mapping) for fault in listed) from None
    if faults := [*spec.slurm.faults_of_spec(), *_bad_names(spec.env)]:
        raise SpecError(faults)
    return spec


def _rename(mapping: object) -> object:
    """The mapping with earlier names of fields under ours. With both the earlier one stays, and is refused."""
    if not isinstance(mapping, Mapping):
        return mapping
    new = {name: ours for name, ours in _EARLIER.items() if ours not in mapping}
    return {new.get(name, name): value for name, value in mapping.items()}


def _name_as_written(fault: Fault, mapping: object) -> Fault:
    """The fault of a field that was written under its earlier name, under that name."""
    for earlier, ours in _EARLIER.items():
        if fault.path == ours and isinstance(mapping, Mapping) and earlier in mapping and ours not in mapping:
            return replace(fault, path=earlier)
    return fault


def _bad_names(env: Mapping[str, str]) -> Iterator[Fault]:
    """Names that a shell, a batch script or a log would read as something else."""
    for name in env:
        if not name.isprintable() or any(c.isspace() for c in name):
            message = "not a name for an environment variable: it holds a space or a control character"
            yield Fault(path=f"env.{name!r:.80}", message=message)


def _hint(fault: Fault, mapping: object) -> Fault:
    """The fault with the line to write, for what people write most often."""
    value = mapping.get(fault.path) if isinstance(mapping, Mapping) else None
    if fault.path == "command" and isinstance(value, str):
        # Not the caller's own words: a secret among them would stand in the answer, cut so that no filter knows it.
        return Fault(path=fault.path, message='write a list of words: command: ["python", "train.py"]')
    if fault.path == "image":
        return Fault(path=fault.path, message="unknown field; an image stands in `container: { image: … }`")
    return fault


def _faults_between(mapping: object, faults: Sequence[Fault]) -> Iterator[Fault]:
    """Faults that `build` did not look for because single fields are wrong: it is run again on the sound fields."""
    if not isinstance(mapping, Mapping) or any(fault.path in ("", "train") for fault in faults):
        return
    faulty = {re.split(r"[.\[]", fault.path)[0] for fault in faults}
    own = mapping.get("command") is not None or mapping.get("container") is not None
    if (mapping.get("train") is None) != own:
        yield Fault(path="train", message=_EXACTLY_ONE)
    sound = {name: value for name, value in mapping.items() if name not in faulty}
    if sound.get("train") is None and sound.get("command") is None and sound.get("container") is None:
        sound["command"] = ["x"]  # stands for the one that is wrong or missing
    try:
        build(JobSpec, {"name": "x", **sound})
    except SpecError as more:
        seen = {(fault.path, fault.message) for fault in faults}
        yield from (fault for fault in more.faults if fault.path != "train" and (fault.path, fault.message) not in seen)
