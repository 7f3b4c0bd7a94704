"""Spares in pods of a real cluster of three kubelets: a node is lost, and the run ends with the same losses."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.test_kubernetes import CONFIG, drive, is_final
from kube_nodes import Cluster
from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status
from trainmaster.store import events
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow

pytestmark = [pytest.mark.spawns, pytest.mark.timeout(600)]
STEPS = 400
TRAIN = {
    **CONFIG, "steps": STEPS, "epoch_steps": STEPS, "checkpoint": {"every_steps": 20, "mode": "sync", "lease_s": 2.0},
}  # fmt: skip
SPEC: dict[str, Any] = {
    "name": "trio", "train": TRAIN, "preflight": {"level": 0}, "limits": {"attempts": 1, "grace_s": 20},
    "env": {"OMP_NUM_THREADS": "1"},
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def third(nodes: Cluster) -> Iterator[None]:
    with nodes.third_node():
        yield


@pytest.fixture(autouse=True)
def restart_kubelets(nodes: Cluster, third: None) -> Iterator[None]:
    """Start those again that a test has killed."""
    yield
    for number, name in enumerate(list(nodes.kubelets)):
        if nodes.kubelets[name].poll() is not None:
            nodes.start_kubelet(number)
            nodes.wait_ready(name)


def losses(db: Database, job: JobRow) -> dict[int, float]:
    """Loss of each step; a step that was made again must have the same."""
    found: dict[int, set[float]] = {}
    for row in events.list_events(db, job.id, phase="STEP", limit=100_000):
        if row.event == "metrics":
            found.setdefault(int(row.data["step"]), set()).add(float(row.data["loss"]))
    assert all(len(values) == 1 for values in found.values()), "a step made again has another loss"
    return {step: values.pop() for step, values in found.items()}


def find_pods(nodes: Cluster, job: JobRow) -> dict[int, dict[str, Any]]:
    """The pod of each node."""
    items = nodes.kube.call("GET", "/api/v1/pods?labelSelector=trainmaster/node")["items"]
    return {
        int(item["metadata"]["labels"]["trainmaster/node"]): item
        for item in items
        if item["metadata"]["labels"]["trainmaster/attempt"] == f"{job.id}.1"
    }


def ctr(nodes: Cluster, name: str, *words: str) -> str:
    number = list(nodes.kubelets).index(name)
    command = ["ctr", "-a", f"{nodes.kube.folder}/ctd-{number}.sock", "-n", "k8s.io", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def lose_node(nodes: Cluster, pod: dict[str, Any]) -> None:
    """End the machine of a pod: its kubelet first, so that no word of the end gets out, then its containers."""
    where = pod["spec"]["nodeName"]
    nodes.kubelets[where].kill()
    nodes.kubelets[where].wait()
    for task in ctr(nodes, where, "tasks", "ls", "-q").split():
        ctr(nodes, where, "tasks", "kill", "-s", "SIGKILL", task)


def kill_pod(nodes: Cluster, pod: dict[str, Any]) -> None:
    """Kill the container of a pod and nothing else; the kubelet sees its end."""
    container = str(pod["status"]["containerStatuses"][0]["containerID"]).rpartition("/")[2]
    ctr(nodes, pod["spec"]["nodeName"], "tasks", "kill", "-s", "SIGKILL", container)


def count_left(nodes: Cluster) -> int:
    paths = ("/api/v1/pods", "/apis/batch/v1/jobs", "/api/v1/services", "/api/v1/configmaps")
    return sum(len(nodes.kube.call("GET", f"{path}?labelSelector=trainmaster/attempt")["items"]) for path in paths)


def has_saved(db: Database, job: JobRow) -> bool:
    return any(row.event == "saved" for row in events.list_events(db, job.id, phase="CHECKPOINT", limit=10))


def run_and_strike(
    db: Database, home: Path, nodes: Cluster, where: str, strike: Callable[[Cluster, dict[str, Any]], None], node: int
) -> JobRow:
    """Run a job of two nodes and a spare; strike the pod of a node once the run has saved. Its last state."""
    job = submitting.submit(db, parse_spec({**SPEC, "target": where, "resources": {"nodes": 2, "spares": 1}}))
    drive(db, home, job, lambda now: has_saved(db, now))
    pods = find_pods(nodes, job)
    assert sorted(pods) == [0, 1, 2]
    assert len({pod["spec"]["nodeName"] for pod in pods.values()}) == 3, "each on a machine of its own"
    strike(nodes, pods[node])
    return drive(db, home, job, is_final)


@pytest.mark.parametrize("strike", [lose_node, kill_pod])
@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_spare_takes_the_place_of_a_lost_pod(
    db: Database,
    tmp_path: Path,
    nodes: Cluster,
    target: Callable[..., str],
    strike: Callable[[Cluster, dict[str, Any]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = run_and_strike(db, tmp_path, nodes, target(), strike, 1)
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    assert count_left(nodes) == 0, "jobs, pods, service and plan are removed"
    recoveries = list(events.list_events(db, ended.id, phase="RECOVERY", limit=1000))
    assert [(row.event, row.data["how"]) for row in recoveries] == [("start", "spare"), ("done", "spare")]
    found = losses(db, ended)
    assert sorted(found) == list(range(1, STEPS + 1))
    whole = submitting.submit(db, parse_spec({**SPEC, "resources": {"processes_per_node": 2}}))
    assert drive(db, tmp_path, whole, is_final).status is Status.COMPLETED
    assert losses(db, whole) == found, "the losses of an undisturbed run"
    with capsys.disabled():
        print(f"\n[kubernetes] {strike.__name__}: a spare took over: {recoveries[-1].data}", end="")


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_the_loss_of_node_0_ends_an_attempt_with_a_spare(
    db: Database, tmp_path: Path, nodes: Cluster, target: Callable[..., str]
) -> None:
    ended = run_and_strike(db, tmp_path, nodes, target(), lose_node, 0)
    assert (ended.status, ended.reason) == (Status.FAILED, Reason.NODE_LOST), ended.message
    assert count_left(nodes) == 0
