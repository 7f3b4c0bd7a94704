"""Agents of several nodes agree: on a start, a recovery in place, a spare, and an end where one is not heard."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.test_recovery import TRAIN
from trainmaster.agent import group as group_module
from trainmaster.agent import leader as leader_module
from trainmaster.agent.diagnose import Outcome
from trainmaster.agent.group import Follower, Start
from trainmaster.agent.leader import Leader, free_port
from trainmaster.agent.recovery import Recovery
from trainmaster.core.plan import EVENTS_FILE, MEMBERS_FILE, Plan
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason
from trainmaster.node.emit import Emitter

KILLED = Outcome(reason=Reason.CRASHED, message="rank 1 of 2 was killed by SIGKILL", evidence={"rank": 1})
SYMPTOM = Outcome(reason=Reason.COLLECTIVE_TIMEOUT, message="Connection closed by peer", evidence={"rank": 0})


class Clock:
    """What a group needs of a watch: one that is never asked to stop."""

    def asked(self) -> None: ...

    def beat(self, *, ranks: int) -> None: ...

    def sleep(self, *_: socket.socket) -> None:
        time.sleep(0.01)


class Nodes:
    """A leader and its followers in this process, each driven by a thread while it waits."""

    def __init__(self, folder: Path, *, nodes: int = 2, spares: int = 0) -> None:
        self.folder, self.port = folder, free_port("127.0.0.1")
        resources = {"nodes": nodes, "spares": spares}
        self.spec = parse_spec({"name": "a", "train": {**TRAIN, "batch_sequences": 6}, "resources": resources})
        self.recovery = Recovery(self._plan(0), Emitter(folder / EVENTS_FILE))
        self.leader = Leader(self._plan(0), self.recovery)
        self.followers = {number: Follower(self._plan(number)) for number in range(1, nodes + spares)}

    def _plan(self, number: int, attempt: str = "job.1") -> Plan:
        return Plan(
            attempt=attempt, spec=self.spec, folder=str(self.folder), checkpoints="/none", node_rank=number,
            master_port=self.port,
        )  # fmt: skip

    def meet(self, *numbers: int, **calls: Callable[[], Any]) -> dict[int, Start | Outcome]:
        """The next start of these nodes, with the failure or refusal that `n1=` and the like make of each."""
        results: dict[int, Start | Outcome] = {}

        def go(number: int) -> None:
            given = calls[f"n{number}"]() if f"n{number}" in calls else {}
            one = self.leader if number == 0 else self.followers[number]
            results[number] = one.next_start(Clock(), **given)  # type: ignore[arg-type]

        threads = [threading.Thread(target=go, args=(number,)) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return results

    def until(self, look: Callable[[], Any], *others: int) -> Any:
        """Let the leader and these followers talk until the value is there."""
        end = time.monotonic() + 10
        while not (value := look()):
            for number in others:
                self.followers[number].pump()
            self.leader.pump()
            assert time.monotonic() < end
            time.sleep(0.01)
        return value

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.folder / EVENTS_FILE).read_text().splitlines())
        return [line["data"] for line in lines if (line["phase"], line["event"]) == ("RECOVERY", name)]

    def close(self) -> None:
        for one in (self.leader, *self.followers.values()):
            one.close(None)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Nodes]]:
    monkeypatch.setattr(leader_module, "GONE_S", 0.1)
    for module in (leader_module, group_module):
        monkeypatch.setattr(module, "AGREE_S", 0.5)
    made: list[Nodes] = []

    def build(**counts: int) -> Nodes:
        made.append(Nodes(tmp_path, **counts))
        return made[-1]

    yield build
    for nodes in made:
        nodes.close()


def test_all_start_together_and_again_after_a_failure_on_one(make: Callable[..., Nodes]) -> None:
    nodes = make(nodes=3)
    first = nodes.meet(0, 1, 2)
    starts = [first[number] for number in range(3)]
    assert [(start.restart, start.node) for start in starts if isinstance(start, Start)] == [(0, 0), (0, 1), (0, 2)]
    assert len({start.port for start in starts if isinstance(start, Start)}) == 1
    assert nodes.leader.look() is None and nodes.followers[2].look() is None

    nodes.followers[1].tell(KILLED)
    assert nodes.until(nodes.leader.look, 1, 2).message == KILLED.message
    assert nodes.until(nodes.followers[2].look).message == KILLED.message
    # The leader's own ranks only lost their peer: what is told is the cause.
    again = nodes.meet(0, 1, 2, n0=lambda: {"failure": SYMPTOM}, n1=lambda: {"failure": KILLED})
    assert all(isinstance(start, Start) and start.restart == 1 for start in again.values()), again
    (told,) = nodes.events("start")
    assert (told["rank"], told["reason"], told["how"], told["replaced"]) == (1, "crashed", "in_place", {})
    ports = {start.port for start in again.values() if isinstance(start, Start)}
    assert len(ports) == 1 and ports != {start.port for start in starts if isinstance(start, Start)}


@pytest.mark.parametrize(
    ("failure", "refusal", "reason"),
    [
        (
            Outcome(reason=Reason.OUT_OF_MEMORY, message="CUDA out of memory", evidence={"rank": 1}),
            None,
            "out_of_memory",
        ),
        (KILLED, Outcome(reason=Reason.CHECK_FAILED, message="pre-flight FAIL: gpu_count"), "check_failed"),
    ],
)
def test_a_cause_that_does_not_pass_ends_the_attempt_on_all_nodes(
    make: Callable[..., Nodes], failure: Outcome, refusal: Outcome | None, reason: str
) -> None:
    nodes = make()
    nodes.meet(0, 1)
    nodes.followers[1].tell(failure)
    nodes.until(nodes.leader.look, 1)
    led: list[Any] = []

    def lead() -> None:
        led.append(nodes.leader.next_start(Clock(), failure=SYMPTOM))  # type: ignore[arg-type]
        nodes.leader.close(led[0])

    thread = threading.Thread(target=lead)
    thread.start()
    ended = nodes.meet(1, n1=lambda: {"failure": failure, "refusal": refusal})[1]
    thread.join(20)
    assert isinstance(ended, Outcome) and ended.reason == reason
    assert led[0].reason == reason
    assert [told["why"].partition(":")[0] for told in nodes.events("refused")] == (
        [] if refusal is None else [f"node 1 ({nodes.followers[1]._host})"]
    )


def test_an_agent_that_is_not_heard_ends_the_attempt_and_the_event_says_so(make: Callable[..., Nodes]) -> None:
    nodes = make()
    nodes.meet(0, 1)
    line = nodes.followers[1]._line
    assert line is not None
    line.close()  # killed: it said nothing
    assert nodes.leader.look() is None, "without a spare a lost connection stops no rank"
    ended = nodes.meet(0, n0=lambda: nodes.leader.tell(SYMPTOM) or {"failure": SYMPTOM})[0]
    assert isinstance(ended, Outcome) and ended.reason is Reason.NODE_LOST
    assert [told["why"] for told in nodes.events("refused")] == [ended.message]
    assert "was not ready within 0.5 s" in ended.message
    # The other side ends too, with its own failure: nobody leads it.
    nodes.leader.close(ended)
    left = nodes.meet(1, n1=lambda: {"failure": SYMPTOM})[1]
    assert left == SYMPTOM


def test_a_connection_that_was_cut_stops_nothing_and_is_opened_again(make: Callable[..., Nodes]) -> None:
    nodes = make()
    nodes.meet(0, 1)
    old = nodes.followers[1]._line
    assert old is not None
    old.close()
    nodes.until(lambda: nodes.followers[1]._line not in (None, old) and not nodes.leader._agents[1].line.closed, 1)
    assert nodes.leader.look() is None and nodes.followers[1].look() is None
    nodes.followers[1].tell(KILLED)
    assert nodes.until(nodes.leader.look, 1).reason is Reason.CRASHED


def test_a_spare_takes_the_place_of_a_lost_node(make: Callable[..., Nodes]) -> None:
    nodes = make(nodes=2, spares=1)
    waiting = threading.Thread(target=lambda: given.update(nodes.meet(2)))
    given: dict[int, Any] = {}
    waiting.start()
    nodes.meet(0, 1)
    nodes.until(lambda: 2 in nodes.leader._agents)
    assert not given, "a spare starts no rank before its turn"
    line = nodes.followers[1]._line
    assert line is not None
    line.close()
    lost = nodes.until(nodes.leader.look)
    assert lost.reason is Reason.NODE_LOST and "node 1" in lost.message
    start = nodes.meet(0)[0]
    waiting.join(20)
    assert isinstance(start, Start) and start.restart == 1
    assert given[2] == Start(restart=1, node=1, port=start.port)
    (told,) = nodes.events("start")
    assert (told["how"], list(told["replaced"])) == ("spare", ["1"])
    assert json.loads((nodes.folder / MEMBERS_FILE).read_text()) == [0, 2]
    # The lost one is back after all: its ranks stop, and its agent ends.
    left = nodes.until(nodes.followers[1].look, 1, 2)
    assert left.reason is Reason.NODE_LOST and nodes.leader.look() is None
    assert nodes.meet(1)[1] == left


def test_the_new_pod_of_a_node_that_was_replaced_is_sent_away(make: Callable[..., Nodes]) -> None:
    """It held a machine until the limit of a first start, half an hour: an older cluster puts it there."""
    nodes = make(nodes=2, spares=1)
    waiting = threading.Thread(target=lambda: nodes.meet(2))
    waiting.start()
    nodes.meet(0, 1)
    nodes.until(lambda: 2 in nodes.leader._agents)
    line = nodes.followers[1]._line
    assert line is not None
    line.close()
    nodes.until(nodes.leader.look)
    nodes.meet(0)
    waiting.join(20)
    for _ in range(2):  # each one that is put there
        nodes.followers[1].close(None)
        nodes.followers[1] = Follower(nodes._plan(1))
        left = nodes.until(nodes.followers[1].look, 1, 2)
        assert left.reason is Reason.NODE_LOST and "a spare has taken the place" in left.message
        assert nodes.leader.look() is None, "the others train on"


def test_strangers_are_not_heard(make: Callable[..., Nodes]) -> None:
    nodes = make()
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"attempt": "other.1", "number": 1}\n', b"{" * 300_000):
        with socket.create_connection(("127.0.0.1", nodes.port)) as stranger:
            sending = threading.Thread(target=_send, args=(stranger, text))
            sending.start()
            stranger.setblocking(False)
            nodes.until(lambda end=stranger: _is_closed(end))
            sending.join(10)
    assert not nodes.leader._agents and not nodes.leader._unnamed
    assert all(isinstance(start, Start) for start in nodes.meet(0, 1).values())


def _is_closed(end: socket.socket) -> bool:
    """Whether the other end has closed the connection."""
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _send(end: socket.socket, data: bytes) -> None:
    """Send all of it, or as much as the other end takes before it closes."""
    left = memoryview(data)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while left:
            with contextlib.suppress(BlockingIOError):
                left = left[end.send(left) :]
            time.sleep(0.001)
