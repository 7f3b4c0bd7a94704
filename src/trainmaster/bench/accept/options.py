"""Options of an acceptance run. Names and defaults of the first eight are those that users of the earlier tool type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from trainmaster.core.errors import UsageError

Model = Literal["resnet18", "resnet50", "transformer"]
DataMode = Literal["synthetic", "fashion_mnist", "cifar10", "cifar100", "imagenet"]
Precision = Literal["fp32", "tf32", "bf16"]
Switch = Literal["auto", "on", "off"]
Injected = Literal["slow", "flip", "nan", "exit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that one rank has on purpose, to see that it is found."""

    kind: Injected
    rank: int
    share: float = 0.3  # of a step, for `slow`


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is trained, how, and for how long."""

    model: Model = "resnet50"
    data_mode: DataMode = "synthetic"
    data_dir: str = "./data"
    batch_size: int = 32  # per rank
    num_classes: int = 1000  # of a transformer: the vocabulary
    learning_rate: float = 0.01
    warmup_iterations: int = 50
    active_iterations: int = 100
    image_size: int = 224
    precision: Precision | None = None  # None: bf16 on GPUs, fp32 on CPUs
    compile: Switch = "auto"
    graph: Switch = "auto"  # a CUDA graph of the whole step
    bucket_mb: float = 25.0  # gradients that are summed at once
    layers: int = 12
    width: int = 768
    heads: int = 12
    sequence: int = 512
    backend: Literal["nccl", "gloo"] | None = None
    processes: int | None = None
    timeout_s: float = 300.0  # without progress of a collective
    min_throughput: float | None = None  # samples/s of all ranks: the user's own floor
    fault: Fault | None = None

    def checked(self) -> Options:
        """These options; UsageError that names the first wrong one."""
        for name in (
            "batch_size",
            "num_classes",
            "active_iterations",
            "image_size",
            "layers",
            "width",
            "heads",
            "sequence",
        ):
            if getattr(self, name) < 1:
                raise UsageError(f"{_option(name)} {getattr(self, name)}: write a number from 1 on")
        words = {"model": Model, "data_mode": DataMode, "compile": Switch, "graph": Switch}
        for name, kind in words.items():
            if getattr(self, name) not in get_args(kind):
                raise UsageError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: one of {', '.join(get_args(kind))}"
                )
        if self.warmup_iterations < 0:
            raise UsageError(f"--warmup-iterations {self.warmup_iterations}: write a number from 0 on")
        if self.data_mode != "synthetic":
            raise UsageError(f"--data-mode {self.data_mode}: only synthetic data is read so far")
        if self.model == "transformer" and self.width % self.heads:
            raise UsageError(f"--width {self.width}: not a multiple of --heads {self.heads}")
        for name in ("learning_rate", "bucket_mb", "timeout_s", "min_throughput"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{_option(name)} {value:g}: write a number above 0")
        return self


def _option(name: str) -> str:
    return "--" + name.removesuffix("_s").replace("_", "-")


def parse_fault(text: str | None) -> Fault | None:
    """`slow:2:0.3`, `flip:1`, `nan:0`, `exit:3`: a kind, a rank, and for `slow` a share of a step."""
    if text is None:
        return None
    kind, _, rest = text.partition(":")
    rank, _, share = rest.partition(":")
    try:
        if kind not in get_args(Injected) or (share and kind != "slow"):
            raise ValueError
        fault = Fault(kind=kind, rank=int(rank), share=float(share or 0.3))  # type: ignore[arg-type]
        if fault.rank < 0 or not 0 < fault.share < 100:
            raise ValueError
    except ValueError:
        raise UsageError(f"--inject {text}: write slow:RANK:SHARE, flip:RANK, nan:RANK or exit:RANK") from None
    return fault
