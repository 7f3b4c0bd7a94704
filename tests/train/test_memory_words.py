"""Out of memory: one line that says what was held and what to change in this very config, and the agent knows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainmaster.agent.diagnose import judge
from trainmaster.core.states import Reason
from trainmaster.train.__main__ import main
from trainmaster.train.parallel import shard
from trainmaster.train.watch.oom import change, explain_memory, find_absurd, hold

from .runs import ALONE, tiny


def test_the_line_names_rank_and_changes_and_gives_the_reason() -> None:
    config = tiny(batch_sequences=8)
    world = shard.join(ALONE, torch.device("cpu"), timeout_s=60)
    try:
        wrong = torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of …"
        )
        line = explain_memory(wrong, config, world)
        host = explain_memory(
            RuntimeError("[alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 1"), config, world
        )
        other = explain_memory(RuntimeError("no such thing"), config, world)
    finally:
        dist.destroy_process_group()
    assert line is not None
    assert line.startswith(
        "out of memory: rank 0 (node 0, cpu): CUDA out of memory. Tried to allocate 2.00 GiB; lower "
    )
    assert "lower micro_sequences from 8 to 4 (the batch stays the same), or set parallel.recompute to ops" in line
    found = judge(
        rank=0, ranks=1, code=1, lines=["Traceback", "torch.OutOfMemoryError: CUDA out of memory", line], oom_kills=0
    )
    assert (found.reason, found.evidence["cause"]) == (Reason.OUT_OF_MEMORY, line)
    assert host is not None
    assert other is None


def test_the_cheapest_change_stands_first_and_what_is_done_is_not_advised() -> None:
    tight = tiny(
        batch_sequences=4, micro_sequences=1, master="bf16", parallel={"recompute": "full", "cpu_offload": True}
    )
    assert list(change(tight, ranks=4)) == ["lower sequence_tokens from 32"]
    hybrid = tiny(parallel={"sharding": "hybrid", "recompute": "ops"})
    assert [text.split(" ")[1] for text in change(hybrid, ranks=1)] == [
        "micro_sequences", "parallel.recompute", "parallel.sharding", "master", "parallel.cpu_offload",
    ]  # fmt: skip


GIB = 2**30


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"model": {"layers": 100_000, "width": 1 << 20, "heads": 8, "kv_heads": 8}}, "model"),
        ({"batch_sequences": 1 << 31, "micro_sequences": 1}, "batch_sequences"),
        ({"sequence_tokens": 1 << 31, "batch_sequences": 1}, "batch_sequences"),
        ({"sequence_tokens": 1 << 25, "batch_sequences": 8}, "micro_sequences"),
        ({"sequence_tokens": 1 << 28, "batch_sequences": 1}, "sequence_tokens"),
        ({}, None),
    ],
)
def test_a_size_that_can_never_fit_is_refused_before_memory_is_asked_for(
    config: dict[str, Any], path: str | None
) -> None:
    for device_bytes in (None, 8.0 * GIB):
        fault = find_absurd(tiny(**config), ALONE, device_bytes=device_bytes, host_bytes=16.0 * GIB)
        assert (fault.path if fault else None) == path, fault
        assert fault is None or "GiB" in fault.message


def test_the_trainer_refuses_it_before_it_joins_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"device": "cpu", "model": {"layers": 100_000, "width": 65_536, "heads": 8}}))
    environ = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert main([str(path)], environ) == 2
    assert "model: its weights, gradients and optimizer take" in capfd.readouterr().out


@pytest.mark.parametrize(("master", "each"), [("fp32", 4), ("bf16", 2)])
def test_what_is_held_is_counted(master: str, each: int) -> None:
    parts = hold(tiny(master=master), sharing=2)
    assert parts == {"weights": each * 26_784 / 2, "gradients": each * 26_784 / 2, "optimizer": each * 26_784}
