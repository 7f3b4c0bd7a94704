"""Jobs by the files of deploy/kubernetes, as they are, in pods of real kubelets whose nodes answer as recorded H100."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_stand_in
import pytest
import yaml
from gpu_stand_in import INSIDE, NODE
from test_gpu_containers import SICK

import kube_nodes
import own_image
from kube_nodes import Cluster, cluster
from machines import Machine
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.results import UNSEEN
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status
from trainmaster.store import events
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job
from trainmaster.store.rows import JobRow

pytestmark = [
    pytest.mark.spawns,
    pytest.mark.timeout(900),
    pytest.mark.make("contract-containers"),  # minutes of CPU
]
DEPLOY = Path(__file__).parents[3] / "deploy" / "kubernetes"
IMAGE = "docker.io/library/trainmaster:1"  # as containerd writes the name in cluster.yaml
CONFIG = {
    "model": {"layers": 1, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 64}, "steps": 3, "batch_sequences": 8,
    "eval_sequences": 0, "sequence_tokens": 32, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the nodes' GPUs answer; rewritten by each test."""
    return gpu_stand_in.write(
        gpu_stand_in.recorded(tmp_path_factory.mktemp("h100")), tmp_path_factory.mktemp("n") / "r"
    )


@pytest.fixture(scope="module")
def nodes(node: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    given = [(place, place) for place in kube_nodes.python_folders()]
    given += [(str(node), INSIDE), (str(node / "pci"), "/sys/bus/pci/devices")]
    devices = [(f"/dev/nvidia{number}", 195, number) for number in range(NODE.gpus)]
    folder = tmp_path_factory.mktemp("image")
    with cluster(given, [*devices, ("/dev/nvidiactl", 195, 255)]) as made:
        with own_image.built(folder) as image:
            (folder / "Containerfile").write_text(
                f"FROM {own_image.NAME}\nENV PATH={INSIDE}/bin:/opt/trainmaster/bin:/usr/bin:/usr/sbin\n"
            )
            image.registry.podman(
                "build", "--quiet", "--tag", IMAGE, "--file", str(folder / "Containerfile"), str(folder)
            )
            image.registry.podman("save", "--quiet", "--output", str(folder / "own.tar"), IMAGE)
            made.import_images(folder / "own.tar")
        made.kube.call("POST", "/api/v1/namespaces", {"metadata": {"name": "training"}})
        _apply(made, DEPLOY / "rbac.yaml")
        yield made


def _apply(made: Cluster, path: Path) -> None:
    for one in yaml.safe_load_all(path.read_text()):
        group = "/api/v1" if one["apiVersion"] == "v1" else f"/apis/{one['apiVersion']}"
        inside = f"/namespaces/{one['metadata']['namespace']}" if "namespace" in one["metadata"] else ""
        made.kube.call("POST", f"{group}{inside}/{one['kind'].lower()}s", one)


@pytest.fixture
def run(
    nodes: Cluster, db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[JobRow, list[Any]]]:
    """Submit a job with a cluster file, and drive it to its end."""
    monkeypatch.setenv("KUBECONFIG", str(nodes.kube.kubeconfig()))

    def submit(file: str, **preflight: Any) -> tuple[JobRow, list[Any]]:
        spec = {"name": "h100", "target": f"kubernetes:{DEPLOY / file}", "train": CONFIG}
        job = submitting.submit(db, parse_spec({**spec, "preflight": {"expect": {"gpus": 8}, **preflight}}))
        ended = asyncio.run(_drive(db, tmp_path, job))
        return ended, events.list_events(db, job.id, limit=10_000)

    return submit


async def _drive(db: Database, home: Path, job: JobRow) -> JobRow:
    stop = asyncio.Event()
    loop = asyncio.create_task(reconcile.run(db, home, stop=stop, tick_s=0.2))
    try:
        async with asyncio.timeout(300):
            while True:
                now = find_job(db, job.id)
                assert now is not None
                if now.status.final:
                    return now
                await asyncio.sleep(0.2)
    finally:
        stop.set()
        await loop


def record(node: Path, folder: Path, damage: Callable[[Machine], None] | None) -> None:
    """Let the nodes answer as another recording. The folders stay: they are mounted."""
    fresh = gpu_stand_in.write(gpu_stand_in.recorded(folder, damage), folder / "fresh")
    shutil.copytree(fresh / "bin", node / "bin", dirs_exist_ok=True)


def of_xid(rows: list[Any]) -> Any:
    (row,) = (one for one in rows if (one.phase, one.event) == ("PREFLIGHT", "check") and one.data["check"] == "xid")
    return row.data


def test_a_healthy_node_trains_with_default_rights(run: Callable[..., Any], node: Path, tmp_path: Path) -> None:
    record(node, tmp_path, None)
    ended, rows = run("cluster.yaml")
    assert ended.status is Status.COMPLETED, (ended.reason, ended.message)
    assert of_xid(rows)["verdict"] == "warn" and of_xid(rows)["findings"][0]["values"][UNSEEN]
    assert [row.data["step"] for row in rows if (row.phase, row.event) == ("STEP", "metrics")] == [1, 2, 3]


def test_who_requires_the_log_is_refused_without_the_right(run: Callable[..., Any], node: Path, tmp_path: Path) -> None:
    record(node, tmp_path, None)
    ended, _ = run("cluster.yaml", require=["xid"])
    assert (ended.status, ended.reason) == (Status.FAILED, Reason.CHECK_INCOMPLETE)
    assert "the kernel log is closed" in (ended.message or "")


def test_the_profile_with_the_right_reads_the_log(run: Callable[..., Any], node: Path, tmp_path: Path) -> None:
    """This machine's own kernel log is judged; what it holds decides about the job."""
    record(node, tmp_path, None)
    _, rows = run("cluster-kernel-log.yaml", require=["xid"])
    assert not any(UNSEEN in finding["values"] for finding in of_xid(rows)["findings"])


@pytest.mark.parametrize("fault", SICK)
def test_a_sick_node_is_refused_by_the_name_of_its_fault(
    run: Callable[..., Any], node: Path, tmp_path: Path, fault: str
) -> None:
    name, damage = SICK[fault]
    record(node, tmp_path, damage)
    ended, rows = run("cluster.yaml")
    assert (ended.status, ended.reason) == (Status.FAILED, Reason.CHECK_FAILED)
    assert f"{name}: " in (ended.message or "")
    assert not any(row.phase == "STEP" for row in rows)
