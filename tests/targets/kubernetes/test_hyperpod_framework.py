"""HyperPod tests end to end on a real API server, with the stand-in of the operators.

test_hyperpod_clusters.py has every make target and every fault on six clusters; here: what a test leaves, interrupts,
other people's objects, edited manifests.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kube import Kube
from sims.kubernetes import script
from sims.kubernetes.clock import FastClock, SimulatedClock
from sims.kubernetes.operator import Operator, Settings
from trainmaster import targets
from trainmaster.cli.main import build
from trainmaster.cluster.hyperpod import manifest, objects, run
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Overall
from trainmaster.targets.kubernetes.client import Client
from trainmaster.targets.kubernetes.kubeconfig import load_access

pytestmark = pytest.mark.spawns
ROOT = Path(__file__).parents[3]
FRAMEWORK = ROOT / "compat" / "fsdp-hyperpod"
JOB = manifest.JOB_NAME
# The virtual environment of this test, as it is: make installs nothing. Relative: make takes no path with a space.
TOOLS = (f"BIN={os.path.relpath(Path(sys.executable).parent, ROOT)}", "--assume-old=.venv/.run")
SettingsFile = Callable[..., Path]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    """Time of the stand-in, and of the verbs that are called in this process."""
    made = SimulatedClock()
    monkeypatch.setattr("trainmaster.cluster.hyperpod.clock.WallClock", lambda: made)
    return made


def operator(kube: Kube, namespace: str, clock: SimulatedClock | FastClock, *faults: str) -> Operator:
    certs = kube.folder / "certs"
    return Operator(
        Settings(
            access=load_access(str(kube.kubeconfig()), None), namespace=namespace, clock=clock,
            certificate=certs / "apiserver.crt", key=certs / "apiserver.key", faults=frozenset(faults),
        )
    )  # fmt: skip


@pytest.fixture
def words(settings_file: SettingsFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command with a manifest of its own: two pods."""
    monkeypatch.setenv("TRAINMASTER_HOME", str(tmp_path / "home"))
    path = tmp_path / "fsdp-hpto.yaml"
    path.write_text(manifest.render(manifest.make(nodes=2)))
    on = f"hyperpod:{settings_file(kind='hyperpod')}"
    return [sys.executable, "-m", "trainmaster", "cluster", "test", "--on", on, "--manifest", str(path)]


def call(words: list[str], *more: str) -> tuple[int, Any]:
    """Exit code and output of a verb, in this process; words begin with those of a new interpreter."""
    done = CliRunner().invoke(build(guarded=True), [*words[3:], *more], env={"COLUMNS": "400"})
    return done.exit_code, parsed(done.stdout, done.stderr)


def parsed(stdout: str, stderr: str) -> Any:
    try:
        return json.loads(stdout)
    except ValueError:
        return stdout + stderr


def left(kube: Kube, namespace: str) -> set[str]:
    found: set[str] = set()
    for path in ("/api/v1/{}/pods", "/api/v1/{}/configmaps", "/apis/sagemaker.amazonaws.com/v1/{}/hyperpodpytorchjobs"):
        items = kube.call("GET", path.format(f"namespaces/{namespace}"))["items"]
        found |= {one["metadata"]["name"] for one in items}
    return found - {"kube-root-ca.crt"}


def verdicts(answer: Any) -> dict[str, str]:
    assert isinstance(answer, dict), answer
    return {one["indicator"]: one["verdict"] for one in answer["indicators"]}


def test_the_quick_test_passes_and_leaves_what_was_there_before(
    kube: Kube, namespace: str, words: list[str], clock: SimulatedClock
) -> None:
    other = {"metadata": {"name": "other", "labels": {"job-name": JOB}}, "data": {}}
    kube.call("POST", f"/api/v1/namespaces/{namespace}/configmaps", other)
    with operator(kube, namespace, clock):
        code, answer = call(words, "--action", "quick-test", "--json")
        assert (code, set(verdicts(answer).values())) == (0, {"pass"}), answer
        assert left(kube, namespace) == {"other"}


@pytest.mark.matrix(one_in=4, of="HyperPod tests on a stand-in")
def test_the_full_test_passes_with_the_rate_of_plan_as_its_baseline(
    kube: Kube, namespace: str, words: list[str], clock: SimulatedClock
) -> None:
    planned = script.plan_figures(
        {**manifest.TRAIN, "batch_tokens": 16 * 8192}, gpu="H100-SXM", nodes=2, per_node=8
    )  # the GPUs of two p5.48xlarge
    with operator(kube, namespace, clock):
        baseline = ("--baseline-tokens-per-s", str(round(planned.tokens_per_s)))
        code, answer = call(words, "--action", "full-test", "--json", *baseline)
    assert (code, answer["overall"]) == (0, "PASS"), answer
    assert set(verdicts(answer).values()) == {"pass"} and len(answer["indicators"]) == 10
    values = {one["indicator"]: one["values"] for one in answer["indicators"]}
    assert values["network"] == {"gbps": 8 * planned.bus_gbps}
    assert values["gpu_memory"] == {"gib": pytest.approx(planned.memory_gib)}
    assert left(kube, namespace) == set()


@pytest.mark.matrix(one_in=4, of="HyperPod tests on a stand-in")
def test_a_model_that_does_not_fit_is_told_before_and_fails(
    kube: Kube, namespace: str, words: list[str], clock: SimulatedClock
) -> None:
    """A model that the user wrote stays as it is."""
    path = Path(words[words.index("--manifest") + 1])
    large = manifest.make(nodes=2, train={"model": {"preset": "llama3.1-70b"}})
    path.write_text(manifest.render(large))
    with operator(kube, namespace, clock):
        done = CliRunner().invoke(build(guarded=True), [*words[3:], "--json"], env={"COLUMNS": "400"})
    assert done.exit_code == 1 and "llama3.1-70b on 16 × H100-SXM on 2 nodes needs" in done.stderr, done.output
    assert "it will not fit" in done.stderr
    (found,) = [one for one in json.loads(done.stdout)["indicators"] if one["verdict"] == "fail"]
    assert found["indicator"] == "pods_running" and "ended with 1" in found["reason"], found


@pytest.mark.matrix(one_in=4, of="HyperPod tests on a stand-in")
def test_a_container_that_was_restarted_once_fails_and_the_rest_is_still_measured(
    kube: Kube, namespace: str, words: list[str], clock: SimulatedClock
) -> None:
    with operator(kube, namespace, clock, "restart"):
        code, answer = call(words, "--action", "quick-test", "--json")
    assert (code, answer["overall"]) == (1, "FAIL"), answer
    assert [name for name, word in verdicts(answer).items() if word != "pass"] == ["pods_running"]
    (found,) = [one for one in answer["indicators"] if one["indicator"] == "pods_running"]
    pod, (container,) = f"{JOB}-pods-1", {one["container"] for one in found["values"]["restarts"]}
    assert found["reason"] == f"{pod}: container {container} was restarted once; it had ended with 137 OOMKilled"
    assert found["values"]["restarts"] == [
        {"pod": pod, "container": container, "restarts": 1, "exit_code": 137, "reason": "OOMKilled"}
    ]


@pytest.mark.matrix(one_in=4, of="HyperPod tests on a stand-in")
def test_status_logs_run_and_cleanup(kube: Kube, namespace: str, words: list[str], clock: SimulatedClock) -> None:
    code, answer = call(words, "--action", "status")
    assert code == 0 and answer["job_exists"] is False
    code, said = call(words, "--action", "describe")
    assert code != 0 and f"no job {JOB} in namespace {namespace}" in said, said
    with operator(kube, namespace, clock):
        assert call(words, "--action", "run")[0] == 0
        code, said = call(words, "--action", "quick-test", "--monitor-duration", "1")
        assert code == 2 and "make stop" in said
        wait_for(lambda: len(call(words, "--action", "status")[1]["pods"]) == 2)
        _, answer = call(words, "--action", "status")
        assert answer["job_exists"] and answer["timestamp"]
        status = answer["job_status"]
        assert [one["type"] for one in status["conditions"]] == ["Created", "PodsRunning", "Running"]
        assert (status["masterAddr"], status["masterPort"]) == ("10.2.8.64", "1234")
        assert [node["ready"] for node in answer["nodes"]] == [True, True]
        asyncio.run(clock.sleep(90.0))
        code, said = call(words, "--action", "logs")
        assert code == 0 and f"[{JOB}-pods-1]" in said and "Loss:" in said
        assert call(words, "--action", "cleanup")[0] == 0
        assert left(kube, namespace) == set()


@pytest.mark.matrix(one_in=4, of="HyperPod tests on a stand-in")
def test_the_quick_test_runs_as_a_make_target(kube: Kube, namespace: str, words: list[str]) -> None:
    """By make itself and a new interpreter; its two seconds are as many minutes of the cluster."""
    args = shlex.join([*words[words.index("--on") :], "--monitor-duration", "2"])
    with operator(kube, namespace, FastClock(60.0)):
        done = subprocess.run(
            ["make", "--no-print-directory", "test-quick", f"ARGS={args}", *TOOLS],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0 and "\nPASS\n" in done.stdout, done.stdout + done.stderr
        assert left(kube, namespace) == set()


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_test_is_cleaned_up(
    kube: Kube, namespace: str, words: list[str], clock: SimulatedClock, number: signal.Signals
) -> None:
    with operator(kube, namespace, clock):
        child = subprocess.Popen([*words, "--monitor-duration", "60"], stdout=subprocess.DEVNULL)
        wait_for(lambda: len(left(kube, namespace)) >= 3)
        os.kill(child.pid, number)
        assert child.wait(60) != 0
        if number == signal.SIGKILL:
            assert left(kube, namespace)
            code, answer = call(words, "--json")
            assert code == 0, answer
        assert left(kube, namespace) == set()


@pytest.mark.matrix(one_in=4, of="HyperPod tests on a stand-in")
def test_reap_removes_what_a_killed_test_left_and_leaves_one_that_runs(
    kube: Kube, namespace: str, words: list[str], clock: SimulatedClock
) -> None:
    on = words[words.index("--on") + 1]
    reap = [sys.executable, "-m", "trainmaster", "reap", "--no-database", "--on", on, "--yes"]
    with operator(kube, namespace, clock):
        child = subprocess.Popen([*words, "--monitor-duration", "60"], stdout=subprocess.DEVNULL)
        wait_for(lambda: len(left(kube, namespace)) >= 3)
        there = left(kube, namespace)
        assert call(reap)[0] == 0 and left(kube, namespace) >= there
        child.kill()
        child.wait(60)
        code, ended = call(reap, "--json")
        assert code == 0 and f"HyperPodPyTorchJob {namespace}/{JOB}" in json.dumps(ended), ended
        assert left(kube, namespace) == set()


def test_reap_does_not_touch_a_job_that_another_made_under_the_name_of_the_manifest(
    kube: Kube, namespace: str, settings_file: SettingsFile
) -> None:
    """A test that was killed before its job was there has left its plan alone."""
    marks = objects.make_marks(JOB, None)
    plan, job = manifest.make(nodes=2)
    target = targets.load(f"hyperpod:{settings_file(kind='hyperpod')}")
    assert isinstance(target, targets.Lists)

    async def go() -> None:
        client = Client(load_access(str(kube.kubeconfig()), None))
        await objects.create(client, [objects.mark(plan, namespace, marks)])
        job["metadata"]["namespace"] = namespace
        await client.post(f"/apis/{job['apiVersion']}/namespaces/{namespace}/hyperpodpytorchjobs", job)
        (owned,) = await target.list_owned()
        await target.release({**owned.handle, "kind": "hyperpod"})
        await client.close()
        await targets.close()

    asyncio.run(go())
    assert left(kube, namespace) == {JOB}
    kube.call("GET", f"/apis/{job['apiVersion']}/namespaces/{namespace}/hyperpodpytorchjobs/{JOB}")


def test_an_object_of_another_is_not_taken_over(kube: Kube, namespace: str, words: list[str]) -> None:
    made = {"metadata": {"name": JOB}, "data": {"mine": "1"}}
    kube.call("POST", f"/api/v1/namespaces/{namespace}/configmaps", made)
    code, said = call(words, "--monitor-duration", "1")
    assert code == 2 and "was not created by this test" in said
    assert kube.call("GET", f"/api/v1/namespaces/{namespace}/configmaps/{JOB}")["data"] == {"mine": "1"}


def plan_of(namespace: str, home: Path) -> run.TestPlan:
    return run.TestPlan(
        manifest=manifest.make(nodes=2), namespace=namespace, home=home, planned=("pods_running",), monitor_s=0.1,
        start_limit_s=0.3, look_s=0.1,
    )  # fmt: skip


def test_the_later_of_two_tests_that_begin_at_once_leaves_the_other_alone(
    kube: Kube, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(load_access(str(kube.kubeconfig()), None))
    other = objects.prepare(manifest.make(nodes=2), namespace, objects.make_marks(JOB, targets.Run(tmp_path)))

    async def look(_self: object) -> None:
        await objects.create(client, other)  # after this test has looked for others

    monkeypatch.setattr(run._Test, "find_unready_nodes", look)

    async def go() -> None:
        with pytest.raises(UsageError, match="was not created by this test"):
            await run.run(client, plan_of(namespace, tmp_path), lambda _: None)
        await client.close()

    asyncio.run(go())
    assert left(kube, namespace) == {JOB}
    assert kube.call("GET", f"/api/v1/namespaces/{namespace}/configmaps/{JOB}")["metadata"]["name"] == JOB


def test_pods_of_another_job_with_the_same_label_are_not_counted(kube: Kube, namespace: str, tmp_path: Path) -> None:
    """A plain Job of the same name gives its pods the label job-name too."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    for number in (0, 1):
        spec = {"containers": [{"name": "t", "image": "x"}]}
        kube.call("POST", path, {"metadata": {"name": f"p-{number}", "labels": {"job-name": JOB}}, "spec": spec})
        running = {"name": "t", "state": {"running": {}}, "ready": True, "restartCount": 0, "image": "x", "imageID": ""}
        status = {"status": {"phase": "Running", "containerStatuses": [running]}}
        kube.call("PATCH", f"{path}/p-{number}/status", status, kind="application/merge-patch+json")

    async def go() -> run.Outcome:
        client = Client(load_access(str(kube.kubeconfig()), None))
        try:
            return await run.run(client, plan_of(namespace, tmp_path), lambda _: None)
        finally:
            await client.close()

    outcome = asyncio.run(go())
    assert (outcome.overall, outcome.measured.pods_running) == (Overall.FAIL, 0)
    assert left(kube, namespace) == {"p-0", "p-1"}


def test_setup_is_judged_by_what_the_manifest_needs(
    kube: Kube, namespace: str, words: list[str], clock: SimulatedClock
) -> None:
    with operator(kube, namespace, clock, "not-ready"):
        code, answer = call(words, "--action", "validate-setup", "--json")
    found = verdicts(answer)
    assert code == 1 and found["cluster_access"] == found["operator"] == "pass"
    assert found["gpu_nodes"] == found["storage_claims"] == "fail"


def test_the_manifest_in_the_clone_is_the_one_that_a_dry_run_prints() -> None:
    assert (FRAMEWORK / "FSDP" / "kubernetes" / "fsdp-hpto.yaml").read_text() == manifest.render(manifest.make())


def test_pods_carry_the_label_and_checkpoints_go_to_fsx() -> None:
    plan, job = yaml.safe_load_all(manifest.render(manifest.make()))
    assert manifest.pod_template(job)["metadata"]["labels"]["job-name"] == JOB
    assert json.loads(plan["data"]["train.json"])["checkpoint"]["folder"] == "/fsx/checkpoints"


def test_the_framework_of_this_clone_is_whole() -> None:
    program = [sys.executable, str(FRAMEWORK / "tools" / "validate_test_setup.py"), "--json"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=100)
    code, answer = done.returncode, parsed(done.stdout, done.stderr)
    assert set(verdicts(answer)) == {"files", "scripts", "programs", "make_targets"}
    assert [name for name, word in verdicts(answer).items() if word == "fail"] in ([], ["programs"])
    assert code == (0 if answer["overall"] == "PASS" else 1)


def wait_for(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(0.05)
