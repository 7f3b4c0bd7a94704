"""Runs with a remote tier on a real S3 server: everything local is lost, the store is down, the store comes back."""

from __future__ import annotations

import select
import shutil
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from s3_server import S3, SECRET
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import CheckpointError
from trainmaster.storage import open_store
from trainmaster.train.checkpoint.tiers import tiered
from trainmaster.train.checkpoint.tiers.remote import list_steps
from trainmaster.train.watch.stop import Stop

from ..runs import Ran, RunHere, tiny


class Gate(socketserver.ThreadingTCPServer):
    """A door in front of the server. Shut, it hangs up on everybody."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition("//")[2].partition(":")
        self.behind, self.is_open = (host, int(port)), True
        super().__init__(("127.0.0.1", 0), Visit)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"


class Visit(socketserver.BaseRequestHandler):
    """One connection, passed on as long as the gate is open."""

    server: Gate

    def handle(self) -> None:
        with suppress(OSError):
            if self.server.is_open:
                with socket.create_connection(self.server.behind) as behind:
                    other = {self.request: behind, behind: self.request}
                    while self.server.is_open:
                        for end in select.select(list(other), [], [], 0.02)[0]:
                            data = end.recv(1 << 16)
                            if not data:
                                return
                            other[end].sendall(data)


@pytest.fixture
def gate(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    with Gate(s3.endpoint) as gate:
        S3(endpoint=gate.endpoint).use(monkeypatch)
        serving = threading.Thread(target=gate.serve_forever, kwargs={"poll_interval": 0.02})
        serving.start()
        yield gate
        gate.is_open = False
        gate.shutdown()
        serving.join()


@pytest.fixture
def url(s3: S3, tmp_path: Path) -> str:
    return f"s3://{s3.bucket}/{tmp_path.name}/run"


def config(url: str, *, steps: int = 6, **checkpoint: Any) -> TrainConfig:
    merged = {"every_steps": 2, "mode": "sync", "remote": url, **checkpoint}
    return tiny(steps=steps, epoch_steps=100, eval_sequences=0, optimizer={"min_lr_ratio": 1.0}, checkpoint=merged)


def told(ran: Ran, event: str, tier: str) -> list[int]:
    return [item["data"].get("step") for item in ran.named("CHECKPOINT", event) if item["data"]["tier"] == tier]


def test_everything_local_is_lost_and_the_run_goes_on_from_the_store(
    run_here: RunHere, tmp_path: Path, gate: Gate, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unbroken = run_here(tmp_path / "unbroken", config(url, steps=8, remote=None))
    ran = run_here(tmp_path / "run", config(url))
    assert told(ran, "saved", "remote")[-1] == 6
    assert list_steps(open_store(url))[0] == 6
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    again = run_here(tmp_path / "run", config(url, steps=8))
    assert told(again, "loaded", "remote") == [6]
    assert again.losses == unbroken.losses  # bit-equal
    files = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert all(SECRET.encode() not in data for data in [*files, capsys.readouterr().out.encode()])


class DownForAWhile(Stop):
    """Asked at every step boundary, it shuts the gate after the first step, opens it after an upload has failed, and
    stops the run after one has not."""

    def __init__(self, gate: Gate, events: Path) -> None:
        super().__init__(None)
        self._gate, self._ran = gate, Ran(codes=[], output=[], folder=events.parent)

    def asked(self) -> str | None:
        failed = told(self._ran, "failed", "remote")
        self._gate.is_open = bool(failed) or not self._ran.named("STEP", "metrics")
        return "seen" if failed and told(self._ran, "saved", "remote") else None


def test_training_goes_on_while_the_store_is_down_and_a_later_step_gets_there(
    run_here: RunHere, tmp_path: Path, gate: Gate, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered, "_UPLOADS", 1)
    plan = config(url, steps=100_000, every_steps=4)
    ran = run_here(tmp_path, plan, stop=DownForAWhile(gate, tmp_path / "events.jsonl"))
    last = ran.named("TRAINING", "end")[0]["data"]["step"]
    assert told(ran, "failed", "remote")[0] == 4
    assert list(ran.losses) == list(range(1, last + 1))
    assert told(ran, "failed", "disk") == []
    assert told(ran, "saved", "remote")[-1] == last == list_steps(open_store(url))[0]


def test_a_store_that_is_down_at_the_start(run_here: RunHere, tmp_path: Path, gate: Gate, url: str) -> None:
    run_here(tmp_path, config(url, steps=4))
    gate.is_open = False
    # The newest that was ever committed here is good: nothing newer can be there.
    again = run_here(tmp_path, config(url, steps=4))
    assert told(again, "loaded", "disk") == [4]
    (rejected,) = again.named("CHECKPOINT", "rejected")
    assert rejected["data"]["tier"] == "remote"
    assert rejected["data"]["path"] == url
    # It is not good: the store may have it.
    (tmp_path / "checkpoints" / "step-00000004" / "__0_0.distcp").write_bytes(b"lost")
    with pytest.raises(CheckpointError, match=r"step 2 in .*checkpoints may not be the newest"):
        run_here(tmp_path, config(url, steps=4))
    gate.is_open = True
    mended = run_here(tmp_path, config(url, steps=6))
    assert told(mended, "loaded", "remote") == [4]
    # Nothing is here: nobody knows.
    gate.is_open = False
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="it is not known whether it holds checkpoints"):
        run_here(tmp_path, config(url, steps=4))
