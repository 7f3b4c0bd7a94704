"""Two ways to run: ranks as processes, or one rank inside this process, which is quicker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fork_server import ForkServer
from s3_server import S3
from sims.checkpoint_daemon import Daemon
from trainmaster.core.config.train import TrainConfig
from trainmaster.node.emit import Emitter
from trainmaster.train import loop
from trainmaster.train.parallel import shard
from trainmaster.train.run_log import RunLog
from trainmaster.train.watch.stop import Stop

from .checkpoint.managed_runs import Managed
from .runs import ALONE, Ran, Ranks, RunHere, Start, tiny


@pytest.fixture
def start(programs: ForkServer) -> Iterator[Start]:
    """Start ranks as processes; whatever still runs at the end of the test is killed."""
    begun: list[Ranks] = []

    def begin(
        folder: Path, config: TrainConfig, *, ranks: int = 1, nodes: int = 1, env: Mapping[str, str] | None = None
    ) -> Ranks:
        begun.append(Ranks(programs, folder, config, ranks=ranks, nodes=nodes, env=env))
        return begun[-1]

    yield begin
    for ranks in begun:
        ranks.kill()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A stand-in of HyperPod's memory daemon."""
    with Daemon() as daemon:
        yield daemon


@pytest.fixture
def managed(daemon: Daemon, s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Managed]:
    """The config of a run with managed checkpoints: to memory every 2 steps, to S3 every 4, 10 in all."""
    from amzn_sagemaker_checkpointing.checkpointing.filesystem.s3_operations import _S3Operations

    s3.use(monkeypatch)
    for action in (_S3Operations.read_checkpoint, _S3Operations.write_checkpoint):
        monkeypatch.setattr(action.retry, "sleep", lambda seconds: None)  # the library tries thrice, seconds apart
    namespace = f"run-{uuid.uuid4()}"
    section = {
        "namespace": namespace, "s3": f"s3://{s3.bucket}/managed", "s3_every_steps": 4,
        "daemon": daemon.url, "timeout_s": 5,
    }  # fmt: skip

    def config(**changes: Any) -> TrainConfig:
        checkpoint = {"every_steps": 2, "managed": section, **changes.pop("checkpoint", {})}
        return tiny(**{"steps": 10, "log_every_steps": 1, "eval_sequences": 0, "checkpoint": checkpoint, **changes})

    yield config
    for log in Path("/var/log/sagemaker_checkpointing").glob(f"{namespace}*"):  # the library's own
        log.unlink()


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
                    run_log=RunLog(ALONE, emitter),
                )
        finally:
            dist.destroy_process_group()
        return Ran(codes=[0], output=[], folder=folder)

    yield run
    if dist.is_initialized():
        dist.destroy_process_group()
