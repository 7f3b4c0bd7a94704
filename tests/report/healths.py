"""Runs of checks as the reports get them: a mixed cluster, seed 002's published example, and any at all."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import CheckResult, Finding, Verdict, error, fail, ok, skip, warn
from trainmaster.report.health import FILES, build

AT = "2026-03-01T12:00:00+00:00"
SIZES = [1 << power for power in range(13, 34)]


def render(name: str, health: ClusterHealth) -> str:
    """One file of a health report."""
    return FILES[name](build(health))


def result(check: str, *findings: Finding, took_s: float = 0.2) -> CheckResult:
    return CheckResult(check=check, findings=findings, took_s=took_s)


def node(name: str, *results: CheckResult, planned: tuple[str, ...] = (), **fields: Any) -> NodeHealth:
    names = planned or tuple(item.check for item in results)
    fields = {"profile": "p5.48xlarge", "started_at": AT, "took_s": 41.5, "version": "0.1.0", "level": 2, **fields}
    return NodeHealth(node=name, planned=names, results=results, **fields)


def healthy(name: str, gpus: int = 8) -> NodeHealth:
    return node(
        name,
        result("gpu_count", ok(f"{gpus} of {gpus} GPUs", listed=gpus, expected=gpus), *(
            ok("NVIDIA H100 80GB HBM3", device=f"gpu{i}", model="NVIDIA H100 80GB HBM3", uuid=f"GPU-{name}-{i}",
               serial=f"16{name}{i}") for i in range(gpus))),
        result("gpu_driver", ok("driver 580.82", driver="580.82", cuda="13.0")),
        result("gpu_memory", *(ok("79.6 GiB", device=f"gpu{i}", total_gib=79.6, used_gib=0.5) for i in range(gpus))),
        result("gpu_temperature", *(ok("31 °C", device=f"gpu{i}", celsius=31.0) for i in range(gpus))),
        result("ram", ok("1900 of 2000 GiB free", total_gib=2000.0, free_gib=1900.0)),
        result("efa", ok("32 devices", expected=32, devices=[f"rdmap{i}s0" for i in range(32)])),
        result("ib_ports", skip("the profile expects no InfiniBand", proof="ib_ports=0")),
    )  # fmt: skip


def all_reduce(verdict: Verdict = Verdict.PASS, **values: Any) -> CheckResult:
    points = [{"size_bytes": size, "busbw_gbps": 480 * size / (size + (1 << 26)), "latency_us": 20.0} for size in SIZES]
    baseline = [
        {"size_bytes": 1 << 27, "busbw_gbps": 289.0, "source": "awsome-distributed-ai"},
        {"size_bytes": 1 << 34, "busbw_gbps": 487.0, "source": "awsome-distributed-ai"},
    ]
    values = {"collective": "all_reduce", "points": points, "baseline": baseline, "ranks": 32, **values}
    finding = Finding(verdict=verdict, reason="477 GB/s at 8 GiB", action=None, values=values)
    return result("collective_bandwidth", finding)


def mixed() -> ClusterHealth:
    """Four nodes: one healthy, one with a lost GPU, one that warns, one that hangs."""
    lost = node(
        "n2",
        result(
            "gpu_count",
            fail("7 of 8 GPUs", action="drain the node and reboot it", listed=7, expected=8),
            fail("not there", action="look for Xid 79 in the kernel log", device="gpu3"),
        ),
        result("gpu_memory", error("it is not listed by nvidia-smi", action="see gpu_count", device="gpu3")),
        planned=("gpu_count", "gpu_memory", "clock"),
    )
    warns = node("n3", result("ram", warn("0.9 of 16 GiB free", action="end what else runs here", free_gib=0.9)))
    return ClusterHealth(
        asked=("n1", "n2", "n3", "n4"),
        nodes=(healthy("n1"), lost, warns),
        silent=(
            Silent(
                node="n4", verdict=Verdict.ERROR, reason="no answer in 60 s", action="look at its console", took_s=60.0
            ),
        ),
        cluster=(
            result(
                "drift",
                fail("driver 570.1, 3 of 4 have 580.82", action="install the driver the others have", device="n3"),
            ),
            all_reduce(),
        ),
        started_at=AT,
        took_s=123.4,
    )


def published_example() -> ClusterHealth:
    """Seed 002's published run: `dcgmi diag` failed Targeted Power on GPU 1, on a row that its tool dropped."""
    reason = "Targeted Power: Max power of 224.1 did not reach desired power minimum target_power_min_ratio of 224"
    dcgm = result(
        "dcgm_stress",
        ok("Pass", device="gpu0"),
        fail(reason, action="drain the node and replace GPU 1", device="gpu1"),
        ok("Pass", device="gpu2"),
        ok("Pass", device="gpu3"),
    )
    found = ok("4 of 4 GPUs", listed=4, expected=4)
    return ClusterHealth(
        asked=("algo-1",), nodes=(node("algo-1", result("gpu_count", found), dcgm, profile="g5.12xlarge"),),
        started_at=AT, took_s=300.0,
    )  # fmt: skip


def cluster_of(many: int) -> ClusterHealth:
    """A large cluster in which two nodes are bad in different ways."""
    names = tuple(f"gpu-{place:03}" for place in range(many))
    nodes = [healthy(name) for name in names]
    bad = fail("2 uncorrectable errors", action="replace GPU 5", device="gpu5", volatile=2)
    nodes[many // 3] = node(names[many // 3], *nodes[many // 3].results, result("gpu_ecc", bad))
    if many > 2:
        hot = warn("84 °C", action="look at its fans", device="gpu1", celsius=84.0)
        nodes[many // 2] = node(names[many // 2], *nodes[many // 2].results, result("gpu_heat", hot))
    return ClusterHealth(asked=names, nodes=tuple(nodes), cluster=(all_reduce(),), started_at=AT, took_s=180.0)


# --- any run at all --------------------------------------------------------------------------------------------------

# Every code point, lone surrogates and controls too; and what has a meaning somewhere.
TEXT = st.text(st.characters(exclude_characters="\x00", exclude_categories=()), max_size=12) | st.sampled_from(
    [
        "gpu0",
        "n1",
        "n2",
        "",
        "</title><script>alert(1)</script>",
        'a"b\\c\nd',
        "]]>",
        "| x `y` <b>",
        "\x1b[31m",
        "see x",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
POINTS = st.lists(
    st.fixed_dictionaries({"size_bytes": st.integers() | st.floats(), "busbw_gbps": st.floats() | TEXT}), max_size=3
)
VALUES = st.dictionaries(
    TEXT | st.sampled_from(["total_gib", "points", "on", "expected", "busbw_gbps"]), JSON, max_size=3
)
VALUES = VALUES | st.fixed_dictionaries({"points": POINTS, "baseline": POINTS})
TIMES = st.floats(min_value=0, max_value=1e9)
CHECKS = st.sampled_from(["gpu_count", "gpu_memory", "ram", "dcgm_stress", "efa", "nccl", "x"]) | TEXT
FINDINGS = st.builds(
    Finding, verdict=st.sampled_from(list(Verdict)), reason=TEXT, action=st.none() | TEXT, device=st.none() | TEXT,
    values=VALUES,
)  # fmt: skip
RESULTS = st.lists(
    st.builds(CheckResult, check=CHECKS, findings=st.lists(FINDINGS, max_size=3).map(tuple), took_s=TIMES), max_size=4
).map(tuple)
NODES = st.builds(
    NodeHealth, node=TEXT, level=st.integers(1, 3), planned=st.lists(CHECKS, max_size=4).map(tuple), results=RESULTS,
    profile=st.none() | TEXT, started_at=TEXT, took_s=TIMES, version=TEXT,
)  # fmt: skip
SILENT = st.builds(Silent, node=TEXT, verdict=st.just(Verdict.ERROR), reason=TEXT, action=TEXT, took_s=TIMES)
HEALTHS = st.builds(
    ClusterHealth, asked=st.lists(TEXT, max_size=4).map(tuple), nodes=st.lists(NODES, max_size=3).map(tuple),
    silent=st.lists(SILENT, max_size=2).map(tuple), cluster=RESULTS, started_at=TEXT | st.just(AT), took_s=TIMES,
)  # fmt: skip
