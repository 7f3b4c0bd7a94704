"""Programs in milliseconds: a process that has imported their modules already and forks one child for each.

`python -m MODULE WORDS` starts an interpreter and imports; torch alone takes two seconds of a processor. A child here
runs the same module as `__main__`, with its own environment, folder and streams. Forking is safe because the server
has one thread when it does so; it refuses otherwise. A test of the start itself, of a terminal or of what is imported
uses a new interpreter. The workers of a parallel run fork theirs from one process (`share`), which imports once.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
# Of ranks, of the control plane and of the verbs. torch imports `torch._dynamo` at the first use of a meta tensor.
IMPORTS = (
    "torch._dynamo", "trainmaster.train.__main__", "trainmaster.train.loop", "trainmaster.bench.collectives.__main__",
    "trainmaster.bench.accept.rank", "torch.utils.flop_counter",
    "sqlalchemy.dialects.sqlite.pysqlite", "alembic.command", "httpx", "uvicorn", "yaml", "rich.console", "rich.table",
    "trainmaster.web.app", "trainmaster.control", "trainmaster.targets.local", "trainmaster.checks.registry",
)  # fmt: skip
_REQUEST_BYTES = 1 << 17  # one packet: the words and the environment of a program
_PR_SET_PDEATHSIG = 1
SHARED = "TRAINMASTER_TESTS_FORK_SERVER"  # the name of the socket of the process that `share` started


class Child:
    """A program that runs; the part of subprocess.Popen that tests use."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + timeout if timeout is not None else None
        rest_s = 0.005
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(rest_s)
            rest_s = min(0.05, rest_s * 1.2)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # the server has not collected it: its number cannot be another's
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The warmed process, seen from the test."""

    def __init__(self, *imports: str, python: str | Path = sys.executable) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        if imports == IMPORTS and (shared := os.environ.get(SHARED)):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.connect(f"\0{shared}")
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _launch(theirs, *imports, python=python)

    def start(
        self,
        module: str,
        *words: str,
        env: Mapping[str, str],
        cwd: Path | None = None,
        out: int | None = None,
        err: int | None = None,
        stdin: int | None = None,
        prepare: Sequence[str] = (),
    ) -> Child:
        """Run a module, or after `-c` a text; the streams are descriptors, /dev/null where none is given.

        `prepare`: `module:function` and its arguments, called first in the child.
        """
        request = {"module": module, "words": words, "env": dict(env), "prepare": list(prepare)}
        with Path(os.devnull).open("r+b") as nothing:
            streams = [nothing.fileno() if stream is None else stream for stream in (stdin, out, err)]
            return Child(self, self.ask({**request, "cwd": str(cwd or Path.cwd())}, streams))

    def run(
        self,
        module: str,
        *words: str,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdout: int | None = None,
        timeout: float = 150,
        prepare: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; its output unless `stdout` is a descriptor for it."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            to = out.fileno() if stdout is None else stdout
            child = self.start(module, *words, env=env, cwd=cwd, out=to, err=err.fileno(), prepare=prepare)
            try:
                code = child.wait(timeout)
            finally:
                child.kill()
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return subprocess.CompletedProcess([module, *words], code, *texts)

    def ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(descriptors))
            answer = self._socket.recv(_REQUEST_BYTES)
        assert answer, "the fork server died"
        return json.loads(answer)

    def close(self) -> None:
        self._socket.close()
        if self._process is not None:
            self._process.wait()


def _launch(place: socket.socket, *words: str, python: str | Path = sys.executable) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        # A thread of OpenBLAS, or of pyarrow's allocator, in the server would make the fork unsafe.
        "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }  # fmt: skip
    return subprocess.Popen(
        [str(python), str(Path(__file__)), str(place.fileno()), *words],
        env=environment, stdin=subprocess.DEVNULL, pass_fds=[place.fileno()],
    )  # fmt: skip


@contextlib.contextmanager
def share() -> Iterator[None]:
    """One process imports, when the first worker asks for it, and forks a server for each worker."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # the kernel finds a name, which is no file
        listener.listen()
        process = _launch(listener)
        os.environ[SHARED] = listener.getsockname()[1:].decode()
        try:
            yield
        finally:
            del os.environ[SHARED]
            process.kill()
            process.wait()


def serve_each(listener: socket.socket) -> None:
    """Fork a server for each connection; the imports wait for the first."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    while True:
        connection, _ = listener.accept()
        _import(IMPORTS)
        if os.fork() == 0:
            listener.close()
            serve(connection, ())
            os._exit(0)
        connection.close()


def _import(names: Sequence[str]) -> None:
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page


def serve(connection: socket.socket, imports: Sequence[str]) -> None:
    """Answer requests until the test's end of the connection is closed."""
    _import(imports)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a second thread: children could inherit a held lock"
    while True:
        packet, descriptors = _receive(connection)
        if not packet:
            return
        request = json.loads(packet)
        answer = _poll(request["poll"]) if "poll" in request else _fork(request, descriptors, connection)
        connection.send(json.dumps(answer).encode())


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    packet, ancillary, _, _ = connection.recvmsg(_REQUEST_BYTES, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    return packet, list(descriptors)


def _poll(pid: int) -> int | None:
    """Exit code, negative for a signal; None while the child runs. It is asked for once."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _fork(request: Mapping[str, Any], descriptors: Sequence[int], connection: socket.socket) -> int:
    server, child = os.getpid(), os.fork()
    if child == 0:
        connection.close()
        _become(request, descriptors, server=server)
    for descriptor in descriptors:
        os.close(descriptor)
    return child


def _become(request: Mapping[str, Any], descriptors: Sequence[int], *, server: int) -> None:
    """Run the program in this child and end the process as an interpreter would."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # no program outlives its test
        if os.getppid() != server:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and a test may be about it
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        code = _run(request)
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # wait for threads that are no daemons
            atexit._run_exitfuncs()
        try:
            sys.stdout.flush()
        except Exception:
            code = 120  # as an interpreter ends that cannot write what is left
        os._exit(code)


def _run(request: Mapping[str, Any]) -> int:
    try:
        if request["prepare"]:
            name, *words = request["prepare"]
            module, function = name.split(":")
            getattr(importlib.import_module(module), function)(*words)
        _take_path(request["env"].get("PYTHONPATH", ""))
        sys.path[0] = request["cwd"]
        sys.modules.pop(f"{request['module']}.__main__", None)  # imported by the server; runpy warns about it
        sys.argv = [request["module"], *request["words"]]
        if request["module"] == "-c":
            exec(sys.argv.pop(1), {"__name__": "__main__"})
        else:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _take_path(folders: str) -> None:
    """PYTHONPATH of the child, with the `sitecustomize` that an interpreter would import at its start."""
    new = [folder for folder in folders.split(os.pathsep) if folder and folder not in sys.path]
    sys.path[1:1] = new
    if any((Path(folder) / "sitecustomize.py").exists() for folder in new):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")


if __name__ == "__main__":
    place = socket.socket(fileno=int(sys.argv[1]))
    if place.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        serve_each(place)
    serve(place, sys.argv[2:])
