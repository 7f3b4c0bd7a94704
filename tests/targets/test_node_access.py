"""The node contract: every target that states nodes opens them; programs of this machine run by it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainmaster import targets
from trainmaster.core.errors import NodeUnavailable
from trainmaster.targets import Node, Program, ReachesNodes, Result
from trainmaster.targets.local import LocalNodes

OPTIONS = {"ssh": "hosts.yaml", "sagemaker": "account.yaml", "pool": "pool.yaml", "hyperpod": "cluster.yaml"}


@pytest.mark.parametrize("name", targets.names())
def test_a_target_that_states_nodes_opens_them_and_no_other_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMBDA_API_KEY", "a-key-that-is-never-sent")
    option = OPTIONS.get(name)
    target = targets.load(f"{name}:{option}" if option else name)
    if name != "hyperpod":  # pods of Kubernetes, whose tests are a submission
        assert isinstance(target, ReachesNodes) is targets.traits(name).nodes


def run(programs: Sequence[Program], timeout_s: float = 60.0) -> list[Result]:
    async def go() -> list[Result]:
        access = LocalNodes()
        try:
            (node,) = await access.nodes()
            return await access.run(node, programs, timeout_s)
        finally:
            await access.close()

    return asyncio.run(go())


@pytest.mark.spawns
def test_programs_run_at_once_each_with_its_environment_end_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "mine.py").write_text(
        "import os, sys, pathlib\nprint(os.environ['WORD'])\nfolder = pathlib.Path(sys.argv[-1]) / 'files'\n"
        "folder.mkdir(parents=True)\n(folder / 'a').write_text('x')\nsys.exit(3)\n"
    )
    mine = Program(module="mine", env={"WORD": "hello"}, captures=True)
    first, second = run([mine, Program(module="platform")])
    assert (first.code, first.out, first.files) == (3, "hello\n", {"files/a": "x"})
    assert (second.code, second.files) == (0, {}) and "Linux" in second.out


@pytest.mark.spawns
def test_a_program_that_hangs_is_ended_at_its_deadline_and_a_cancelled_one_at_once() -> None:
    endless = Program(module="http.server", words=["0", "--bind", "127.0.0.1"])
    (result,) = run([endless], timeout_s=4.0)
    assert result.code is None

    async def cancel() -> None:
        access = LocalNodes()
        task = asyncio.create_task(access.run(Node(name="here"), [endless], 60.0))
        await asyncio.sleep(1.0)
        task.cancel()
        async with asyncio.timeout(20):
            await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(cancel())


@pytest.mark.spawns
def test_a_node_without_an_answer_is_unavailable_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(NodeUnavailable, match="/bin/false ended with 1: nothing was printed"):
        run([Program(module="platform")])
