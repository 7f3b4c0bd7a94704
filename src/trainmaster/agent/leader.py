"""The agent of node 0, which leads the others (group.py): it decides on each start, and on who takes part in it."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.agent.diagnose import Outcome
from trainmaster.agent.group import AGREE_S, END, LEAVE, RUN, STOP, WAIT, Order, Start, make_name, stopped_before
from trainmaster.agent.line import BEAT_S, Line, parse_outcome
from trainmaster.agent.recovery import IN_PLACE, SILENT_S, SPARE, Recovery
from trainmaster.agent.watch import Watch
from trainmaster.core.failures import SYMPTOMS
from trainmaster.core.files import write_whole
from trainmaster.core.plan import MEMBERS_FILE, Plan
from trainmaster.core.states import Reason

LOST_S = 10.0  # an agent that is silent for so long is replaced where there is a spare
GONE_S = 3.0  # the same with its connection closed: its process has ended, or connects again at once
_UNNAMED = 64  # connections that have not said who they are, beside one for each agent
_DESCRIPTORS = 256  # of this process, beside one for each agent


@dataclass(slots=True, kw_only=True)
class _Agent:
    """Another agent, as its last line says."""

    number: int  # of its node; those of spares follow
    name: str
    host: str
    line: Line
    heard: float
    restart: int
    runs: bool
    over: bool
    failure: Outcome | None
    refusal: Outcome | None

    @property
    def place(self) -> str:
        return f"node {self.number} ({self.host})"

    @property
    def is_broken(self) -> bool:
        """Whether no rank may start there again: a check failed, or a rank says that a GPU is lost."""
        return self.refusal is not None or (self.failure is not None and self.failure.reason is Reason.NODE_LOST)

    def find_loss(self, now: float) -> str | None:
        """Why it is lost; None while it may answer."""
        silent_s = now - self.heard
        if silent_s > LOST_S or (self.line.closed and silent_s > GONE_S):
            return f"{self.place} was not heard for {silent_s:.0f} s"
        return None


class Leader:
    """The agent of node 0, towards the others."""

    def __init__(self, plan: Plan, recovery: Recovery) -> None:
        assert plan.master_port is not None and plan.spec.train is not None
        resources = plan.spec.resources
        self._plan, self._recovery, self._name = plan, recovery, make_name()
        self._all = resources.machines
        _allow_descriptors(self._all)
        self._listener = _listen(plan.master_addr, plan.master_port)
        self._unnamed: list[Line] = []
        self._agents: dict[int, _Agent] = {}
        self._places = list(range(resources.nodes))  # place → number of the node that has it
        self._do, self._port, self._beat_at = WAIT, 0, 0.0
        self._why: Outcome | None = None  # of what is done now

    def sockets(self) -> Sequence[socket.socket]:
        lines = (*self._unnamed, *(agent.line for agent in self._agents.values()))
        return [self._listener, *(line.socket for line in lines if not line.closed)]

    def look(self) -> Outcome | None:
        self.pump()
        for agent in self._others():
            if agent.restart == self._recovery.restart and agent.failure is not None and not agent.over:
                return self._stop(agent.failure)
            if (loss := self._find_loss(agent)) and self._find_spare() is not None:
                silent = {SILENT_S: time.monotonic() - agent.heard}
                return self._stop(Outcome(reason=Reason.NODE_LOST, message=loss, evidence=silent))
        return None

    def tell(self, failure: Outcome) -> None:
        self._stop(failure)

    def next_start(
        self, watch: Watch, failure: Outcome | None = None, refusal: Outcome | None = None
    ) -> Start | Outcome:
        train = self._plan.spec.train
        assert train is not None
        first = self._do == WAIT
        limit_s = train.timeouts.first_step_s if first else AGREE_S
        began, replaced = time.monotonic(), dict[str, str]()
        while missing := self._fill(replaced):
            self.pump()
            if stop := watch.asked():
                return failure or stopped_before(stop)
            if (obstacle := refusal or self._find_end()) is not None:
                break
            if time.monotonic() - began > limit_s:
                message = f"{missing[0]} was not ready within {limit_s:g} s"
                obstacle = Outcome(reason=Reason.NODE_LOST, message=message)
                break
            watch.beat(ranks=0)
            watch.sleep(*self.sockets())
        else:
            obstacle = refusal
        if not first and (end := self._judge(failure, obstacle, replaced)) is not None:
            return end
        if obstacle is not None:
            return obstacle
        return self._start(agree_s=time.monotonic() - began)

    def close(self, outcome: Outcome | None) -> None:
        self.pump()  # unread lines would cut off the last one
        self._do, self._why = END, outcome
        self._tell()
        for line in (*self._unnamed, *(agent.line for agent in self._agents.values())):
            line.close()
        self._listener.close()

    def _judge(self, own: Outcome | None, obstacle: Outcome | None, replaced: Mapping[str, str]) -> Outcome | None:
        """Begin the recovery; an Outcome ends the attempt instead, and says in an event why it is not recovered."""
        cause = self._find_cause(own)
        passed = bool(replaced) and cause is not own  # with the node that had it
        why = obstacle.message if obstacle is not None else self._recovery.find_obstacle(cause, replaced=passed)
        if why is None:
            self._recovery.begin(cause, how=SPARE if replaced else IN_PLACE, replaced=replaced)
            return None
        if obstacle is not None or self._recovery.is_passing(cause):
            self._recovery.refuse(cause, why)
        # What is only not heard says less than a failure that was; a check that failed says more.
        unheard = obstacle is None or (obstacle.reason is Reason.NODE_LOST and cause.reason not in SYMPTOMS)
        return cause if obstacle is None or unheard else obstacle

    def _find_cause(self, own: Outcome | None) -> Outcome:
        """The failure that came first, as far as can be told: a rank that only lost its peer comes last."""
        failures = [own, self._why]
        failures += [agent.failure for agent in self._others() if agent.restart == self._recovery.restart]
        found = [failure for failure in failures if failure is not None]
        assert found, "ranks are stopped for a reason"
        return min(found, key=lambda failure: (failure.reason in SYMPTOMS, failure.reason is Reason.NODE_LOST))

    def _find_end(self) -> Outcome | None:
        """Why some place can be filled no more: its agent has ended, or may not start its ranks, and no spare waits."""
        for agent in self._others():
            if (agent.over or agent.is_broken) and self._find_spare() is None:
                given = agent.refusal or agent.failure
                message = f"{agent.place}: {'its agent has ended' if given is None else given.message}"
                return Outcome(reason=(given and given.reason) or Reason.NODE_LOST, message=message)
        return None

    def _fill(self, replaced: dict[str, str]) -> list[str]:
        """Put spares in the places of the lost; the nodes that are not ready yet."""
        missing = []
        for place, number in enumerate(self._places):
            agent = self._agents.get(number)
            if number == 0 or (agent is not None and self._is_ready(agent)):
                continue
            unusable = agent is not None and (agent.over or agent.is_broken or self._find_loss(agent))
            spare = self._find_spare() if unusable else None
            if agent is None or spare is None:
                missing.append(agent.place if agent is not None else f"node {number}")
                continue
            replaced[str(place)] = spare.host
            self._places[place] = spare.number
            write_members(self._plan, self._places)  # before the lost agent is told: its end is no end of the attempt
        return missing

    def _is_ready(self, agent: _Agent) -> bool:
        return not (agent.runs or agent.over or agent.line.closed or agent.is_broken or self._find_loss(agent))

    def _find_spare(self) -> _Agent | None:
        spares = [agent for number, agent in sorted(self._agents.items()) if number not in self._places]
        nodes = self._plan.spec.resources.nodes
        return next((agent for agent in spares if agent.number >= nodes and self._is_ready(agent)), None)

    def _find_loss(self, agent: _Agent) -> str | None:
        return None if agent.over else agent.find_loss(time.monotonic())

    def _start(self, *, agree_s: float) -> Start:
        self._recovery.add_part("agree", agree_s)
        self._do, self._why, self._port = RUN, None, free_port(self._plan.master_addr)
        self._tell()
        return Start(restart=self._recovery.restart, node=0, port=self._port)

    def _stop(self, why: Outcome) -> Outcome:
        self._do, self._why = STOP, why
        self._tell()
        return why

    def _others(self) -> Iterator[_Agent]:
        """Agents of the places but the first, as far as they have been heard."""
        return (self._agents[number] for number in self._places[1:] if number in self._agents)

    def pump(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._unnamed.append(Line(connection))
                if len(self._unnamed) > self._all + _UNNAMED:
                    self._unnamed.pop(0).close()
        now = time.monotonic()
        for line in (*self._unnamed, *(agent.line for agent in self._agents.values())):
            for message in line.receive():
                if not self._hear(line, message, now):
                    line.close()
        self._unnamed = [line for line in self._unnamed if not line.closed]
        if now >= self._beat_at:
            self._tell()

    def _hear(self, line: Line, message: Mapping[str, Any], now: float) -> bool:
        """Take in the state of an agent; False for what is none of this attempt."""
        try:
            agent = _Agent(
                number=int(message["number"]), name=str(message["agent"]), host=str(message["host"])[:255], line=line,
                heard=now, restart=int(message["restart"]), runs=bool(message["runs"]), over=bool(message["over"]),
                failure=parse_outcome(message["failure"]), refusal=parse_outcome(message["refusal"]),
            )  # fmt: skip
            ours = message["attempt"] == self._plan.attempt and 0 < agent.number < self._all
        except (KeyError, TypeError, ValueError):
            return False
        known = self._agents.get(agent.number)
        if not ours:
            return False
        replaced = agent.number < self._plan.spec.resources.nodes and agent.number not in self._places
        another = known is not None and known.name != agent.name and not replaced  # that one is sent away at once
        if known is not None and another and (self._do == RUN or not known.line.closed):
            return True  # a new agent of the node: it waits until the ranks of the others have stopped
        if known is not None and known.line is not line:
            known.line.close()
        self._agents[agent.number] = agent
        self._unnamed = [other for other in self._unnamed if other is not line]
        if known is None or known.name != agent.name:
            agent.line.send(self._order(agent).render())
        return True

    def _tell(self) -> None:
        self._beat_at = time.monotonic() + BEAT_S
        for agent in self._agents.values():
            if not agent.line.closed:
                agent.line.send(self._order(agent).render())

    def _order(self, agent: _Agent) -> Order:
        do, why, place = self._do, self._why, agent.number
        if agent.number in self._places:
            place = self._places.index(agent.number)
        elif agent.number < self._plan.spec.resources.nodes:
            do, why = LEAVE, Outcome(reason=Reason.NODE_LOST, message="a spare has taken the place of this node")
        elif do != END:
            do = WAIT
        restart = self._recovery.restart
        return Order(leader=self._name, do=do, restart=restart, node=place, port=self._port, why=why)


def free_port(address: str) -> int:
    """A free port of this machine. Another program may take it first; that is diagnosed and retried."""
    for place in (address, ""):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET) as probe:
            probe.bind((place, 0))
            port: int = probe.getsockname()[1]
            return port
    raise OSError(f"no port is free at {address}")


def write_members(plan: Plan, places: Sequence[int]) -> None:
    """Say which node has which place, for the target: the end of a node that was replaced is not the attempt's."""
    write_whole(Path(plan.folder) / MEMBERS_FILE, json.dumps(list(places)), durable=False)


def _listen(address: str, port: int) -> socket.socket:
    """Listen at the address that the others are told, or at all where it is not this machine's own (NAT, a service)."""
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(found[4][:2], family=found[0], backlog=1024)
    except OSError:
        listener = socket.create_server(("", port), backlog=1024)
    listener.setblocking(False)
    return listener


def _allow_descriptors(agents: int) -> None:
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(agents + _DESCRIPTORS, most) if most != resource.RLIM_INFINITY else agents + _DESCRIPTORS
    if soft != resource.RLIM_INFINITY and wanted > soft:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
