"""Agents of a job of several nodes: they agree when the ranks start, stop, and start again in the same attempt.

The agent of node 0 leads (leader.py). It listens where the ranks would meet; the others connect to it, and it gives the
ranks another port for each start. Once a second, and at every change, each of them says its whole state, and the leader
what each of them is to do. Who is not sure, because nobody answers, ends its ranks and its attempt: a new attempt
follows, as on targets without a group. A connection that is lost while ranks run ends nothing: it is opened again.

A spare is a node without ranks. Its agent is numbered after the others, and is given the place of a lost one.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainmaster.agent.diagnose import Outcome
from trainmaster.agent.line import BEAT_S, Line, parse_outcome, render_outcome
from trainmaster.agent.watch import Stop, Watch
from trainmaster.core.plan import Plan
from trainmaster.core.states import Reason

# For all agents to be ready again after a failure; most take a second. Longer than the look at the GPUs may take.
AGREE_S = 30.0
WAIT, RUN, STOP, END, LEAVE = "wait", "run", "stop", "end", "leave"
_DIAL_S = 0.5
_DIALLED_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the ranks of a node are started with."""

    restart: int
    node: int
    port: int

    @property
    def environment(self) -> Mapping[str, str]:
        return {"MASTER_PORT": str(self.port), "GROUP_RANK": str(self.node)}


class Group(Protocol):
    """The agents of an attempt, as one of them sees them."""

    def sockets(self) -> Sequence[socket.socket]:
        """What wakes a loop that waits for the others."""

    def pump(self) -> None:
        """Hear the others, and say that this agent is there."""

    def look(self) -> Outcome | None:
        """Hear the others while ranks run; the failure elsewhere for which they must stop."""

    def tell(self, failure: Outcome) -> None:
        """A rank of this node has failed: the others stop theirs now."""

    def next_start(
        self, watch: Watch, failure: Outcome | None = None, refusal: Outcome | None = None
    ) -> Start | Outcome:
        """Wait for the next start of all ranks; an Outcome ends the attempt here.

        No rank of this node runs. `failure` is that of its own ranks; `refusal` says why none may start here again.
        """

    def close(self, outcome: Outcome | None) -> None:
        """This agent ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the leader wants of an agent."""

    leader: str
    do: str
    restart: int
    node: int
    port: int
    why: Outcome | None

    def render(self) -> dict[str, Any]:
        return {
            "leader": self.leader, "do": self.do, "restart": self.restart, "node": self.node, "port": self.port,
            "why": render_outcome(self.why),
        }  # fmt: skip

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> Order:
        """ValueError for what is no order."""
        try:
            return cls(
                leader=str(message["leader"]), do=str(message["do"]), restart=int(message["restart"]),
                node=int(message["node"]), port=int(message["port"]), why=parse_outcome(message["why"]),
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise ValueError(f"no order: {error}") from None


class Follower:
    """An agent that is led: of a node but the first, or of a spare."""

    def __init__(self, plan: Plan) -> None:
        assert plan.master_port is not None and plan.spec.train is not None
        self._place = plan.master_addr, plan.master_port
        self._attempt, self._number = plan.attempt, plan.node_rank
        self._name, self._host = make_name(), platform.node()
        self._first_s = plan.spec.train.timeouts.first_step_s
        self._line: Line | None = None
        self._dialling: tuple[socket.socket, float] | None = None
        self._dial_at = self._beat_at = 0.0
        self._order: Order | None = None
        self._heard = time.monotonic()
        self._restart, self._runs, self._over = -1, False, False
        self._failure: Outcome | None = None
        self._refusal: Outcome | None = None

    def sockets(self) -> Sequence[socket.socket]:
        return [self._line.socket] if self._line is not None and not self._line.closed else []

    def look(self) -> Outcome | None:
        self.pump()
        order = self._order
        if order is None or (order.restart < self._restart and order.do != LEAVE):
            return None
        if order.do in (STOP, LEAVE) or order.restart > self._restart:
            return order.why or Outcome(reason=Reason.CRASHED, message="a rank of another node failed")
        return None

    def tell(self, failure: Outcome) -> None:
        self._failure = failure
        self._say()

    def next_start(
        self, watch: Watch, failure: Outcome | None = None, refusal: Outcome | None = None
    ) -> Start | Outcome:
        self._runs, self._failure, self._refusal = False, failure, refusal
        self._heard = time.monotonic()
        self._say()
        while True:
            self.pump()
            order = self._order
            if stop := watch.asked():
                return failure or stopped_before(stop)
            if order is not None and order.do in (END, LEAVE):
                return refusal or _pick(failure, order.why)
            if order is not None and order.do == RUN and order.restart > self._restart:
                self._restart, self._runs, self._failure = order.restart, True, None
                self._say()
                return Start(restart=order.restart, node=order.node, port=order.port)
            limit_s = AGREE_S if self._order is not None else self._first_s
            if time.monotonic() - self._heard > limit_s:
                return refusal or failure or _unheard(limit_s)
            watch.beat(ranks=0)
            watch.sleep(*self.sockets())

    def close(self, outcome: Outcome | None) -> None:
        self.pump()  # unread lines would cut off the last one
        self._over, self._runs = True, False
        if outcome is not None and outcome.reason is not None:
            self._failure = self._failure or outcome
        self._say()
        for connection in (self._line and self._line.socket, self._dialling and self._dialling[0]):
            if connection:
                connection.close()
        self._line = self._dialling = None

    def pump(self) -> None:
        now = time.monotonic()
        if self._line is None or self._line.closed:
            self._line = None
            self._dial(now)
            return
        for message in self._line.receive():
            with contextlib.suppress(ValueError):
                self._hear(Order.parse(message), now)
        if now >= self._beat_at:
            self._say()

    def _hear(self, order: Order, now: float) -> None:
        if self._order is not None and order.leader != self._order.leader:
            why = Outcome(reason=Reason.NODE_LOST, message="node 0 has another agent than before")
            order = Order(leader=self._order.leader, do=LEAVE, restart=order.restart, node=0, port=0, why=why)
        elif self._order is not None and self._order.do == LEAVE:
            return
        self._order, self._heard = order, now

    def _dial(self, now: float) -> None:
        """Take up a connection without waiting for it."""
        if self._dialling is not None:
            connection, since = self._dialling
            fault = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            try:
                connection.getpeername()
            except OSError:
                if fault or now - since > _DIALLED_S:
                    connection.close()
                    self._dialling = None
                return
            self._line, self._dialling = Line(connection), None
            self._say()
        elif now >= self._dial_at:
            self._dial_at = now + _DIAL_S
            with contextlib.suppress(OSError):
                family, kind, protocol, _, address = socket.getaddrinfo(*self._place, type=socket.SOCK_STREAM)[0]
                connection = socket.socket(family, kind, protocol)
                connection.setblocking(False)
                connection.connect_ex(address)
                self._dialling = connection, now

    def _say(self) -> None:
        self._beat_at = time.monotonic() + BEAT_S
        if self._line is not None:
            self._line.send(
                {
                    "attempt": self._attempt, "agent": self._name, "host": self._host, "number": self._number,
                    "restart": self._restart, "runs": self._runs, "over": self._over,
                    "failure": render_outcome(self._failure), "refusal": render_outcome(self._refusal),
                }
            )  # fmt: skip


def stopped_before(stop: Stop) -> Outcome:
    """Outcome of a stop request while no rank runs: there is nothing to save."""
    message = f"{stop.message}; stopped before the ranks started"
    return Outcome(reason=stop.reason, message=message, resumable=True)


def make_name() -> str:
    """A name for this agent: another one in its place has another."""
    return os.urandom(8).hex()


def _pick(own: Outcome | None, led: Outcome | None) -> Outcome:
    """The outcome of this node: the leader's, and with its evidence where it is the node's own."""
    if led is None:
        return own or Outcome(reason=None, message="the job ended without this node")
    return own if own is not None and own.evidence.get("rank") == led.evidence.get("rank") else led


def _unheard(limit_s: float) -> Outcome:
    message = f"the agent of node 0 was not heard for {limit_s:g} s"
    return Outcome(reason=Reason.NODE_LOST, message=message)
