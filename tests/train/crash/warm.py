"""Ranks in milliseconds: a process that has imported torch already and forks one child per rank.

Forking is safe because the parent has one thread and no process group when it does so; it refuses otherwise.
A real rank is `python -m trainmaster.train CONFIG.json`; a child here runs the same `main` with the same environment,
and leaves in the same way.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
LIMIT_S = 120.0  # for one attempt, all ranks; on a quiet machine it takes about one


class Warm:
    """The warmed process, seen from the test: one attempt at a time."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            # A thread of OpenBLAS in the parent would make the fork unsafe; ranks here are too small to want one.
            "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "train.crash.warm"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def run(self, folder: Path, config: Path, *, ranks: int, env: Mapping[str, str]) -> tuple[int, ...]:
        """Run all ranks to their end; their exit codes. Logs are in the folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        folder.mkdir(parents=True, exist_ok=True)
        request = {"folder": str(folder), "config": str(config), "ranks": ranks, "env": dict(env)}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the warmed process died"
        codes: list[int] = json.loads(answer)
        return tuple(codes)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve() -> None:
    """Read requests until nobody is there to send one."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    # Imported for the children. torch imports the second one at the first use of a meta tensor, a second's work.
    import torch._dynamo  # noqa: F401

    from trainmaster.train import __main__ as entry
    from trainmaster.train import loop  # noqa: F401
    from trainmaster.train.parallel import shard  # noqa: F401

    assert len(list(Path("/proc/self/task").iterdir())) == 1, (
        "a second thread: children could inherit a lock that nobody opens"
    )
    for line in sys.stdin:
        answers.write(json.dumps(attempt(json.loads(line), entry)) + "\n")
        answers.flush()


def attempt(request: Mapping[str, Any], entry: Any) -> list[int]:
    ranks, port, me = request["ranks"], free_port(), os.getpid()
    children: dict[int, int] = {}
    for rank in range(ranks):
        ours = {
            "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        child = os.fork()
        if child == 0:
            become_rank(request, {key: str(value) for key, value in ours.items()}, entry, parent=me)
        children[child] = rank
    return [code for _, code in sorted(collect(children).items())]


def become_rank(request: Mapping[str, Any], ours: Mapping[str, str], entry: Any, *, parent: int) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: no rank outlives its test
        if os.getppid() != parent:
            os._exit(1)
        log = os.open(f"{request['folder']}/rank-{ours['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # {rank} in a value: two ranks on one machine can stand for two nodes, with a memory each.
        asked = {name: value.replace("{rank}", ours["RANK"]) for name, value in request["env"].items()}
        os.environ.update({**ours, **asked})
        code = entry.main([request["config"]], os.environ)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def collect(children: Mapping[int, int]) -> dict[int, int]:
    """Each rank's exit code; a rank that hangs is killed in the end, and told apart by its code."""
    codes: dict[int, int] = {}
    end = time.monotonic() + LIMIT_S
    while len(codes) < len(children):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in children:
            codes[children[pid]] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > end:
            for child, rank in children.items():
                if rank not in codes:
                    os.kill(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    codes[rank] = 999  # no exit code there is: it hung
        elif pid == 0:
            time.sleep(0.005)
    return codes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    serve()
