"""HyperPod tests through outages: a real API server behind a proxy that refuses, drops and forgets some requests."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from typer.testing import CliRunner

from kube import ADMIN, Kube
from sims.kubernetes.clock import SimulatedClock
from sims.kubernetes.operator import Operator, Settings
from trainmaster.cli.main import build
from trainmaster.cluster.hyperpod import manifest, run
from trainmaster.cluster.hyperpod.clock import WallClock
from trainmaster.core.errors import Unreachable, UsageError
from trainmaster.core.results import Overall
from trainmaster.targets.kubernetes import names, retrying
from trainmaster.targets.kubernetes.kubeconfig import Access, load_access
from trainmaster.targets.kubernetes.retrying import RetryingClient

pytestmark = pytest.mark.spawns
JOB = manifest.JOB_NAME
# What happens to a request, by its method, its path and its number: a status that is answered in its place, `drop` for
# a connection that closes, `lose` for one that closes after the server has carried the request out, None: its answer.
Fault = Callable[[str, str, int], int | str | None]


class Proxy:
    """Forwards to the API server, with faults; `seen` has every request."""

    def __init__(self, kube: Kube, fault: Fault) -> None:
        self.seen: list[tuple[str, str]] = []
        address, numbers, seen = urlsplit(kube.url), itertools.count(), self.seen
        context = ssl.create_default_context(cadata=kube.ca)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                seen.append((self.command, self.path))
                what = fault(self.command, self.path, next(numbers))
                if isinstance(what, int):
                    self.reply(what, b"the server is not well")
                    return
                self.close_connection = True
                if what != "drop":
                    assert address.hostname and address.port
                    upstream = http.client.HTTPSConnection(address.hostname, address.port, context=context, timeout=20)
                    names = ("Authorization", "Content-Type", "Accept")
                    kept = {name: self.headers[name] for name in names if self.headers[name]}
                    upstream.request(self.command, self.path, body or None, kept)
                    answer = upstream.getresponse()
                    data = answer.read()
                    upstream.close()
                    if what != "lose":
                        self.reply(answer.status, data)

            def reply(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

            do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815 (names of http.server)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        mine = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        mine.load_cert_chain(kube.folder / "certs" / "apiserver.crt", kube.folder / "certs" / "apiserver.key")
        self._server.socket = mine.wrap_socket(self._server.socket, server_side=True)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.access = Access(server=f"https://127.0.0.1:{self._server.server_port}", ca=kube.ca, token=ADMIN)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def operator(kube: Kube, namespace: str) -> Iterator[SimulatedClock]:
    certs, clock = kube.folder / "certs", SimulatedClock()
    access = load_access(str(kube.kubeconfig()), None)
    files = {"certificate": certs / "apiserver.crt", "key": certs / "apiserver.key"}
    with Operator(Settings(access=access, namespace=namespace, clock=clock, **files)):
        yield clock


def plan_of(namespace: str, home: Path, clock: SimulatedClock | None = None) -> run.TestPlan:
    planned = ("nodes_ready", "pods_running", "loss_falling", "checkpoint")
    return run.TestPlan(
        manifest=manifest.make(nodes=2), namespace=namespace, home=home, planned=planned, monitor_s=200.0, look_s=50.0,
        clock=clock or WallClock(),
    )  # fmt: skip


def run_test(client: RetryingClient, plan: run.TestPlan) -> run.Outcome:
    async def go() -> run.Outcome:
        try:
            return await run.run(client, plan, lambda _: None)
        finally:
            await client.close()

    return asyncio.run(go())


def left(kube: Kube, namespace: str) -> set[str]:
    kinds = ("/api/v1/namespaces/{}/configmaps", "/apis/sagemaker.amazonaws.com/v1/namespaces/{}/hyperpodpytorchjobs")
    items = [one for path in kinds for one in kube.call("GET", path.format(namespace))["items"]]
    return {one["metadata"]["name"] for one in items} - {"kube-root-ca.crt"}


def every_third(method: str, _path: str, number: int) -> int | str | None:
    """A read or a deletion: 500, a closed connection, 429, 503, in turn; also twice in a row."""
    if method in ("GET", "DELETE") and number % 3 == 1:
        return (500, "drop", 429, 503)[number // 3 % 4]
    return 502 if method == "GET" and number % 12 == 2 else None


@pytest.mark.matrix(one_in=4, of="creations that the API server refuses")
def test_a_test_outlasts_refused_reads_and_deletions(kube: Kube, namespace: str, tmp_path: Path) -> None:
    with operator(kube, namespace) as clock, Proxy(kube, every_third) as proxy:
        outcome = run_test(RetryingClient(proxy.access), plan_of(namespace, tmp_path, clock))
    assert outcome.overall is Overall.PASS, outcome.results
    assert left(kube, namespace) == set()
    assert [path.rpartition("/")[2] for method, path in proxy.seen if method == "POST"] == [
        "configmaps", "hyperpodpytorchjobs", "pods",
    ], "each object was created by one request"  # fmt: skip


@pytest.mark.matrix(one_in=4, of="creations that the API server refuses")
@pytest.mark.parametrize("what", ["lose", "drop", 500])
def test_a_request_to_create_is_repeated_only_where_the_object_is_not_there(
    kube: Kube, namespace: str, tmp_path: Path, what: int | str
) -> None:
    posts = itertools.count()

    def fault(method: str, _path: str, _number: int) -> int | str | None:
        return what if method == "POST" and next(posts) == 0 else None

    with operator(kube, namespace) as clock, Proxy(kube, fault) as proxy:
        outcome = run_test(RetryingClient(proxy.access), plan_of(namespace, tmp_path, clock))
    assert outcome.overall is Overall.PASS, outcome.results
    sent = [path.rpartition("/")[2] for method, path in proxy.seen if method == "POST"]
    again = [] if what == "lose" else ["configmaps"]
    assert sent == [*again, "configmaps", "hyperpodpytorchjobs", "pods"], "the pod reads the checkpoint"
    assert left(kube, namespace) == set()


def test_an_object_of_another_is_not_taken_for_ours_after_an_outage(kube: Kube, namespace: str, tmp_path: Path) -> None:
    mine = {"metadata": {"name": JOB, "labels": {names.ATTEMPT_LABEL: "other.1"}}, "data": {"mine": "1"}}
    kube.call("POST", f"/api/v1/namespaces/{namespace}/configmaps", mine)
    posts = itertools.count()

    def fault(method: str, _path: str, _number: int) -> int | str | None:
        return 503 if method == "POST" and next(posts) == 0 else None

    with Proxy(kube, fault) as proxy, pytest.raises(UsageError, match="was not created by this test"):
        run_test(RetryingClient(proxy.access), plan_of(namespace, tmp_path))
    assert kube.call("GET", f"/api/v1/namespaces/{namespace}/configmaps/{JOB}")["data"] == {"mine": "1"}


def test_the_verb_outlasts_an_answer_of_500(kube: Kube, namespace: str, tmp_path: Path) -> None:
    def fault(_method: str, _path: str, number: int) -> int | None:
        return 500 if number in (0, 3) else None

    with Proxy(kube, fault) as proxy:
        document = yaml.safe_load(kube.kubeconfig().read_text())
        document["clusters"][0]["cluster"]["server"] = proxy.access.server
        path = kube.folder / "kubeconfig-proxy"  # beside the certificate
        path.write_text(yaml.safe_dump(document))
        settings = {"kubeconfig": str(path), "namespace": namespace, "image": "x", "kind": "hyperpod"}
        (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(settings))
        on = f"hyperpod:{tmp_path / 'cluster.yaml'}"
        done = CliRunner().invoke(build(guarded=True), ["cluster", "test", "--on", on, "--action", "status"])
    assert done.exit_code == 0 and '"job_exists": false' in done.output, done.output
    assert len(proxy.seen) > 5


def test_patience_ends(kube: Kube) -> None:
    state = {"down": False}

    def fault(_method: str, _path: str, _number: int) -> int | None:
        return 500 if state["down"] else None

    async def go(proxy: Proxy) -> float:
        client = RetryingClient(proxy.access, patience_s=1.5)
        try:
            await client.get("/version")
            state["down"] = True
            began = time.monotonic()
            with pytest.raises(Unreachable):
                await client.get("/version")
            return time.monotonic() - began
        finally:
            await client.close()

    with Proxy(kube, fault) as proxy:
        assert asyncio.run(go(proxy)) < 10
    assert 3 <= len(proxy.seen) <= 12, "more than one try, and no storm of them"


def test_a_server_that_never_answers_is_given_up_soon() -> None:
    async def go() -> None:
        client = RetryingClient(Access(server="https://127.0.0.1:9"))
        try:
            with pytest.raises(Unreachable):
                await client.list("/api/v1/nodes")
        finally:
            await client.close()

    began = time.monotonic()
    asyncio.run(go())
    assert time.monotonic() - began < retrying.PATIENCE_S / 2
