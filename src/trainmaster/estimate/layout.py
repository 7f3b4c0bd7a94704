"""How a run is laid out on GPUs: what each rank holds, and how much it computes at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import Fault
from trainmaster.estimate.shapes import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One rank's part of a step."""

    ranks: int
    ranks_per_node: int
    shard_ranks: int  # that share one copy of the weights
    micro_sequences: int  # rows of one pass
    passes: int  # of each step
    sequence_tokens: int
    compute_bytes: int  # of an activation
    master_bytes: int  # of a weight, of its gradient and of each of its two moments
    compiled: bool
    recompute: str
    recompute_every: int
    float8: bool
    cpu_offload: bool
    reduce_once: bool  # gradients are whole until the last pass, then summed over the ranks

    @property
    def tokens(self) -> int:
        """Of one pass of one rank."""
        return self.micro_sequences * self.sequence_tokens

    @property
    def step_tokens(self) -> int:
        """Of one step over all ranks."""
        return self.tokens * self.passes * self.ranks

    @property
    def alone(self) -> bool:
        """One rank that computes in the type it keeps: there is no FSDP, nothing to gather (parallel/shard.py)."""
        return self.ranks == 1 and self.master_bytes == self.compute_bytes and not self.cpu_offload

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


def faults_on(config: TrainConfig, *, ranks: int, ranks_per_node: int) -> Iterator[Fault]:
    """Why this run cannot be laid out so. Evaluation's shares are left out: they decide neither memory nor speed."""
    yield from (fault for fault in config.faults_on(ranks) if not fault.path.startswith("eval"))
    if config.parallel.shard_ranks is None and ranks % shard_ranks(config, ranks=ranks, ranks_per_node=ranks_per_node):
        message = f"hybrid needs as many ranks on every node; {ranks} are not a multiple of {ranks_per_node}"
        yield Fault(path="parallel.sharding", message=message)


def setting_of(config: TrainConfig, *, ranks: int, ranks_per_node: int, gpu_bytes: int | None = None) -> Setting:
    """The layout on that many GPUs of that size. `auto` is read as on a GPU: bfloat16, compiled."""
    rows = max(1, config.batch_sequences // ranks)
    at_once = min(config.micro_sequences or rows, rows)
    return Setting(
        ranks=ranks,
        ranks_per_node=min(ranks, ranks_per_node),
        shard_ranks=shard_ranks(config, ranks=ranks, ranks_per_node=ranks_per_node),
        micro_sequences=at_once,
        passes=-(-rows // at_once),
        sequence_tokens=config.sequence_tokens,
        compute_bytes=4 if config.precision == "fp32" else 2,
        master_bytes=4 if config.master == "fp32" else 2,
        compiled=config.parallel.compile != "off",
        recompute=config.parallel.recompute,
        recompute_every=config.parallel.recompute_every,
        float8=config.parallel.float8,
        cpu_offload=config.parallel.cpu_offload,
        reduce_once=_reduces_once(config, gpu_bytes),
    )


def shard_ranks(config: TrainConfig, *, ranks: int, ranks_per_node: int) -> int:
    if config.parallel.sharding == "full":
        return ranks
    return config.parallel.shard_ranks or min(ranks, ranks_per_node)


def _reduces_once(config: TrainConfig, gpu_bytes: int | None) -> bool:
    """As parallel/shard.py decides `auto`: where whole gradients in float32 take no more than a tenth of the GPU."""
    if config.parallel.reduce != "auto":
        return config.parallel.reduce == "last"
    return gpu_bytes is not None and 4 * count(config.model).all <= gpu_bytes / 10
