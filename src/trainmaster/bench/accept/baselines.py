"""Baselines of acceptance runs: shipped ones with their sources, and golden runs of a site.

A golden run is a run of the same machines that somebody was content with. `trainmaster baseline record` appends it to a
TOML file; later runs of the same configuration are compared with the newest one, and a regression is named: which
figure, and which GPU by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from trainmaster.bench.accept.options import Options
from trainmaster.bench.accept.record import RankRecord, percentile, total_s, total_samples
from trainmaster.core.compat import read_toml
from trainmaster.core.errors import UsageError
from trainmaster.core.files import open_whole
from trainmaster.core.gpus import find_gpu, of_gpu

# Shares of a golden run. Ours: the same machines repeat themselves within 1 to 3 %.
FAIL_BELOW, WARN_BELOW = 0.9, 0.95
# Shares of a figure that another GPU reached, scaled to this one. Ours, and wide: for an A100 the scaled one is 1,890
# images/s and NVIDIA publishes 2,470; batch, program and hosts differ.
SCALED_FAIL_BELOW, SCALED_WARN_BELOW = 0.25, 0.5
_MOST = 1e15  # of any figure
# What must be equal for two runs to be comparable. The names are those of options and of results.json.
_KEY_OPTIONS = ("model", "data_mode", "batch_size", "accumulate", "num_classes", "layers", "width", "heads", "sequence")
_KEY_RESULTS = ("device", "precision", "world_size", "nodes", "backend")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Samples per second that a configuration is known to reach."""

    gpu: str  # name in core/data/gpus.toml
    model: str
    batch_size: int | None  # None: its source does not state it
    precision: str | None  # None: its source does not state it
    world_size: int
    samples_per_s: float
    source: str
    judges: bool  # False: shown beside the measurement only


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """A golden run: its configuration and its figures."""

    name: str
    recorded_at: str
    key: Mapping[str, Any]
    samples_per_s: float
    step_p99_s: float
    scaling_efficiency: float | None
    alone_s: Mapping[str, float]  # median step without exchange, by GPU uuid or rank

    @property
    def source(self) -> str:
        return f"golden run {self.name} of {self.recorded_at[:10]}"


@cache
def load() -> tuple[Baseline, ...]:
    """All shipped baselines."""
    text = resources.files("trainmaster.bench").joinpath("data", "accept.toml").read_text(encoding="utf-8")
    document = read_toml(text)
    return tuple(
        Baseline(
            gpu=row["gpu"], model=row["model"], batch_size=row.get("batch_size"), precision=row.get("precision"),
            world_size=row["world_size"], samples_per_s=float(row["samples_per_s"]),
            source=document["source"][row["source"]], judges=row.get("judges", True),
        )
        for row in document["training"]
    )  # fmt: skip


def find(options: Options, records: Sequence[RankRecord]) -> list[Baseline]:
    """Shipped baselines of this configuration, the highest that judges first."""
    known = [baseline for baseline in load() if _matches(baseline, options, records)]
    return sorted(known, key=lambda baseline: (not baseline.judges, -baseline.samples_per_s))


def _matches(baseline: Baseline, options: Options, records: Sequence[RankRecord]) -> bool:
    gpu = of_gpu(device_of(records).removeprefix("NVIDIA "))
    same = (baseline.model, baseline.world_size) == (options.model, len(records))
    alike = baseline.precision in (None, records[0].precision) and baseline.batch_size in (None, options.batch_size)
    return gpu is not None and baseline.gpu == gpu.name and same and alike and _standard(options)


def scale(options: Options, records: Sequence[RankRecord]) -> Baseline | None:
    """What our measured GPU would give with this GPU's memory; None where no figure of ours fits.

    Training of these models waits for memory. Bandwidth and peak are those of the datasheets; the lower ratio counts.
    A smaller batch takes no longer than a larger one: its figure is reduced by that.
    """
    gpu = of_gpu(device_of(records).removeprefix("NVIDIA "))
    if gpu is None or not gpu.hbm_gbps or not gpu.bf16_tflops or not _standard(options):
        return None
    own = [one for one in load() if one.judges and one.world_size == 1 and one.precision == records[0].precision]
    fitting = [one for one in own if one.model == options.model and one.batch_size is not None]
    if not fitting:
        return None
    nearest = min(fitting, key=lambda one: abs((one.batch_size or 0) - options.batch_size))
    known = find_gpu(nearest.gpu)
    if known is None or not known.hbm_gbps or not known.bf16_tflops:
        return None
    ratio = min(gpu.hbm_gbps / known.hbm_gbps, gpu.bf16_tflops / known.bf16_tflops)
    smaller = min(1.0, options.batch_size / (nearest.batch_size or options.batch_size))
    return replace(
        nearest,
        gpu=gpu.name,
        batch_size=options.batch_size,
        world_size=len(records),
        samples_per_s=nearest.samples_per_s * ratio * smaller * len(records),
        source=f"scaled from {nearest.gpu} by bandwidth and peak; {nearest.source}",
    )


def _standard(options: Options) -> bool:
    """Whether shapes are the ones that baselines were measured with."""
    plain = Options()
    names = ("data_mode", "accumulate", "num_classes", "pixels", "layers", "width", "heads", "sequence")
    return all(getattr(options, name) == getattr(plain, name) for name in names)


def find_golden(options: Options, records: Sequence[RankRecord]) -> Golden | None:
    """The newest golden run of this configuration in the site's file."""
    if options.baselines is None:
        return None
    return newest(load_golden(Path(options.baselines)), key_of(options, records))


def newest(known: Sequence[Golden], key: Mapping[str, Any]) -> Golden | None:
    """The last golden run with this key."""
    return next((golden for golden in reversed(known) if golden.key == key), None)


def device_of(records: Sequence[RankRecord]) -> str:
    """The device of all ranks; where they differ, all of them: no baseline of one of them fits."""
    return " + ".join(dict.fromkeys(record.device for record in records))


def key_of(options: Options, records: Sequence[RankRecord]) -> dict[str, Any]:
    """The configuration of a run."""
    first = records[0]
    results = {
        "device": device_of(records),
        "precision": first.precision,
        "world_size": len(records),
        "nodes": len({record.node for record in records}),
        "backend": first.backend,
    }
    return _key({name: getattr(options, name) for name in _KEY_OPTIONS}, results, options.pixels)


def _key(options: Mapping[str, Any], results: Mapping[str, Any], pixels: int) -> dict[str, Any]:
    return {
        **{name: options[name] for name in _KEY_OPTIONS},
        "pixels": pixels,
        **{name: results[name] for name in _KEY_RESULTS},
    }


def load_golden(path: Path) -> list[Golden]:
    """Golden runs of a file, oldest first; UsageError with the file's name where it cannot be read."""
    try:
        rows = read_toml(path.read_text(encoding="utf-8")).get("golden", [])
        return [_read(row) for row in rows]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: not a file of golden runs: {type(error).__name__}: {error}") from None


def _read(row: Mapping[str, Any]) -> Golden:
    """A golden run with numbers that can be compared: NaN would pass every run, and 0 or infinity none."""
    share = row.get("scaling_efficiency")
    return Golden(
        name=_text(row, "name"),
        recorded_at=_text(row, "recorded_at"),
        key=dict(row["key"].items()),
        samples_per_s=_number(row, "samples_per_s"),
        step_p99_s=_number(row, "step_p99_s"),
        scaling_efficiency=_number(row, "scaling_efficiency") if share is not None else None,
        alone_s={name: _number(row["alone_s"], name) for name in row.get("alone_s", {})},
    )


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row[name]
    if type(value) not in (int, float) or not 0 < value < _MOST:
        raise ValueError(f"{name} is {value!r:.40}; write a number above 0")
    return float(value)


def _text(row: Mapping[str, Any], name: str) -> str:
    if not isinstance(row[name], str):
        raise ValueError(f"{name} is {row[name]!r:.40}; write a string")
    return str(row[name])


def figures(options: Options, records: Sequence[RankRecord]) -> Golden:
    """The figures of this run, to be compared with a golden one."""
    return Golden(
        name="this run",
        recorded_at="",
        key=key_of(options, records),
        samples_per_s=total_samples(options, records) / total_s(records),
        step_p99_s=max(percentile(record.steps_s, 0.99) for record in records),
        scaling_efficiency=None,
        alone_s={record.gpu or f"rank{record.rank}": percentile(record.alone_s, 0.5) for record in records},
    )


def golden_of(document: Mapping[str, Any], *, name: str) -> Golden:
    """A golden run from results.json. UsageError for a run that failed or measured nothing."""
    if document.get("overall") == "FAIL":
        raise UsageError("this run ended with FAIL: a golden run must not have failed")
    golden = figures_of(document, name=name)
    if document["options"].get("fault") is not None:
        raise UsageError("this run had a fault on purpose (--inject): it is no measure for others")
    limit = document.get("limit_samples_per_second")
    if isinstance(limit, int | float) and golden.samples_per_s > limit:
        raise UsageError("this run was faster than the datasheet's peak allows: its clock cannot be trusted")
    if unknown := _unknown(document):
        raise UsageError(f"this run could not measure {', '.join(unknown)}: run it again")
    return golden


def _unknown(document: Mapping[str, Any]) -> list[str]:
    """Checks that could not be measured; without a baseline throughput is one of them, and no reason against a run."""
    try:
        return [
            str(check["check"])
            for check in document["checks"]
            if check["check"] != "accept_throughput"
            and any(finding["verdict"] == "error" for finding in check["findings"])
        ]
    except (KeyError, TypeError) as error:
        raise UsageError(f"not a whole results.json: {type(error).__name__}: {error}") from None


def figures_of(document: Mapping[str, Any], *, name: str) -> Golden:
    """The figures of a results.json, also of a failed run. UsageError where it measured nothing."""
    if "throughput_samples_per_second" not in document:
        raise UsageError(f"this run ended with {document.get('overall')} and measured nothing")
    try:
        return _figures_of(document, name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"not a whole results.json: {type(error).__name__}: {error}") from None


def _figures_of(document: Mapping[str, Any], name: str) -> Golden:
    options, ranks = document["options"], document["ranks"]
    if [rank["rank"] for rank in ranks] != list(range(document["world_size"])):
        raise ValueError(f"world_size is {document['world_size']}, and `ranks` does not have each of them once")
    pixels = Options(data_mode=options["data_mode"], image_size=options["image_size"]).pixels
    share = document["scaling_efficiency"]
    return Golden(
        name=name,
        recorded_at=_text(document, "finished_at"),
        key=_key(options, document, pixels),
        samples_per_s=_number(document, "throughput_samples_per_second"),
        step_p99_s=max(_number(rank["step_s"], "p99") for rank in ranks),
        scaling_efficiency=_number(document, "scaling_efficiency") if share is not None else None,
        alone_s={rank["gpu"] or f"rank{rank['rank']}": _number(rank["alone_s"], "p50") for rank in ranks},
    )


def compare(golden: Golden, now: Golden) -> list[tuple[str, float]]:
    """Figures of a run that are worse than those of a golden run, each with its loss as a share.

    `throughput`, `p99 of a step`, and the uuid of each GPU (or its rank) that is slower by itself.
    """
    pairs = [
        ("throughput", now.samples_per_s / golden.samples_per_s),
        ("p99 of a step", golden.step_p99_s / now.step_p99_s),
        *((name, before / now.alone_s[name]) for name, before in golden.alone_s.items() if name in now.alone_s),
    ]
    return [(name, 1 - share) for name, share in pairs if share < WARN_BELOW]


def append(path: Path, golden: Golden) -> None:
    """Add a golden run to the file. The file is replaced whole."""
    load_golden(path)  # a file that cannot be read is not overwritten
    before = path.read_text(encoding="utf-8") if path.exists() else _HEAD
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_whole(path, durable=False) as file:
        file.write(f"{before.rstrip()}\n\n{_render(golden)}".encode())


_HEAD = "# Golden runs of this site, oldest first: `trainmaster baseline record`. The newest of its kind counts.\n"


def _render(golden: Golden) -> str:
    lines = [
        "[[golden]]",
        f"name = {json.dumps(golden.name)}",
        f"recorded_at = {json.dumps(golden.recorded_at)}",
        f"samples_per_s = {golden.samples_per_s!r}",
        f"step_p99_s = {golden.step_p99_s!r}",
    ]
    if golden.scaling_efficiency is not None:
        lines.append(f"scaling_efficiency = {golden.scaling_efficiency!r}")
    lines += ["", "[golden.key]", *(f"{name} = {json.dumps(value)}" for name, value in golden.key.items())]
    lines += ["", "[golden.alone_s]", *(f"{json.dumps(name)} = {value!r}" for name, value in golden.alone_s.items())]
    return "\n".join(lines) + "\n"
