"""Attempts with spares as a server sees them: what it must have read before it judges, and what it asks for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from targets.kubernetes.test_hostile_answers import MARKS, Server, body
from targets.kubernetes.test_hostile_answers import go as against  # noqa: F401 (a fixture)
from targets.kubernetes.test_manifests import ATTEMPT
from targets.kubernetes.test_spares import HANDLE, RUNS, TRIO, ended, pod
from trainmaster.core.plan import MEMBERS_LOG
from trainmaster.core.states import Reason, TargetState
from trainmaster.targets import Handle, Submission
from trainmaster.targets._spool import Spool
from trainmaster.targets.kubernetes import logs, session, spares
from trainmaster.targets.kubernetes.logs import PodLog
from trainmaster.targets.kubernetes.target import Kubernetes


def spool_in(folder: Path) -> Spool:
    """The files of the attempt that `against` polls."""
    return Spool(folder / "job" / "attempts" / "1" / "kubernetes")


def listed(*pods: dict[str, Any], not_ready: str = "") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Pods and nodes as the API server lists them."""
    for one in pods:
        one["metadata"]["labels"] |= {**MARKS, "trainmaster/attempt": ATTEMPT}
        one["spec"]["containers"] = [{"name": "trainmaster"}]
        if one["spec"]["nodeName"] == not_ready:
            one["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    return list(pods), [{"metadata": {"name": not_ready}, "status": {}}] if not_ready else []


def serve(logs: Mapping[Any, Any], pods: list[dict[str, Any]], nodes: list[dict[str, Any]]) -> Server:
    """An API server with these logs: the text of a node or of a pod, or the answer that is made for it."""

    def first(request: httpx.Request) -> httpx.Response | None:
        if request.url.path.endswith("/api/v1/nodes"):
            return httpx.Response(200, json={"metadata": {"resourceVersion": "5"}, "items": nodes})
        if not request.url.path.endswith("/log"):
            return None
        name = request.url.path.split("/")[-2]
        log = logs.get(name, logs.get(int(name.split("-")[-2]), b""))
        return httpx.Response(200, content=body(log)) if isinstance(log, bytes) else log()

    return Server(first, pods=pods)


FIRST = b"2026-01-01T00:00:00Z @tm members.jsonl 0 [0, 1]\n"
REPLACED = FIRST + b"2026-01-01T00:00:09Z @tm members.jsonl 7 [0, 2]\n"
REPEATED = REPLACED + REPLACED.replace(b"T00:", b"T01:")
ROTATED = b"2026-01-01T02:00:00Z @tm events.jsonl 9000000 {}\n"  # what is left of a log


def poll_again(times: int = 1, *between: Callable[[session.Session], Any]) -> Callable[..., Any]:
    """Polls, and what is done to the server's connection after each."""

    async def work(target: Kubernetes, _: Submission, handle: Handle) -> list[TargetState]:
        states = []
        for turn in range(times):
            states.append((await target.poll({**handle, **TRIO})).state)
            for act in between[turn : turn + 1]:
                act(next(iter(session._SESSIONS.values())))
            await asyncio.sleep(0.05)  # logs are followed
        return states

    return work


@pytest.mark.parametrize("gone", [False, True], ids=["failed", "gone"])
@pytest.mark.parametrize("over", [False, True], ids=["trains on", "has ended"])
def test_a_server_that_was_away_reads_who_has_which_place_before_it_judges(
    against: Any,  # noqa: F811 (the fixture)
    over: bool,
    gone: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod was lost and a spare took its place meanwhile: that is in the log of node 0, and not here yet."""
    monkeypatch.setattr(spares, "_DECIDED_S", -1.0)
    spool_in(tmp_path).mark(spares.BEGAN, "")
    now = ended() if over else RUNS
    lost = [] if gone else [pod(1, ended(Reason.PREEMPTED, ago_s=3600))]
    texts = [ROTATED + REPEATED, ROTATED]  # the newest line is read again when node 0 has repeated it
    log = {0: lambda: httpx.Response(200, content=body(texts.pop() if len(texts) > 1 else texts[0]))}
    server = serve(log, *listed(pod(0, now), *lost, pod(2, now)))
    (first, *later) = against(server, poll_again(3))
    assert first is TargetState.RUNNING, "the line was in the part of the log that is gone"
    assert later == [TargetState.SUCCEEDED if over else TargetState.RUNNING] * 2


def test_no_verdict_about_others_while_the_log_of_node_0_cannot_be_read(against: Any) -> None:  # noqa: F811
    answers = [httpx.Response(500, json={"message": "dial tcp: connection refused"})]
    log = {0: lambda: answers.pop() if answers else httpx.Response(200, content=body(REPLACED))}
    server = serve(log, *listed(pod(0, ended()), pod(2, ended())))
    assert against(server, poll_again(2)) == [TargetState.RUNNING, TargetState.SUCCEEDED]


def test_a_log_of_node_0_that_never_comes_does_not_hold_up_the_end(against: Any, monkeypatch: Any) -> None:  # noqa: F811
    monkeypatch.setattr(session, "_LAST_LINES_S", -1.0)
    server = serve({0: lambda: httpx.Response(500, json={})}, *listed(pod(0, ended()), pod(2, ended())))
    assert against(server, poll_again()) == [TargetState.LOST]


def test_the_log_of_a_node_0_that_was_given_up_is_not_waited_for(against: Any) -> None:  # noqa: F811
    pods = listed(pod(0, RUNS, leaving=True), pod(1, RUNS), pod(2, RUNS), not_ready="host-0")
    assert against(serve({0: lambda: httpx.Response(500, json={})}, *pods), poll_again()) == [TargetState.LOST]


@pytest.mark.parametrize(("members", "waits"), [(FIRST, True), (REPLACED, False)], ids=["has a place", "was replaced"])
def test_last_lines_are_given_up_only_of_a_pod_that_has_no_place(against: Any, members: bytes, waits: bool) -> None:  # noqa: F811
    others = pod(1, ended(Reason.PREEMPTED) if not waits else ended()), pod(2, ended())
    server = serve(
        {0: members, 1: lambda: httpx.Response(500, json={})}, *listed(pod(0, ended()), *others, not_ready="host-1")
    )
    assert against(server, poll_again()) == [TargetState.RUNNING if waits else TargetState.SUCCEEDED]


@pytest.mark.parametrize(
    "end", [{"state": ended(Reason.CRASHED)}, {"state": RUNS, "leaving": True}], ids=["failed", "replaced"]
)
def test_the_failure_of_node_0_is_judged_whatever_its_log_says(against: Any, end: dict[str, Any]) -> None:  # noqa: F811
    pods = [pod(0, **end), *([pod(0, RUNS, made=1)] if end.get("leaving") else []), pod(1, RUNS), pod(2, RUNS)]
    (state,) = against(serve({0: ROTATED}, *listed(*pods)), poll_again())
    assert state is (TargetState.LOST if end.get("leaving") else TargetState.FAILED)


def test_the_minute_of_a_failure_begins_when_this_server_sees_it(against: Any) -> None:  # noqa: F811
    failed = pod(1, ended(Reason.OUT_OF_MEMORY, ago_s=3600))

    def wait(live: session.Session) -> None:
        live._ended[ATTEMPT] = {start: at - 61 for start, at in live._ended[ATTEMPT].items()}

    server = serve({0: FIRST}, *listed(pod(0, RUNS), failed, pod(2, RUNS)))
    assert against(server, poll_again(2, wait)) == [TargetState.RUNNING, TargetState.FAILED]


def test_a_wait_for_the_log_of_node_0_that_ended_otherwise_is_forgotten(against: Any) -> None:  # noqa: F811
    """At the next end one read that failed had made it judge without that log."""
    (items, nodes), back = listed(pod(0, ended()), pod(2, ended())), pod(1, RUNS)
    listed(back)

    def appear(live: session.Session) -> None:
        live.pods._apply(
            {"type": "ADDED", "object": {**back, "metadata": {**back["metadata"], "resourceVersion": "6"}}}
        )
        live._over = {key: since - 1000 for key, since in live._over.items()}

    def vanish(live: session.Session) -> None:
        live.pods._drop(back["metadata"]["name"])

    server = serve({0: lambda: httpx.Response(500, json={})}, items, nodes)
    assert against(server, poll_again(3, appear, vanish)) == [TargetState.RUNNING] * 3


def test_what_the_newer_pod_of_a_node_writes_is_stored(against: Any, tmp_path: Path) -> None:  # noqa: F811
    """An older cluster has put it there; the listing is by name, and both were seen first together."""
    newer, older = pod(1, RUNS, made=1), pod(1, RUNS, leaving=True)

    async def late() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.01)  # the other pod's log is opened meanwhile
        yield b"2026-01-01T00:00:00Z @tm events.jsonl 0 {}\n"

    answers = {0: FIRST, newer["metadata"]["name"]: lambda: httpx.Response(200, content=late())}

    def read() -> bytes:
        return spool_in(tmp_path).node(1).read("events.jsonl", 0, 99)

    async def follow(target: Kubernetes, _: Submission, handle: Handle) -> None:
        await target.poll({**handle, **TRIO})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                while not read():  # noqa: ASYNC110 (a file has no event)
                    await asyncio.sleep(0.01)

    against(serve(answers, *listed(pod(0, RUNS), newer, older, pod(2, RUNS))), follow)
    assert read() == b"{}\n"


@pytest.mark.parametrize("older_ends", [True, False])
def test_the_last_lines_of_the_older_pod_of_a_node_are_stored(
    against: Any,  # noqa: F811
    older_ends: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It writes on while it is ended, and the newer one has begun. One that never ends is waited for in vain."""
    monkeypatch.setattr(logs, "_OLDER_S", 60.0 if older_ends else 0.3)
    newer, older = pod(1, RUNS, made=1), pod(1, RUNS, leaving=True)
    first, last = (b"2026-01-01T00:00:0%dZ @tm events.jsonl %d old\n" % (n, 4 * n) for n in (0, 1))

    async def write() -> AsyncIterator[bytes]:
        yield first
        await asyncio.sleep(0.5)  # the newer one's log is opened meanwhile, if nothing keeps it
        yield last
        if not older_ends:
            await asyncio.sleep(60)

    answers: dict[Any, Any] = {
        0: FIRST,
        older["metadata"]["name"]: lambda: httpx.Response(200, content=write()),
        newer["metadata"]["name"]: b"2026-01-01T00:00:09Z @tm events.jsonl 0 new\n",
    }
    spool = spool_in(tmp_path)

    def read() -> bytes:
        return spool.node(1).read("events.jsonl", 0, 99)

    async def follow(target: Kubernetes, _: Submission, handle: Handle) -> None:
        await target.poll({**handle, **TRIO})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                while b"new" not in read():  # noqa: ASYNC110 (a file has no event)
                    await asyncio.sleep(0.01)

    against(serve(answers, *listed(pod(0, RUNS), newer, older, pod(2, RUNS))), follow)
    assert read() == b"old\n" * (1 + older_ends) + b"new\n"


def test_a_stop_while_only_a_spare_has_a_machine_ends_the_attempt(against: Any, tmp_path: Path) -> None:  # noqa: F811
    spool_in(tmp_path).mark("stop", "user_cancelled: by its owner")
    waits = {"waiting": {"reason": "ContainerCreating"}}
    for spare in (RUNS, ended(Reason.USER_CANCELLED)):
        assert against(serve({}, *listed(pod(0, waits), pod(1, waits), pod(2, spare))), poll_again()) == [
            TargetState.FAILED
        ]


@pytest.mark.parametrize(("spares", "folder", "asks"), [(1, True, True), (0, True, False), (0, False, True)])
def test_jobs_of_nodes_are_listed_only_where_there_may_be_some(
    against: Any,  # noqa: F811
    spares: int,
    folder: bool,
    asks: bool,
) -> None:
    async def release(target: Kubernetes, _: Submission, handle: Handle) -> None:
        known = {key: value for key, value in handle.items() if folder or key != "folder"}
        await target.release(known | ({"nodes": 3, "spares": 1} if spares else {}))

    server = serve({}, [], [])
    against(server, release)
    selectors = [one.url.params.get("labelSelector", "") for one in server.asked if one.url.path.endswith("/jobs")]
    assert any("trainmaster/node" in selector for selector in selectors) == asks


class Log:
    """The log of node 0 as an API server gives it from a second on."""

    def __init__(self, text: bytes) -> None:
        self.text, self.since = text, ""

    async def lines(self, _: str, params: Mapping[str, str]) -> AsyncIterator[bytes]:
        self.since = params.get("sinceTime", "")
        for line in self.text.splitlines():
            if line[:20] >= self.since.encode():
                yield line

    async def merge(self, *_: Any) -> None: ...


def test_the_newest_line_about_places_is_read_where_it_was_written(tmp_path: Path) -> None:
    """Not from where the last read ended: it need not be repeated once more before a verdict."""

    spool = Spool(tmp_path)

    async def hear() -> None:
        api = Log(REPEATED + ROTATED)
        log = PodLog(api, "ns", pod(0, RUNS), spool.node(0))  # type: ignore[arg-type]
        assert await log.drain() and await log.hear(MEMBERS_LOG) and await log.hear(MEMBERS_LOG)
        assert spool.node(0).read(MEMBERS_LOG, 0, 99) == b"[0, 1]\n[0, 2]\n", "each line once"
        api.text = ROTATED
        assert not await log.hear(MEMBERS_LOG) and spares.read_members(spool, HANDLE) == [0, 2]
        api.text = REPEATED.splitlines(keepends=True)[-1] + ROTATED  # begins in the middle of what is repeated
        assert await log.hear(MEMBERS_LOG)
        again = PodLog(api, "ns", pod(0, RUNS), Spool(tmp_path / "another").node(0))  # type: ignore[arg-type]
        assert not await again.hear(MEMBERS_LOG) and not api.since
        assert not await again.hear(MEMBERS_LOG) and api.since.startswith("2026-01-01T02"), "what has none is read once"

    asyncio.run(hear())
