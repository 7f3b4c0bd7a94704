"""SageMaker HyperPod: `hyperpodrun` with its options, restart policy, log rules, pre-flight, auto-resume."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex

from trainmaster.core import schema
from trainmaster.core.expect import Expect
from trainmaster.core.heartbeat import hyperpod_rules
from trainmaster.core.spec import JobSpec
from trainmaster.targets.kubernetes import kueue, names
from trainmaster.targets.kubernetes.pods import Object
from trainmaster.targets.kubernetes.settings import Settings

LOG_FOLDER = f"{names.RUN_FOLDER}/ranks"  # of hyperpodrun: standard output of each rank
TRAIN_FILE = f"{names.PLAN_FOLDER}/train.json"
PREFLIGHT_FILE = f"{names.PLAN_FOLDER}/preflight.sh"
AUTO_RESUME = "sagemaker.amazonaws.com/enable-job-auto-resume"
MAX_RETRIES = "sagemaker.amazonaws.com/job-max-retry-count"


def launcher(spec: JobSpec) -> tuple[str, ...]:
    """Words of `hyperpodrun`: torchrun's, a stop with time to save, the pre-flight, logs that the rules can read."""
    words = [
        "hyperpodrun",
        f"--nnodes={spec.resources.nodes}",
        f"--nproc-per-node={spec.resources.processes_per_node}",
        "--shutdown-signal=SIGTERM",  # the default SIGKILL leaves no time for the last checkpoint
        f"--shutdown-timeout={math.ceil(spec.limits.grace_s)}",
        # Without a copy in a file the log rules find nothing and call the job hanging.
        "--tee=3",
        f"--log-dir={LOG_FOLDER}",
    ]
    if spec.preflight.level:
        words.append(f"--pre-train-script={PREFLIGHT_FILE}")
    if spec.train is not None:
        return (*words, "-m", "trainmaster.train", TRAIN_FILE)
    return (*words, "--no-python", *(spec.command or ()))


def plan_files(spec: JobSpec, settings: Settings) -> dict[str, str]:
    """Files of the plan's ConfigMap that `launcher` names."""
    files = {}
    if spec.train is not None:
        files["train.json"] = json.dumps(schema.to_plain(spec.train), indent=2, sort_keys=True) + "\n"
    if spec.preflight.level:
        files["preflight.sh"] = preflight(spec, settings)
    return files


def preflight(spec: JobSpec, settings: Settings) -> str:
    """Script for `--pre-train-script`: the checks of this node. It fails as the pre-flight of an agent does."""
    wanted = spec.preflight
    words = [settings.python, "-m", "trainmaster.checks", "--level", str(wanted.level)]
    if wanted.profile is not None:
        words += ["--expect", wanted.profile]
    for name in wanted.skip:
        words += ["--skip", name]
    for name in wanted.require:
        words += ["--require", name]
    expected = {name: value for name, value in schema.to_plain(wanted.expect).items() if value not in (None, [], {})}
    if wanted.expect != Expect():
        words += ["--expect-json", json.dumps(expected)]
    passes = '[ "$code" = 0 ] || [ "$code" = 3 ]' if wanted.allow_incomplete else '[ "$code" = 0 ]'
    return f"#!/bin/sh\n# Checks of this node before every start.\n{shlex.join(words)}\ncode=$?\n{passes} || exit 1\n"


def job_spec(spec: JobSpec, settings: Settings, template: Object) -> Object:
    """Spec of a HyperPodPyTorchJob."""
    nodes, own = spec.resources.nodes, settings.hyperpod
    replica: Object = {"name": "pods", "replicas": nodes, "template": template}
    if own.spares:
        replica |= {"spares": own.spares}
    policy: Object = {
        **kueue.suspended(settings),
        "cleanPodPolicy": "None",  # logs of ended pods are read before they are removed
        "jobMaxRetryCount": own.restart.job_retries,
        "restartPolicy": {
            "numRestartBeforeFullJobRestart": own.restart.before_full,
            "evalPeriodSeconds": own.restart.period_s,
            "maxFullJobRestarts": own.restart.full,
        },
        "ttlSecondsAfterFinished": settings.ttl_s,
    }
    if spec.limits.timeout_s is not None:
        policy["activeDeadlineSeconds"] = math.ceil(spec.limits.timeout_s)
    if spec.train is not None:  # only our trainer prints the heartbeat that the rules wait for
        policy["logMonitoringConfiguration"] = hyperpod_rules(**dataclasses.asdict(own.rules))
    return {
        "nprocPerNode": str(spec.resources.processes_per_node),  # text: a number is refused
        "replicaSpecs": [replica],
        "runPolicy": policy,
    }


def auto_resume(settings: Settings) -> dict[str, str]:
    """Annotations of a PyTorchJob that HyperPod restarts after it has replaced a node."""
    if not settings.hyperpod.auto_resume:
        return {}
    return {AUTO_RESUME: "true", MAX_RETRIES: str(settings.hyperpod.restart.job_retries)}
