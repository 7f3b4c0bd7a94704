"""Start the ranks of a node: forked from a fork server that has imported torch already, or as new processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trainmaster.agent.watch import Watch
from trainmaster.core.files import open_plain
from trainmaster.core.plan import AGENT_LOG, RESUMABLE_EXIT, ROOM_VARIABLE, rank_log
from trainmaster.node.owner import die_with

_PACKET_BYTES = 1 << 16
# For an answer of the fork server: its imports take a minute on a busy machine; later a fork takes milliseconds.
_FIRST_ANSWER_S, _ANSWER_S = 300.0, 15.0
_ROOM_BYTES = 256  # for RANK, LOCAL_RANK and the like
# Libraries that would start threads when they are imported; a fork wants none. A rank gets its own setting back.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS",)


class Process(Protocol):
    """The part of subprocess.Popen that is needed of a rank."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...


@dataclass(slots=True)
class Forked:
    """A rank that the fork server has made and the kernel has handed to this process."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode


@dataclass(slots=True)
class Rank:
    """One rank of this node. What it prints in this start begins at `log_start` of its log."""

    number: int
    process: Process
    log_start: int = 0

    def send(self, number: signal.Signals) -> None:
        """Signal the process group of a rank that has not been reaped: its pid cannot be another process's."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:  # forked a moment ago: it has no group of its own yet
                os.kill(self.process.pid, number)


class NotStarted(Exception):
    """A rank could not be started; `number` names it. The ranks before it run."""

    def __init__(self, number: int, cause: OSError) -> None:
        super().__init__(str(cause))
        self.number, self.cause = number, cause


class ForkServer:
    """The fork server of a node (train/fork_server.py), seen from the agent. It dies with the agent."""

    def __init__(self, config: str, environment: Mapping[str, str], *, work: Path, folder: Path) -> None:
        self._added = [name for name in _ONE_THREAD if name not in environment]
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.setblocking(False)
        with theirs, (folder / AGENT_LOG).open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainmaster.train.fork_server", config],
                env={**environment, **dict.fromkeys(self._added, "1"), ROOM_VARIABLE: "-" * _ROOM_BYTES},
                cwd=work,
                stdin=theirs.fileno(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 (two system calls; see die_with)
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, number: int, environment: Mapping[str, str], log: Path) -> bool:
        """Ask for a rank; False if the server is gone."""
        request = {"rank": number, "env": dict(environment), "remove": self._added, "log": str(log)}
        with contextlib.suppress(OSError):
            self.line.send(json.dumps(request).encode())
            return True
        return False

    def answers(self) -> dict[int, int]:
        """Ranks that were forked since the last call, with their process numbers."""
        forked: dict[int, int] = {}
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while packet := self.line.recv(_PACKET_BYTES):
                answer = json.loads(packet)
                forked[answer["rank"]] = answer["pid"]
        return forked

    def close(self) -> None:
        self.line.close()
        if self.alive:
            self._process.kill()
        self._process.wait()


@dataclass(slots=True, kw_only=True)
class Starter:
    """Starts the ranks of one node, as often as it is asked to."""

    argv: Sequence[str]
    environment: Mapping[str, str]  # of every rank
    numbers: range  # of the ranks of this node
    work: Path
    folder: Path
    server: ForkServer | None = None
    of_first: Mapping[str, str] = field(default_factory=dict)  # of rank 0 alone
    has_forked: bool = False

    def start(self, watch: Watch, more: Mapping[str, str], numbers: range | None = None) -> list[Rank]:
        """Start these ranks, or every one, with `more` variables; on a stop request the rest is not started.

        A rank that was not started because of a stop request counts as stopped: there is nothing to save.
        """
        numbers = numbers or self.numbers
        ends = {number: self._size(number) for number in numbers}
        is_trainer = self.server is not None  # whose ranks end with this code before their first step
        forked = self._fork(watch, more, numbers) if is_trainer else {}
        ranks: list[Rank] = []
        for number in numbers:
            process: Process
            if number in forked:
                process = Forked(forked[number])
            elif watch.asked():
                if not is_trainer:
                    break
                process = Forked(0, RESUMABLE_EXIT)
            else:
                process = self._spawn(number, more)
            ranks.append(Rank(number, process, ends[number]))
        return ranks

    def take_place(self, node: int) -> None:
        """Start the ranks of this node from now on: a spare has those of the node that it replaces."""
        each = len(self.numbers)
        self.numbers = range(node * each, (node + 1) * each)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    def _fork(self, watch: Watch, more: Mapping[str, str], numbers: range) -> dict[int, int]:
        """Ranks that the server forked. Fewer than all if it is gone or silent, or if a stop request came before."""
        assert self.server is not None
        server, forked = self.server, dict[int, int]()
        for number in numbers:
            if not server.ask(number, {**self._own(number), **more}, self.folder / rank_log(number)):
                break
        heard = time.monotonic()
        while len(forked) < len(numbers):
            if new := server.answers():
                forked |= new
                heard, self.has_forked = time.monotonic(), True
            if len(forked) == len(numbers) or not server.alive or watch.asked():
                break
            if time.monotonic() - heard > (_ANSWER_S if self.has_forked else _FIRST_ANSWER_S):
                break  # it was stopped, or hangs: it is killed below, and the others are new processes
            watch.beat(ranks=len(forked))
            watch.sleep(server.line)
        forked |= server.answers()
        if len(forked) < len(numbers):
            self.close()
        return forked

    def _spawn(self, number: int, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        environment = {**self.environment, **more, **self._own(number)}
        try:
            log = open_plain(self.folder / rank_log(number), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with os.fdopen(log, "ab") as output:
                return subprocess.Popen(
                    self.argv,
                    env=environment,
                    cwd=self.work,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # its own group: a signal reaches its children, and none of the agent's
                    preexec_fn=die_with(os.getpid()),  # noqa: PLW1509 (two system calls; see die_with)
                )
        except OSError as error:
            raise NotStarted(number, error) from error

    def _own(self, number: int) -> dict[str, str]:
        own = {"RANK": str(number), "LOCAL_RANK": str(number - self.numbers.start), "ROLE_RANK": str(number)}
        return {**own, **self.of_first} if number == 0 else own

    def _size(self, number: int) -> int:
        try:
            return (self.folder / rank_log(number)).stat().st_size
        except OSError:
            return 0
