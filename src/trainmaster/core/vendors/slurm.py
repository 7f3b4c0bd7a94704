"""`slurm:` of a job spec: options of its Slurm job. The cluster file of a target has the same fields as defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from trainmaster.core.errors import Fault
from trainmaster.core.schema import field

# Values become lines of the batch script: no space, no quote, no character of a shell.
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.,:&|*\[\]()+@/-]{0,254}"
_HOSTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,\[\]-]{0,254}")
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(=[A-Za-z0-9_.,:&|*\[\]()+@/%=-]{0,254})?")
_MOUNT = re.compile(r"/[^\s:,'\"$`\\]{0,254}(:/[^\s:,'\"$`\\]{0,254}(:(ro|rw))?)?")
# Options that the batch script has for its own reasons.
_OWN = frozenset(
    "array chdir clusters cluster-constraint comment error exclude export export-file get-user-env gid gres "
    "gpus-per-node help input job-name kill-on-bad-exit no-requeue nodelist nodes ntasks ntasks-per-node open-mode "
    "output parsable quiet requeue signal test-only time uid usage version wait wrap".split()
)
# Options that a spec may add: what nodes, memory and placement a job gets. None that changes its place in the queue
# (priority, nice), runs or reads a file as root (bbf, prolog) or sends mail; a cluster file may have those.
_OF_SPECS = frozenset(
    "begin contiguous cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution "
    "exclusive extra-node-info gpu-bind gpu-freq gpus gpus-per-socket gpus-per-task gres-flags hint licenses mem-bind "
    "mem-per-cpu mem-per-gpu mincpus network no-kill overcommit oversubscribe prefer sockets-per-node spread-job "
    "switches threads-per-core time-min tmp tres-bind tres-per-task use-min-nodes wckey".split()
)
_OTHER = frozenset({"gpus"})  # beginnings of the above that are options themselves
Runtime = Literal["engine", "pyxis", "apptainer", "singularity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Options of the Slurm job. What is not stated comes from the cluster file, else from Slurm."""

    partition: str | None = field(default=None, pattern=_WORD, example="gpu", doc="partition, or several with commas")
    account: str | None = field(default=None, pattern=_WORD, example="lab", doc="account that is charged")
    qos: str | None = field(default=None, pattern=_WORD, example="normal", doc="quality of service")
    constraint: str | None = field(default=None, pattern=_WORD, example="h100&ib", doc="features that nodes must have")
    reservation: str | None = field(default=None, pattern=_WORD, example="maintenance", doc="reservation to run in")
    gpus_per_node: int | None = field(
        default=None,
        ge=0,
        le=1024,
        doc="GPUs of each node, as GRES",
        default_text="resources.processes_per_node for `train` on a GPU, else 0",
    )
    gpu_type: str | None = field(default=None, pattern=_WORD, example="h100", doc="type of the GPU GRES; default: any")
    cpus_per_node: int | None = field(default=None, ge=1, le=65_536, doc="CPUs of each node; default: Slurm's")
    memory_gib: float | None = field(default=None, gt=0, doc="memory of each node; default: Slurm's")
    exclusive: bool | None = field(default=None, doc="whole nodes, shared with no other job")
    time_minutes: float | None = field(
        default=None,
        gt=0,
        le=525_600,
        doc="time limit of the Slurm job",
        default_text="limits.timeout_s with grace, else the partition's",
    )
    nodelist: tuple[str, ...] = field(default=(), doc="nodes that must be among those of the job, as [n1, 'n[3-4]']")
    exclude: tuple[str, ...] = field(default=(), doc="nodes that must not be used; added to those of the cluster file")
    array: str | None = field(
        default=None,
        pattern=r"[0-9]+(-[0-9]+(:[0-9]+)?)?(,[0-9]+(-[0-9]+(:[0-9]+)?)?)*(%[0-9]+)?",
        example="0-7%2",
        doc="run one task for each of these numbers, found in SLURM_ARRAY_TASK_ID; %2: two at once",
    )
    requeue: bool | None = field(
        default=None, doc="let Slurm start the same job again after a lost node or a preemption; it resumes"
    )
    container_runtime: Runtime | None = field(
        default=None,
        doc="how `container` runs: pyxis, apptainer and singularity hold the whole node program; engine: "
        "docker or podman",
        default_text="engine",
    )
    mounts: tuple[str, ...] = field(default=(), doc="folders to mount into the container, as [/data, '/scratch:/s:ro']")
    task_prolog: str | None = field(
        default=None,
        pattern=r"/[^\s'\"$`\\]+",
        example="/opt/prolog.sh",
        doc="program of each node before the checks (srun --task-prolog)",
    )
    task_epilog: str | None = field(
        default=None,
        pattern=r"/[^\s'\"$`\\]+",
        example="/opt/epilog.sh",
        doc="program of each node after the end (srun --task-epilog)",
    )
    options: tuple[str, ...] = field(default=(), doc="further options of sbatch, as [--licenses=matlab, --switches=1]")

    def faults(self) -> Iterator[Fault]:
        for name in ("nodelist", "exclude"):
            for number, word in enumerate(getattr(self, name)):
                if not _HOSTS.fullmatch(word):
                    yield Fault(path=f"{name}[{number}]", message=f"{word!r:.80} is no node; write n1 or n[3-4]")
        for number, word in enumerate(self.mounts):
            if not _MOUNT.fullmatch(word):
                yield Fault(path=f"mounts[{number}]", message=f"{word!r:.80} is no mount; write /data or /data:/d:ro")
        for number, word in enumerate(self.options):
            match = _OPTION.fullmatch(word)
            if match is None:
                message = f"{word!r:.80} is no option of sbatch without spaces; write for example --switches=1"
                yield Fault(path=f"options[{number}]", message=message)
            elif match[1] not in _OTHER and any(own.startswith(match[1]) for own in _OWN):  # sbatch takes beginnings
                message = f"--{match[1]} is set by Trainmaster; use the field of `slurm:` or `resources:`"
                yield Fault(path=f"options[{number}]", message=message)

    def faults_of_spec(self) -> Iterator[Fault]:
        """Options that a job may not set; the cluster file, which is the administrator's, may."""
        for number, word in enumerate(self.options):
            name = word.partition("=")[0].removeprefix("--")
            if name not in _OF_SPECS:
                message = f"--{name:.80} cannot be set by a job; allowed: {', '.join(sorted(_OF_SPECS))}"
                yield Fault(path=f"slurm.options[{number}]", message=message)

    def over(self, defaults: SlurmOptions) -> SlurmOptions:
        """These options, with `defaults` where nothing is stated. Excluded nodes and further options are joined."""
        merged: dict[str, Any] = {}
        for item in fields(self):
            mine, other = getattr(self, item.name), getattr(defaults, item.name)
            if item.name in ("exclude", "options", "mounts"):
                merged[item.name] = tuple(dict.fromkeys((*other, *mine)))
            else:
                merged[item.name] = other if mine is None or mine == () else mine
        return SlurmOptions(**merged)
