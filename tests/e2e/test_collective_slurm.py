"""Collectives, bandwidth and pair tests between nodes of a real Slurm: gloo ranks that srun started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from slurm import Cluster
from trainmaster.cli._documents.hosts_file import load_nodes
from trainmaster.cli.main import build
from trainmaster.core.errors import NodeUnavailable
from trainmaster.targets import Program, home_mark

pytestmark = [pytest.mark.spawns, pytest.mark.timeout(600)]


@pytest.fixture
def word(slurm: Cluster, tmp_path: Path) -> str:
    document = {
        "folder": str(slurm.folder / "shared"), "python": sys.executable, "env": {"SLURM_CONF": str(slurm.conf)},
    }  # fmt: skip
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(document))
    return f"slurm:{tmp_path / 'cluster.yaml'}"


@pytest.fixture
def drained(slurm: Cluster) -> Iterator[str]:
    """A node that somebody has taken out."""
    slurm.call("scontrol", "update", "nodename=n3", "state=drain", "reason=disk swap, ask Kim")
    yield "n3"
    slurm.call("scontrol", "update", "nodename=n3", "state=resume")
    slurm.wait(lambda: slurm.idle() == {"n1", "n2", "n3"})


@pytest.fixture
def call(tmp_path: Path, slurm: Cluster) -> Callable[..., tuple[int, dict[str, Any]]]:
    def call(*words: str) -> tuple[int, dict[str, Any]]:
        ran = CliRunner().invoke(build(), [*words, "--json"])
        assert ran.stdout.startswith("{"), (ran.output, ran.exception)
        assert slurm.call("squeue", "-h", "--states=PENDING,RUNNING") == "", "every node is given back"
        return ran.exit_code, json.loads(ran.stdout)

    return call


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_bandwidth_between_nodes_is_measured_and_a_drained_node_is_named(
    word: str, drained: str, call: Callable[..., Any], tmp_path: Path
) -> None:
    words = ("--collective", "all_reduce", "--min", "64K", "--max", "64K", "--min-busbw", "0.0001", "--backend", "gloo")
    code, told = call("bandwidth", "--on", word, *words, "--out", str(tmp_path / "out"))
    assert (code, told["overall"], told["world"], told["nodes"]) == (3, "INCOMPLETE", 2, 2), told["results"]
    assert told["silent"] == {drained: "Slurm shows it as IDLE+DRAIN: disk swap, ask Kim"}
    judged = {result["check"]: result["findings"][0] for result in told["results"]}
    assert judged["collective_ranks"]["verdict"] == "pass" and judged["collective_bandwidth"]["verdict"] == "pass"
    assert "n3 took no part" in judged["collective_nodes"]["reason"]
    assert [row["busbw_gbps"] > 0 for row in told["rows"]] == [True]
    assert len(list((tmp_path / "out" / "ranks").glob("rank-*-n[12].out"))) == 2


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_isolate_pairs_the_nodes_that_answer(word: str, drained: str, call: Callable[..., Any]) -> None:
    code, told = call("isolate", "--on", word, "--max-rounds", "1", "--size", "64K", "--timeout", "100")
    assert (code, told["verdict"]) == (3, "INCOMPLETE")
    assert told["silent"].keys() == {drained} and "disk swap, ask Kim" in told["silent"][drained]
    found = told["diagnosis"]
    assert (found["rounds"], found["measurements"], found["suspects"]) == (1, 1, [])
    assert found["healthy_gbps"] is None or found["healthy_gbps"] > 0


@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_a_check_at_level_2_ends_with_collectives(
    word: str, slurm: Cluster, call: Callable[..., Any], tmp_path: Path
) -> None:
    slurm.wait(lambda: slurm.idle() == {"n1", "n2", "n3"})  # a busy machine: slurmctld may have missed an answer
    words = ("--level", "2", "--only", "cpu,collectives", "--timeout", "200", "--home", str(tmp_path / "home"))
    _, health = call("check", "--on", word, *words)
    assert [node["node"] for node in health["nodes"]] == ["n1", "n2", "n3"], health["silent"]
    (result,) = [result for result in health["cluster"] if result["check"] == "collectives"]
    passed = [finding["reason"] for finding in result["findings"] if finding["verdict"] == "pass"]
    assert any(reason.startswith("all 3 ranks on ") for reason in passed), result["findings"]
    assert any(reason.startswith("every element of 3 points was right on all 3 ranks") for reason in passed)


WORDS = {
    "check": ("--only", "cpu", "--level", "1"),
    "bandwidth": ("--backend", "gloo", "--max", "64K"),
    "isolate": ("--max-rounds", "2", "--size", "64K"),
}


@pytest.mark.matrix(one_in=3, of="interrupted runs on Slurm")
@pytest.mark.parametrize("verb", WORDS)
def test_a_terminated_run_gives_the_nodes_back(word: str, slurm: Cluster, verb: str, tmp_path: Path) -> None:
    def held() -> str:
        return slurm.call("squeue", "-h", "--states=PENDING,RUNNING,COMPLETING", "-o", "%j %N")

    slurm.wait(lambda: slurm.idle() == {"n1", "n2", "n3"})
    slurm.set_prolog("sleep 3")  # a check is over before it could be interrupted
    try:
        more = ("--home", str(tmp_path / "home")) if verb == "check" else ()
        child = subprocess.Popen([sys.executable, "-m", "trainmaster", verb, "--on", word, *WORDS[verb], *more])
        slurm.wait(lambda: held().count("trainmaster-") == 3)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 130
        slurm.wait(lambda: not held(), limit_s=60)
    finally:
        slurm.set_prolog("exit 0")


def find_processes(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.mark.matrix(one_in=3, of="interrupted runs on Slurm")
def test_a_program_that_is_cut_off_ends_on_its_node_and_the_node_stays_ours(
    word: str, slurm: Cluster, tmp_path: Path
) -> None:
    cluster = load_nodes(word, verb="isolate")
    mark = f"MARK={tmp_path}"
    name, _, value = mark.partition("=")
    endless = Program(module="http.server", words=["0", "--bind", "127.0.0.1"], env={name: value})

    async def go() -> None:
        access = cluster.open_nodes(limit_s=300, home=tmp_path / "home")
        try:
            node = (await access.nodes())[0]
            started = asyncio.create_task(access.run(node, [endless], 200))
            async with asyncio.timeout(120):
                while not find_processes(mark):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            started.cancel()
            await asyncio.wait([started])
            async with asyncio.timeout(60):
                while find_processes(mark):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            held = slurm.call("squeue", "-h", "--states=RUNNING", "-o", "%j %N").split()
            assert held[0].startswith("trainmaster-") and held[1] == "n1"
            (ran,) = await access.run(node, [Program(module="platform")], 100)
            assert ran.code == 0 and "Linux" in ran.out
        finally:
            await access.close()

    asyncio.run(go())
    until = time.monotonic() + 30
    while slurm.call("squeue", "-h", "--states=PENDING,RUNNING,COMPLETING") and time.monotonic() < until:
        time.sleep(0.2)
    assert slurm.idle() >= {"n1"}


def test_a_node_in_use_is_not_called_bad(
    word: str, slurm: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("trainmaster.targets.slurm.node_list.FREE_S", 2)
    cluster = load_nodes(word, verb="isolate")
    slurm.call("sbatch", "-w", "n1", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 300")
    slurm.wait(lambda: slurm.node_state("n1").startswith("allocated"))

    async def go() -> None:
        access = cluster.open_nodes(limit_s=300, home=tmp_path / "home")
        try:
            node = (await access.nodes())[0]
            with pytest.raises(NodeUnavailable, match="it was not free within 2 s"):
                await access.run(node, [Program(module="platform")], 100)
        finally:
            await access.close()

    try:
        asyncio.run(go())
    finally:
        slurm.call("scancel", "--name=wrap")
    slurm.wait(lambda: slurm.node_state("n1").startswith("idle"))


@pytest.mark.matrix(one_in=3, of="interrupted runs on Slurm")
def test_what_a_killed_run_held_is_given_back_by_the_next_of_its_home_and_seen_by_reap(
    word: str, slurm: Cluster, tmp_path: Path
) -> None:
    def held() -> int:
        return slurm.call("squeue", "-h", "--states=PENDING,RUNNING", "-o", "%j").count("trainmaster-")

    def reap(home: Path, *more: str) -> list[dict[str, Any]]:
        words = ["reap", "--on", word, "--no-database", "--home", str(home), "--json", *more]
        return list(json.loads(CliRunner().invoke(build(), words).stdout)["leftovers"])

    async def next_run(home: Path) -> None:
        access = load_nodes(word, verb="isolate").open_nodes(limit_s=60, home=home)
        try:
            await access.nodes()
        finally:
            await access.close()

    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    slurm.wait(lambda: slurm.idle() == {"n1", "n2", "n3"})
    command = [sys.executable, "-m", "trainmaster", "bandwidth", "--on", word, *WORDS["bandwidth"]]
    with subprocess.Popen(command, env={**os.environ, "TRAINMASTER_HOME": str(ours)}) as child:
        slurm.wait(lambda: held() == 3)
        assert reap(ours) == [], "a run that lives is left alone"
        child.kill()
    assert {one["ours"] for one in reap(theirs, "--yes")} == {False} and held() == 3
    asyncio.run(next_run(theirs))
    assert held() == 3, "another home's are untouched"
    assert [(one["ours"], one["why"]) for one in reap(ours)] == [(True, "its run is gone")] * 3
    asyncio.run(next_run(ours))
    slurm.wait(lambda: held() == 0, limit_s=60)

    name = f"trainmaster_retest_{home_mark(ours)}_{'0' * 12}_n2"  # as one that was killed in a retest leaves it
    slurm.wait(lambda: slurm.idle() == {"n1", "n2", "n3"})
    slurm.call(
        "scontrol", "create", "reservation", f"ReservationName={name}", "Nodes=n2", "Users=root", "StartTime=now",
        "Duration=UNLIMITED", "Flags=MAINT,IGNORE_JOBS",
    )  # fmt: skip
    try:
        assert [(one["attempt"], one["ours"]) for one in reap(theirs, "--yes")] == [(name, False)]
        assert [(one["attempt"], one["result"]) for one in reap(ours, "--yes")] == [(name, "ended")]
        assert slurm.node_state("n2") == "drained|trainmaster: a retest was interrupted"
        assert name not in slurm.call("scontrol", "show", "reservation")
    finally:
        slurm.call("scontrol", "delete", f"ReservationName={name}", check=False)
        slurm.call("scontrol", "update", "nodename=n2", "state=resume")
