"""Manifests of all kinds: valid for Kubernetes and for the operators, printable, and without a secret in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from trainmaster.core.errors import SpecError, UsageError
from trainmaster.core.plan import Plan
from trainmaster.core.spec import parse_spec
from trainmaster.targets import Placement, Submission
from trainmaster.targets.kubernetes import planning
from trainmaster.targets.kubernetes.lint import find_traps
from trainmaster.targets.kubernetes.settings import parse_settings

KINDS = ("job", "pytorchjob", "trainjob", "hyperpod")
ATTEMPT = "0b6c5c4e-53ad-4f0e-9c57-6a4f1f3c2d10.1"
CRDS = {
    one["spec"]["names"]["kind"]: one["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for one in yaml.safe_load_all((Path(__file__).parent / "crds.yaml").read_text())
}
EVERYTHING: dict[str, Any] = {
    "image": "registry.example.org/team/train:1", "namespace": "lab", "gpus": 8, "efa": 32, "cpus": "96",
    "memory": "1000Gi", "resources": {"rdma/hca": "8"}, "shm": "64Gi", "ulimits": "check",
    "node_labels": {"node.kubernetes.io/instance-type": "ml.p5.48xlarge"}, "not_nodes": ["bad-1"],
    "tolerations": [{"key": "nvidia.com/gpu"}], "priority_class": "high", "queue": "team", "queue_priority": "urgent",
    "service_account": "train", "pull_secret": "registry", "volumes": [{"mount": "/fsx", "claim": "fsx"}],
    "folder": "/fsx/trainmaster", "env": {"NCCL_DEBUG": "WARN"}, "hyperpod": {"spares": 1},
}  # fmt: skip


def plan(kind: str, *, settings: dict[str, Any] | None = None, **spec: Any) -> Submission:
    what = {"command": ["python", "train.py"]} if "train" not in spec and "container" not in spec else {}
    mapping = {"name": "a", "resources": {"nodes": 2, "processes_per_node": 8}, **what, **spec}
    placement = Placement(attempt=ATTEMPT, spec=parse_spec(mapping), job_folder=Path("/home/jobs/a"))
    return planning.plan(placement, parse_settings({"kind": kind, "image": "train:1", **(settings or {})}))


def objects(made: Submission) -> dict[str, Any]:
    (text,) = made.files.values()
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


def job(made: Submission) -> dict[str, Any]:
    return list(objects(made).values())[-1]


def pod(made: Submission) -> dict[str, Any]:
    spec = job(made)["spec"]
    if "pytorchReplicaSpecs" in spec:
        return dict(spec["pytorchReplicaSpecs"]["Master"]["template"])
    return dict(spec["replicaSpecs"][0]["template"] if "replicaSpecs" in spec else spec["template"])


def strict(schema: Any) -> Any:
    """The schema with unknown fields refused: an API server of 1.20 drops them without a word."""
    if isinstance(schema, dict):
        made = {name: strict(value) for name, value in schema.items() if name != "x-kubernetes-int-or-string"}
        if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields") and "metadata" not in made:
            made.setdefault("additionalProperties", False)
        return made
    return [strict(one) for one in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("settings", [{}, EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("kind", KINDS)
def test_manifests_fit_kubernetes_and_the_operators(kind: str, settings: dict[str, Any]) -> None:
    version = kubernetes_validate.latest_version()
    made = plan(kind, settings=settings, limits={"timeout_s": 3600})
    for one in objects(made).values():
        if one["kind"] in CRDS:
            jsonschema.validate(one, strict(CRDS[one["kind"]]))
        else:
            kubernetes_validate.validate(one, version, strict=True)
    if kind != "trainjob":
        template = pod(made)
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **template["metadata"]}}
        kubernetes_validate.validate({**body, "spec": template["spec"]}, version, strict=True)
    else:
        override = job(made)["spec"]["podTemplateOverrides"][0]["spec"]
        trainer = job(made)["spec"]["trainer"]
        merged = {"name": "node", "image": trainer["image"], "env": trainer["env"], **override["containers"][0]}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
        kubernetes_validate.validate({**body, "spec": {**override, "containers": [merged]}}, version, strict=True)


def test_a_schema_that_does_not_fit_is_seen() -> None:
    made = job(plan("hyperpod"))
    made["spec"]["nprocPerNode"] = 8
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made, strict(CRDS["HyperPodPyTorchJob"]))
    made["spec"]["nprocPerNode"] = "8"
    made["spec"]["unheardOf"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made, strict(CRDS["HyperPodPyTorchJob"]))


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_settings_ask_for_is_in_the_pod(kind: str) -> None:
    made = plan(kind, settings=EVERYTHING)
    text = json.dumps(job(made))
    for wanted in ("vpc.amazonaws.com/efa", "FI_PROVIDER", "rdma/hca", "ml.p5.48xlarge", "bad-1", "nvidia.com/gpu",
                   "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class", "64Gi", "/fsx", "claimName",
                   "registry", "node.kubernetes.io/unreachable"):  # fmt: skip
        assert wanted in text, wanted
    if kind == "trainjob":
        return
    spec = pod(made)["spec"]
    assert spec["priorityClassName"] == "high"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["initContainers"][0]["name"] == "ulimits"
    assert spec["terminationGracePeriodSeconds"] == 60
    (container,) = spec["containers"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_a_plain_job_has_an_index_a_service_and_no_restart() -> None:
    made = objects(plan("job"))
    spec = made["Job"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"]) == (0, 86400)
    assert made["Service"]["spec"]["publishNotReadyAddresses"] is True
    own = Plan.from_json(made["ConfigMap"]["data"]["plan.json"])
    assert own.master_addr == f"{made['Service']['metadata']['name']}-0.{spec['template']['spec']['subdomain']}"


def test_hyperpodrun_saves_before_it_dies_and_checks_before_it_starts() -> None:
    made = plan("hyperpod", train={"steps": 10}, preflight={"level": 2, "skip": ["ntp"], "expect": {"gpus": 8}})
    (container,) = pod(made)["spec"]["containers"]
    words = container["command"]
    start = words[words.index("hyperpodrun") :]
    assert "--shutdown-signal=SIGTERM" in start and "--shutdown-timeout=30" in start
    assert start[-3:] == ["-m", "trainmaster.train", "/trainmaster/plan/train.json"]
    script = objects(made)["ConfigMap"]["data"]["preflight.sh"]
    assert "-m trainmaster.checks --level 2 --skip ntp --expect-json '{\"gpus\": 8}'" in script
    policy = job(made)["spec"]["runPolicy"]
    assert policy["restartPolicy"] == {
        "numRestartBeforeFullJobRestart": 3, "evalPeriodSeconds": 21600, "maxFullJobRestarts": 1,
    }  # fmt: skip
    assert [rule["name"] for rule in policy["logMonitoringConfiguration"]] == ["TrainmasterAlive"]
    assert "logMonitoringConfiguration" not in job(plan("hyperpod"))["spec"]["runPolicy"]


def test_auto_resume_of_a_pytorchjob() -> None:
    made = job(plan("pytorchjob", settings={"hyperpod": {"auto_resume": True}}))
    assert made["metadata"]["annotations"] == {
        "sagemaker.amazonaws.com/enable-job-auto-resume": "true",
        "sagemaker.amazonaws.com/job-max-retry-count": "10",
    }
    assert {one["restartPolicy"] for one in made["spec"]["pytorchReplicaSpecs"].values()} == {"OnFailure"}


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_are_secret_objects_and_are_not_printed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINMASTER_JOB_ENV", "HF_TOKEN,REGISTRY_PASSWORD")
    monkeypatch.setenv("HF_TOKEN", "hf_verysecretvalue123")
    monkeypatch.setenv("REGISTRY_PASSWORD", "correct-horse")
    login = {"user": "alice", "password_from": "REGISTRY_PASSWORD"}
    container = {"image": "registry.example.org/t:1", "login": login}
    made = plan(kind, container=container, command=["python", "train.py"])
    text = made.render()
    assert "HF_TOKEN" in text
    for value in ("hf_verysecretvalue123", "correct-horse"):
        assert value not in text
    found = [one for one in yaml.safe_load_all(next(iter(made.files.values()))) if one["kind"] == "Secret"]
    version = kubernetes_validate.latest_version()
    for one in found:
        whole = planning.reveal(one)
        kubernetes_validate.validate(whole, version, strict=True)
    names = [name for one in found for name in one["data"]]
    assert names == ["HF_TOKEN", ".dockerconfigjson"], "the registry's password is not among the variables"
    monkeypatch.delenv("REGISTRY_PASSWORD")
    with pytest.raises(UsageError, match="REGISTRY_PASSWORD"):
        planning.reveal(found[1])


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(UsageError, match="command: write the program"):
        plan("job", container={"image": "x:1"})
    with pytest.raises(UsageError, match="no image"):
        plan("job", settings={"image": None})
    with pytest.raises(SpecError, match=r"hyperpod\.spares: spare pods need Kueue"):
        parse_settings({"hyperpod": {"spares": 2}})
    with pytest.raises(SpecError, match="env"):
        plan("job", settings={"env": {"WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567"}})


@pytest.mark.parametrize("kind", KINDS)
def test_no_trap_in_what_is_generated(kind: str) -> None:
    for one in objects(plan(kind, settings=EVERYTHING, train={"steps": 3})).values():
        assert list(find_traps(one)) == []
