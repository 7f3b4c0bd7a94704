"""Checks, collectives and acceptance training in pods of a real cluster: API server, scheduler, two kubelets."""

from __future__ import annotations

import json
import os
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

from kube import LIMITED
from kube_nodes import GPUS, Cluster
from trainmaster.cli.main import build
from trainmaster.cluster.health.gather import OFFER
from trainmaster.targets.kubernetes import nodes as pod_nodes
from trainmaster.targets.kubernetes.node_list import NO_GPU

ROOT, ATTEMPT = Path(__file__).parents[2], "trainmaster/attempt"
pytestmark = [pytest.mark.spawns, pytest.mark.timeout(600)]


ACCEPT = (
    "--model transformer --layers 1 --width 16 --heads 2 --sequence 8 --num-classes 11 --warmup-iterations 1 "
    "--batch-size 4 --active-iterations 3 --min-throughput 0.01 --backend gloo --timeout 60"
).split()


def accept(out: Path, on: str, *more: str) -> tuple[int, str]:
    words = ["accept", *ACCEPT, "--on", on, "--out", str(out), "--home", str(out.parent / "home"), *more]
    done = CliRunner().invoke(build(), words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_cluster_is_accepted_by_training_in_a_pod_of_every_node(
    tmp_path: Path, nodes: Cluster, target: Callable[..., str]
) -> None:
    out = tmp_path / "results.json"
    code, text = accept(out, target(kind="pytorchjob"))
    found = json.loads(out.read_text())
    assert (code, found["world_size"], found["nodes"]) == (found["exit_code"], 2, 2), text
    fine = ("pass", "warn", "skip")
    rest = {one["check"] for one in found["checks"] for finding in one["findings"] if finding["verdict"] not in fine}
    assert rest <= {"accept_stragglers"}, found["checks"]  # both pods share the cores of this machine
    assert len({one["host"] for one in found["ranks"]}) == 2
    assert nodes.kube.call("GET", "/api/v1/pods?labelSelector=app=gpu-acceptance-test")["items"] == []
    assert nodes.kube.call("GET", "/apis/kubeflow.org/v1/pytorchjobs")["items"] == []


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_rank_that_dies_in_a_pod_is_named(tmp_path: Path, target: Callable[..., str]) -> None:
    out = tmp_path / "results.json"
    code, text = accept(out, target(kind="pytorchjob"), "--inject", "exit:1")
    (finding,) = json.loads(out.read_text())["checks"][0]["findings"]
    assert (code, finding["verdict"], finding["device"]) == (1, "fail", "rank1"), text


def test_the_plan_of_an_acceptance_has_every_node_and_creates_nothing(
    tmp_path: Path, nodes: Cluster, target: Callable[..., str]
) -> None:
    code, text = accept(tmp_path / "results.json", target(kind="pytorchjob"), "--dry-run", "plan")
    job = next(one for one in yaml.safe_load_all(text) if one["kind"] == "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (code, replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (0, 1, 1)
    assert job["metadata"]["labels"]["app"] == "gpu-acceptance-test"
    assert nodes.kube.call("GET", "/apis/kubeflow.org/v1/pytorchjobs")["items"] == []


def ask(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(build(guarded=True), words, env={"COLUMNS": "300"})
    return done.exit_code, done.output


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_every_node_is_checked_and_measured_in_a_pod_of_its_own(
    tmp_path: Path, nodes: Cluster, target: Callable[..., str]
) -> None:
    where, merge = target(), "application/merge-patch+json"
    nodes.kube.call("PATCH", "/api/v1/nodes/node-b", {"spec": {"unschedulable": True}}, kind=merge)
    try:
        bundle = tmp_path / "bundle"
        words = ("--only", "shm", "--only", "hostname", "--home", str(tmp_path / "home"), "--out", str(bundle))
        code, text = ask("check", "--on", where, *words)
        health = json.loads((bundle / "health.json").read_text())
        assert (code, health["silent"]) == (0, []), text
        assert [(one["node"], len(one["results"])) for one in health["nodes"]] == [("node-a", 2), ("node-b", 2)]
    finally:
        nodes.kube.call("PATCH", "/api/v1/nodes/node-b", {"spec": {"unschedulable": False}}, kind=merge)
    sizes = ("--collective", "all_reduce", "--min", "8K", "--max", "8K", "--backend", "gloo")
    code, text = ask("bandwidth", "--on", where, *sizes, "--json")
    found = json.loads(text[text.index("{") :])
    assert [row["busbw_gbps"] > 0 for row in found["rows"]] == [True], text
    assert (code, found["silent"]) == (found["exit_code"], {})
    code, text = ask("isolate", "--on", where, "--size", "64K", "--max-rounds", "1", "--json")
    found = json.loads(text[text.index("{") :])
    assert (found["silent"], found["diagnosis"]["measurements"]) == ({}, 1), text
    left = nodes.kube.call("GET", "/api/v1/pods?labelSelector=trainmaster/attempt")["items"]
    assert left == [] and nodes.kube.call("GET", "/apis/batch/v1/jobs")["items"] == []


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("check", ("--only", "shm")),
        ("bandwidth", ("--max", "8K", "--backend", "gloo")),
        ("isolate", ("--size", "64K", "--max-rounds", "1")),
        ("accept", ACCEPT),
    ],
)
def test_a_terminated_run_deletes_its_pods(
    tmp_path: Path, nodes: Cluster, target: Callable[..., str], verb: str, words: tuple[str, ...]
) -> None:
    def left() -> list[Any]:
        pods = nodes.kube.call("GET", "/api/v1/namespaces/default/pods?labelSelector=trainmaster/attempt")["items"]
        kinds = ("/apis/batch/v1/jobs", "/apis/kubeflow.org/v1/pytorchjobs")
        return [*pods, *(one for path in kinds for one in nodes.kube.call("GET", path)["items"])]

    assert left() == []
    more = {"check": ("--home", str(tmp_path / "home")), "accept": ("--out", str(tmp_path / "results.json"))}
    where = target(kind="pytorchjob") if verb == "accept" else target()
    command = [sys.executable, "-m", "trainmaster", verb, "--on", where, *words, *more.get(verb, ())]
    child = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "TRAINMASTER_HOME": str(tmp_path / "home")})
    until = time.monotonic() + 120
    while len(left()) < 2:
        assert child.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    assert child.wait(100) == 130
    assert left() == []


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_node_whose_gpus_are_in_use_is_silent_and_the_other_answers(
    tmp_path: Path, nodes: Cluster, target: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_nodes, "_FREE_S", 1.0)
    where = target(gpus=None)
    busy = nodes.settings("default", gpus=GPUS)
    pod = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "busy"},
        "spec": {"nodeName": "node-a", "terminationGracePeriodSeconds": 0, "containers": [
            {"name": "c", "image": busy["image"], "command": ["/pause/busybox", "sleep", "600"],
             "resources": {"limits": {"nvidia.com/gpu": str(GPUS)}}},
        ]},
    }  # fmt: skip
    nodes.kube.call("POST", "/api/v1/namespaces/default/pods", pod)
    try:
        code, text = ask("check", "--on", where, "--only", "shm", "--home", str(tmp_path / "home"), "--json")
        health = json.loads(text[text.index("{") :])
        (silent,) = health["silent"]
        assert (code, silent["node"], [one["node"] for one in health["nodes"]]) == (3, "node-a", ["node-b"]), text
        assert "its GPUs are in use" in silent["reason"] and "nvidia.com/gpu" in silent["reason"]
    finally:
        nodes.kube.call("DELETE", "/api/v1/namespaces/default/pods/busy?gracePeriodSeconds=0")


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_node_that_lost_its_gpus_is_named_and_a_pod_without_gpus_is_no_pass(
    tmp_path: Path, nodes: Cluster, target: Callable[..., str]
) -> None:
    def set_gpus(count: int) -> None:
        capacity, merge = {"status": {"capacity": {"nvidia.com/gpu": str(count)}}}, "application/merge-patch+json"
        nodes.kube.call("PATCH", "/api/v1/nodes/node-b/status", capacity, kind=merge)
        until = time.monotonic() + 60
        while nodes.kube.call("GET", "/api/v1/nodes/node-b")["status"]["allocatable"]["nvidia.com/gpu"] != str(count):
            assert time.monotonic() < until
            time.sleep(0.2)

    set_gpus(0)  # so does a kubelet that was restarted while the device plugin was gone
    try:
        where = target(gpus=None)
        code, text = ask("check", "--on", where, "--only", "gpu_count", "--home", str(tmp_path / "home"), "--json")
        health = json.loads(text[text.index("{") :])
        assert (code, health["asked"]) == (3, ["node-a", "node-b"]), text
        assert [(one["node"], one["reason"]) for one in health["silent"]] == [("node-b", NO_GPU)]
        (found,) = next(one["findings"] for one in health["cluster"] if one["check"] == OFFER)
        assert (found["verdict"], found["device"]) == ("error", "node-a") and "found none" in found["reason"]
    finally:
        set_gpus(GPUS)


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_an_account_with_the_shipped_rights_is_sent_to_those_of_a_shell(
    tmp_path: Path, nodes: Cluster, target: Callable[..., str]
) -> None:
    made, api = [], "/apis/rbac.authorization.k8s.io/v1"
    for one in yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "rbac.yaml").read_text()):
        if one["kind"] == "ServiceAccount":
            continue
        if "namespace" in one["metadata"]:
            one["metadata"]["namespace"] = "default"
        if "subjects" in one:
            one["subjects"] = [{"kind": "User", "name": "limited", "apiGroup": "rbac.authorization.k8s.io"}]
        place = f"{api}{'' if one['kind'].startswith('Cluster') else '/namespaces/default'}/{one['kind'].lower()}s"
        nodes.kube.call("POST", place, one)
        made.append(f"{place}/{one['metadata']['name']}")
    try:
        where = target(kubeconfig=str(nodes.kube.kubeconfig(LIMITED)))
        code, text = ask("check", "--on", where, "--only", "shm", "--home", str(tmp_path / "home"), "--json")
        health = json.loads(text[text.index("{") :])
        assert (code, [one["node"] for one in health["silent"]]) == (3, ["node-a", "node-b"]), text
        for one in health["silent"]:
            assert "may not get pods" in one["reason"] and "trainmaster cluster rights --shell" in one["reason"]
            assert "apply deploy" not in one["reason"]
    finally:
        for path in made:
            nodes.kube.call("DELETE", path)
    assert nodes.kube.call("GET", "/apis/batch/v1/jobs")["items"] == []


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_second_ctrl_c_leaves_no_pod(tmp_path: Path, nodes: Cluster, target: Callable[..., str]) -> None:
    def left() -> list[Any]:
        paths = ("/api/v1/namespaces/default/pods", "/apis/batch/v1/jobs", "/api/v1/namespaces/default/configmaps")
        found = [one for path in paths for one in nodes.kube.call("GET", f"{path}?labelSelector={ATTEMPT}")["items"]]
        return [one["metadata"]["name"] for one in found]

    command = [sys.executable, "-m", "trainmaster", "check", "--on", target(), "--only", "shm"]
    child = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "TRAINMASTER_HOME": str(tmp_path / "home")}, stderr=subprocess.PIPE
    )
    until = time.monotonic() + 120
    while len(left()) < 4:
        assert child.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    for _ in range(2):
        child.send_signal(signal.SIGINT)
        time.sleep(0.3)
    said = child.communicate(timeout=100)[1].decode()
    assert (child.returncode, left()) == (130, []), said
    assert "Ctrl-C once more leaves it there" in said


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_pod_that_is_evicted_during_its_checks_is_told_as_that(
    tmp_path: Path, nodes: Cluster, target: Callable[..., str]
) -> None:
    settings, begun = nodes.settings("default"), nodes.kube.folder / "shared" / "begun"
    hangs = begun.with_name("hangs")
    hangs.write_text(
        f"#!/bin/sh\n'''exec' \"{settings['python']}\" \"$0\" \"$@\"\n' '''\nimport os, sys, time\n"
        "if 'bootstrap' in sys.argv[2]:\n    open('/shared/begun', 'w').close()\n    time.sleep(600)\n"
        f"os.execv({settings['python']!r}, [{settings['python']!r}, *sys.argv[1:]])\n"
    )
    hangs.chmod(0o755)
    where = target(python="/shared/hangs", not_nodes=["node-a"])
    command = [sys.executable, "-m", "trainmaster", "check", "--on", where, "--only", "shm", "--json"]
    child = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "TRAINMASTER_HOME": str(tmp_path / "home")}, stdout=subprocess.PIPE
    )
    until = time.monotonic() + 120
    while not begun.exists():
        assert child.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    pods = "/api/v1/namespaces/default/pods"
    (name,) = (one["metadata"]["name"] for one in nodes.kube.call("GET", f"{pods}?labelSelector={ATTEMPT}")["items"])
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": name}}
    nodes.kube.call("POST", f"{pods}/{name}/eviction", eviction)
    (silent,) = json.loads(child.communicate(timeout=100)[0])["silent"]
    assert (child.returncode, silent["node"]) == (3, "node-b") and "its pod ended: " in silent["reason"], silent
    assert nodes.kube.call("GET", "/apis/batch/v1/jobs")["items"] == []


def list_marked(nodes: Cluster) -> list[str]:
    """Names of everything that runs have made in the namespace."""
    paths = ("/api/v1/namespaces/default/pods", "/apis/batch/v1/jobs", "/api/v1/namespaces/default/configmaps")
    return [
        f"{path.rpartition('/')[2]}/{one['metadata']['name']}"
        for path in paths
        for one in nodes.kube.call("GET", f"{path}?labelSelector=trainmaster/run")["items"]
    ]


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_what_a_killed_check_left_is_removed_by_the_next_one_of_its_home_and_by_reap(
    tmp_path: Path, nodes: Cluster, target: Callable[..., str]
) -> None:
    where = target()

    def kill_a_check(home: str) -> None:
        before, command = len(list_marked(nodes)), [sys.executable, "-m", "trainmaster", "check", "--on", where]
        child = subprocess.Popen([*command, "--only", "shm", "--home", str(tmp_path / home)], cwd=tmp_path)
        until = time.monotonic() + 120
        while len(list_marked(nodes)) < before + 4:  # a job and a plan on each node
            assert child.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        child.kill()
        child.wait()

    def reap(home: str, *more: str) -> tuple[int, list[dict[str, Any]]]:
        words = ("reap", "--on", where, "--no-database", "--home", str(tmp_path / home), "--json", *more)
        code, text = ask(*words)
        return code, json.loads(text[text.index("{") :])["leftovers"]

    kill_a_check("one")
    theirs = list_marked(nodes)
    code, text = ask("check", "--on", where, "--only", "shm", "--home", str(tmp_path / "two"), "--json")
    assert code == 0 and json.loads(text[text.index("{") :])["silent"] == [], text
    assert set(theirs) <= set(list_marked(nodes)), "another home's are untouched"
    code, listed = reap("two", "--yes")
    assert (code, {one["ours"] for one in listed}) == (0, {False}) and set(theirs) <= set(list_marked(nodes))
    code, text = ask("check", "--on", where, "--only", "shm", "--home", str(tmp_path / "one"), "--json")
    assert code == 0 and list_marked(nodes) == [], "the next check of the home removes them"

    kill_a_check("one")
    for job in nodes.kube.call("GET", "/apis/batch/v1/jobs?labelSelector=trainmaster/run")["items"]:
        path = f"/apis/batch/v1/namespaces/default/jobs/{job['metadata']['name']}?propagationPolicy=Background"
        nodes.kube.call("DELETE", path)  # as the cluster does some time after its end: the plans stay
    code, listed = reap("one")
    assert code == 1 and [one["what"].partition(" ")[0] for one in listed] == ["ConfigMap"] * 2
    assert {(one["ours"], one["why"]) for one in listed} == {(True, "its run is gone")}
    code, listed = reap("one", "--yes")
    assert (code, [one["result"] for one in listed]) == (0, ["ended"] * 2) and list_marked(nodes) == []
