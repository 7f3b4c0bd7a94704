"""A tiny run, ranks as real processes with torchrun's environment, and what a run leaves behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fork_server import ForkServer
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.schema import build, to_plain
from trainmaster.train.parallel.rank_info import RankInfo
from trainmaster.train.watch.stop import Stop

TINY = {
    "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 64},
    "optimizer": {"warmup_steps": 2},
    "data": {},
    "steps": 8,
    "epoch_steps": 4,
    "batch_sequences": 8,
    "eval_sequences": 8,
    "sequence_tokens": 32,
    "device": "cpu",
    # Saves that end before the next step begins, so that a test knows what comes after what.
    "checkpoint": {"every_steps": 4, "mode": "sync", "retry_s": 0.01},
}
# As if a second rank shared the machine: one thread. Two would wait for each other longer than they compute.
ALONE = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=2, node_rank=0, nodes=1, master=None)


def tiny(**changes: Any) -> TrainConfig:
    """The tiny run with some fields changed; sections are merged."""
    merged: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in TINY.items()}
    for key, value in changes.items():
        merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else value
    return build(TrainConfig, merged)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a run left behind."""

    codes: list[int]
    output: list[str]  # of each rank
    folder: Path

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_events(self.folder / "events.jsonl")

    def named(self, phase: str, event: str) -> list[dict[str, Any]]:
        return [item for item in self.events if (item["phase"], item["event"]) == (phase, event)]

    @property
    def losses(self) -> dict[int, float]:
        return {item["data"]["step"]: item["data"]["loss"] for item in self.named("STEP", "metrics")}

    @property
    def checkpoints(self) -> list[str]:
        names = (entry.name for entry in (self.folder / "checkpoints").iterdir())
        return sorted(name for name in names if name != ".lock")

    def manifest(self, step: int) -> dict[str, Any]:
        text = (self.folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text()
        manifest: dict[str, Any] = json.loads(text)
        return manifest


def read_events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Ranks:
    """A run of several processes that a test can watch and signal."""

    def __init__(
        self,
        server: ForkServer,
        folder: Path,
        config: TrainConfig,
        *,
        ranks: int,
        nodes: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """With several nodes each has as many ranks and a memory of its own, `memory-N` in the folder."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(to_plain(config)))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.processes = []
        for rank in range(ranks):
            node, local = divmod(rank, ranks // nodes)
            ours = {
                "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": ranks // nodes,
                "GROUP_RANK": node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
                "TRAINMASTER_MEMORY": folder / f"memory-{node}",
                "TRAINMASTER_EVENTS": folder / "events.jsonl", "TRAINMASTER_CHECKPOINTS": folder / "checkpoints",
                "TRAINMASTER_STOP": folder / "stop",
            }  # fmt: skip
            environment = {**os.environ, **{key: str(value) for key, value in ours.items()}, **(env or {})}
            words = ("trainmaster.train", str(folder / "config.json"))
            with (folder / f"rank-{rank}.log").open("wb") as log:
                self.processes.append(server.start(*words, env=environment, out=log.fileno(), err=log.fileno()))

    def wait_for(self, phase: str, event: str, **data: Any) -> None:
        """Until such an event is written; fails if the run ends first."""
        while True:
            over = all(process.poll() is not None for process in self.processes)
            for item in read_events(self.folder / "events.jsonl"):
                same = all(item.get("data", {}).get(key) == value for key, value in data.items())
                if (item["phase"], item["event"]) == (phase, event) and same:
                    return
            time.sleep(0.02)
            assert not over, f"the run ended without {phase} {event}: {self.finish().output}"

    def finish(self, *, timeout_s: float | None = None) -> Ran:
        """Wait for the end of every rank; a test that needs the run to stop by itself says how soon."""
        try:
            codes = [process.wait(timeout_s) for process in self.processes]
        except subprocess.TimeoutExpired:
            self.kill()
            logs = "".join((self.folder / f"rank-{rank}.log").read_text() for rank in range(len(self.processes)))
            raise AssertionError(
                f"{self.folder.name} still runs after {timeout_s:g} s and should have ended: {logs}"
            ) from None
        output = [(self.folder / f"rank-{rank}.log").read_text() for rank in range(len(codes))]
        return Ran(codes=codes, output=output, folder=self.folder)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


class StopAfter(Stop):
    """Asks to stop once it was asked this many times."""

    def __init__(self, times: int) -> None:
        super().__init__(None)
        self._left = times

    def asked(self) -> str | None:
        self._left -= 1
        return "enough" if self._left < 0 else None


Start = Callable[..., Ranks]
RunHere = Callable[..., Ran]
