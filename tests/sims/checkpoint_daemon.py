"""A stand-in of the memory daemon of SageMaker HyperPod's managed tiered checkpointing: HTTP, all in memory.

    python -m sims.checkpoint_daemon [--port 9200] [--limit-gib 4]

It answers what `amzn-sagemaker-checkpointing` 1.1.3 asks. No public description exists but that library's client:

    GET, POST, DELETE  /v1/cp/namespaces/NAME                  POST with ?num_ranks=N&steps_retained=K
    GET                /v1/cp/checkpoints/NAME/latest?limit=N  a JSON list of steps, newest first
    GET, POST, DELETE  /v1/cp/checkpoints/NAME/RANK/STEP       the bytes; header Shard-Meta holds their xxh3_128
    POST               /v1/cp/cluster/reset

Where the real one's ways are not known, this one takes the way that is harder on its user: `latest` lists steps that
are not complete, the steps written least recently go first whether complete or not, a rank outside the namespace is
refused, and nothing is replicated. PUT is taken like POST. Faults are set from Python (`Daemon.faults`), or over HTTP:

    POST /sim {"slow_s": 2, "status": 503, "mute": false, "only": "/1/20"}    from now on, for paths that hold `only`
    POST /sim/lose                                                            the memory is gone, the daemon is not
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from trainmaster.core.errors import MissingExtra

_NAMESPACE = re.compile(r"/v1/cp/namespaces/([\w-]+)")
_LATEST = re.compile(r"/v1/cp/checkpoints/([\w-]+)/latest")
_SHARD = re.compile(r"/v1/cp/checkpoints/([\w-]+)/(\d+)/(\d+)")
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is wrong with it, for requests whose path holds `only`."""

    slow_s: float = 0.0
    status: int | None = None  # answered instead of anything else
    mute: bool = False  # the connection ends without an answer
    only: str = ""
    method: str = ""  # of these requests alone: GET or POST


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: bytes = b""
    shard_meta: str | None = None


@dataclass(slots=True, kw_only=True)
class Space:
    """One namespace. Steps are in the order of their last write."""

    num_ranks: int
    steps_retained: int
    steps: dict[int, dict[int, tuple[bytes, str]]] = field(default_factory=dict)


class Memory:
    """What it holds, and the rules of holding it. No HTTP."""

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self._spaces: dict[str, Space] = {}
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()

    def lose(self) -> None:
        """As if every node that held a copy was replaced."""
        with self._lock:
            self._spaces.clear()

    def flip(self, namespace: str, rank: int, step: int) -> None:
        """Flip a bit of a shard and let its checksum agree: damage that HTTP's own checks do not see."""
        with self._lock:
            ranks = self._spaces[namespace].steps[step]
            data = bytearray(ranks[rank][0])
            data[len(data) // 2] ^= 1
            ranks[rank] = bytes(data), _meta(bytes(data))

    def held(self) -> dict[str, dict[int, list[int]]]:
        """Namespace → step → ranks."""
        with self._lock:
            return {
                name: {step: sorted(ranks) for step, ranks in space.steps.items()}
                for name, space in self._spaces.items()
            }

    def answer(self, method: str, target: str, body: bytes, shard_meta: str | None) -> Answer:
        address = urlsplit(target)
        asked = {key: values[0] for key, values in parse_qs(address.query).items()}
        with self._lock:
            if found := _NAMESPACE.fullmatch(address.path):
                return self._namespace(method, found[1], asked)
            if found := _LATEST.fullmatch(address.path):
                return self._latest(found[1], int(asked.get("limit", 5)))
            if found := _SHARD.fullmatch(address.path):
                return self._shard(
                    method, found[1], rank=int(found[2]), step=int(found[3]), body=body, shard_meta=shard_meta
                )
            if (method, address.path) == ("POST", "/v1/cp/cluster/reset"):
                self._spaces.clear()
                return Answer(status=200)
        return Answer(status=404, body=b"no such path")

    def _namespace(self, method: str, name: str, asked: dict[str, str]) -> Answer:
        space = self._spaces.get(name)
        if method in ("POST", "PUT"):
            if space is not None:
                return Answer(status=409, body=b"the namespace is there")
            ranks, retained = int(asked["num_ranks"]), int(asked["steps_retained"])
            self._spaces[name] = Space(num_ranks=ranks, steps_retained=retained)
            return Answer(status=201)
        if space is None:
            return Answer(status=404, body=b"no such namespace")
        if method == "DELETE":
            del self._spaces[name]
            return Answer(status=200)
        told = {"namespace": name, "num_ranks": space.num_ranks, "steps_retained": space.steps_retained}
        return Answer(status=200, body=json.dumps(told).encode())

    def _latest(self, name: str, limit: int) -> Answer:
        space = self._spaces.get(name)
        if space is None:
            return Answer(status=404, body=b"no such namespace")
        return Answer(status=200, body=json.dumps(sorted(space.steps, reverse=True)[:limit]).encode())

    def _shard(self, method: str, name: str, *, rank: int, step: int, body: bytes, shard_meta: str | None) -> Answer:
        space = self._spaces.get(name)
        if space is None:
            return Answer(status=404, body=b"no such namespace")
        if method in ("POST", "PUT"):
            return self._keep(space, rank, step, body, shard_meta)
        shard = space.steps.get(step, {}).get(rank)
        if shard is None:
            return Answer(status=404, body=b"no such shard")
        if method == "DELETE":
            del space.steps[step][rank]
            return Answer(status=200)
        return Answer(status=200, body=shard[0], shard_meta=shard[1])

    def _keep(self, space: Space, rank: int, step: int, body: bytes, shard_meta: str | None) -> Answer:
        if rank >= space.num_ranks:
            return Answer(status=400, body=f"rank {rank} of a namespace of {space.num_ranks}".encode())
        if shard_meta is None or json.loads(shard_meta)["checksum"] != json.loads(_meta(body))["checksum"]:
            return Answer(status=400, body=b"the bytes do not match their checksum")
        held = sum(len(data) for s in self._spaces.values() for ranks in s.steps.values() for data, _ in ranks.values())
        if self._limit_bytes is not None and held + len(body) > self._limit_bytes:
            return Answer(status=507, body=b"the memory is full")
        ranks = space.steps.pop(step, {})
        space.steps[step] = {**ranks, rank: (body, shard_meta)}
        while len(space.steps) > space.steps_retained:
            del space.steps[next(iter(space.steps))]
        return Answer(status=200)


class Daemon:
    """The memory behind HTTP on 127.0.0.1, in threads of this process; a context manager."""

    def __init__(self, *, port: int = 0, limit_bytes: int | None = None) -> None:
        _meta(b"")  # a missing package is named here, not in the first save
        self.memory = Memory(limit_bytes=limit_bytes)
        self.faults = Faults()
        self._server = _server(self, port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="checkpoint-daemon", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> Daemon:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Gone, with all it held."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait(self) -> None:
        self._thread.join()

    def __enter__(self) -> Daemon:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _server(daemon: Daemon, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            faults = daemon.faults
            if self.path.startswith("/sim"):
                self.send(_control(daemon, self.path, body))
                return
            if faults.only in self.path and faults.method in ("", self.command):
                time.sleep(faults.slow_s)
                if faults.mute:
                    self.close_connection = True
                    return
                if faults.status is not None:
                    self.send(Answer(status=faults.status, body=b"a fault that was asked for"))
                    return
            self.send(daemon.memory.answer(self.command, self.path, body, self.headers.get("Shard-Meta")))

        do_GET = do_POST = do_PUT = do_DELETE = respond  # noqa: N815 (http.server's names)

        def send(self, answer: Answer) -> None:
            with contextlib.suppress(ConnectionError):  # a client that did not wait
                self.send_whole(answer)

        def send_whole(self, answer: Answer) -> None:
            self.send_response(answer.status)
            if answer.shard_meta is not None:
                self.send_header("Shard-Meta", answer.shard_meta)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            for start in range(0, len(answer.body), _PIECE):
                self.wfile.write(answer.body[start : start + _PIECE])

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (http.server's name)
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    return server


def _control(daemon: Daemon, path: str, body: bytes) -> Answer:
    if path == "/sim/lose":
        daemon.memory.lose()
        return Answer(status=200)
    if path == "/sim":
        try:
            daemon.faults = Faults(**json.loads(body or b"{}"))
        except (TypeError, ValueError) as error:
            return Answer(status=400, body=str(error).encode())
        return Answer(status=200)
    return Answer(status=404, body=b"no such path")


def _meta(data: bytes) -> str:
    try:
        import xxhash
    except ImportError:
        raise MissingExtra("the checkpoint daemon", "hyperpod") from None
    checksum = base64.b64encode(xxhash.xxh3_128(data).digest()).decode()
    return json.dumps({"checksum": checksum, "algorithm": "xxh3_128"})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sims.checkpoint_daemon", description="see its docstring")
    parser.add_argument("--port", type=int, default=9200)
    parser.add_argument("--limit-gib", type=float, default=None, help="answer 507 when this much is held")
    asked = parser.parse_args(arguments)
    limit = None if asked.limit_gib is None else int(asked.limit_gib * 2**30)
    with Daemon(port=asked.port, limit_bytes=limit) as daemon:
        print(f"a checkpoint daemon listens at {daemon.url}", flush=True)
        daemon.wait()


if __name__ == "__main__":
    main()
