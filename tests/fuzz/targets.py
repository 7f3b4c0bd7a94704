"""The parsers under fire: their samples, and what a judge would read out of their data.

`healthy` is what a judge may call healthy, `broken` what the data says is broken. A sample of a broken thing names the
lines (or the place in the JSON) that say so; a sample of healthy things names the lines each of them lives by.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmaster.node.parse import dcgm, fi_info, ibstat, kernel_log, nccl_debug, nccl_tests, nvidia_smi

FOLDER = Path(__file__).parents[1] / "node" / "parse" / "samples"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One output. Either it holds something broken, or things that are healthy."""

    text: str
    broken: str | None = None
    kept: frozenset[str] = frozenset()  # the lines that say so
    kept_path: tuple[str | int, ...] | None = None  # or, in JSON, the object that says so
    lives_by: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # healthy thing → numbers of its lines
    lives_at: Mapping[str, tuple[tuple[str | int, ...], ...]] = field(default_factory=dict)  # or paths of its objects
    all_lines: bool = False  # it is lost only when every one of its lines is damaged, not just one
    after: str = ""  # damage a line only behind this word,
    before: str = ""  # or only ahead of what this pattern finds


@dataclass(frozen=True, kw_only=True)
class Target:
    """One parser and its oracles."""

    name: str
    parse: Callable[[str | bytes], Any]
    samples: tuple[Sample, ...]
    healthy: Callable[[Any], frozenset[str]]
    broken: Callable[[Any], frozenset[str]]
    evidence: Callable[[str], int]  # at most so many things can be healthy in this text


def _text(name: str) -> str:
    return (FOLDER / name).read_text()


def _numbers(text: str, pattern: str) -> tuple[int, ...]:
    return tuple(i for i, line in enumerate(text.split("\n")) if re.search(pattern, line))


# --- DCGM ---------------------------------------------------------------------------------------------------------


def _dcgm_healthy(diag: dcgm.Diag) -> frozenset[str]:
    level = 3 if any(test.key == "diagnostic" for test in diag.tests) else 2
    if dcgm.missing_tests(diag, level):
        return frozenset()
    return frozenset(f"gpu{gpu}" for gpu in diag.gpus if dcgm.worst(diag, gpu) in (dcgm.Status.PASS, dcgm.Status.SKIP))


def _dcgm_broken(diag: dcgm.Diag) -> frozenset[str]:
    return frozenset(
        f"gpu{result.gpu}" for test in diag.tests for result in test.results if result.status is dcgm.Status.FAIL
    )


def _results(name: str, key: str) -> dict[str, list[tuple[str | int, ...]]]:
    """Where the results of each GPU are in a JSON sample."""
    document = json.loads(_text(name))
    top = next(top for top in document if top.startswith("DCGM"))
    found: dict[str, list[tuple[str | int, ...]]] = {}
    for c, category in enumerate(document[top]["test_categories"]):
        for t, test in enumerate(category["tests"]):
            for r, result in enumerate(test["results"]):
                if key in result:
                    path = (top, "test_categories", c, "tests", t, "results", r)
                    found.setdefault(f"gpu{int(result[key])}", []).append(path)
    return found


def _dcgm_samples() -> tuple[Sample, ...]:
    power, memory, healthy4 = (
        _text(name) for name in ("dcgm-3.3.9-targeted-power.txt", "dcgm-4.2-memory-fails.txt", "dcgm-4.2-healthy.txt")
    )
    healthy3 = _text("dcgm-3.3.9-healthy.txt")
    three, four = _results("dcgm-3.3.9-healthy.json", "gpu_id"), _results("dcgm-4.2-healthy.json", "entity_id")
    cells = _numbers(healthy3, r"\| Pass|GPU Device IDs")
    return (
        Sample(text=power, broken="gpu1", kept=frozenset({next(r for r in power.split("\n") if "Fail - GPU: 1" in r)})),
        Sample(text=memory, broken="gpu1", kept=frozenset({next(r for r in memory.split("\n") if "GPU1: Fail" in r)})),
        Sample(
            text=_text("dcgm-3.3.9-memory-fails.json"),
            broken="gpu1",
            kept_path=("DCGM GPU Diagnostic", "test_categories", 2, "tests", 0, "results", 1),
        ),
        Sample(
            text=_text("dcgm-4.2-memory-fails.json"),
            broken="gpu2",
            kept_path=("DCGM Diagnostic", "test_categories", 1, "tests", 0, "results", 2),
        ),
        Sample(text=healthy3, lives_by={f"gpu{n}": cells for n in range(8)}, after="| Pass"),
        Sample(text=healthy4, lives_by={f"gpu{n}": _numbers(healthy4, f"GPU{n}: Pass") for n in range(4)}),
        Sample(text=_text("dcgm-3.3.9-healthy.json"), lives_at={gpu: tuple(paths) for gpu, paths in three.items()}),
        Sample(text=_text("dcgm-4.2-healthy.json"), lives_at={gpu: tuple(paths) for gpu, paths in four.items()}),
    )


# --- nccl-tests ---------------------------------------------------------------------------------------------------


def _run_is_healthy(run: nccl_tests.Run) -> bool:
    sides = [side for row in run.rows for side in (row.out_of_place, row.in_place) if side is not None]
    checked = bool(sides) and all(side.wrong == 0 for side in sides)
    return not (run.faults or run.corrupt) and run.validated is True and checked


def _nccl_tests_healthy(output: nccl_tests.Output) -> frozenset[str]:
    for run in output.runs:
        run.proven_ranks(), run.hosts, run.at(1)
    if output.errors or output.faults:
        return frozenset()
    return frozenset(f"run{i}" for i, run in enumerate(output.runs) if _run_is_healthy(run))


def _nccl_tests_broken(output: nccl_tests.Output) -> frozenset[str]:
    return frozenset({"corrupt"} if any(run.corrupt for run in output.runs) else ())


def _nccl_tests_samples() -> tuple[Sample, ...]:
    wrong, two, iterations = (_text(f"nccl-tests-{name}.txt") for name in ("wrong", "2-nodes", "per-iteration"))
    needed = r"#\s+Rank|nThread|Out of bounds|\s(float)\s"
    report = json.loads(_text("nccl-tests-2-nodes.json"))
    rows = tuple(("results", i, side) for i in range(len(report["results"])) for side in ("out_of_place", "in_place"))
    return (
        Sample(text=wrong, broken="corrupt", kept=frozenset({r for r in wrong.split("\n") if "FAILED" in r})),
        Sample(text=_text("nccl-tests-wrong.json"), broken="corrupt", kept_path=("results", 3, "in_place")),
        # The name of a GPU that lost a letter is still a name, and a last number that lost a digit still a number.
        Sample(text=two, lives_by={"run0": _numbers(two, needed)}, before="NVIDIA| graph:"),
        Sample(text=iterations, lives_by={"run0": _numbers(iterations, needed)}, before=r"NVIDIA| graph:|\S+$"),
        Sample(text=_text("nccl-tests-2-nodes.json"), lives_at={"run0": (*rows, ("out_of_bounds",))}),
    )


# --- NCCL_DEBUG ---------------------------------------------------------------------------------------------------


def _nccl_debug_healthy(log: nccl_debug.NcclLog) -> frozenset[str]:
    ready = {(rank.comm, rank.rank) for rank in log.ranks if rank.ready}
    if log.faults or any((rank.comm, number) not in ready for rank in log.ranks for number in range(rank.ranks)):
        return frozenset()
    fast = log.transports(nccl_debug.Scope.INTER)
    carried = {"fabric"} if fast and fast <= {nccl_debug.Transport.IB, nccl_debug.Transport.OFI} else set()
    return frozenset({f"rank{rank.rank}" for rank in log.ranks} | carried)


def _nccl_debug_broken(log: nccl_debug.NcclLog) -> frozenset[str]:
    return frozenset(str(transport) for transport in log.transports())


def _nccl_debug_samples() -> tuple[Sample, ...]:
    socket, ib, efa = (_text(f"nccl-debug-{name}.txt") for name in ("socket", "ib", "efa"))
    ready = {f"rank{n}": _numbers(ib, rf"rank {n} nranks 4 .*COMPLETE") for n in range(4)}
    return (
        Sample(
            text=socket,
            broken="socket",
            kept=frozenset({r for r in socket.split("\n") if "via NET/Socket" in r}.pop().splitlines()),
        ),
        Sample(text=ib, lives_by=ready),
        Sample(text=efa, lives_by={"fabric": _numbers(efa, "via NET/")}, all_lines=True),
    )


# --- ibstat, fi_info, kernel log ----------------------------------------------------------------------------------


def _ibstat_healthy(found: ibstat.Ibstat) -> frozenset[str]:
    if found.faults or found.errors:
        return frozenset()
    return frozenset(f"{ca.name}/{port.number}" for ca in found.adapters for port in ca.ports if port.up)


def _ibstat_broken(found: ibstat.Ibstat) -> frozenset[str]:
    down = [port for ca in found.adapters for port in ca.ports if "Down" in (port.state or "")]
    return frozenset({"down"} if down or found.faults else ())


def _ibstat_samples() -> tuple[Sample, ...]:
    polling, healthy = _text("ibstat-polling.txt"), _text("ibstat-healthy.txt")
    heads = _numbers(healthy, r"^\tPort \d:")
    names = ("mlx5_0/1", "mlx5_1/1", "mlx5_1/2", "mlx5_2/1")
    ports = {name: tuple(range(head, head + 10)) for name, head in zip(names, heads, strict=True)}
    return (
        Sample(text=polling, broken="down", kept=frozenset({"\t\tState: Down", "\t\tPhysical state: Polling"})),
        # A GUID, LID or mask that lost a digit is still one; the words that make a port healthy are not.
        Sample(
            text=healthy,
            lives_by={
                n: tuple(i for i in at if not re.search("GUID|lid|LMC|mask|Rate", healthy.split("\n")[i]))
                for n, at in ports.items()
            },
        ),
    )


def _fi_info_healthy(found: fi_info.FiInfo) -> frozenset[str]:
    return frozenset() if found.faults or found.error is not None else frozenset(found.devices("efa"))


def _fi_info_broken(found: fi_info.FiInfo) -> frozenset[str]:
    return frozenset(() if found.error is None else {"error"})


def _fi_info_samples() -> tuple[Sample, ...]:
    none, four = _text("fi-info-none.txt"), _text("fi-info-4-nics.txt")
    mixed = four + none
    names = ("rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0")
    return (
        Sample(text=mixed, broken="error", kept=frozenset({none.strip()})),
        Sample(text=four, lives_by={n: _numbers(four, f"domain: {n}-rdm") for n in names}, all_lines=True),
    )


def _kernel_healthy(log: kernel_log.KernelLog) -> frozenset[str]:
    return frozenset() if log.xids or log.sxids or log.faults or not log.lines else frozenset({"quiet"})


def _kernel_broken(log: kernel_log.KernelLog) -> frozenset[str]:
    return frozenset({f"{x.device} {x.code}" for x in log.xids} | {f"{s.device} {s.code}" for s in log.sxids})


def _kernel_samples() -> tuple[Sample, ...]:
    log = _text("kernel-log.txt")
    rows = log.split("\n")

    def broken(name: str, word: str) -> Sample:
        return Sample(text=log, broken=name, kept=frozenset({next(row for row in rows if word in row)}))

    one = next(row for row in rows if "): 63," in row)
    return (
        broken("0000:3b:00 79", "): 79,"),
        broken("0018:01:00 149", "): 149,"),
        broken("0000:86:00 94", "): 94,"),
        broken("0000:c2:00 20034", "20034"),
        # A line that still says "Xid (" is an event or a fault, whatever else of it is gone.
        Sample(text=one, broken=None, lives_by={"quiet": (0,)}, after="Xid ("),
    )


# --- nvidia-smi ---------------------------------------------------------------------------------------------------


def _smi_healthy(smi: nvidia_smi.Smi) -> frozenset[str]:
    if smi.attached != len(smi.gpus):
        return frozenset()
    return frozenset(
        gpu.bus for gpu in smi.gpus if None not in (gpu.memory_total_mib, gpu.memory_used_mib, gpu.temperature_c)
    )


def _smi_broken(smi: nvidia_smi.Smi) -> frozenset[str]:
    silent = any(gpu.temperature_c is None for gpu in smi.gpus)
    return frozenset({"silent"} if silent or smi.attached > len(smi.gpus) else ())


def _smi_samples() -> tuple[Sample, ...]:
    two = _text("nvidia-smi-2-gpus.xml")
    hot = two.replace("<gpu_temp>38 C<", "<gpu_temp>ERR!<", 1)
    lines = two.split("\n")
    half = next(i for i, line in enumerate(lines) if "00000000:00:07.0" in line)
    memory = _numbers(two, "<fb_memory_usage>")
    reads = (*_numbers(two, "<gpu_temp>|<gpu id="), *(i for at in memory for i in (at + 1, at + 3)))
    return (
        Sample(text=hot, broken="silent", kept=frozenset({next(row for row in hot.split("\n") if "ERR!" in row)})),
        Sample(
            text=two,
            lives_by={
                "0000:00:06.0": tuple(i for i in reads if i < half),
                "0000:00:07.0": tuple(i for i in reads if i >= half),
            },
        ),
    )


def _count(*words: str) -> Callable[[str], int]:
    return lambda text: min(text.count(word) for word in words)


TARGETS = (
    Target(
        name="dcgm",
        parse=dcgm.parse,
        samples=_dcgm_samples(),
        healthy=_dcgm_healthy,
        broken=_dcgm_broken,
        evidence=lambda text: 1000 * len(re.findall("pass", text, re.IGNORECASE)),
    ),
    Target(
        name="nccl_tests",
        parse=nccl_tests.parse,
        samples=_nccl_tests_samples(),
        healthy=_nccl_tests_healthy,
        broken=_nccl_tests_broken,
        evidence=lambda text: len(re.findall(r'Out of bounds values *: *0+ *OK|"okay": *"true"', text)),
    ),
    Target(
        name="nccl_debug",
        parse=nccl_debug.parse,
        samples=_nccl_debug_samples(),
        healthy=_nccl_debug_healthy,
        broken=_nccl_debug_broken,
        evidence=lambda text: text.count("Init COMPLETE") + text.count("via NET/"),
    ),
    Target(
        name="ibstat",
        parse=ibstat.parse,
        samples=_ibstat_samples(),
        healthy=_ibstat_healthy,
        broken=_ibstat_broken,
        evidence=_count("State: Active", "Physical state: LinkUp"),
    ),
    Target(
        name="fi_info",
        parse=fi_info.parse,
        samples=_fi_info_samples(),
        healthy=_fi_info_healthy,
        broken=_fi_info_broken,
        evidence=_count("domain:", "FI_EP_RDM"),
    ),
    Target(
        name="kernel_log",
        parse=kernel_log.parse,
        samples=_kernel_samples(),
        healthy=_kernel_healthy,
        broken=_kernel_broken,
        evidence=lambda text: 0 if re.search(r"\bS?Xid \(", text) else 1,
    ),
    Target(
        name="nvidia_smi",
        parse=nvidia_smi.parse,
        samples=_smi_samples(),
        healthy=_smi_healthy,
        broken=_smi_broken,
        evidence=_count("<gpu id=", "<uuid>", "<gpu_temp>"),
    ),
)
