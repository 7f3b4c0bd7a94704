"""Answers that a healthy API server does not give: of proxies, cut off, odd. Nothing counts as done by them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from trainmaster.core.errors import Unreachable, UsageError
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import TargetState
from trainmaster.targets import Handle, Placement, Submission
from trainmaster.targets.kubernetes import kubeconfig, session, states
from trainmaster.targets.kubernetes import watch as watch_module
from trainmaster.targets.kubernetes.client import Client
from trainmaster.targets.kubernetes.kubeconfig import Access, Credentials, parse_access
from trainmaster.targets.kubernetes.target import Kubernetes

ATTEMPT = "00000000-0000-4000-8000-000000000000.1"
MARKS = {"trainmaster/attempt": ATTEMPT, "app.kubernetes.io/managed-by": "trainmaster"}
NAME = "tm-00000000000040008000000000000000-1"
RECORD = json.dumps(
    {"attempt": ATTEMPT, "ok": True, "ended_at": "2026-01-01T00:00:00+00:00", "message": "done", "v": 1}
)
HTML = b"<html>Please log in</html>"
Answer = Callable[[httpx.Request], httpx.Response | None]


def pod(state: dict[str, Any], phase: str = "Running") -> dict[str, Any]:
    statuses = [{"name": "trainmaster", "restartCount": 0, "state": state}]
    metadata = {"name": "p", "uid": "u", "labels": MARKS, "creationTimestamp": "2026-01-01T00:00:00Z"}
    spec = {"nodeName": "n", "containers": [{"name": "trainmaster"}]}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase, "containerStatuses": statuses}}


ENDED = pod({"terminated": {"exitCode": 0, "message": RECORD}}, "Succeeded")


def job(*conditions: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": NAME, "uid": "j", "labels": MARKS}, "status": {"conditions": list(conditions)}}


async def body(text: bytes) -> AsyncIterator[bytes]:
    yield text


async def silence() -> AsyncIterator[bytes]:
    await asyncio.sleep(600)
    yield b""


class Server:
    """Answers of an API server with one job and one pod, after those of `first`."""

    def __init__(self, first: Answer, *, jobs: Any = None, pods: Any = None) -> None:
        self._first, self._jobs, self._pods = first, [job()] if jobs is None else jobs, [] if pods is None else pods
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if (found := self._first(request)) is not None:
            return found
        path = request.url.path
        if "watch" in request.url.params:
            return httpx.Response(200, content=silence())
        for plural, items in (("jobs", self._jobs), ("pods", self._pods), ("nodes", [])):
            if path.endswith(f"/{plural}"):
                return httpx.Response(200, json={"metadata": {"resourceVersion": "5"}, "items": items})
        if request.method == "GET":
            return httpx.Response(404, json={"message": "not found"})
        return httpx.Response(200, json={"metadata": {"name": path.rpartition("/")[2]}})


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run something against a server, as `work(target, submission, handle)`."""

    def run(server: Server, work: Callable[[Kubernetes, Submission, Handle], Coroutine[Any, Any, Any]]) -> Any:
        def open_(client: Client) -> httpx.AsyncClient:
            if client._http is None:
                client._http = httpx.AsyncClient(base_url="https://x", transport=httpx.MockTransport(server))
            return client._http

        monkeypatch.setattr(Client, "_open", open_)
        write_kubeconfig(tmp_path, "one")
        (tmp_path / "cluster.yaml").write_text(f"kubeconfig: {tmp_path / 'kubeconfig'}\nimage: x\npackage: image\n")
        target = Kubernetes(tmp_path / "cluster.yaml")
        spec = parse_spec({"name": "n", "command": ["true"]})
        made = target.plan(Placement(attempt=ATTEMPT, spec=spec, job_folder=tmp_path / "job"))

        async def whole() -> Any:
            try:
                async with asyncio.timeout(20):
                    return await work(target, made, {**made.handle, "submitted": True})
            finally:
                await session.close_all()

        return asyncio.run(whole())

    return run


def write_kubeconfig(folder: Path, token: str) -> None:
    (folder / "kubeconfig").write_text(yaml.safe_dump(config(user={"token": token})))


def config(*, cluster: Any = None, user: Any = None) -> dict[str, Any]:
    return {
        "current-context": "c", "clusters": [{"name": "c", "cluster": {"server": "https://x", **(cluster or {})}}],
        "users": [{"name": "u", "user": user or {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }  # fmt: skip


CUT = [HTML, b'{"kind":"Job","metada', b"[]", b"{}", b'{"items": [{}]}']


@pytest.mark.parametrize("text", CUT)
def test_an_answer_that_is_none_is_no_success(go: Any, text: bytes) -> None:
    """A proxy with a page to log in answers everything with 200."""
    server = Server(lambda request: httpx.Response(200, content=text) if "watch" not in request.url.params else None)
    with pytest.raises(Unreachable):
        go(server, lambda target, made, _: target.submit(made))
    assert go(server, lambda target, _, handle: target.poll(handle)).state is TargetState.UNKNOWN
    with pytest.raises(Unreachable):  # an empty list would be: nothing runs there
        go(server, lambda target, _, __: target.list_owned())
    with pytest.raises(Unreachable):  # and no pod left
        go(server, lambda target, _, handle: target.release(handle))


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"MODI',
        b'{"type":"MODIFIED","object":{}}',
        b'{"type":"MODIFIED","object":null}',
        b'{"type":"ERROR"}',
        b'{"type":"ERROR","object":{"code":"x"}}',
        b'{"type":"MODIFIED","object":{"metadata":{"resourceVersion":"9"}}}',
    ],
)
def test_a_watch_goes_on_after_a_change_that_cannot_be_read(go: Any, line: bytes) -> None:
    """The collection is listed again: the end of the pod is seen."""
    pods = [pod({"running": {}})]

    def first(request: httpx.Request) -> httpx.Response | None:
        if "watch" in request.url.params and request.url.path.endswith("/pods"):
            return httpx.Response(200, content=body(line + b"\n"))
        return httpx.Response(200, content=body(b"")) if request.url.path.endswith("/log") else None

    async def work(target: Kubernetes, _: Submission, handle: Handle) -> TargetState:
        assert (await target.poll(handle)).state is TargetState.RUNNING
        pods[0] = ENDED
        for _try in range(60):
            if (await target.poll(handle)).state.over:
                break
            await asyncio.sleep(0.05)
        return (await target.poll(handle)).state

    assert go(Server(first, pods=pods), work) is TargetState.SUCCEEDED


@pytest.mark.parametrize("line", [b"", b'{"type":"ERROR","object":{"code":410,"message":"too old"}}\n'])
def test_a_watch_that_ends_at_once_is_asked_for_ever_more_seldom(go: Any, line: bytes) -> None:
    server = Server(lambda request: httpx.Response(200, content=body(line)) if "watch" in request.url.params else None)

    async def work(target: Kubernetes, _: Submission, handle: Handle) -> None:
        await target.poll(handle)
        await asyncio.sleep(1.0)

    go(server, work)
    assert len(server.asked) < 30, "jobs and pods, each listed and watched after 0.2, 0.4, 0.8 s"


def test_the_log_of_an_ended_pod_is_asked_for_again(go: Any) -> None:
    """The kubelet does not answer for a moment; the events of the attempt must not be lost by it."""
    answers = [httpx.Response(500, json={"message": "dial tcp: connection refused"})]

    def first(request: httpx.Request) -> httpx.Response | None:
        if not request.url.path.endswith("/log"):
            return None
        line = b'2026-01-01T00:00:00Z @tm events.jsonl 0 {"v":1}\n'
        return answers.pop() if answers else httpx.Response(200, content=body(line))

    async def work(target: Kubernetes, _: Submission, handle: Handle) -> Any:
        polls = [(await target.poll(handle)).state for _ in range(2)]
        return polls, await target.read(handle, "events.jsonl", offset=0, limit=100)

    states_, data = go(Server(first, pods=[ENDED]), work)
    assert (states_, data) == ([TargetState.RUNNING, TargetState.SUCCEEDED], b'{"v":1}\n')


def test_a_log_that_never_comes_ends_no_job_late_for_ever(go: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_LAST_LINES_S", -1.0)
    server = Server(lambda r: httpx.Response(500, json={}) if r.url.path.endswith("/log") else None, pods=[ENDED])
    assert go(server, lambda target, _, handle: target.poll(handle)).state is TargetState.SUCCEEDED


def test_new_credentials_double_no_byte(go: Any, tmp_path: Path) -> None:
    async def lines() -> AsyncIterator[bytes]:
        for number in range(20):
            yield b"2026-01-01T00:00:00Z @tm events.jsonl %d line%05d\n" % (10 * number, number)
            await asyncio.sleep(0.01)
        await asyncio.sleep(600)

    def first(request: httpx.Request) -> httpx.Response | None:
        return httpx.Response(200, content=lines()) if request.url.path.endswith("/log") else None

    async def work(target: Kubernetes, _: Submission, handle: Handle) -> bytes:
        await target.poll(handle)
        await asyncio.sleep(0.1)
        write_kubeconfig(tmp_path, "another")
        await target.poll(handle)
        for _ in range(400):  # a busy machine takes its time
            await asyncio.sleep(0.05)
            data = await target.read(handle, "events.jsonl", offset=0, limit=1000)
            if data.endswith(b"line00019\n"):
                break
        await asyncio.sleep(0.1)  # in which a doubled byte would come
        return await target.read(handle, "events.jsonl", offset=0, limit=1000)

    data = go(Server(first, pods=[pod({"running": {}})]), work)
    assert data == b"".join(b"line%05d\n" % number for number in range(20))


def test_a_complete_job_without_pods_does_not_wait_for_ever(go: Any) -> None:
    """Somebody removed ended pods. Without their records it is not known to have succeeded."""
    done = job({"type": "Complete", "status": "True"})
    poll = go(Server(lambda _: None, jobs=[done]), lambda target, _, handle: target.poll(handle))
    assert (poll.state, "removed before" in poll.note) == (TargetState.LOST, True)


def test_odd_objects_are_survived() -> None:
    odd = states.trim_job(job({"status": "True"}, {"type": "Failed", "status": "Unknown"}))
    handle = {"nodes": 1, "attempt": ATTEMPT, "name": NAME}
    assert states.judge(odd, [], handle, not_ready=frozenset()).state is TargetState.WAITING
    states.trim_pod({"metadata": {"name": "p"}})


def test_an_image_that_an_init_container_lacks_ends_the_job() -> None:
    waits = pod({"waiting": {"reason": "PodInitializing"}}, "Pending")
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "no such tag"}}
    waits["status"]["initContainerStatuses"] = [{"name": "ulimits", "image": "x", "state": state}]
    handle = {"nodes": 1, "attempt": ATTEMPT, "name": NAME}
    poll = states.judge(states.trim_job(job()), [states.trim_pod(waits)], handle, not_ready=frozenset())
    assert (poll.state, "no such tag" in poll.note) == (TargetState.FAILED, True)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (config(user={"token": 12345}), "token of the kubeconfig is not text"),
        (config(user={"tokenFile": 5}), "tokenFile of the kubeconfig is not text"),
        ({**config(), "users": ["u"]}, "no list of users"),
        ({**config(), "users": [{"name": "u", "user": ["a"]}]}, "no mapping"),
        ({**config(), "contexts": "c"}, "no list of contexts"),
        (config(cluster={"server": "https://x:port"}), "not an address"),
        (config(cluster={"server": "https://x\n/y"}), "not an address"),
        (config(cluster={"proxy-url": "socks5://p"}), "proxy-url"),
        (config(user={"token": "t", "as-groups": ["bob"]}), "need `as` too"),
        (config(user={"token": "t", "username": "bob"}), "username of the kubeconfig's user"),
    ],
)
def test_a_kubeconfig_that_cannot_be_followed_is_refused(document: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        parse_access([(document, tmp_path)], None)


@pytest.mark.parametrize(
    "access",
    [
        Access(server="https://x", token="t\u00f6"),
        Access(server="https://x", token="a\nX-Other: 1"),
        Access(server="https://x", token_file=Path("/nowhere/token")),
        Access(server="https://x", command={"args": []}),
        Access(server="https://x", command={"command": "sh", "args": 5}),
        Access(server="https://x", command={"command": "sh", "args": ["-c", "true"], "env": [{}]}),
        Access(server="https://x", command={"command": "sh", "args": ["-c", "echo '{\"status\": []}'"]}),
        Access(server="https://x", command={"command": "a\0b"}),
    ],
)
def test_credentials_that_cannot_be_had_are_told(access: Access) -> None:
    with pytest.raises((UsageError, Unreachable)):
        asyncio.run(Credentials(access).headers())


def test_a_refused_token_is_asked_for_again_and_by_one_program(tmp_path: Path) -> None:
    script = f'echo x >> {tmp_path}/asked; echo \'{{"status": {{"token": "t"}}}}\''
    access = Access(server="https://x", command={"command": "sh", "args": ["-c", script]})

    async def work() -> None:
        client = Client(access)
        answers = httpx.MockTransport(lambda _: httpx.Response(401, json={}))
        client._http = httpx.AsyncClient(base_url="https://x", transport=answers)
        await asyncio.gather(*(client._credentials.headers() for _ in range(5)))
        assert (tmp_path / "asked").read_text() == "x\n"
        with pytest.raises(Exception, match="credentials are refused"):
            await client.get("/version")
        await client._credentials.headers()
        assert (tmp_path / "asked").read_text() == "x\nx\n"
        await client.close()

    asyncio.run(work())


def test_a_credential_program_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kubeconfig, "_EXEC_S", 0.2)
    script = f"echo $$ > {tmp_path}/pid; exec sleep 30"
    access = Access(server="https://x", command={"command": "sh", "args": ["-c", script]})
    with pytest.raises(Unreachable, match="none within"):
        asyncio.run(Credentials(access).headers())
    number = (tmp_path / "pid").read_text().strip()
    state = Path(f"/proc/{number}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_limits_of_silence_fit_each_other() -> None:
    from trainmaster.targets.kubernetes import client

    assert client.WATCH_S < client._SILENT_S <= 120, "a dead connection is seen within two minutes"
    assert watch_module._STALE_S < client._SILENT_S
