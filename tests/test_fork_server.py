"""A forked program does what a new interpreter does: output, exit code, environment, folder, signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fork_server import IMPORTS, SHARED, ForkServer, share

pytestmark = pytest.mark.spawns


@pytest.fixture(scope="module")
def small() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.mark.parametrize(
    "code",
    [
        "import sys; print('out'); print('err', file=sys.stderr)",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('why')",
        "import sys; sys.exit(None)",
        "import os, signal; print('lost'); os.kill(os.getpid(), signal.SIGKILL)",
        "import os; print(sorted(os.environ), os.getcwd())",
        "import sys; print(sys.argv, sys.stdin.read(), __name__)",
        "import atexit; atexit.register(print, 'last'); print('first')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
        "import site_of_test; print(site_of_test.VALUE)",
    ],
)
def test_a_forked_program_ends_as_a_new_interpreter_does(small: ForkServer, tmp_path: Path, code: str) -> None:
    (tmp_path / "site_of_test.py").write_text("VALUE = 7\n")
    (tmp_path / "sitecustomize.py").write_text("import site_of_test\nsite_of_test.VALUE = 8\n")
    env = {"PYTHONPATH": str(tmp_path), "LC_CTYPE": "C.UTF-8"}
    new = subprocess.run(
        [sys.executable, "-c", code, "word"], env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    forked = small.run("-c", code, "word", env=env, cwd=tmp_path)
    assert (forked.returncode, forked.stdout, forked.stderr) == (new.returncode, new.stdout, new.stderr)


def test_an_exception_ends_with_1_and_its_traceback(small: ForkServer, tmp_path: Path) -> None:
    done = small.run("-c", "raise ValueError('no')", env={}, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("ValueError: no\n")


def test_output_that_cannot_be_written_ends_with_120(small: ForkServer, tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        assert small.run("-c", "print('x')", env={}, cwd=tmp_path, stdout=full.fileno()).returncode == 120


def test_signals_reach_the_program(small: ForkServer, tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        child = small.start("-c", "import time; print(1, flush=True); time.sleep(60)", env={}, out=out.fileno())
    assert child.poll() is None
    while not (tmp_path / "out").read_bytes():
        time.sleep(0.01)
    child.terminate()
    assert child.wait(timeout=30) == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        other = small.start("-c", "import time; time.sleep(60)", env={})
        other.wait(timeout=0.05)
    other.kill()
    assert other.wait() == -signal.SIGKILL


def test_a_program_ends_with_its_server(tmp_path: Path) -> None:
    server = ForkServer()
    child = server.start("-c", "import time; time.sleep(60)", env={}, cwd=tmp_path)
    server.close()
    assert _ended(child.pid)


def test_two_servers_that_share_the_imports_know_their_own_programs(tmp_path: Path) -> None:
    with contextlib.nullcontext() if SHARED in os.environ else share():
        servers = [ForkServer(*IMPORTS) for _ in range(2)]
        for number, server in enumerate(servers):
            code = f"import sys; print('torch' in sys.modules, {number})"
            assert server.run("-c", code, env={}, cwd=tmp_path).stdout == f"True {number}\n"
        child = servers[0].start("-c", "import time; time.sleep(60)", env={}, cwd=tmp_path)
        servers[0].close()
        assert _ended(child.pid)
        assert servers[1].run("-c", "print('still')", env={}, cwd=tmp_path).stdout == "still\n"
        servers[1].close()


def _ended(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    end = time.monotonic() + 60
    while status.exists() and ") Z " not in status.read_text() and time.monotonic() < end:
        time.sleep(0.01)
    return not status.exists() or ") Z " in status.read_text()
