"""Judge a GPU memory test: every word reads back as written, and no uncorrectable error was counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainmaster.checks.active import _probe
from trainmaster.core.results import Finding, fail, ok, warn

GIB = 1 << 30
REPLACE = "drain the node, reset the GPU so that bad rows are remapped, run this again; replace the GPU if it repeats"


def judge_one(device: str, report: _probe.Report, _: Mapping[str, _probe.Report]) -> Finding:
    results = report.results
    tested, total = _probe.number(results, "bytes", least=1), _probe.number(results, "memory_bytes", least=1)
    patterns, wrong_words, seconds = (
        results["patterns"],
        _probe.count(results, "wrong_words"),
        _probe.number(results, "seconds"),
    )
    if not isinstance(patterns, list) or not patterns:
        raise ValueError("no pattern was written")
    ecc = ecc_new(results)
    values = {
        **report.software,
        "tested_bytes": int(tested),
        "share": round(tested / total, 3),
        "patterns": len(patterns),
        "seconds": seconds,
        "wrong_words": wrong_words,
        "ecc_new": ecc,
    }
    what = f"{tested / GIB:.1f} of {total / GIB:.1f} GiB, {len(patterns)} patterns"
    if wrong_words:
        first = results["wrong"][0]
        shown = ", ".join(f"{item['read']} for {item['expected']}" for item in first["shown"][:1])
        again = "still wrong when read again" if first.get("again") else "right when read again"
        reason = (
            f"{wrong_words:,} of its words came back changed ({what}): first in {first['pattern']}, {shown}, {again}"
        )
        return fail(reason, action=REPLACE, device=device, **values, wrong=results["wrong"][:4])
    if ecc["uncorrected"]:
        reason = f"{ecc['uncorrected']} uncorrectable memory errors while {what} were tested"
        return fail(reason, action=REPLACE, device=device, **values)
    if ecc["corrected"]:
        reason = f"{ecc['corrected']} corrected memory errors while {what} were tested"
        return warn(reason, action="watch its ECC and row-remap counters; run level 3", device=device, **values)
    return ok(f"{what}, all as written, in {seconds:.1f} s", device=device, **values)


def ecc_new(results: Mapping[str, Any]) -> dict[str, int | None]:
    """Memory errors counted during a probe. None: not counted by the GPU, or not read."""
    before, after = results.get("ecc_before") or {}, results.get("ecc_after") or {}
    new: dict[str, int | None] = {}
    for kind in ("corrected", "uncorrected"):
        first, last = before.get(kind), after.get(kind)
        new[kind] = max(0, last - first) if isinstance(first, int) and isinstance(last, int) else None
    return new
