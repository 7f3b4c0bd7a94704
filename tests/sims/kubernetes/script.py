"""Output of a simulated training run: the lines that trainer, NCCL and agent print, with faults. Pure."""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta

from trainmaster.core import events, heartbeat
from trainmaster.core.events import Event
from trainmaster.remote.framed_lines import Frame, encode

FAULTS = (
    "crash-loop", "image-pull", "loss-flat", "nccl-timeout", "no-checkpoint", "checkpoint-damaged", "not-ready",
    "slow-network", "idle-gpus", "much-memory", "restart",
)  # fmt: skip
_EVERY = 5  # steps between checkpoints


def lines(
    *, node: int, begin: datetime, now: datetime, step_s: float, checkpoints: str, faults: frozenset[str]
) -> list[tuple[datetime, bytes]]:
    """Lines that a pod has printed up to now, each with its time."""
    stamped: list[tuple[datetime, bytes]] = []

    def put(at: datetime, text: str) -> None:
        if at <= now:
            stamped.append((at, text.encode()))

    ready = begin + timedelta(seconds=step_s)
    put(ready, f"node-{node}:7:7 [0] NCCL INFO ncclCommInitRank comm 0x1 rank {node} - Init COMPLETE")
    done = int((now - ready).total_seconds() / step_s)
    for step in range(1, done + 1):
        at = ready + timedelta(seconds=step * step_s)
        loss = 10.5 if "loss-flat" in faults else 2.0 + 8.5 * math.exp(-step / 20)
        put(at, f"{heartbeat.prefix(node, node, at=at)}step {step}/10000 Loss: {loss:.4f} lr 3.0e-04 gnorm 1.00")
        beat = heartbeat.Beat(
            rank=node, node=node, step=step, steps=10000, loss=loss, grad_norm=1.0, tokens_per_s=50000.0,
            step_s=step_s, at="train",
        )  # fmt: skip
        put(at, heartbeat.prefix(node, node, at=at) + heartbeat.words(beat))
        put(at, _metrics(step, 39.5 if "much-memory" in faults else 21.5, at))
        if node == 0 and step % _EVERY == 0 and "no-checkpoint" not in faults:
            put(at, _saved(step, checkpoints, at))
    if "nccl-timeout" in faults and done >= 1:
        put(
            ready + timedelta(seconds=step_s),
            f"[rank{node}]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) "
            "ran for 600012 milliseconds before timing out.",
        )
    return sorted(stamped)


def bandwidth_lines(*, node: int, nodes: int, begin: datetime, faults: frozenset[str]) -> list[tuple[datetime, bytes]]:
    """Output of an all-reduce between the pods: rows and the report, by rank 0 alone."""
    if node:
        return [(begin, b"waiting for the ranks")]
    row = {
        "seq": 0, "collective": "all_reduce", "size_bytes": 64 << 20, "ranks": nodes, "heard": list(range(nodes)),
        "busbw_gbps": 0.9 if "slow-network" in faults else 11.6, "wrong": [],
    }  # fmt: skip
    rows = [{"row": {**row, "size_bytes": size << 20}} for size in (64, 128, 256)]
    return [(begin, json.dumps(row).encode()) for row in [*rows, {"report": {"exit_code": 0}}]]


def gpu_answer(faults: frozenset[str]) -> bytes:
    """Answer of nvidia-smi to the question for utilisation."""
    return b"12\n" if "idle-gpus" in faults else b"97\n"


def read_answer(checkpoint: str, faults: frozenset[str]) -> bytes:
    """Output of the pod that reads a checkpoint back."""
    fault = "rank-0.bin: other bytes than were saved" if "checkpoint-damaged" in faults else ""
    return json.dumps({"checkpoint": checkpoint, "fault": fault}).encode()


def _saved(step: int, folder: str, at: datetime) -> str:
    """The event of a committed checkpoint, as the agent copies it from the pod."""
    data = {
        "step": step, "path": f"{folder}/step-{step:08d}", "seconds": 0.1, "bytes": 1, "tier": "disk", "stall_s": 0.0,
    }  # fmt: skip
    return _framed(Event(phase="CHECKPOINT", event="saved", ts=at, seq=step, data=data), offset=step * 2000)


def _metrics(step: int, memory_gib: float, at: datetime) -> str:
    """The event of a step, as the agent copies it from the pod."""
    data = {"step": step, "memory_gib": memory_gib}
    return _framed(Event(phase="STEP", event="metrics", ts=at, seq=step, data=data), offset=step * 2000 + 1000)


def _framed(event: Event, *, offset: int) -> str:
    (line,) = encode(Frame(stream="events.jsonl", offset=offset, data=events.render(event).encode() + b"\n"))
    return line.decode().rstrip("\n")
