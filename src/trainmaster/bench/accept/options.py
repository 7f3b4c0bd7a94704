"""Options of an acceptance run. Names and defaults of the first eight are those of the earlier tool."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trainmaster.core.errors import UsageError

Model = Literal["resnet18", "resnet50", "transformer"]
DataMode = Literal["synthetic", "fashion_mnist", "cifar10", "cifar100", "imagenet"]
Precision = Literal["fp32", "tf32", "bf16"]
Backend = Literal["nccl", "gloo"]
Switch = Literal["auto", "on", "off"]
Injected = Literal["slow", "flip", "nan", "exit"]

BACKEND_VARIABLE, TIMEOUT_VARIABLE = "BACKEND", "NCCL_TIMEOUT_MS"
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


def _field(default: Any, text: str, **option: Any) -> Any:
    """A field with its help; `option` is passed to typer."""
    return dataclasses.field(default=default, metadata={"help": text, **option})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Model, data, schedule and limits of a run: the table of which both command lines are made."""

    model: Model = _field("resnet50", "resnet18, resnet50 or transformer.")
    data_mode: DataMode = _field(
        "synthetic", "synthetic (made on the device), fashion_mnist, cifar10, cifar100 or imagenet."
    )
    data_dir: str = _field("./data", "Folder of data sets; missing ones are downloaded (not ImageNet).", metavar="DIR")
    batch_size: int = _field(32, "Samples of each rank in a batch.")
    num_classes: int = _field(1000, "Classes; of a transformer the vocabulary.")
    learning_rate: float = _field(0.01, "Of SGD with momentum 0.9.")
    warmup_iterations: int = _field(50, "Steps before the measurement.")
    active_iterations: int = _field(100, "Measured steps.")
    duration_s: float | None = _field(None, "Seconds of measured steps, instead of their number.", metavar="S")
    repeats: int = _field(1, "Measurements, one after the other.")
    accumulate: int = _field(1, "Batches per step; gradients are exchanged after the last.")
    image_size: int | None = _field(None, "Height and width of an image; without: 224, or the size of the data.")
    workers: int | None = _field(None, "Processes per rank that read data; without: as the data needs.")
    precision: Precision | None = _field(None, "fp32, tf32 or bf16; without: bf16 on GPUs, fp32 on CPUs.")
    channels_last: Switch = _field("auto", "Memory layout of images; auto: on GPUs.", metavar="auto|on|off")
    compile: Switch = _field("auto", "torch.compile; auto: on GPUs.", metavar="auto|on|off")
    graph: Switch = _field("auto", "One CUDA graph per step; auto: on GPUs.", metavar="auto|on|off")
    bucket_mb: float = _field(25.0, "Megabytes of gradients that are summed at once.")
    layers: int = _field(12, "Of the transformer.")
    width: int = _field(768, "Of the transformer.")
    heads: int = _field(12, "Of the transformer.")
    sequence: int = _field(512, "Tokens of a sample of the transformer.")
    backend: Backend | None = _field(
        None, "nccl or gloo (CPUs); without: nccl where there are GPUs.", envvar=BACKEND_VARIABLE
    )
    processes: int | None = _field(None, "Ranks to start here; without: one per GPU, or one.", min=1)
    timeout_s: float = _field(
        DEFAULT_TIMEOUT_S, "Seconds until a collective without answer ends the run; without: NCCL_TIMEOUT_MS, or 300."
    )
    log_dir: str | None = _field(None, "Logs of ranks and of NCCL; without: beside the result.", metavar="DIR")
    baselines: str | None = _field(
        None, "Golden runs of this site (`trainmaster baseline`); without: HOME's.", metavar="FILE"
    )
    min_throughput: float | None = _field(
        None, "Your own floor for all ranks, instead of a baseline.", metavar="SAMPLES/S"
    )
    fault: Fault | None = _field(
        None, "Give a rank a fault (slow, flip, nan, exit) to see that it is found.", metavar="FAULT:RANK"
    )

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An option of the command line."""

    field: str
    name: str  # of its argument: timeout
    kind: type  # str, int or float
    optional: bool
    default: Any  # None where the environment decides
    texts: Mapping[str, Any]  # help, metavar, envvar, min


def table() -> list[Row]:
    """Every option of a run, for a command line to be made of."""
    hints, rows = get_type_hints(Options), []
    for each in dataclasses.fields(Options):
        hint, optional = hints[each.name], False
        if isinstance(hint, UnionType) or get_origin(hint) is Union:
            hint, optional = next(kind for kind in get_args(hint) if kind is not NoneType), True
        late = each.name == "timeout_s"
        rows.append(
            Row(
                field=each.name,
                name=option(each.name)[2:].replace("-", "_"),
                kind=hint if hint in (int, float) else str,
                optional=optional or late,
                default=None if late else each.default,
                texts=each.metadata,
            )
        )
    return rows


def option(name: str) -> str:
    """The word on the command line for a field."""
    return "--inject" if name == "fault" else "--" + name.removesuffix("_s").replace("_", "-")


def read(given: Mapping[str, Any], env: Mapping[str, str]) -> Options:
    """Options of the arguments of a command line that was made of `table`; others in `given` are left alone."""
    values = {row.field: given[row.name] for row in table()}
    values["fault"] = parse_fault(values["fault"])
    if values["timeout_s"] is None:
        values["timeout_s"] = read_timeout(env)
    return Options(**values)


def words(options: Options) -> list[str]:
    """The command line of these options: every one that is not the default."""
    plain, found = Options(), []
    for field in dataclasses.fields(Options):
        value = getattr(options, field.name)
        if value == getattr(plain, field.name):
            continue
        if isinstance(value, Fault):
            share = f":{value.share:g}" if value.kind == "slow" else ""
            found += [option(field.name), f"{value.kind}:{value.rank}{share}"]
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
