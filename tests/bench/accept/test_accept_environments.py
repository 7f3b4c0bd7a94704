"""Two real ranks under the variables of every launcher, and the stopwatch beside them."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import acceptance
import jsonschema
import pytest

from fork_server import ForkServer
from trainmaster.bench.accept import identity
from trainmaster.bench.accept.rank import BEGIN, END
from trainmaster.bench.collectives.capabilities import free_ports
from trainmaster.core.errors import UsageError
from trainmaster.train.parallel.rank_info import RankInfo

HERE = "127.0.0.1"


def _slurm(rank: int, port: int) -> dict[str, Any]:
    return {
        "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": 2, "SLURM_NODELIST": "localhost",
        "SLURM_NNODES": 1, "SLURM_NODEID": 0, "SLURM_STEP_ID": 0, "SLURM_JOB_ID": port - 20_000,
    }  # fmt: skip


def _mpi(rank: int, port: int) -> dict[str, Any]:
    values = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": value for name, value in values.items()} | {"MASTER_PORT": port}


def _pet(rank: int, port: int) -> dict[str, Any]:
    return {
        "PET_NNODES": 2, "PET_NODE_RANK": rank, "PET_NPROC_PER_NODE": 1, "PET_MASTER_ADDR": HERE,
        "PET_MASTER_PORT": port,
    }  # fmt: skip


def _sagemaker(rank: int, port: int) -> dict[str, Any]:
    return {
        "SM_HOSTS": json.dumps(["algo-1", "algo-2"]), "SM_CURRENT_HOST": f"algo-{rank + 1}", "SM_NUM_GPUS": 0,
        "SM_MASTER_ADDR": HERE, "SM_MASTER_PORT": port,
    }  # fmt: skip


LAUNCHERS = {
    "torchrun": lambda rank, port: acceptance.torchrun(2, port)[rank],
    "pet": _pet,
    "slurm": _slurm,
    "openmpi": _mpi,
    "kubeflow": lambda rank, port: {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": HERE, "MASTER_PORT": port},
    "sagemaker": _sagemaker,
    "plain": lambda rank, port: {
        "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": HERE, "MASTER_PORT": port,
    },
    "half-set": lambda rank, port: {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_PORT": port},
}  # fmt: skip
NODES = {"pet": 2, "kubeflow": 2, "sagemaker": 2}


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_meet_under_every_launcher(programs: ForkServer, tmp_path: Path, launcher: str) -> None:
    port = free_ports(1)[0]
    environments = [{name: str(value) for name, value in LAUNCHERS[launcher](rank, port).items()} for rank in range(2)]
    codes, document, _ = acceptance.accept(programs, tmp_path, f"{acceptance.TINY} --active-iterations 3", environments)
    assert codes[1] == 0
    assert document["exit_code"] == codes[0]
    assert (document["world_size"], document["nodes"]) == (2, NODES.get(launcher, 1))
    assert [one["rank"] for one in document["ranks"]] == [0, 1]
    assert len({one["parameters_digest"] for one in document["ranks"]}) == 1
    assert document["total_samples"] == 2 * 4 * 3
    _validate(document)


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
@pytest.mark.spawns
def test_two_ranks_meet_under_mpirun(tmp_path: Path) -> None:
    """Open MPI itself starts them: two processes, as `mpirun -np 8 trainmaster accept` on a machine with 8 GPUs."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("no mpirun here: make system-packages (as root)")
    out = tmp_path / "results.json"
    words = f"{acceptance.TINY} --active-iterations 3 --backend gloo --timeout 60 --out {out}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**acceptance.clean(), **root, "MASTER_PORT": str(free_ports(1)[0])}
    done = subprocess.run(
        [mpirun, "-np", "2", "--oversubscribe", sys.executable, "-m", "trainmaster.bench.accept", *words.split()],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert out.exists(), done.stderr[-2000:]
    document = json.loads(out.read_text())
    assert (done.returncode, document["world_size"], document["nodes"]) == (document["exit_code"], 2, 1)
    assert [one["rank"] for one in document["ranks"]] == [0, 1]
    assert len({one["parameters_digest"] for one in document["ranks"]}) == 1
    assert len(done.stdout.strip().splitlines()) == 1  # rank 0 alone prints
    _validate(document)


def test_one_process_without_a_launcher_has_the_defaults(programs: ForkServer, tmp_path: Path) -> None:
    """RANK 0, WORLD_SIZE 1, LOCAL_RANK 0: stated in part, the rest follows."""
    codes, document, _ = acceptance.accept(
        programs, tmp_path, f"{acceptance.TINY} --active-iterations 2", [{"WORLD_SIZE": "1"}]
    )
    assert (codes, document["world_size"]) == ([document["exit_code"]], 1)
    _validate(document)


def _validate(document: Mapping[str, Any]) -> None:
    text = resources.files("trainmaster.bench").joinpath("data", "accept-results.schema.json").read_text()
    jsonschema.validate(document, json.loads(text))


@pytest.mark.matrix(one_in=3)
@pytest.mark.alone
@pytest.mark.parametrize("world", [1, 2, 4])
def test_throughput_agrees_with_a_stopwatch(programs: ForkServer, tmp_path: Path, world: int) -> None:
    """The clock is this process's, and the samples are counted from the command line: each of them once."""
    environments = acceptance.torchrun(world, free_ports(1)[0])
    words = f"{acceptance.TINY} --width 64 --duration 3"
    _, document, lines = acceptance.accept(programs, tmp_path, words, environments)
    times = {text: at for at, text in lines}
    steps = next(int(text.split("/")[1]) for text in times if text.startswith("active "))
    measured = world * 4 * steps / (times[END] - times[BEGIN])
    assert document["throughput_samples_per_second"] == pytest.approx(measured, rel=0.01)


PLAIN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500"}


def test_the_loop_of_bare_metal_needs_no_number_of_ranks_per_machine() -> None:
    """The loop of docker runs sets five variables; machines are found when the ranks have met."""
    info = identity.find_info(PLAIN)
    assert (info.rank, info.world_size, info.local_rank) == (3, 4, 1)
    assert info.nodes > 1  # gloo is not bound to the loopback
    placed = identity.place(info, ["a", "a", "b", "b"])
    assert (placed.node_rank, placed.nodes, placed.local_world_size) == (1, 2, 2)
    assert not identity.machine_unknown({**PLAIN, "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(UsageError, match="RANK"):
        identity.find_ranks({**PLAIN, "RANK": "x"})


def test_a_node_with_one_rank_is_that_rank() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": HERE, "MASTER_PORT": "1"}
    node = identity.find_ranks(env)
    assert node.rank is None
    assert identity.complete(node, 2).rank is None
    whole = identity.find_info(env, identity.complete(node, 1))
    assert isinstance(whole, RankInfo)
    assert (whole.rank, whole.world_size, whole.nodes) == (1, 2, 2)


def own_address() -> str | None:
    """An address of this machine by which others reach it; its name is often one of the loopback. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent, contextlib.suppress(OSError):
        unsent.connect(("192.0.2.1", 9))  # for documentation: RFC 5737
        return str(unsent.getsockname()[0])
    return None


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
@pytest.mark.skipif(own_address() is None, reason="this machine has no address but the loopback")
def test_ranks_on_unknown_machines_find_each_other(programs: ForkServer, tmp_path: Path) -> None:
    port, address = free_ports(1)[0], own_address()
    environments = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": address,
         "MASTER_PORT": str(port)}
        for rank in range(2)
    ]  # fmt: skip
    _, document, _ = acceptance.accept(programs, tmp_path, f"{acceptance.TINY} --active-iterations 2", environments)
    assert (document["world_size"], document["nodes"]) == (2, 1)
