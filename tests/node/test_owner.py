"""Which process is above a rank, and whether it is gone: read from a /proc of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainmaster.node import owner

RANK = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_RANK": "1"}


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(owner, "_PROC", tmp_path)
    (tmp_path / "self").mkdir()
    return tmp_path


def add(
    proc: Path, pid: int, parent: int, *, state: str = "S", start: int = 7, env: dict[str, str] | None = None
) -> None:
    (proc / str(pid)).mkdir(exist_ok=True)
    fields = [state, str(parent), *["0"] * 17, str(start), "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}\n")
    if env is not None:
        (proc / str(pid) / "environ").write_text("".join(f"{name}={value}\0" for name, value in env.items()))


def test_the_launcher_is_the_nearest_process_without_the_rank(proc: Path) -> None:
    """A shell between torchrun and its rank has the rank's variables; Kubeflow gives RANK to torchrun itself."""
    add(proc, os.getpid(), 30)
    add(proc, 30, 20, env=RANK)  # numactl
    add(proc, 20, 10, env={"TORCHELASTIC_RUN_ID": "outer", "RANK": "1"})
    assert owner.find_launcher(RANK) == "20:7"


def test_a_torchrun_that_is_a_rank_itself_is_the_launcher(proc: Path) -> None:
    """A job with `command: torchrun … -m trainmaster.train`: the agent gives torchrun the numbers of its only rank.
    The agent above it was taken for one that had only adopted the rank, which ended at once."""
    rank = {"RANK": "0", "LOCAL_RANK": "0"}
    add(proc, os.getpid(), 30)
    add(proc, 30, 20, env=rank)  # torchrun
    (proc / "30" / "maps").write_text("7f00-7f01 r-xp 00000000 08:01 11  /usr/lib/libtorch_cpu.so\n")
    add(proc, 20, 1, env={})  # the agent
    (proc / "20" / "maps").write_text("7f00-7f01 r-xp 00000000 08:01 11  /usr/lib/libc.so.6\n")
    own = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert owner.find_launcher({**rank, **own}) == "30:7"


@pytest.mark.parametrize(
    ("environ", "parent"),
    [
        ({"RANK": "1", "LOCAL_RANK": "1"}, 30),  # set by a shell, which need not stay
        (RANK, 0),  # the first process of a container
    ],
)
def test_no_launcher(proc: Path, environ: dict[str, str], parent: int) -> None:
    add(proc, os.getpid(), parent)
    add(proc, 30, 0, env={})
    assert owner.find_launcher(environ) is None


@pytest.mark.parametrize(
    ("maps", "command", "found"),
    [
        ("libc.so.6", "python3 supervisor.py", owner.GONE),
        ("torch/lib/libtorch_cpu.so", "elastic-agent", "1:7"),  # the first process of a container
        (None, "/sbin/init splash", owner.GONE),
        (None, "/usr/bin/python3 /usr/bin/torchrun a.py", "1:7"),
        (None, None, "1:7"),  # proves nothing
    ],
)
def test_a_rank_whose_torchrun_ended_before_it_looked_knows_it(
    proc: Path, maps: str | None, command: str | None, found: str
) -> None:
    """It took the process that adopted it for its launcher, and waited for its peers."""
    add(proc, os.getpid(), 1)
    add(proc, 1, 0, env={})
    if maps is not None:
        (proc / "1" / "maps").write_text(f"7f00-7f01 r-xp 00000000 08:01 11  /usr/lib/{maps}\n")
    if command is not None:
        (proc / "1" / "cmdline").write_text(command.replace(" ", "\0") + "\0")
    launcher = owner.find_launcher({**RANK, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert launcher == found and owner.is_gone(launcher) is (found == owner.GONE)


def test_another_users_launcher_counts(proc: Path) -> None:
    add(proc, os.getpid(), 30)
    add(proc, 30, 1)  # its environment cannot be read
    assert owner.find_launcher({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3"}) == "30:7"


def test_a_process_is_gone_when_it_or_its_number_is(proc: Path) -> None:
    add(proc, 30, 1)
    word = owner.name_process(30)
    assert not owner.is_gone(word)
    add(proc, 30, 1, start=8)
    assert owner.is_gone(word), "another process has its number"
    add(proc, 30, 1, state="Z")
    assert owner.is_gone(word), "it waits for its parent"
    assert owner.is_gone("31:7")
    assert not owner.is_gone("") and not owner.is_gone("31:"), "proves nothing"


@pytest.mark.parametrize(("state", "stopped"), [("T", True), ("t", True), ("S", False), ("R", False)])
def test_a_stopped_process(proc: Path, state: str, stopped: bool) -> None:
    add(proc, 30, 1, state=state)
    assert owner.is_stopped(30) is stopped


def test_what_is_stopped_below_a_process_is_found(proc: Path) -> None:
    for pid, below, state in ((10, "20 21", "S"), (20, "30", "S"), (21, "", "T"), (30, "10", "t")):
        add(proc, pid, 1, state=state)
        (proc / str(pid) / "task" / str(pid)).mkdir(parents=True)
        (proc / str(pid) / "task" / str(pid) / "children").write_text(below)
    assert sorted(set(owner.find_stopped(10))) == [21, 30], "and it ends where processes point at each other"
    assert owner.find_stopped(99) == []


def test_a_fork_server_is_told_from_its_ranks(proc: Path) -> None:
    for pid, words in ((30, b"A=1\0TRAINMASTER_ROOM=----\0"), (31, b"RANK=0\0A=1\0"), (32, b"TRAINMASTER_ROOM=x\0")):
        add(proc, pid, 1)
        (proc / str(pid) / "environ").write_bytes(words)
    assert [pid for pid in (30, 31, 32, 33) if owner.is_fork_server(pid)] == [30]
