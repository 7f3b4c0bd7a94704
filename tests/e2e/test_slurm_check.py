"""Checks on a real Slurm: a node that fails is drained with the reason, retested while drained, and given back."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

import trainmaster
from slurm import NODES, PATH, Cluster
from trainmaster.cli.main import build
from trainmaster.control import reconcile
from trainmaster.control import submit as submitting
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, Status
from trainmaster.store import attempts
from trainmaster.store.database import Database
from trainmaster.store.jobs import find_job

pytestmark = [pytest.mark.spawns, pytest.mark.timeout(600)]

FEW_FILES = ("--nofile=256:256",)
EXPECTED = "open_files=1000"
REASON = "trainmaster: open_files: 256 files may be open, not 1000"


@pytest.fixture
def sick(slurm: Cluster) -> Iterator[str]:
    """A node whose jobs may open few files, as after a wrong limits.conf."""
    slurm.restart_node("n2", limits=FEW_FILES)
    yield "n2"
    slurm.restart_node("n2")
    slurm.call("scontrol", "update", "nodename=n2", "state=resume", check=False)
    slurm.wait(lambda: slurm.idle() == set(NODES))


@pytest.fixture
def cluster_file(slurm: Cluster, tmp_path: Path) -> Path:
    document = {
        "folder": str(slurm.folder / "shared"), "env": {"SLURM_CONF": str(slurm.conf)}, "poll_s": 0.3, "drain": True,
    }  # fmt: skip
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def call(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    return lambda *words: CliRunner().invoke(build(), [*words, "--home", str(tmp_path / "home")])


def verdicts(folder: Path) -> dict[str, str]:
    health = json.loads((folder / "health.json").read_text())
    answered = {
        node["node"]: {result["findings"][0]["verdict"] for result in node["results"]} for node in health["nodes"]
    }
    return {name: words.pop() if len(words) == 1 else "mixed" for name, words in answered.items()} | {
        node["node"]: node["reason"] for node in health["silent"]
    }


@pytest.mark.proof
def test_a_node_is_drained_by_a_check_retested_and_given_back(
    slurm: Cluster, sick: str, cluster_file: Path, call: Callable[..., Result], tmp_path: Path
) -> None:
    def check(name: str) -> dict[str, str]:
        words = ("check", "--on", f"slurm:{cluster_file}", "--only", "open_files", "--expect", EXPECTED)
        ran = call(*words, "--out", str(tmp_path / name))
        assert ran.exit_code in (0, 1, 3), (ran.output, ran.exception)
        return verdicts(tmp_path / name)

    assert check("first") == {"n1": "pass", "n2": "fail", "n3": "pass"}
    assert (tmp_path / "first" / "nodes" / "n2").is_dir(), "what the node read is in the bundle"
    drained = call("remedy", str(tmp_path / "first"), "--on", f"slurm:{cluster_file}", "--yes")
    assert drained.exit_code == 0, drained.output

    def wait_drained() -> None:
        # Slurm calls it draining until the end of the check's job is known everywhere.
        slurm.wait(lambda: not slurm.node_state(sick).startswith("draining|"), limit_s=150)
        assert slurm.node_state(sick) == f"drained|{REASON}"

    wait_drained()
    assert check("still bad") == {"n1": "pass", "n2": "fail", "n3": "pass"}, "drained, and measured all the same"
    wait_drained()
    assert "No reservations" in slurm.call("scontrol", "show", "reservation")
    assert call("readmit", str(tmp_path / "still bad"), "--with", "slurm", "--yes").exit_code == 1

    slurm.restart_node(sick)
    assert check("retest") == {"n1": "pass", "n2": "pass", "n3": "pass"}
    wait_drained()  # a check alone gives no node back
    given = call("readmit", str(tmp_path / "retest"), "--with", "slurm", "--yes")
    assert given.exit_code == 0, given.output
    slurm.wait(lambda: slurm.node_state(sick).startswith("idle"))

    slurm.call("scontrol", "update", "nodename=n3", "state=drain", "reason=disk swap, ask Kim")
    try:
        found = check("foreign")
        assert found["n3"] == "Slurm shows it as IDLE+DRAIN: disk swap, ask Kim"
        assert slurm.node_state("n3") == "drained|disk swap, ask Kim"
    finally:
        slurm.call("scontrol", "update", "nodename=n3", "state=resume")


@pytest.mark.proof
def test_a_failed_preflight_drains_its_node_and_the_next_attempt_runs_elsewhere(
    db: Database, slurm: Cluster, sick: str, cluster_file: Path, call: Callable[..., Result], tmp_path: Path
) -> None:
    spec = parse_spec(
        {
            "name": "elsewhere", "target": f"slurm:{cluster_file}", "command": ["sh", "-c", "echo $SLURMD_NODENAME"],
            "preflight": {"level": 1, "expect": {"open_files": 1000}, "allow_incomplete": True},
            "limits": {"attempts": 2}, "slurm": {"exclude": ["n1"]},
        }
    )  # fmt: skip

    async def drive(job: str) -> None:
        stop = asyncio.Event()
        loop = asyncio.create_task(reconcile.run(db, tmp_path, stop=stop, tick_s=0.2))
        while not (now := find_job(db, job)) or not now.status.final:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        stop.set()
        await loop

    job = submitting.submit(db, spec)
    asyncio.run(drive(job.id))
    ended = find_job(db, job.id)
    first, second = attempts.list_attempts(db, job.id)
    assert ended is not None and ended.status is Status.COMPLETED, (ended, first, second)
    assert first.reason is Reason.CHECK_FAILED and second.reason is None
    assert slurm.node_state(sick).startswith("drained|trainmaster: open_files: 256 files may be open, not 1000")
    log = slurm.folder / "shared" / "jobs" / job.id / "attempts" / "2-node-0" / "rank-0.log"
    assert log.read_text() == "n3\n"

    # Drained by its own job, not by `remedy`: a retest gives it back all the same.
    slurm.restart_node(sick)
    words = ("check", "--on", f"slurm:{cluster_file}", "--only", "open_files", "--expect", EXPECTED)
    call(*words, "--out", str(tmp_path / "retest"))
    given = call("readmit", str(tmp_path / "retest"), "--with", "slurm", "--yes")
    assert given.exit_code == 0, given.output
    slurm.wait(lambda: slurm.node_state(sick).startswith("idle"))


@pytest.mark.proof
def test_the_prolog_drains_a_node_that_fails_before_a_job_starts_on_it(
    slurm: Cluster, sick: str, tmp_path: Path
) -> None:
    script = Path(__file__).parents[2] / "deploy" / "slurm" / "node-check.sh"
    conf = tmp_path / "node-check.conf"
    conf.write_text(f'PYTHON="{sys.executable}"\nCHECKS="--only open_files --expect {EXPECTED}"\n')
    variables = f"SLURM_CONF={slurm.conf} NODE_CHECK_CONF={conf} PYTHONPATH='{Path(trainmaster.__file__).parents[1]}'"
    slurm.set_prolog(f"exec env PATH={PATH} {variables} '{script}'")
    try:
        assert slurm.call("srun", "-w", "n3", "-N1", "echo", "started") == "started\n", "a healthy node runs the job"
        slurm.call("srun", "--immediate=20", "-w", sick, "-N1", "echo", "started", check=False)
        slurm.wait(lambda: slurm.node_state(sick).startswith("drained"))
        assert slurm.node_state(sick).startswith(
            "drained|trainmaster: open_files 256 files may be open, not 1000 (since"
        )
    finally:
        slurm.set_prolog("exit 0")
        slurm.call("scancel", "--user=root", check=False)
