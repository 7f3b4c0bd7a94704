"""Under somebody else's launcher each process is one rank; rank 0 reports, and names one that was stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fork_server import Child, ForkServer
from trainmaster.bench.collectives.pairs import Command, plan_pair, read_pair
from trainmaster.node.ranks import detect

MODULE = "trainmaster.bench.collectives"
WORDS = ["--collective", "all_reduce", "--min", "1K", "--max", "4K", "--backend", "gloo"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """As srun gives it on one node."""
    return {
        **os.environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip


def start(programs: ForkServer, words: list[str], *, rank: int, port: int, out: Path) -> Child:
    with out.open("wb") as file:
        return programs.start(MODULE, *words, env=environment(rank, 3, port), out=file.fileno())


def test_three_ranks_of_a_launcher_meet_and_rank_0_alone_reports(programs: ForkServer, tmp_path: Path) -> None:
    port, words = free_port(), [*WORDS, "--min-busbw", "1e-9"]
    logs = [tmp_path / f"rank-{rank}.out" for rank in range(3)]
    running = [start(programs, words, rank=rank, port=port, out=out) for rank, out in enumerate(logs)]
    assert [process.wait(timeout=150) for process in running] == [0, 0, 0]
    outputs = [log.read_text() for log in logs]
    assert outputs[1:] == ["", ""]
    told = [json.loads(line) for line in outputs[0].splitlines()]
    assert [line["row"]["size_bytes"] for line in told[:-1]] == [1024, 2048, 4096]
    report = told[-1]["report"]
    assert (report["overall"], report["world"], report["nodes"]) == ("PASS", 3, 1)
    assert sorted(member["rank"] for member in report["members"]) == [0, 1, 2]


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_lost_rank_of_a_launcher_is_named_by_rank_0(
    programs: ForkServer, tmp_path: Path, how: signal.Signals
) -> None:
    port, log = free_port(), tmp_path / "rank-0.out"
    words = ["--collective", "all_reduce", "--backend", "gloo", "--max", "64M", "--timeout", "5"]
    running = [
        start(programs, words, rank=rank, port=port, out=tmp_path / f"rank-{rank}.out") for rank in range(3)
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while log.read_text().count('"row"') < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(running[2].pid, how)
        assert [running[0].wait(timeout=90), running[1].wait(timeout=30)] == [1, 1]
    finally:
        for process in running:
            process.kill()
            process.wait()
    lines = log.read_text().splitlines()
    report = json.loads(lines[-1])["report"]
    assert report["overall"] == "FAIL"
    assert [(lost["rank"], lost["pid"], lost["state"]) for lost in report["lost"]] == [(2, running[2].pid, "silent")]
    assert len(report["rows"]) == len(lines) - 1 >= 3


def test_a_pair_is_two_ranks_that_meet_at_the_first_node() -> None:
    first, second = plan_pair("a", "b", address="10.0.0.1", port=29600, gpu=3)
    assert (first.node, second.node) == ("a", "b")
    assert first.argv == second.argv
    for rank, command in enumerate((first, second)):
        ranks = detect(command.env)
        assert (ranks.rank, ranks.world_size, ranks.nodes, ranks.node_rank) == (rank, 2, 2, rank)
        assert (ranks.master_addr, ranks.master_port) == ("10.0.0.1", 29600)
        assert command.env["CUDA_VISIBLE_DEVICES"] == "3"


def test_the_two_commands_of_a_pair_give_its_bandwidth(programs: ForkServer) -> None:
    def run(command: Command) -> str:
        python, option, module, *words = command.argv
        assert (python, option) == ("python3", "-m")
        return programs.run(module, *words, env={**os.environ, **command.env}).stdout

    commands = plan_pair("a", "b", address="127.0.0.1", port=free_port(), backend="gloo")
    with ThreadPoolExecutor(max_workers=2) as pool:
        first, _ = pool.map(run, commands)
    gbps = read_pair(first)
    assert gbps is not None and gbps > 0


@pytest.mark.parametrize(
    "output",
    [
        "",
        "Traceback",
        '{"row": {}}',
        '{"report": {"rows": [], "lost": []}}',
        '{"report": {"rows": [{"busbw_gbps": 9, "wrong": []}], "lost": [{"rank": 1}]}}',
        '{"report": {"rows": [{"busbw_gbps": 9, "wrong": [{"rank": 1}]}], "lost": []}}',
        '{"report": {"rows": [{"busbw_gbps": "fast", "wrong": []}], "lost": []}}',
    ],
)
def test_what_is_not_a_whole_measurement_is_none(output: str) -> None:
    assert read_pair(output) is None
    assert read_pair('{"report": {"rows": [{"busbw_gbps": 9, "wrong": []}], "lost": []}}') == 9
