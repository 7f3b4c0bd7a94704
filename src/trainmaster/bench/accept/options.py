"""Options of an acceptance run. Names and defaults of the first eight are those of the earlier tool."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from trainmaster.core.errors import UsageError

Model = Literal["resnet18", "resnet50", "transformer"]
DataMode = Literal["synthetic", "fashion_mnist", "cifar10", "cifar100", "imagenet"]
Precision = Literal["fp32", "tf32", "bf16"]
Backend = Literal["nccl", "gloo"]
Switch = Literal["auto", "on", "off"]
Injected = Literal["slow", "flip", "nan", "exit"]

TIMEOUT_VARIABLE = "NCCL_TIMEOUT_MS"
DEFAULT_TIMEOUT_S = 300.0
# What no machine does, and what would end in an overflow somewhere in torch.
_MOST = {"image_size": 8192, "processes": 1024, "workers": 1024, "layers": 10_000, "heads": 10_000, "batch_size": 10**6}
_MOST_COUNT, _MOST_NUMBER = 10**8, 1e9
# Channels and pixels of the images of each data mode, before --image-size.
_SHAPES = {
    "synthetic": (3, 224), "imagenet": (3, 224), "fashion_mnist": (1, 28), "cifar10": (3, 32), "cifar100": (3, 32),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault that one rank has on purpose, to see that it is found."""

    kind: Injected
    rank: int
    share: float = 0.3  # of a step, for `slow`


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Model, data, schedule and limits of a run."""

    model: Model = "resnet50"
    data_mode: DataMode = "synthetic"
    data_dir: str = "./data"
    batch_size: int = 32  # per rank
    num_classes: int = 1000  # of a transformer: the vocabulary
    learning_rate: float = 0.01
    warmup_iterations: int = 50
    active_iterations: int = 100
    duration_s: float | None = None  # of a repeat, in place of active_iterations
    repeats: int = 1
    accumulate: int = 1  # batches per step; gradients are exchanged after the last
    image_size: int | None = None  # None: that of the data
    workers: int | None = None  # processes that read data, per rank; None: as the data needs
    precision: Precision | None = None  # None: bf16 on GPUs, fp32 on CPUs
    channels_last: Switch = "auto"
    compile: Switch = "auto"
    graph: Switch = "auto"  # a CUDA graph of the whole step
    bucket_mb: float = 25.0  # gradients that are summed at once
    layers: int = 12
    width: int = 768
    heads: int = 12
    sequence: int = 512
    backend: Backend | None = None
    processes: int | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S  # without progress of a collective
    log_dir: str | None = None  # keeps the output and NCCL's log of every rank
    baselines: str | None = None  # TOML file of the site's golden runs
    min_throughput: float | None = None  # samples/s of all ranks: the user's own floor
    fault: Fault | None = None

    @property
    def channels(self) -> int:
        return _SHAPES[self.data_mode][0]

    @property
    def pixels(self) -> int:
        """Height and width of the model's images."""
        return self.image_size or _SHAPES[self.data_mode][1]

    @property
    def samples_per_step(self) -> int:
        """Of one rank."""
        return self.batch_size * self.accumulate

    def checked(self) -> Options:
        """These options; UsageError that names the first wrong one."""
        self._check_numbers()
        words = {
            "model": Model, "data_mode": DataMode, "compile": Switch, "graph": Switch, "channels_last": Switch,
            "precision": Precision, "backend": Backend,
        }  # fmt: skip
        for name, kind in words.items():
            if getattr(self, name) is not None and getattr(self, name) not in get_args(kind):
                raise UsageError(f"{option(name)} {getattr(self, name)}: one of {', '.join(get_args(kind))}")
        if self.model == "transformer" and self.data_mode != "synthetic":
            raise UsageError(f"--data-mode {self.data_mode}: images; a transformer takes synthetic tokens")
        if self.model == "transformer" and self.width % self.heads:
            raise UsageError(f"--width {self.width}: not a multiple of --heads {self.heads}")
        return self

    def _check_numbers(self) -> None:
        counts = (
            "batch_size", "num_classes", "active_iterations", "repeats", "accumulate", "image_size", "layers", "width",
            "heads", "sequence", "processes",
        )  # fmt: skip
        least = {**dict.fromkeys(counts, 1), "warmup_iterations": 0, "workers": 0}
        for name, smallest in least.items():
            value, largest = getattr(self, name), _MOST.get(name, _MOST_COUNT)
            if value is not None and not smallest <= value <= largest:
                raise UsageError(f"{option(name)} {value:.12g}: write a number from {smallest} to {largest:,}")
        for name in ("learning_rate", "bucket_mb", "timeout_s", "duration_s", "min_throughput"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= _MOST_NUMBER:
                raise UsageError(f"{option(name)} {value:g}: write a number above 0, at most {_MOST_NUMBER:g}")


def option(name: str) -> str:
    """The word on the command line for a field."""
    return "--" + name.removesuffix("_s").replace("_", "-")


def words(options: Options) -> list[str]:
    """The command line of these options: every one that is not the default."""
    plain, found = Options(), []
    for field in dataclasses.fields(Options):
        value = getattr(options, field.name)
        if value == getattr(plain, field.name):
            continue
        if isinstance(value, Fault):
            share = f":{value.share:g}" if value.kind == "slow" else ""
            found += ["--inject", f"{value.kind}:{value.rank}{share}"]
        else:
            found += [option(field.name), str(int(value)) if _is_whole(value) else str(value)]
    return found


def _is_whole(value: object) -> bool:
    """Whether a number reads better without its `.0`. Others keep all their digits: `:g` would move a floor."""
    return isinstance(value, float) and value.is_integer() and value < 1e15


def read_timeout(env: Mapping[str, str]) -> float:
    """Seconds of NCCL_TIMEOUT_MS, or the default."""
    text = env.get(TIMEOUT_VARIABLE)
    if text is None:
        return DEFAULT_TIMEOUT_S
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 10**12):
        raise UsageError(f"{TIMEOUT_VARIABLE}={text}: write a whole number of milliseconds above 0")
    return int(text) / 1000


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
