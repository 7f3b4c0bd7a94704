"""The batch script of an attempt: pure text, printed by `--dry-run`. It holds no secret and no environment of ours.

One srun starts one node program on each node (node_start.py), which writes the node's plan and runs the agent. Before
the time limit Slurm sends SIGUSR1 to this script, which asks the agents to save and stop.

With spares the loss of a node ends neither the job nor the step (`--no-kill`): the agent of node 0 gives its place to a
spare. The script runs on node 0, and the run is over when the agent there is.

Slurm requeues a preempted job only when it has killed it at the end of the grace time. A run that saves and ends within
it would count as failed: with `--requeue` the script puts the job back into the queue itself.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass

from trainmaster.core.errors import TargetError
from trainmaster.core.spec import JobSpec
from trainmaster.core.vendors.slurm import SlurmOptions
from trainmaster.remote.slurm.layout import COMMENT, PREEMPTED_FILE
from trainmaster.targets.slurm.settings import SlurmSettings

_SIGNAL_MARGIN_S = 90.0  # Slurm may send the signal up to 60 s early or late; the record needs time too
_TIME_MARGIN_S = 300.0

_BODY = """
set -u
base={base}
units="$base"{units}
again="${{SLURM_RESTART_COUNT:+-r$SLURM_RESTART_COUNT}}"  # the folders of this start
export PYTHONPATH={package} PYTHONSAFEPATH=1
{setup}
ask_to_stop() {{
  for folder in "$units"-node-*"$again"; do
    if [ -d "$folder" ] && [ ! -e "$folder/stop" ]; then echo "$1" >"$folder/stop"; fi
  done
}}
is_preempted() {{  # in this start: Slurm keeps the time of an earlier one
  facts=" $(scontrol show job --oneliner "$SLURM_JOB_ID" 2>/dev/null)"
  [[ $facts =~ [[:space:]]PreemptTime=([0-9][0-9T:-]+) ]] || return 1
  at=${{BASH_REMATCH[1]}}
  [[ $facts =~ [[:space:]]StartTime=([0-9][0-9T:-]+) ]] && [[ ! $at < ${{BASH_REMATCH[1]}} ]]
}}
near_end() {{
  if is_preempted; then ask_to_stop "preempted: Slurm gives its nodes to another job"
  else ask_to_stop "timed_out: the time limit of the Slurm job is near"; fi
}}
trap near_end USR1
trap 'ask_to_stop "preempted: Slurm ends the job"' TERM

{srun} &
step=$!
{wait}{requeue}exit "$code"
"""
_WAIT = """while :; do
  wait "$step"
  code=$?
  kill -0 "$step" 2>/dev/null || break
done
# A run that was asked to stop ends with 0 on its nodes, so that no node cuts off the save of another.
if [ "$code" -eq 0 ] && grep -L '"ok": true' "$units"-node-*"$again"/exit.json | grep -q .; then code=75; fi
"""
# srun waits for a lost node until Slurm gives it up (SlurmdTimeout, 5 minutes by default), and fails because of it.
_WAIT_WITH_SPARES = """ended="$units-node-0$again/exit.json"
left={grace_s}  # for the other nodes to end
while kill -0 "$step" 2>/dev/null && [ "$left" -gt 0 ]; do
  if [ -e "$ended" ]; then left=$((left - 1)); fi
  sleep 1 &
  wait "$!"
done
code=75
if kill -0 "$step" 2>/dev/null; then :; else wait "$step"; code=$?; fi
if grep -qs '"ok": true' "$ended"; then code=0; elif [ "$code" -eq 0 ]; then code=75; fi
"""
_REQUEUE = """if [ "$code" -ne 0 ] && [ ! -e "$base/stop" ] && [ ! -e "$base/released" ] && is_preempted; then
  trap - TERM
  echo "$at" >"$base/{preempted}"
  scontrol requeue "$SLURM_JOB_ID"
fi
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the script of an attempt depends on."""

    attempt: str
    spec: JobSpec
    options: SlurmOptions  # of the spec, over those of the cluster file
    settings: SlurmSettings
    base: str
    checkpoints: str
    package: str


def job_name(spec: JobSpec, attempt: str) -> str:
    """Name of the Slurm job: the spec's, and the attempt, by which the job is found again."""
    return f"{spec.name}.{attempt}"


def render_script(job: Job) -> str:
    """The whole batch script."""
    lines = ["#!/bin/bash", *(f"#SBATCH {word}" for word in _directives(job))]
    lines.append(f"# Attempt {job.attempt} of {job.spec.name}; written by trainmaster.")
    body = _BODY.format(
        base=shlex.quote(job.base),
        units='"-task-$SLURM_ARRAY_TASK_ID"' if job.options.array else "",
        package=shlex.quote(job.package),
        setup="\n".join(job.settings.setup),
        srun=_srun(job),
        wait=_WAIT_WITH_SPARES.format(grace_s=math.ceil(job.spec.limits.grace_s)) if _has_spares(job) else _WAIT,
        requeue=_REQUEUE.format(preempted=PREEMPTED_FILE) if job.options.requeue else "",
    )
    return "\n".join(lines) + body


def _quote(path: str) -> str:
    """A path as sbatch reads it in a directive: a blank ends a word outside of quotes, also behind a backslash."""
    if re.fullmatch(r"[\w@%+=:,./-]+", path, re.ASCII):
        return path
    return '"' + re.sub(r'([\\"])', r"\\\1", path) + '"'


def _directives(job: Job) -> list[str]:
    options, spec = job.options, job.spec
    words = [
        f"--job-name={job_name(spec, job.attempt)}",
        f"--comment={COMMENT}{job.attempt}",
        f"--chdir={_quote(job.base)}",
        f"--output={_quote(job.base.replace('%', '%%'))}/slurm-{'%A_%a' if options.array else '%j'}.log",
        "--open-mode=append",
        f"--nodes={spec.resources.machines}",
        f"--ntasks={spec.resources.machines}",
        "--ntasks-per-node=1",
        *(["--no-kill"] if _has_spares(job) else []),
    ]
    words += [
        f"--{name}={value}"
        for name in ("partition", "account", "qos", "constraint", "reservation")
        if (value := getattr(options, name)) is not None
    ]
    if gpus := count_gpus(options, spec):
        words.append(f"--gres=gpu:{options.gpu_type}:{gpus}" if options.gpu_type else f"--gres=gpu:{gpus}")
    if options.cpus_per_node is not None:
        words.append(f"--cpus-per-task={options.cpus_per_node}")
    if options.memory_gib is not None:
        words.append(f"--mem={math.ceil(options.memory_gib * 1024)}M")
    if options.exclusive:
        words.append("--exclusive")
    words += [
        f"--{name}={','.join(getattr(options, name))}" for name in ("nodelist", "exclude") if getattr(options, name)
    ]
    if options.array is not None:
        words.append(f"--array={options.array}")
    words += _times(options, spec)
    words.append("--requeue" if options.requeue else "--no-requeue")
    return [*words, *options.options]


def _times(options: SlurmOptions, spec: JobSpec) -> list[str]:
    """Time limit, and the signal that leaves enough of it to save."""
    limit_s = options.time_minutes * 60 if options.time_minutes is not None else None
    if limit_s is None and spec.limits.timeout_s is not None:
        limit_s = spec.limits.timeout_s + spec.limits.grace_s + _TIME_MARGIN_S
    signal_s = min(math.ceil(spec.limits.grace_s + _SIGNAL_MARGIN_S), 65_535)
    words = [f"--time={math.ceil(limit_s / 60)}"] if limit_s is not None else []
    if limit_s is None or limit_s > 2 * signal_s:
        words.append(f"--signal=B:USR1@{signal_s}")
    return words


def count_gpus(options: SlurmOptions, spec: JobSpec) -> int:
    """GPUs of each node to request."""
    if options.gpus_per_node is not None:
        return options.gpus_per_node
    wants = spec.train is not None and spec.train.device != "cpu"
    return spec.resources.processes_per_node if wants else 0


def _has_spares(job: Job) -> bool:
    return job.spec.resources.spares > 0


def _srun(job: Job) -> str:
    options, nodes = job.options, job.spec.resources.machines
    words = [
        "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none", "--wait=0",
        "--kill-on-bad-exit=1", *(["--no-kill"] if _has_spares(job) else []),
    ]  # fmt: skip
    if options.task_prolog:
        words.append(f"--task-prolog={options.task_prolog}")
    if options.task_epilog:
        words.append(f"--task-epilog={options.task_epilog}")
    inside, python = _container(job)
    start = ["-m", "trainmaster.remote.slurm.node_start", *(["--drain"] if job.settings.drain else []), job.base]
    return shlex.join([*words, *inside, python, *start])


def holds_node_program(job_options: SlurmOptions) -> bool:
    """Whether the container runtime runs the whole node program inside the image."""
    return job_options.container_runtime not in (None, "engine")


def _container(job: Job) -> tuple[list[str], str]:
    """Words between srun and the node program, and its Python."""
    container, runtime = job.spec.container, job.options.container_runtime
    if container is None or not holds_node_program(job.options):
        return [], job.settings.python
    if job.spec.command is None and job.spec.train is None:
        raise TargetError(f"slurm: {runtime} runs a command inside the image; state `command` in the spec")
    if container.login is not None:
        raise TargetError(
            f"slurm: {runtime} logs in with credentials of the cluster's user, not with container.login; leave it out"
        )
    job_folder = job.base.rpartition("/attempts/")[0]
    mounts = [*dict.fromkeys((job_folder, job.checkpoints, job.package, *job.options.mounts))]
    gpus = container.gpus == "all" or (container.gpus == "auto" and count_gpus(job.options, job.spec) > 0)
    if runtime == "pyxis":
        pairs = [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]
        words = [
            f"--container-image={_pyxis_image(container.image)}",
            f"--container-mounts={','.join(pairs)}",
            f"--container-workdir={job.base}",
        ]
        return words, job.settings.container_python
    words = [str(runtime), "exec", *(["--nv"] if gpus else []), "--bind", ",".join(mounts), "--pwd", job.base]
    return [*words, *container.options, f"docker://{container.image}"], job.settings.container_python


def _pyxis_image(image: str) -> str:
    """enroot separates the registry with #: registry.example.org#team/train:1."""
    first, slash, rest = image.partition("/")
    return f"{first}#{rest}" if slash and (":" in first or "." in first or first == "localhost") else image
