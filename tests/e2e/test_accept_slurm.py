"""Acceptance on a real Slurm: `srun` starts a task per rank, and each finds its rank in Slurm's variables."""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm import Cluster
from trainmaster.bench.accept.options import Options
from trainmaster.cli._documents.hosts_file import load_nodes
from trainmaster.cluster import acceptance_slurm
from trainmaster.cluster.slurm_nodes import SlurmNode, SlurmNodes

pytestmark = pytest.mark.timeout(600)
SMALL = Options(
    model="transformer", layers=1, width=16, heads=2, sequence=8, num_classes=11, batch_size=4, warmup_iterations=1,
    active_iterations=3, min_throughput=0.01, backend="gloo", processes=1,
)  # fmt: skip


@pytest.fixture
def nodes(slurm: Cluster, tmp_path: Path) -> SlurmNodes:
    document = {
        "folder": str(slurm.folder / "shared"), "python": sys.executable, "defaults": {"nodelist": ["n1", "n2"]},
        "env": {"SLURM_CONF": str(slurm.conf)},
    }  # fmt: skip
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(document))
    found = load_nodes(f"slurm:{tmp_path / 'cluster.yaml'}", verb="accept")
    assert isinstance(found, SlurmNodes)
    return found


@pytest.mark.slow
def test_a_cluster_is_accepted_through_srun(nodes: SlurmNodes) -> None:
    document = acceptance_slurm.accept(nodes, SMALL)
    assert (document.get("world_size"), document.get("nodes")) == (2, 2), document["checks"]
    assert document["total_samples"] == 2 * 4 * 3


def test_an_srun_that_fails_is_incomplete(nodes: SlurmNodes) -> None:
    gone = SlurmNode(name="nowhere", states=("IDLE",), reason="", gpus="")
    document = acceptance_slurm.accept(SlurmNodes(settings=nodes.settings, nodes=(gone,)), SMALL)
    assert document["overall"] == "INCOMPLETE"
    assert "srun ended with" in document["checks"][0]["findings"][0]["reason"]


@pytest.mark.parametrize(
    ("told", "code", "whole"),
    [(0, 0, True), (0, 1, False), (0, 143, False), (1, 1, True), (1, 143, True), (3, 137, True), (1, 0, False),
     (1, None, False), (None, 0, False)],
)  # fmt: skip
def test_a_measured_fail_is_one_although_srun_killed_the_other_ranks(told: Any, code: Any, whole: bool) -> None:
    document = {"world_size": 2, "exit_code": told}
    assert acceptance_slurm.ended_as_told(document, world=2, code=code) is whole
    assert not acceptance_slurm.ended_as_told(document, world=3, code=code)


def test_ranks_follow_the_gpus_of_the_nodes(nodes: SlurmNodes) -> None:
    node = SlurmNode(name="n1", states=("IDLE",), reason="", gpus="gpu:h100:8,gpu:2")
    assert acceptance_slurm.count_gpus(node) == 10
    words = acceptance_slurm.plan(nodes, Options(batch_size=64), name="a", per_node=4, package="/p.zip", limit_s=600)
    assert "--ntasks=8" in words and "--ntasks-per-node=4" in words and "--nodelist=n1,n2" in words
    assert words[-4:] == ["--batch-size", "64", "--out", "-"]


def test_ranks_meet_at_the_address_of_the_first_node(nodes: SlurmNodes) -> None:
    def masters(cluster: SlurmNodes) -> list[str]:
        words = acceptance_slurm.plan(cluster, SMALL, name="a", per_node=1, package="/p.zip", limit_s=600)
        return [word for word in words if word.startswith("MASTER_ADDR=")]

    assert masters(nodes) == ["MASTER_ADDR=127.0.0.2"], "n1 resolves nowhere, and the ranks would wait for it"
    stated = replace(nodes.settings, env=(*nodes.settings.env, ("MASTER_ADDR", "10.0.0.9")))
    assert masters(SlurmNodes(settings=stated, nodes=nodes.nodes)) == [], "that of the cluster file is in srun's own"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_job(slurm: Cluster, nodes: SlurmNodes, number: signal.Signals) -> None:
    def held() -> bool:
        return "gpu-acceptance" in slurm.call("squeue", "--noheader", "--format=%j")

    def interrupt() -> None:
        slurm.wait(held)
        signal.pthread_kill(main, number)

    main = threading.get_ident()
    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        acceptance_slurm.accept(nodes, SMALL)
    other.join()
    slurm.wait(lambda: not held(), limit_s=30)
