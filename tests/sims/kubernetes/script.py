"""Output of a simulated training run: the lines that trainer, NCCL and agent print, with faults. Pure.

Memory, step time, rate and the size of a checkpoint are those that `trainmaster plan` states for the job's own config
on the simulated GPUs. A job that does not fit runs out of memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from trainmaster.bench import bus_baselines
from trainmaster.core import events, gpus, heartbeat
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.events import Event
from trainmaster.core.schema import build
from trainmaster.estimate import Cluster, calibration, estimate
from trainmaster.remote.framed_lines import Frame, encode

# Errors in the words of PyTorch's ProcessGroupNCCL, NCCL (2.28: net_ib/p2p.cc), aws-ofi-nccl and the CUDA runtime.
LINES = {
    "nccl-timeout": "[rank{node}]:[E1117 10:12:41.120 ProcessGroupNCCL.cpp:685] [Rank {node}] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) "
    "ran for 600012 milliseconds before timing out.",
    "heartbeat-monitor": "[rank{node}]:[F1117 10:12:41.120 ProcessGroupNCCL.cpp:1413] [PG 0 Rank {node}] Heartbeat "
    "monitor timed out! Process will be terminated after dumping debug info. workMetaList_.size()=1",
    "remote-error": "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.",
    "system-error": "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
    "NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
    "completion-error": "node-{node}:1:761 [1] transport/net_ib/p2p.cc:648 NCCL WARN NET/IB: Got completion from peer "
    "10.2.8.65<40554> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RECV_RDMA_WITH_IMM(129) vendor_err=129 "
    "localGid ::ffff:1.1.2.2 remoteGids::ffff:1.1.1.4 hca mlx5_1",
    "ofi-error": "node-{node}:194:710 [0] cm_req_handle_error_entry:46 NCCL WARN NET/OFI Request 0x7f456c222f60 "
    "completed with error. RC: 103. Error: 4126 (Unresponsive receiver (reachable by EFA device but handshake failed))",
    "ecc": "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
}
FAULTS = (
    "crash-loop", "image-pull", "loss-flat", "no-checkpoint", "checkpoint-damaged", "not-ready", "slow-network",
    "idle-gpus", "much-memory", "wrong-values", "restart", *LINES,
)  # fmt: skip
_NCCL_S, _COMPILE_S = 20.0, 40.0  # from the start of a pod to NCCL, and from there to the first step
_SLOW_GBPS, _UNPUBLISHED_GBPS = 0.9, 2.6  # GB/s between nodes; the second of g5 with its one EFA device of 25 Gbit/s
_READ_GBPS = 0.5  # of a shared file system


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one job on one cluster, by `plan`."""

    fits: bool
    step_s: float
    tokens_per_s: float
    memory_gib: float
    bus_gbps: float
    write_s: float
    read_s: float
    steps: int
    every_steps: int
    folder: str
    ranks: int


def plan_figures(train: Mapping[str, object], *, gpu: str, nodes: int, per_node: int) -> Figures:
    """Figures of this training config on that many GPUs."""
    model, config = gpus.find_gpu(gpu), build(TrainConfig, train)
    assert model is not None
    bus = bus_baselines.find(model, nodes=nodes, fabric="efa" if nodes > 1 else None)
    bus_gbps = bus.gbps if bus is not None else _UNPUBLISHED_GBPS
    planned = estimate(config, Cluster(gpu=model, gpus=nodes * per_node, gpus_per_node=per_node, bus_gbps=bus_gbps))
    assert planned.speed is not None and config.checkpoint.folder is not None
    size = planned.memory.checkpoint
    return Figures(
        fits=bool(planned.fits), step_s=planned.speed.step_s, tokens_per_s=planned.speed.tokens_per_s,
        memory_gib=planned.memory.peak / 2**30, bus_gbps=bus_gbps, read_s=size / (1e9 * _READ_GBPS),
        write_s=size / (1e9 * calibration.load().save_gbps * nodes), steps=config.steps,
        every_steps=config.checkpoint.every_steps, folder=config.checkpoint.folder, ranks=nodes * per_node,
    )  # fmt: skip


class Script:
    """Lines of one pod, made as time passes."""

    def __init__(self, figures: Figures, *, node: int, begin: datetime, faults: frozenset[str]) -> None:
        self._figures, self._node, self._begin, self._faults = figures, node, begin, faults
        self._lines: list[tuple[datetime, bytes]] = []
        self._step = -1  # the lines before the first step

    @property
    def over(self) -> bool:
        return self._step >= self._figures.steps

    @property
    def out_of_memory(self) -> bool:
        return not self._figures.fits and self._step >= 0

    def read(self, now: datetime) -> list[tuple[datetime, bytes]]:
        """Everything that was printed up to now, each line with its time."""
        ready = self._begin + timedelta(seconds=_NCCL_S)
        if self._step < 0 and now >= ready:
            self._step = 0
            self._put_start(ready)
        while not self.over and self._figures.fits:
            seconds = _COMPILE_S + (self._step + 1) * self._figures.step_s
            if (at := ready + timedelta(seconds=seconds)) > now:
                break
            self._step += 1
            self._put_step(self._step, at)
        return self._lines

    def _put(self, at: datetime, text: str) -> None:
        self._lines.append((at, text.encode()))

    def _put_start(self, at: datetime) -> None:
        """What a healthy EFA cluster prints, with the warnings that mean nothing there; or the end of a job too big."""
        head = f"node-{self._node}:7:7 [0]"
        self._put(at, f"{head} NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 1 nics)")
        self._put(at, f"{head} configure_nvls_option:287 NCCL WARN NET/OFI Could not find ncclGetVersion symbol")
        self._put(at, f"{head} NCCL WARN NET/OFI Failed to initialize GDRCopy: Failed to open gdr handle")
        ranks = self._figures.ranks
        self._put(at, f"{head} NCCL INFO ncclCommInitRank comm 0x1 rank {self._node} nranks {ranks} - Init COMPLETE")
        if not self._figures.fits:
            self._put(at, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")

    def _put_step(self, step: int, at: datetime) -> None:
        figures, node = self._figures, self._node
        loss = 10.5 if "loss-flat" in self._faults else 2.0 + 8.5 * math.exp(-step / 20)
        head = heartbeat.prefix(node, node, at=at)
        self._put(at, f"{head}step {step}/{figures.steps} Loss: {loss:.4f} lr 3.0e-04 gnorm 1.00")
        beat = heartbeat.Beat(
            rank=node, node=node, step=step, steps=figures.steps, loss=loss, grad_norm=1.0,
            tokens_per_s=figures.tokens_per_s, step_s=figures.step_s, at="train",
        )  # fmt: skip
        self._put(at, head + heartbeat.words(beat))
        self._put(at, _metrics(step, 39.5 if "much-memory" in self._faults else figures.memory_gib, at))
        saved = step - math.ceil(figures.write_s / figures.step_s)  # whose writing has come to its end
        if node == 0 and saved > 0 and saved % figures.every_steps == 0 and "no-checkpoint" not in self._faults:
            self._put(at, _saved(saved, figures.folder, at))
        if step == 1:
            for name in sorted(self._faults & LINES.keys()):
                self._put(at, LINES[name].format(node=node))


def bandwidth_lines(
    figures: Figures, *, node: int, nodes: int, begin: datetime, faults: frozenset[str]
) -> list[tuple[datetime, bytes]]:
    """Output of an all-reduce between the pods: rows and the report, by rank 0 alone."""
    if node:
        return [(begin, b"waiting for the ranks")]
    row = {
        "seq": 0, "collective": "all_reduce", "size_bytes": 64 << 20, "ranks": nodes, "heard": list(range(nodes)),
        "busbw_gbps": _SLOW_GBPS if "slow-network" in faults else figures.bus_gbps,
        "wrong": [{"rank": 1, "count": 8}] if "wrong-values" in faults else [],
    }  # fmt: skip
    rows = [{"row": {**row, "size_bytes": size << 20}} for size in (64, 128, 256)]
    return [(begin, json.dumps(row).encode()) for row in [*rows, {"report": {"exit_code": 0}}]]


def gpu_answer(faults: frozenset[str], count: int) -> bytes:
    """Answer of nvidia-smi to the question for utilisation."""
    return (b"12\n" if "idle-gpus" in faults else b"97\n") * count


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
