"""Every make target of the HyperPod tests as typed, and every fault, on six clusters with the figures of plan."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kube import Kube
from sims.kubernetes import script
from sims.kubernetes.clock import SimulatedClock
from sims.kubernetes.operator import Operator, Settings
from trainmaster.cli.main import build
from trainmaster.cluster.hyperpod import framework, manifest
from trainmaster.targets.kubernetes.kubeconfig import load_access

pytestmark = pytest.mark.spawns
ROOT = Path(__file__).parents[3]
NAMESPACE = "default"  # as typed, without a file of settings
CLUSTERS = {
    "A10G": ("ml.g5.8xlarge", 4), "A100-40": ("ml.p4d.24xlarge", 2), "A100-80": ("ml.p4de.24xlarge", 2),
    "H100": ("ml.p5.48xlarge", 2), "H200": ("ml.p5en.48xlarge", 2), "B200": ("ml.p6-b200.48xlarge", 2),
}  # fmt: skip
MODELS = {"A10G": "llama3.2-1b"}  # the others train the shipped one
# What each target prints where all is well. Before those that look at a job, one is deployed.
PRINTS = {
    "validate-framework": "\nPASS\n", "validate-setup": "\nPASS\n", "test-quick": "\nPASS\n",
    "test-cluster": "\nPASS\n",
    "perf-test": "\nPASS\n", "run": f"deployed {manifest.JOB_NAME}", "check-job": '"job_exists": true',
    "logs-follow": "Loss:", "logs-all": "Loss:", "stop": "removed 2 objects", "monitor-pods": "Succeeded",
    "debug-describe": "kind: HyperPodPyTorchJob", "debug-events": "image is there", "test-status": '"running": true',
}  # fmt: skip
FOLLOWED = ("logs-follow", "monitor-pods")  # these end with the job: it must not take its own time
# Fault: the first indicator that fails, and words of its reason.
FAULTS = {
    "crash-loop": ("pods_running", "again and again"), "image-pull": ("pods_running", "ImagePullBackOff"),
    "restart": ("pods_running", "OOMKilled"), "loss-flat": ("loss_falling", "does not fall"),
    "no-checkpoint": ("checkpoint", "none was written"), "checkpoint-damaged": ("checkpoint", "other bytes"),
    "not-ready": ("nodes_ready", f"{NAMESPACE}-node-0"), "slow-network": ("network", "7.2 Gbps"),
    "wrong-values": ("network", "wrong values"), "idle-gpus": ("gpu_utilisation", "12 %"),
    "much-memory": ("gpu_memory", "39.5 GiB"), "nccl-timeout": ("no_nccl_timeout", "Watchdog caught collective"),
    "heartbeat-monitor": ("no_nccl_timeout", "NCCL heartbeat monitor"),
    "remote-error": ("no_nccl_timeout", "NCCL remote error"), "system-error": ("no_nccl_timeout", "NCCL system error"),
    "completion-error": ("no_nccl_timeout", "InfiniBand completion with error"),
    "ofi-error": ("no_nccl_timeout", "OFI error"), "ecc": ("no_nccl_timeout", "uncorrectable ECC"),
}  # fmt: skip


@pytest.fixture(scope="module")
def typed() -> dict[str, list[str]]:
    """Arguments of the command line behind each make target, as make itself prints it."""
    commands = {}
    for target in framework.MAKE_TARGETS:
        done = subprocess.run(
            ["make", "-n", "--no-print-directory", "--assume-old=.venv/.run", target],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        words = shlex.split(done.stdout.strip().splitlines()[-1])
        program = words[1] if words[0].endswith("python") else words[0]
        assert program.endswith(("bin/trainmaster", "tools/validate_test_setup.py")), done.stdout
        script_ = ["cluster", "test", "--action", "validate-framework"]  # what this script starts
        commands[target] = words[1:] if program == words[0] else script_
    return commands


@pytest.fixture(scope="module")
def claims(kube: Kube) -> Iterator[None]:
    """The storage claim and the service account that the shipped manifest needs."""
    volume = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}}
    path = f"/api/v1/namespaces/{NAMESPACE}"
    kube.call("POST", f"{path}/persistentvolumeclaims", {"metadata": {"name": "fsx-claim"}, "spec": volume})
    bound = {"status": {"phase": "Bound"}}
    kind = "application/merge-patch+json"
    kube.call("PATCH", f"{path}/persistentvolumeclaims/fsx-claim/status", bound, kind=kind)
    kube.call("POST", f"{path}/serviceaccounts", {"metadata": {"name": "default"}})
    note = {"metadata": {"name": "note"}, "involvedObject": {"kind": "Pod", "name": "p", "namespace": NAMESPACE},
            "reason": "Pulled", "message": "image is there", "type": "Normal"}  # fmt: skip
    kube.call("POST", f"{path}/events", note)
    yield
    kube.call("DELETE", f"{path}/persistentvolumeclaims/fsx-claim")


class Cluster:
    """One simulated cluster, and the command line in this process."""

    def __init__(self, kube: Kube, typed: dict[str, list[str]], name: str, faults: tuple[str, ...] = ()) -> None:
        instance, nodes = CLUSTERS[name]
        certs, self._typed = kube.folder / "certs", typed
        self.clock = SimulatedClock(stride_s=0.0)
        self.operator = Operator(
            Settings(
                access=load_access(str(kube.kubeconfig()), None), namespace=NAMESPACE, instance=instance, nodes=nodes,
                certificate=certs / "apiserver.crt", key=certs / "apiserver.key", faults=frozenset(faults),
                product_label=name != "A10G", clock=self.clock,
            )
        )  # fmt: skip

    def make(self, target: str, *more: str) -> tuple[int, str, str]:
        done = CliRunner().invoke(build(guarded=True), [*self._typed[target], *more], env={"COLUMNS": "400"})
        return done.exit_code, done.stdout, done.stderr

    def pass_time(self, seconds: float) -> None:
        asyncio.run(self.clock.sleep(0.0))  # a round, in which pods are made
        asyncio.run(self.clock.sleep(seconds))


@pytest.fixture
def made(
    kube: Kube, typed: dict[str, list[str]], claims: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Cluster]:  # fmt: skip
    del claims
    name, faults = request.param
    cluster = Cluster(kube, typed, name, faults)
    (tmp_path / "kubectl").touch(mode=0o755)  # validate-framework looks for one
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig()))
    monkeypatch.setenv("TRAINMASTER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("trainmaster.cluster.hyperpod.clock.WallClock", lambda: cluster.clock)
    with cluster.operator:
        yield cluster
        cluster.make("stop")


@pytest.mark.matrix(one_in=96)
@pytest.mark.parametrize("target", framework.MAKE_TARGETS)
@pytest.mark.parametrize("made", [(name, ()) for name in CLUSTERS], ids=list(CLUSTERS), indirect=True)
def test_every_make_target_as_typed_ends_with_0(made: Cluster, target: str, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["made"][0]
    if target not in ("validate-framework", "validate-setup", "test-quick", "test-cluster", "perf-test", "run"):
        assert made.make("run")[0] == 0
        made.pass_time(120.0)
        if target in FOLLOWED:
            made.clock.stride_s = 60.0
    code, stdout, stderr = made.make(target)
    assert code == 0 and PRINTS[target] in f"\n{stdout}", stdout + stderr
    if target in ("test-quick", "test-cluster", "perf-test", "run"):
        assert f"{MODELS.get(name, 'llama3.1-8b')} on " in stderr, stderr


@pytest.mark.matrix(one_in=120)
@pytest.mark.parametrize(
    ("made", "fault"),
    [((name, (fault,)), fault) for name in CLUSTERS for fault in FAULTS],
    ids=[f"{name}-{fault}" for name in CLUSTERS for fault in FAULTS],
    indirect=["made"],
)
def test_the_full_test_as_typed_names_each_fault(made: Cluster, fault: str) -> None:
    code, stdout, stderr = made.make("test-cluster", "--json")
    assert code == 1, stdout + stderr
    rows = [(row["indicator"], row["reason"]) for row in json.loads(stdout)["indicators"] if row["verdict"] == "fail"]
    indicator, words = FAULTS[fault]
    assert rows[0][0] == indicator and words in rows[0][1], rows


def test_every_fault_of_the_stand_in_has_its_indicator() -> None:
    assert set(FAULTS) == set(script.FAULTS)
