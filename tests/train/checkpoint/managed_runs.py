"""What a run with managed checkpoints says of them. The fixtures `daemon` and `managed` are in conftest.py."""

from __future__ import annotations

from collections.abc import Callable

from trainmaster.core.config.train import TrainConfig

from ..runs import Ran

Managed = Callable[..., TrainConfig]
NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens


def saved(ran: Ran) -> list[tuple[int, str]]:
    return [(item["data"]["step"], item["data"]["tier"]) for item in ran.named("CHECKPOINT", "saved")]


def loaded(ran: Ran) -> tuple[int, str]:
    (item,) = ran.named("CHECKPOINT", "loaded")
    return item["data"]["step"], "s3" if item["data"]["path"].startswith("s3://") else "memory"


def rejected(ran: Ran) -> list[str]:
    return [f"{item['data']['path']}: {item['data']['why']}" for item in ran.named("CHECKPOINT", "rejected")]


def place(config: TrainConfig) -> str:
    """Where in S3 the run keeps everything."""
    assert config.checkpoint.managed is not None
    return f"{config.checkpoint.managed.s3}/{config.checkpoint.managed.namespace}"
