"""Bandwidth baselines with their sources: published figures that a collective is compared with at the same size.

A baseline is keyed by GPU, nodes, GPUs per node, fabric, collective, algorithm and message size, and applies only where
all of them match: 8 GPUs reach 483 GB/s at 16 GiB and 396 at 128 MiB, so a floor of one size fails healthy machines at
another. Without a match the answer is "no baseline", never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from trainmaster.core.compat import read_toml
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Finding, error, fail, ok, skip, warn

# Shares of a published figure. The lowest floor that a cloud ships is 79 % of it (OCI's 185 for 8×A100, published 235):
# below that no vendor accepts a node. Their Hopper floors are 89–95 %: below 90 % is a warning.
FAIL_BELOW, WARN_BELOW = 0.8, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Everything that identifies a measurement except its size."""

    gpu: str
    nodes: int
    gpus_per_node: int
    fabric: str
    collective: str
    algorithm: str = "default"

    def __str__(self) -> str:
        how = "" if self.algorithm == "default" else f", {self.algorithm}"
        return f"{self.collective} on {self.nodes}×{self.gpus_per_node} {self.gpu} over {self.fabric}{how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """One published figure. size_bytes None: its source states no size, so it judges nothing."""

    key: Key
    size_bytes: int | None
    busbw_gbps: float
    kind: Literal["measured", "floor", "symptom"]  # a floor is another check's threshold; a symptom is a known fault
    source: str
    note: str = ""


@cache
def load() -> tuple[Baseline, ...]:
    """All shipped baselines."""
    text = resources.files("trainmaster.bench").joinpath("data", "collectives.toml").read_text(encoding="utf-8")
    return tuple(parse(read_toml(text)))


def parse(document: Mapping[str, Any]) -> list[Baseline]:
    sources = document["source"]
    return [
        Baseline(
            key=Key(
                gpu=entry["gpu"],
                nodes=entry["nodes"],
                gpus_per_node=entry["gpus_per_node"],
                fabric=entry["fabric"],
                collective=entry["collective"],
                algorithm=entry.get("algorithm", "default"),
            ),
            size_bytes=parse_size(entry["size"]) if "size" in entry else None,
            busbw_gbps=float(entry["busbw_gbps"]),
            kind=entry.get("kind", "measured"),
            source=sources[entry["source"]],
            note=entry.get("note", ""),
        )
        for entry in document["busbw"]
    ]


# As torch and nvidia-smi print them. PCIe and NVL boards have other links and are left out on purpose.
_GPUS = {
    "A100": ("A100-SXM4-80GB", "A100-SXM4-40GB", "A100-SXM-80GB", "A100-SXM-64GB"),
    "H100": ("H100 80GB HBM3", "H100 SXM5 80GB", "H100 SXM"),
    "H200": ("H200", "H200 SXM"),
    "B200": ("B200", "B200 SXM6"),
    "B300": ("B300", "B300 SXM6 AC"),
    "GB200": ("GB200",),
}


def gpu_model(product: str) -> str:
    """The GPU model for baseline lookup; an unknown name is returned unchanged and matches none."""
    name = product.removeprefix("NVIDIA ").strip()
    return next((model for model, names in _GPUS.items() if name in names), name)


def algorithm(env: Mapping[str, str], *, in_switch: bool = False) -> str:
    """The algorithm that NCCL was set to use; `in_switch`: its log shows in-network reduction (SHARP)."""
    if env.get("NCCL_ALGO"):
        return env["NCCL_ALGO"].strip().lower()
    if env.get("NCCL_NVLS_ENABLE") == "0":
        return "no-nvls"
    return "sharp" if in_switch else "default"


def judge(
    key: Key | None,
    seen: Mapping[int, float],
    *,
    baselines: Sequence[Baseline],
    least_gbps: float | None = None,
    collective: str,
) -> Finding:
    """Findings on one collective's bus bandwidth by size. Averages over sizes are never judged.

    `least_gbps` is the user's own floor at the largest size, where bandwidth dominates latency.
    """
    values: dict[str, Any] = {
        "collective": collective,
        "busbw_gbps": {str(size): round(gbps, 3) for size, gbps in seen.items()},
    }
    if not seen:
        return error(f"{collective}: no size was finished by every rank", action="see who was lost, then run again")
    if least_gbps is not None:
        return _by_floor(collective, seen, least_gbps, values)
    fit = [base for base in baselines if base.key == key and base.kind != "symptom"] if key is not None else []
    sized = [base for base in fit if base.size_bytes is not None]
    if not sized:
        why = "its sources name no message size" if fit else f"none published for {key}" if key else "not a GPU fabric"
        return skip(
            f"{collective}: measured, not judged: no baseline ({why}); --min-busbw sets your own", proof=why, **values
        )
    at = [base for base in sized if base.size_bytes in seen]
    if not at:
        sizes = ", ".join(sorted({render_size(base.size_bytes or 0) for base in sized}))
        return error(
            f"{collective}: the baseline of {key} is for {sizes}, and none of these was measured",
            action=f"run again with --max {_word(min(base.size_bytes or 0 for base in sized))} or more",
            **values,
        )
    compared = [_compare(base, seen[base.size_bytes or 0]) for base in at]
    worst = min(compared, key=lambda item: item[0])
    reasons = "; ".join(reason for _, reason in compared)
    values["compared"] = [
        {"size_bytes": base.size_bytes, "baseline_gbps": base.busbw_gbps, "kind": base.kind, "source": base.source}
        for base in at
    ]
    if worst[0] == 0:
        to_do = "run `trainmaster isolate` to find the node or link that is slow"
        return fail(f"{collective}: {reasons}", action=to_do, **values)
    if worst[0] == 1:
        to_do = "run again on an idle machine; if it stays, run `trainmaster isolate`"
        return warn(f"{collective}: {reasons}", action=to_do, **values)
    return ok(f"{collective}: {reasons}", **values)


def _compare(base: Baseline, gbps: float) -> tuple[int, str]:
    """0 fail, 1 warn, 2 pass; and the comparison in words."""
    size, share = render_size(base.size_bytes or 0), gbps / base.busbw_gbps
    if base.kind == "floor":
        words = f"{gbps:.1f} GB/s at {size}, floor {base.busbw_gbps:g} ({base.source})"
        return (2 if share >= 1 else 1), words
    words = f"{gbps:.1f} GB/s at {size}, {share:.0%} of {base.busbw_gbps:g} ({base.source})"
    return (0 if share < FAIL_BELOW else 1 if share < WARN_BELOW else 2), words


def _by_floor(collective: str, seen: Mapping[int, float], least: float, values: dict[str, Any]) -> Finding:
    size = max(seen)
    words = f"{collective}: {seen[size]:.3g} GB/s at {render_size(size)}, at least {least:g} was asked for"
    if seen[size] < least:
        return fail(words, action="run `trainmaster isolate` to find the node or link that is slow", **values)
    return ok(words, **values)


def _word(size_bytes: int) -> str:
    return render_size(size_bytes).replace(" ", "").removesuffix("iB").removesuffix("B")


def parse_size(text: str) -> int:
    """`8K` is 8192 bytes; K, M, G are powers of 1024, as in nccl-tests."""
    match = re.fullmatch(r"(\d{1,15})\s*([KMGT]?)(?:i?B)?", text.strip(), flags=re.IGNORECASE | re.ASCII)
    if not match:
        raise UsageError(f"{text!r} is not a size; write it as 8K, 128M or 8G")
    return int(match[1]) << (10 * " KMGT".index(match[2].upper() or " "))


def render_size(size_bytes: int) -> str:
    """`8 KiB`; sizes that are no whole number of a unit in bytes."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << shift and size_bytes % (1 << shift) == 0:
            return f"{size_bytes >> shift} {unit}"
    return f"{size_bytes} B"
