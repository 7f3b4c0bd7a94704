"""Two ways to run: ranks as processes, or one rank inside this process, which is quicker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

from trainmaster.core.train_config import TrainConfig
from trainmaster.node.emit import Emitter
from trainmaster.train import loop, shard
from trainmaster.train.report import Report
from trainmaster.train.stop import Stop

from .runs import ALONE, Ran, Ranks, RunHere, Start


@pytest.fixture
def start() -> Iterator[Start]:
    """Start ranks as processes; whatever still runs at the end of the test is killed."""
    begun: list[Ranks] = []

    def begin(folder: Path, config: TrainConfig, *, ranks: int = 1, env: Mapping[str, str] | None = None) -> Ranks:
        begun.append(Ranks(folder, config, ranks=ranks, env=env))
        return begun[-1]

    yield begin
    for ranks in begun:
        ranks.kill()


@pytest.fixture
def run_here() -> Iterator[RunHere]:
    """Run one rank inside this process, as the entry would, and leave the group whatever happened."""

    def run(folder: Path, config: TrainConfig, *, stop: Stop | None = None) -> Ran:
        world = shard.join(ALONE, shard.pick_device(config.device, ALONE), timeout_s=60)
        try:
            with Emitter(folder / "events.jsonl") as emitter:
                loop.run(
                    config,
                    world,
                    folder=Path(config.checkpoint.folder or folder / "checkpoints"),
                    stop=stop or Stop(None),
                    report=Report(ALONE, emitter),
                )
        finally:
            dist.destroy_process_group()
        return Ran(codes=[0], output=[], folder=folder)

    yield run
    if dist.is_initialized():
        dist.destroy_process_group()
