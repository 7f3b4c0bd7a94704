"""Tables of nccl-tests: recorded ones, and such of any shape and bandwidth."""

from __future__ import annotations

import re
from pathlib import Path

SAMPLES = Path(__file__).parents[1] / "node" / "parse" / "samples"


def text(name: str) -> str:
    return (SAMPLES / f"nccl-tests-{name}").read_text()


def healthy() -> str:
    """8×H100 on one node, healthy."""
    return "\n".join(line[3:] for line in text("two-single-nodes.txt").splitlines() if line.startswith("0: "))


def averaged(table: str) -> str:
    """The table with the average of its rows in its summary."""
    cells = [line.split() for line in re.findall(r"^ *\d{4,} +\d+ +float .*$", table, flags=re.MULTILINE)]
    mean = sum(float(row[7]) + float(row[11]) for row in cells) / 2 / len(cells)
    return re.sub(r"(Avg bus bandwidth +: )[\d.]+", rf"\g<1>{mean:.4f}", table)


def shape(gpu: str, nodes: int, each: int, gbps: float, *, collective: str = "all_reduce") -> str:
    """A healthy table of a shape, with this bus bandwidth from 64 MiB to 8 GiB."""
    ranks = nodes * each
    factor = (ranks - 1) / ranks * (2 if collective == "all_reduce" else 1)
    sizes = [64 << 20 << step for step in range(8)]
    lines = [f"# Collective test starting: {collective}_perf",
             f"# nThread 1 nGpus 1 minBytes {sizes[0]} maxBytes {sizes[-1]} step: 2(factor) warmup iters: 5 iters: 20 "
             "agg iters: 1 validation: 1 graph: 0", "# Using devices"]  # fmt: skip
    lines += [f"#  Rank {rank:2d} Group  0 Pid {4000 + rank} on node{rank // each} device {rank % each} "
              f"[0000:{16 + rank % each:02x}:00] {gpu}" for rank in range(ranks)]  # fmt: skip
    lines += [line for line in healthy().splitlines() if re.match(r"#\s+(size|\(B\)|out-of-place)", line)]
    for size in sizes:
        side = f"{size / (gbps / factor) / 1e3:.1f} {gbps / factor:.2f} {gbps:.2f} 0"
        lines.append(f"  {size} {size // 4} float sum -1 {side} {side}")
    return averaged("\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1"]) + "\n")
