"""Acceptance training in pods of a real cluster: API server, scheduler, two kubelets with containerd."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kube_nodes import Cluster, cluster
from trainmaster.cli.main import build

pytestmark = [pytest.mark.spawns, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


@pytest.fixture
def target(nodes: Cluster, tmp_path: Path) -> Callable[..., str]:
    def write(**more: Any) -> str:
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump(nodes.settings("default", **more)))
        return f"kubernetes:{path}"

    return write


ACCEPT = (
    "--model transformer --layers 1 --width 16 --heads 2 --sequence 8 --num-classes 11 --warmup-iterations 1 "
    "--batch-size 4 --active-iterations 3 --min-throughput 0.01 --backend gloo --timeout 60"
).split()


def accept(out: Path, on: str, *more: str) -> tuple[int, str]:
    words = ["accept", *ACCEPT, "--on", on, "--out", str(out), "--home", str(out.parent / "home"), *more]
    done = CliRunner().invoke(build(), words)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


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
