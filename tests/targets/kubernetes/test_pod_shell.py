"""Shells in pods: which pod is meant, what a throw-away pod has, how a command ends, and refusals of a real API server.

Shells in running containers are in tests/e2e/test_kubernetes.py.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kube import ADMIN, LIMITED, Kube
from trainmaster.cli.main import build
from trainmaster.cluster.hyperpod import manifest
from trainmaster.cluster.pod_shell import Choice, choose, shell_pod
from trainmaster.core.errors import TargetError, UsageError
from trainmaster.targets.kubernetes.commands import parse_result

ATTEMPT = "0a483b16-8313-431b-b59a-ba4ab85085de.1"


def pod(name: str, role: str, index: int, node: str, *, made: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    labels = {"training.kubeflow.org/replica-type": role, "training.kubeflow.org/replica-index": str(index)}
    return {
        "metadata": {"name": name, "labels": labels, "creationTimestamp": made},
        "spec": {"nodeName": node, "containers": [{"name": "pytorch"}]}, "status": {},
    }  # fmt: skip


PODS = [
    pod("w1", "worker", 1, "node-c"), pod("m0", "master", 0, "node-a"), pod("w0", "worker", 0, "node-b"),
    pod("w0-old", "worker", 0, "node-z", made="2025-01-01T00:00:00Z"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        (Choice(), "m0"), (Choice(rank=7), "m0"), (Choice(rank=8), "w0"), (Choice(rank=23), "w1"),
        (Choice(node="2"), "w1"), (Choice(node="node-b"), "w0"), (Choice(pod="w0-old"), "w0-old"),
    ],
)  # fmt: skip
def test_a_pod_is_chosen_by_rank_node_or_name(choice: Choice, name: str) -> None:
    assert choose(PODS, choice, 8)["metadata"]["name"] == name


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (Choice(rank=24), "no rank 24, node 3; it has 0, 1, 2"), (Choice(node="node-q"), "no node node-q"),
        (Choice(pod="x"), "no pod x; it has m0, w0, w0-old, w1"),
    ],
)  # fmt: skip
def test_a_pod_that_is_not_there_is_told_with_those_that_are(choice: Choice, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        choose(PODS, choice, 8)


def test_a_throw_away_pod_is_like_the_jobs_pods_without_their_devices() -> None:
    job = manifest.find_job(manifest.make())
    assert job is not None
    own = manifest.pod_template(job)["spec"]
    made = shell_pod(own, "llama", "training", node="node-a", lasts_s=60)
    (container,) = made["spec"]["containers"]
    theirs = own["containers"][0]
    assert all(container[key] == theirs[key] for key in ("image", "env", "volumeMounts", "securityContext"))
    assert "resources" not in container and "affinity" not in made["spec"]
    assert made["spec"]["securityContext"] == own["securityContext"]
    assert made["spec"]["nodeSelector"] == {"kubernetes.io/hostname": "node-a"}
    assert made["spec"]["activeDeadlineSeconds"] == 60
    assert "job-name" not in made["metadata"]["labels"], "no test and no status counts it as a pod of the job"


def test_how_a_command_ended_is_read_from_the_status() -> None:
    failed = {"status": "Failure", "reason": "NonZeroExitCode", "message": "exit 7",
              "details": {"causes": [{"reason": "ExitCode", "message": "7"}]}}  # fmt: skip
    assert parse_result(b'{"metadata":{},"status":"Success"}') == 0
    assert parse_result(json.dumps(failed).encode()) == 7
    with pytest.raises(TargetError, match="did not start: not found"):
        parse_result(b'{"status":"Failure","message":"not found"}')
    for raw in (b"", b"[]", b"\xff", b'{"status":"Failure","details":{"causes":[{"reason":"ExitCode"}]}}'):
        with pytest.raises(TargetError, match="cannot be read"):
            parse_result(raw)


def make_running(kube: Kube, namespace: str) -> None:
    """A pod that runs, as far as the API server knows."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    body = {"metadata": {"name": "one", "labels": {"job-name": "run"}},
            "spec": {"nodeName": "nowhere", "containers": [{"name": "c", "image": "i"}]}}  # fmt: skip
    kube.call("POST", path, body)
    state = {"name": "c", "image": "i", "imageID": "", "ready": True, "restartCount": 0, "state": {"running": {}}}
    status = {"status": {"phase": "Running", "containerStatuses": [state]}}
    kube.call("PATCH", f"{path}/one/status", status, kind="application/merge-patch+json")


def grant_pods(kube: Kube, namespace: str) -> None:
    root = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    kube.call("POST", f"{root}/roles", {"metadata": {"name": "see"}, "rules": [rule]})
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "see"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "limited"}
    kube.call(
        "POST", f"{root}/rolebindings", {"metadata": {"name": "see"}, "roleRef": reference, "subjects": [subject]}
    )


@pytest.mark.spawns
def test_refusals_say_what_is_missing(kube: Kube, namespace: str, settings_file: Callable[..., Path]) -> None:
    make_running(kube, namespace)
    grant_pods(kube, namespace)

    def ask(*words: str, token: str = ADMIN) -> tuple[int, str]:
        on = f"kubernetes:{settings_file(token=token)}"
        done = CliRunner().invoke(build(), ["cluster", "shell", "--on", on, *words])
        return done.exit_code, done.output + repr(done.exception)

    code, said = ask("--job", "run", "--", "true", token=LIMITED)
    assert code != 0 and "may not get pods/exec in namespace" in said and "cluster rights --shell" in said, said
    code, said = ask("--job", "run", "--new", "--", "true", token=LIMITED)
    assert code != 0 and "may not " in said, said
    code, said = ask("--job", "run", "--rank", "1", "--", "true")
    assert code != 0 and "write --node in place of --rank" in said, said
    assert "no pod of none" in ask("--job", "none", "--", "true")[1]
    assert "no job none" in ask("--job", "none", "--new", "--", "true")[1]
    assert "write the command after --" in ask("--job", "run")[1]
    assert "write one of" in ask("--rank", "1", "--node", "2", "--", "true")[1]
    assert "--manifest goes with --new" in ask("--manifest", "x.yaml", "--", "true")[1]
    assert "pod of its own" in ask("--new", "--rank", "1", "--", "true")[1]


@pytest.mark.spawns
def test_the_rights_of_a_shell_are_asked_for_when_wanted(settings_file: Callable[..., Path]) -> None:
    def ask(*words: str) -> str:
        target = f"kubernetes:{settings_file(token=LIMITED)}"
        return CliRunner().invoke(build(), ["cluster", "rights", target, *words]).output

    assert "pods/exec" not in ask() and "pods/exec" not in ask("--manifest")
    assert "MISSING            get pods/exec" in ask("--shell")
    assert "pods/exec" in ask("--shell", "--manifest")


@pytest.mark.spawns
@pytest.mark.parametrize(("script", "words"), [("k8s-shell/shell.sh", "--rank"), ("dataset/dataset.sh", "prepare")])
def test_the_scripts_lead_to_the_verbs(script: str, words: str) -> None:
    path = Path(__file__).parents[3] / "compat" / "fsdp-hyperpod" / "tools" / script
    done = subprocess.run([str(path), "--help"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and words in done.stdout, done.stderr
