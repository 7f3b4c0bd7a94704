"""Each trap of manifests is refused at its place with the reason, and the manifest without it is not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from targets.kubernetes.test_manifests import EVERYTHING, job, plan
from trainmaster.cli.main import build
from trainmaster.targets.kubernetes.lint import find_traps

Path_ = tuple[str | int, ...]
POD: dict[str, Path_] = {
    "hyperpod": ("spec", "replicaSpecs", 0, "template", "spec"),
    "pytorchjob": ("spec", "pytorchReplicaSpecs", "Master", "template", "spec"),
}
CONTAINER = ("containers", 0)
RULE: Path_ = ("spec", "runPolicy", "logMonitoringConfiguration", 0)
ALIVE = r"^\S+ [A-Z]+ \[rank \d+ node \d+\] heartbeat .*"


def manifest(kind: str) -> dict[str, Any]:
    return job(plan(kind, settings={**EVERYTHING, "hyperpod": {"spares": 1, "auto_resume": True}}, train={"steps": 3}))


def put(one: dict[str, Any], path: Path_, value: Any) -> None:
    inner: Any = one
    for part in path[:-1]:
        inner = inner[part]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value


def words(*instead: str, without: str = "") -> list[str]:
    """Words of hyperpodrun, with an option replaced or left out."""
    start = [
        "hyperpodrun", "--nnodes=2", "--nproc-per-node=8", "--shutdown-signal=SIGTERM", "--shutdown-timeout=30",
        "--tee=3", "--log-dir=/tmp/x",
    ]  # fmt: skip
    names = {word.partition("=")[0] for word in instead} | {without}
    return [*(word for word in start if word.partition("=")[0] not in names), *instead, "-m", "trainmaster.train", "x"]


COMMAND = (*POD["hyperpod"], *CONTAINER, "command")
ENV = (*CONTAINER, "env")
TRAPS: list[tuple[str, Path_, Any, str, str]] = [
    ("hyperpod", ("spec", "nprocPerNode"), 8, "spec.nprocPerNode", 'write "8" in quotes'),
    ("hyperpod", COMMAND, words(without="--shutdown-signal"), "command", "SIGKILL and no checkpoint is saved"),
    ("hyperpod", COMMAND, words("--shutdown-signal=SIGKILL"), "command", "SIGKILL and no checkpoint is saved"),
    ("hyperpod", COMMAND, ["sh", "-c", "hyperpodrun --tee 3 --log_dir /x a.py"], "command", "no checkpoint is saved"),
    ("hyperpod", COMMAND, words("--shutdown-timeout=60"), "command", "the kubelet kills first"),
    ("hyperpod", COMMAND, words("--nnodes=2:4"), "command", "one number of nodes"),
    ("hyperpod", COMMAND, words(without="--tee"), "command", "log rules find every job hanging"),
    ("hyperpod", COMMAND, words(without="--log-dir"), "command", "log rules find every job hanging"),
    ("hyperpod", COMMAND, words("--rdzv-backend=c10d"), "command", "--rdzv-backend is ignored"),
    ("hyperpod", ("metadata", "labels"), {}, "replicaSpecs[0].spares", "kueue.x-k8s.io/queue-name"),
    ("hyperpod", (*RULE, "metricThreshold"), "2.5", "metricThreshold", "drops all rules"),
    ("hyperpod", (*RULE, "expectedStartCutOffInSeconds"), 1.5, "expectedStartCutOffInSeconds", "drops all rules"),
    ("hyperpod", (*RULE, "faultOnMatch"), "false", "faultOnMatch", "any text is true"),
    ("hyperpod", (*RULE, "metricThreshold"), 5, "logMonitoringConfiguration[0]", "belong together"),
    ("hyperpod", (*RULE, "operator"), "below", "operator", "drops all rules"),
    ("hyperpod", (*RULE, "logPattern"), "heartbeat step=", "logPattern", "from the start of its line"),
    ("hyperpod", (*RULE, "logPattern"), "^([", "logPattern", "not a regular expression"),
    ("hyperpod", ("spec", "elasticPolicy"), {"replicaIncrementStep": 1, "replicaDiscreteValues": [2]}, "elasticPolicy",
     "one of replicaIncrementStep"),
    ("hyperpod", (*POD["hyperpod"], "volumes"), [], "volumes", "/dev/shm"),
    ("hyperpod", (*POD["hyperpod"], *ENV), [{"name": "HF_TOKEN", "value": "hf_" + "a" * 34}], "env[0]", "clear text"),
    ("hyperpod", (*POD["hyperpod"], *ENV), [{"name": "DB_PASSWORD", "value": "hunter2"}], "env[0]", "clear text"),
    ("hyperpod", (*POD["hyperpod"], *ENV), [{"name": "N", "value": 8}], "env[0]", "in quotes"),
    ("hyperpod", (*POD["hyperpod"], *CONTAINER, "resources", "requests", "nvidia.com/gpu"), "4", "nvidia.com", "equal"),
    ("pytorchjob", (*POD["pytorchjob"], *CONTAINER, "name"), "train", "containers", "named `pytorch`"),
    ("pytorchjob", (*POD["pytorchjob"], *ENV), [{"name": "WORLD_SIZE", "value": "16"}], "env[0]", "counts pods"),
    ("pytorchjob", ("spec", "pytorchReplicaSpecs", "Worker", "restartPolicy"), "Never", "restartPolicy", "OnFailure"),
    ("pytorchjob", ("spec", "pytorchReplicaSpecs", "Master"), None, "pytorchReplicaSpecs", "MASTER_ADDR"),
    ("pytorchjob", ("metadata", "annotations", "sagemaker.amazonaws.com/enable-job-auto-resume"), True, "annotations",
     '"true" in quotes'),
    ("trainjob", ("spec", "trainer", "env"), [{"name": "PET_NNODES", "value": "2"}], "env[0]", "set by the trainer's"),
    ("trainjob", ("spec", "trainer", "env"), [{"name": "API_KEY", "value": "x"}], "env[0]", "clear text"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "path", "value", "where", "why"), TRAPS, ids=lambda one: str(one)[-30:])
def test_a_trap_is_refused_with_its_place_and_reason(kind: str, path: Path_, value: Any, where: str, why: str) -> None:
    one = manifest(kind)
    assert list(find_traps(one)) == []
    put(one, path, value)
    found = [(fault.path, fault.message) for fault in find_traps(one)]
    assert any(where in place and why in message for place, message in found), found


def test_a_number_in_a_loss_hides_nan() -> None:
    one = manifest("hyperpod")
    rule = {"name": "x", "logPattern": ALIVE + r"loss=(\d+\.\d+) ", "metricThreshold": 9, "operator": "gt"}
    put(one, RULE, rule)
    assert any("NaN does not match" in fault.message for fault in find_traps(one))


def test_any_manifest_is_survived() -> None:
    for one in (
        {},
        {"kind": "PyTorchJob", "spec": []},
        {"kind": "HyperPodPyTorchJob", "spec": {"replicaSpecs": [None]}},
    ):
        list(find_traps(one))


def test_the_command_names_every_trap(tmp_path: Path) -> None:
    good, bad = manifest("hyperpod"), copy.deepcopy(manifest("hyperpod"))
    bad["spec"]["nprocPerNode"] = 8
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all([good]))
    done = CliRunner().invoke(build(), ["cluster", "lint", str(path)])
    assert (done.exit_code, done.output) == (0, "no trap in 1 object\n")
    path.write_text(yaml.safe_dump_all([good, bad]))
    done = CliRunner().invoke(build(), ["cluster", "lint", str(path)])
    assert "spec.nprocPerNode" in str(done.exception)
    path.write_text("name: tales\ntrain: {steps: 1}\n")
    done = CliRunner().invoke(build(), ["cluster", "lint", str(path)])
    assert "not a manifest" in str(done.exception), "a job spec has no kind"
