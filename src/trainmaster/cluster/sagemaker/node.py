"""Parts of the SageMaker health check on one host that no check of the node covers.

The EFA ping-pong with a neighbour host, NVIDIA's nccl-tests over the GPUs of the host, CPU usage, and the raw output of
the diagnostics from the node's capture. All of it becomes findings of one result, `sagemaker_job`, which names the
host, so that the metrics file can be filled from the run alone.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trainmaster.bench import nccl_tests
from trainmaster.cluster.sagemaker.job import Job
from trainmaster.core import schema
from trainmaster.core.errors import FileMissing, HostError, SpecError, UsageError
from trainmaster.core.results import CheckResult, Finding, error, fail, ok, skip
from trainmaster.node.host import Host
from trainmaster.node.parse import ParseError, dcgm
from trainmaster.node.parse.dcgm_data import WEIGHT
from trainmaster.node.recorded import RecordedHost
from trainmaster.storage import Store

CHECK = "sagemaker_job"
EFA_CHECK = "efa_communication"
NCCL_CHECK = nccl_tests.CHECK
_RAW_CHARACTERS = 65_536  # kept of one command's output
_PINGPONG_S = 60.0
_FI_INFO = ("fi_info", "/opt/amazon/efa/bin/fi_info")
_PINGPONG = ("fi_pingpong", "/opt/amazon/efa/bin/fi_pingpong")
Role = Literal["server", "client"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """Results of one host beside its checks; travels through the store as JSON."""

    host: str
    facts: Mapping[str, Any]
    efa: tuple[Finding, ...] = ()
    nccl: tuple[Finding, ...] = ()


def parse_report(plain: object) -> HostReport:
    """A report from JSON. SpecError where it has another shape."""
    return schema.build(HostReport, plain)


def results(
    reports: Mapping[str, HostReport], nccl: Mapping[str, list[Finding]], *, absent: Mapping[str, str] | None = None
) -> tuple[CheckResult, ...]:
    """Results of the cluster from the reports of its hosts. A finding's device names the host.

    `absent`: hosts without a report, with the reason. Their EFA test and nccl-tests were planned and not measured.
    """
    jobs = [ok(_summary(report), device=host, **report.facts) for host, report in reports.items()]
    jobs += [finding for host, report in reports.items() if (finding := _judge_idle(host, report.facts)) is not None]
    jobs += [
        error(f"its EFA test and nccl-tests are not known: {why}", action="see its log in CloudWatch", device=host)
        for host, why in (absent or {}).items()
    ]
    efa = [replace(finding, device=host) for host, report in reports.items() for finding in report.efa]
    tests = [replace(finding, device=host) for host, findings in nccl.items() for finding in findings]
    checks = ((CHECK, jobs), (EFA_CHECK, efa), (NCCL_CHECK, tests))
    return tuple(CheckResult.of(name, items) for name, items in checks if items)


def _judge_idle(host: str, facts: Mapping[str, Any]) -> Finding | None:
    """GPUs of a host that no rank uses: nothing was measured between them."""
    gpus, ranks = facts.get("gpus"), facts.get("processes_per_node")
    if not isinstance(gpus, int) or not isinstance(ranks, int) or ranks >= gpus:
        return None
    reason = f"{ranks} of {gpus} GPUs of this host take part in the collectives"
    return error(reason, action=f"start one process per GPU: process_count_per_node={gpus}", device=host)


def _summary(report: HostReport) -> str:
    facts = report.facts
    return f"rank {facts.get('rank')} of {facts.get('world_size')}, started by {facts.get('distribution')}"


# --- EFA -------------------------------------------------------------------------------------------------------------


def find_pairs(job: Job) -> list[tuple[Role, str]]:
    """This host's roles in the ping-pong, with the partner of each, in order.

    Even hosts serve the next one. An odd one out at the end is a client of the first host, which serves it second.
    """
    last = len(job.hosts) - 1
    odd_out = last if last % 2 == 0 and last > 0 else None
    if job.index == odd_out:
        return [("client", job.hosts[0])]
    pairs: list[tuple[Role, str]] = []
    if job.index % 2:
        pairs.append(("client", job.hosts[job.index - 1]))
    elif job.index < last:
        pairs.append(("server", job.hosts[job.index + 1]))
    if job.index == 0 and odd_out is not None:
        pairs.append(("server", job.hosts[odd_out]))
    return pairs


def ping(
    host: Host,
    job: Job,
    store: Store,
    *,
    provider: str,
    address: str | None,
    wait_s: float,
    devices: int | None = None,
    run: str = "job",
) -> list[Finding]:
    """Messages over EFA with neighbour hosts. `devices`: EFA devices that SageMaker attaches here; None: not known.
    `run`: name of the job, so that hosts do not meet the marks of another one.

    A host that has none by its type or by `fi_info` skips with that proof; one that should have some is an error.
    """
    shown = _first(host, _FI_INFO, "-p", provider)
    if shown is None or "fi_getinfo" in shown or "provider" not in shown:
        provider_words = (
            "fi_info is not installed or gave no answer" if shown is None else " ".join(shown.split())[:200]
        )
        if devices or (devices is None and (shown is None or "fi_getinfo" not in shown) and _has_rdma(host)):
            wanted = f"{devices} EFA devices" if devices else "the RDMA devices of this host"
            action = "see the check efa of this host, and libfabric in the image"
            return [error(f"no {provider} provider over {wanted}: {provider_words}", action=action)]
        proof = f"SageMaker attaches no EFA device to this type; {provider_words}" if devices == 0 else provider_words
        return [skip(f"no {provider} provider on this host", proof=proof)]
    pairs = find_pairs(job)
    if not pairs:
        return [skip("no neighbour host to exchange messages with", proof=f"{len(job.hosts)} host")]
    return [
        _exchange(host, job, store, role, partner, provider=provider, address=address, wait_s=wait_s, run=run)
        for role, partner in pairs
    ]


def _exchange(
    host: Host,
    job: Job,
    store: Store,
    role: Role,
    partner: str,
    *,
    provider: str,
    address: str | None,
    wait_s: float,
    run: str,
) -> Finding:
    values: dict[str, Any] = {"test_role": role, "partner": partner, "rank": job.rank}
    words: list[str] = []
    if role == "server":
        store.put(f"efa/{run}/{job.here}.{partner}.ready", b"")
    elif not _wait(store, f"efa/{run}/{partner}.{job.here}.ready", wait_s):
        reason = f"{partner} did not start its side of the EFA test in {wait_s:g} s"
        return error(reason, action=f"see the log of {partner}", **values)
    else:
        words = [address or partner]
    for tool in _PINGPONG:
        with contextlib.suppress(HostError):
            limit_s = _PINGPONG_S + (wait_s if role == "server" else 0.0)
            result = host.run(tool, "-p", provider, "-e", "rdm", *words, timeout_s=limit_s)
            raw = f"{result.stdout}\n{result.stderr}".strip()[:_RAW_CHARACTERS]
            if result.exit_code:
                action = "check that the security group allows all traffic between its members, EFA included"
                reason = f"the EFA test with {partner} ended with {result.exit_code}"
                return fail(reason, action=action, raw_output=raw, **values)
            sizes = len(re.findall(r"^\d+[kmg]? +\d+[kmg]? +=\d", result.stdout, flags=re.MULTILINE | re.IGNORECASE))
            if not sizes:
                reason = f"fi_pingpong with {partner} ended without a result for any message size"
                return error(reason, action="run it by hand on both hosts", raw_output=raw, **values)
            return ok(
                f"messages of {sizes} sizes arrived, as {role} with {partner}", raw_output=raw, sizes=sizes, **values
            )
    return error("fi_pingpong is not installed or gave no answer", action="install libfabric-bin", **values)


def _has_rdma(host: Host) -> bool:
    """Whether the kernel shows an RDMA device; True where it cannot be read."""
    try:
        return bool(host.list("/sys/class/infiniband"))
    except FileMissing:
        return False
    except HostError:
        return True


def _first(host: Host, tools: tuple[str, ...], *words: str) -> str | None:
    for tool in tools:
        with contextlib.suppress(HostError):
            result = host.run(tool, *words, timeout_s=30.0)
            return f"{result.stdout}\n{result.stderr}"
    return None


def _wait(store: Store, name: str, wait_s: float) -> bool:
    until = time.monotonic() + wait_s
    while not store.exists(name):
        if time.monotonic() >= until:
            return False
        time.sleep(0.5)
    return True


# --- nccl-tests and facts ---------------------------------------------------------------------------------------------


def run_nccl_tests(host: Host, gpus: int, *, max_size: str) -> list[Finding]:
    """all_reduce and all_gather of NVIDIA's nccl-tests over the GPUs of this host."""
    if gpus < 2:
        return [skip("nccl-tests need two GPUs or more", proof=f"nvidia-smi -L lists {gpus}")]
    return list(nccl_tests.run(host, ("all_reduce", "all_gather"), max_size=max_size).findings)


def read_facts(host: Host, capture: Path) -> dict[str, Any]:
    """CPU usage, and versions and raw output of the diagnostics that the checks ran."""
    facts: dict[str, Any] = {"usage_percent": _cpu_percent(host), "nccl_tests_installed": _has_nccl_tests(host)}
    try:
        recorded = RecordedHost(capture)
    except (UsageError, SpecError):
        return facts
    for level, name in ((1, "dcgm"), (2, "dcgm_extended"), (3, "dcgm_stress")):
        with contextlib.suppress(HostError, ParseError):
            text = recorded.run("dcgmi", "diag", "-r", str(level), "-j").stdout
            facts[f"{name}_raw_output"] = text[:_RAW_CHARACTERS]
            diag = dcgm.parse(text)
            facts["dcgm_version"], facts["driver_version"] = diag.dcgm_version, diag.driver_version
            facts["gpu_device_ids"] = list(diag.gpus)
            facts[f"{name}_tests"] = _categories(diag)
    for tool in _FI_INFO:
        with contextlib.suppress(HostError):
            facts["efa_raw_output"] = recorded.run(tool, "-p", "efa").stdout[:_RAW_CHARACTERS]
            break
    return {name: value for name, value in facts.items() if value is not None}


def _categories(diag: dcgm.Diag) -> dict[str, dict[str, str]]:
    """Status of every test by category, the worst of its results; a GPU at fault is named."""
    categories: dict[str, dict[str, str]] = {}
    for test in diag.tests:
        worst = max(test.results, key=lambda result: WEIGHT[result.status], default=None)
        word = str(worst.status if worst is not None else test.summary or "unknown")
        bad = worst is not None and worst.gpu is not None and word.lower() not in ("pass", "skip")
        at = f" - GPU {worst.gpu}" if worst is not None and bad else ""
        categories.setdefault(test.category.lower().replace(" ", "_"), {})[test.key] = f"{word}{at}"
    return categories


def _cpu_percent(host: Host) -> float | None:
    """Share of CPU time that was not idle, between two reads of /proc/stat a quarter of a second apart."""
    with contextlib.suppress(HostError, ValueError, IndexError, ZeroDivisionError):
        before = _cpu_times(host)
        time.sleep(0.25)
        after = _cpu_times(host)
        total = sum(after) - sum(before)
        idle = after[3] + after[4] - before[3] - before[4]
        return round(100.0 * (total - idle) / total, 1)
    return None


def _cpu_times(host: Host) -> list[int]:
    return [int(word) for word in host.read("/proc/stat").splitlines()[0].split()[1:]]


def _has_nccl_tests(host: Host) -> bool:
    for folder in nccl_tests.FOLDERS:
        if folder:
            with contextlib.suppress(HostError):
                if "all_reduce_perf" in host.list(folder):
                    return True
        else:
            with contextlib.suppress(HostError):
                host.run("all_reduce_perf", "--help", timeout_s=10.0)
                return True
    return False
