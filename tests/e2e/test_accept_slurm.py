"""Acceptance on a real Slurm: `srun` starts a task per rank, and each finds its rank in Slurm's variables."""

from __future__ import annotations

import asyncio
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
from trainmaster.cluster.acceptance.judge import is_whole, judge_job
from trainmaster.cluster.acceptance.run import accept, make_job
from trainmaster.targets._runs import Owner
from trainmaster.targets.slurm import create
from trainmaster.targets.slurm.cluster_job import SlurmClusterJob
from trainmaster.targets.slurm.node_list import SlurmNode, count_gpus, list_nodes
from trainmaster.targets.slurm.queue import queue
from trainmaster.targets.slurm.settings import SlurmSettings
from trainmaster.targets.slurm.target import Slurm

pytestmark = pytest.mark.timeout(600)
SMALL = Options(
    model="transformer", layers=1, width=16, heads=2, sequence=8, num_classes=11, batch_size=4, warmup_iterations=1,
    active_iterations=3, min_throughput=0.01, backend="gloo", processes=1,
)  # fmt: skip


@pytest.fixture
def target(slurm: Cluster, tmp_path: Path) -> Slurm:
    document = {
        "folder": str(slurm.folder / "shared"), "python": sys.executable, "defaults": {"nodelist": ["n1", "n2"]},
        "env": {"SLURM_CONF": str(slurm.conf)},
    }  # fmt: skip
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(document))
    return create(str(tmp_path / "cluster.yaml"))


def plan(
    target: Slurm, home: Path, *nodes: SlurmNode, options: Options = SMALL, settings: SlurmSettings | None = None
) -> SlurmClusterJob:
    """The job on these nodes; on those of the cluster where none is given."""

    async def found() -> list[SlurmNode]:
        return list(nodes) or await list_nodes(queue(target.settings), target.settings)

    return SlurmClusterJob(target, settings or target.settings, asyncio.run(found()), make_job(options), home=home)


def command(planned: SlurmClusterJob) -> list[str]:
    return planned.command(name="a", owner=Owner(home="0" * 8, run="1" * 12), package="/p.zip")


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
@pytest.mark.slow
def test_a_cluster_is_accepted_through_srun(target: Slurm, tmp_path: Path) -> None:
    document = accept(target, SMALL, home=tmp_path)
    assert (document.get("world_size"), document.get("nodes")) == (2, 2), document["checks"]
    assert document["total_samples"] == 2 * 4 * 3


def test_an_srun_that_fails_is_incomplete(target: Slurm, tmp_path: Path) -> None:
    gone = SlurmNode(name="nowhere", states=("IDLE",), reason="", gpus="")
    planned = plan(target, tmp_path, gone)
    document = judge_job(SMALL, asyncio.run(planned.run(lambda _: None)), world=planned.world)
    assert document["overall"] == "INCOMPLETE"
    assert "srun ended with" in document["checks"][0]["findings"][0]["reason"]


@pytest.mark.parametrize(
    ("told", "code", "whole"),
    [(0, 0, True), (0, 1, False), (0, 143, False), (1, 1, True), (1, 143, True), (3, 137, True), (1, 0, False),
     (1, None, False), (None, 0, False)],
)  # fmt: skip
def test_a_measured_fail_is_one_although_srun_killed_the_other_ranks(told: Any, code: Any, whole: bool) -> None:
    document = {"world_size": 2, "exit_code": told}
    assert is_whole(document, world=2, code=code, highest=True) is whole
    assert not is_whole(document, world=3, code=code, highest=True)


def test_ranks_follow_the_gpus_of_the_nodes(target: Slurm, tmp_path: Path) -> None:
    node = SlurmNode(name="n1", states=("IDLE",), reason="", gpus="gpu:h100:8,gpu:2")
    assert count_gpus(node) == 10
    words = command(plan(target, tmp_path, options=Options(batch_size=64, processes=4)))
    assert "--ntasks=8" in words and "--ntasks-per-node=4" in words and "--nodelist=n1,n2" in words
    assert words[-4:] == ["--batch-size", "64", "--out", "-"]


def test_ranks_meet_at_the_address_of_the_first_node(target: Slurm, tmp_path: Path) -> None:
    def masters(settings: SlurmSettings) -> list[str]:
        words = command(plan(target, tmp_path, settings=settings))
        return [word for word in words if word.startswith("MASTER_ADDR=")]

    assert masters(target.settings) == ["MASTER_ADDR=127.0.0.2"], "n1 resolves nowhere, and the ranks would wait for it"
    stated = replace(target.settings, env=(*target.settings.env, ("MASTER_ADDR", "10.0.0.9")))
    assert masters(stated) == [], "that of the cluster file is in srun's own"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_job(
    slurm: Cluster, target: Slurm, number: signal.Signals, tmp_path: Path
) -> None:
    def held() -> bool:
        return "gpu-acceptance" in slurm.call("squeue", "--noheader", "--format=%j")

    def interrupt() -> None:
        slurm.wait(held)
        signal.pthread_kill(main, number)

    main = threading.get_ident()
    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        accept(target, SMALL, home=tmp_path)
    other.join()
    slurm.wait(lambda: not held(), limit_s=30)
