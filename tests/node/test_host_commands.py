"""Commands end, one way or another: with an answer, or killed with everything they started."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from trainmaster.core.errors import CommandMissing, CommandTimedOut, HostError
from trainmaster.node import host as host_module
from trainmaster.node.host import Host


def alive(pid: int) -> bool:
    """Running, not a zombie that waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    """The kill is sent before run() returns; the kernel may take a moment to carry it out."""
    for _ in range(500):
        if not alive(pid):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.spawns
def test_an_answer_has_both_streams_and_the_exit_code() -> None:
    ran = Host().run("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (ran.exit_code, ran.stdout, ran.stderr) == (7, "out\n", "err\n")


@pytest.mark.spawns
def test_python_is_the_interpreter_that_runs_us() -> None:
    assert Host().run("python", "-c", "import sys; print(sys.prefix)").stdout.strip() == sys.prefix


@pytest.mark.spawns
def test_a_signal_is_a_negative_exit_code() -> None:
    assert Host().run("sh", "-c", "kill -TERM $$").exit_code == -15


@pytest.mark.spawns
def test_a_program_that_is_not_there_is_missing() -> None:
    with pytest.raises(CommandMissing, match="no-such-program-here"):
        Host().run("no-such-program-here")


@pytest.mark.spawns
def test_a_program_that_may_not_be_run_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    with pytest.raises(HostError) as caught:
        Host().run(str(tmp_path / "tool"))
    assert not isinstance(caught.value, CommandMissing)


@pytest.mark.spawns
def test_a_timeout_kills_the_children_and_grandchildren(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"(sleep 600 & echo $! >> {pids}; sleep 600) & echo $! >> {pids}; echo $$ >> {pids}; wait"
    with pytest.raises(CommandTimedOut, match="in 2 s"):
        Host().run("sh", "-c", script, timeout_s=2)
    found = [int(line) for line in pids.read_text().split()]
    assert len(found) == 3
    assert all(gone(pid) for pid in found)


@pytest.mark.spawns
def test_a_grandchild_that_holds_the_pipes_is_not_waited_for(tmp_path: Path) -> None:
    """`dcgmi` and the like start daemons; a reader that waits for the end of the pipe would wait for ever."""
    ran = Host().run("sh", "-c", f"sleep 600 & echo $! > {tmp_path}/pid; echo done", timeout_s=120)
    assert ran.stdout == "done\n"
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.spawns
def test_a_grandchild_that_left_the_group_does_not_hold_us_up() -> None:
    ran = Host().run("setsid", "--fork", "sh", "-c", "echo $$; exec sleep 3", timeout_s=120)
    assert ran.exit_code == 0


@pytest.mark.spawns
def test_a_program_that_closed_its_output_is_still_timed() -> None:
    with pytest.raises(CommandTimedOut):
        Host().run("sh", "-c", "exec >&- 2>&-; sleep 600", timeout_s=0.3)


@pytest.mark.spawns
def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "MAX_OUTPUT_BYTES", 1 << 20)
    with pytest.raises(HostError, match="more than 1 MiB"):
        Host().run("cat", "/dev/zero")


@pytest.mark.spawns
def test_large_output_on_both_streams_comes_back_whole() -> None:
    ran = Host().run("sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' a; head -c 3000000 /dev/zero | tr '\\0' b >&2")
    assert (ran.stdout.count("a"), ran.stderr.count("b")) == (3_000_000, 3_000_000)


@pytest.mark.spawns
def test_a_program_cannot_wait_for_our_terminal() -> None:
    assert Host().run("cat").stdout == ""


@pytest.mark.spawns
def test_programs_speak_english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert Host().run("sh", "-c", "echo $LC_ALL").stdout == "C\n"


@pytest.mark.spawns
def test_bytes_that_are_no_text_are_kept_as_marks() -> None:
    assert Host().run("printf", "\\377x").stdout == "\ufffdx"
