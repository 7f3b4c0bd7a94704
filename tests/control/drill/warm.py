"""Control planes in milliseconds: a process that has imported everything already and forks one child for each life.

A real one is `python -m trainmaster.control HOME`; a child here runs the same `main` with the same environment.
Forking is safe because the parent has one thread when it does so; it refuses otherwise.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS, SOURCE = Path(__file__).parents[2], Path(__file__).parents[3] / "src"


class Warm:
    """The warmed process, seen from the test."""

    def __init__(self, *modules: str) -> None:
        """`modules` are imported beforehand too: those of the targets that the children will use."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "control.drill.warm", *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{SOURCE}"},
        )  # fmt: skip

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> int:
        """A new control plane; its pid."""
        pid: int = self._ask({"start": list(argv), "env": dict(env), "log": str(log)})
        return pid

    def poll(self, pid: int) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""
        code: int | None = self._ask({"poll": pid})
        return code

    def end(self, pid: int, number: signal.Signals) -> int:
        os.kill(pid, number)  # it is not collected before we ask: its number cannot be another's
        while (code := self.poll(pid)) is None:
            time.sleep(0.01)
        return code

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the warmed process died"
        return json.loads(answer)


def serve() -> None:
    """Answer until nobody is there to ask."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    import psycopg  # noqa: F401 (for the children)
    import sqlalchemy.dialects.postgresql.psycopg
    import sqlalchemy.dialects.sqlite.pysqlite  # noqa: F401

    from trainmaster.control import __main__ as entry
    from trainmaster.targets import local  # noqa: F401

    for name in sys.argv[1:]:
        importlib.import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a second thread: children could inherit a held lock"
    codes: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            answer: int | None = start(request, entry, parent=os.getpid())
            codes.pop(answer, None)  # numbers come again after some ten thousand processes
        else:
            answer = poll(request["poll"], codes)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def start(request: Mapping[str, Any], entry: Any, *, parent: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: none outlives its test
        if os.getppid() != parent:
            os._exit(1)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["env"])
        entry.main(request["start"])
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
    return 0


def poll(pid: int, codes: dict[int, int]) -> int | None:
    if pid not in codes:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found == 0:
            return None
        codes[pid] = os.waitstatus_to_exitcode(status)
    return codes[pid]


if __name__ == "__main__":
    serve()
