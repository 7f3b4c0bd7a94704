"""Success indicators of a test, judged from measurements. What was not measured is an error, never a pass. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trainmaster.cluster.hyperpod.logs import PodLog
from trainmaster.cluster.hyperpod.pods import Restart, describe_restart
from trainmaster.core.results import CheckResult, Finding, Overall, error, fail, judge_overall, ok, skip

START_LIMIT_S = 300.0
NCCL_LIMIT_S = 120.0
GPU_LIMIT_PERCENT = 80.0
NETWORK_LIMIT_GBPS = 10.0
MEMORY_LIMIT_GIB = 32.0
MIN_LOSSES = 4  # fewer show no direction
_BASELINE_SHARE = 0.9
_SHOWN = 3  # restarts in words; all of them are in the values

QUICK = ("nodes_ready", "pods_running", "loss_falling", "no_nccl_timeout", "nccl_init")
FULL = (*QUICK, "checkpoint", "gpu_utilisation", "gpu_memory", "network", "throughput")
PERFORMANCE = ("nodes_ready", "pods_running", "no_nccl_timeout", "gpu_utilisation", "gpu_memory", "throughput")


@dataclass(kw_only=True)
class Measurements:
    """Everything that a test has measured. None: not measured."""

    pods_wanted: int
    pods_running: int = 0
    running_after_s: float | None = None  # all pods
    pod_faults: Mapping[str, str] = field(default_factory=dict)  # pod: why it does not run
    restarts: Sequence[Restart] = ()  # during the test
    not_ready_nodes: Sequence[str] = ()
    nodes: int = 0
    logs: Mapping[str, PodLog] = field(default_factory=dict)
    nccl_after_s: float | None = None
    nccl_from: str = ""
    checkpoint: str | None = None  # path of the newest that was committed
    checkpoint_fault: str | None = None  # from reading it; "": whole
    gpu_percent: float | None = None
    gpu_memory_gib: float | None = None
    network_gbps: float | None = None
    wrong_rows: Sequence[str] = ()  # of that all-reduce, or of a table in the job's own logs
    network_fault: str = ""  # NCCL timeout of the all-reduce between the pods
    efa: bool = True  # whether the pods ask for EFA devices
    tokens_per_s: float | None = None
    baseline_tokens_per_s: float | None = None


def judge(measured: Measurements, planned: Sequence[str]) -> tuple[list[CheckResult], Overall]:
    """A result for each planned indicator, and the verdict over all of them."""
    results = [CheckResult.of(name, [_INDICATORS[name](measured)]) for name in planned]
    return results, judge_overall(results, planned=planned)


def nodes_ready(measured: Measurements) -> Finding:
    if measured.not_ready_nodes:
        return fail(
            f"not ready: {', '.join(measured.not_ready_nodes)} (condition Ready is not True)",
            action="see why with: kubectl describe node NAME",
            not_ready=list(measured.not_ready_nodes),
        )
    if not measured.nodes:
        return error("no node was read", action="see the missing right with: trainmaster cluster rights")
    return ok(f"{measured.nodes} nodes with condition Ready", nodes=measured.nodes)


def pods_running(measured: Measurements) -> Finding:
    wanted, after = measured.pods_wanted, measured.running_after_s
    restarts: dict[str, Any] = (
        {"restarts": [asdict(restart) for restart in measured.restarts]} if measured.restarts else {}
    )
    if measured.pod_faults:
        pod, why = next(iter(measured.pod_faults.items()))
        action = "see its events with: make debug-events"
        return fail(f"{pod}: {why}", action=action, pods=dict(measured.pod_faults), **restarts)
    if measured.restarts:
        words = "; ".join(f"{restart.pod}: {describe_restart(restart)}" for restart in measured.restarts[:_SHOWN])
        more = f"; and {len(measured.restarts) - _SHOWN} more" if len(measured.restarts) > _SHOWN else ""
        return fail(f"{words}{more}", action="see why with: kubectl logs --previous POD", **restarts)
    if after is None:
        return fail(
            f"{measured.pods_running} of {wanted} pods ran", action="see why with: make check-job", wanted=wanted
        )
    if after > START_LIMIT_S:
        return fail(
            f"all {wanted} pods ran after {after:.0f} s, later than {START_LIMIT_S:.0f} s",
            action="see the pull and scheduling times with: make debug-events",
            seconds=after,
        )
    return ok(f"all {wanted} pods ran after {after:.0f} s", seconds=after)


def loss_falling(measured: Measurements) -> Finding:
    """Mean of the last third against the first third: one lucky step is no trend."""
    seen = [value for log in measured.logs.values() for value in (*log.losses, *log.beat_losses)]
    if bad := [value for value in seen if not math.isfinite(value)]:
        return fail(f"{len(bad)} losses are not finite", action="lower the learning rate; see the logs")
    curves = [log.loss_curve for log in measured.logs.values() if log.loss_curve]
    if not curves or len(longest := max(curves, key=len)) < MIN_LOSSES:
        return error(
            f"fewer than {MIN_LOSSES} `Loss:` values in the logs", action="watch longer with --monitor-duration"
        )
    third = max(1, len(longest) // 3)
    first, last = statistics.fmean(longest[:third]), statistics.fmean(longest[-third:])
    text = f"mean loss {first:.4f} at the beginning, {last:.4f} at the end, {len(longest)} values"
    if last >= first:
        return fail(f"the loss does not fall: {text}", action="check data and learning rate", first=first, last=last)
    return ok(text, first=first, last=last)


def no_nccl_timeout(measured: Measurements) -> Finding:
    timeouts = {pod: log.nccl_timeouts[0] for pod, log in measured.logs.items() if log.nccl_timeouts}
    if timeouts:
        pod, line = next(iter(timeouts.items()))
        return fail(f"{pod}: {line}", action="find the node with: trainmaster isolate", pods=timeouts)
    faults = {pod: log.faults[0] for pod, log in measured.logs.items() if log.faults}
    if faults:
        pod, line = next(iter(faults.items()))
        action = "drain its node and reset the GPU" if "ECC" in line else "find the node with: trainmaster isolate"
        return fail(f"{pod}: {line}", action=action, pods=faults)
    if (missing := _count_unread(measured)) > 0:
        text = f"no whole log of {missing} of {measured.pods_wanted} pods"
        return error(text, action="read them with: make logs-all")
    return ok(f"none in the logs of {len(measured.logs)} pods")


def _count_unread(measured: Measurements) -> int:
    """Pods whose log was not read, or not to its end."""
    unread = [pod for pod, log in measured.logs.items() if not log.lines or not log.whole]
    return max(0, measured.pods_wanted - len(measured.logs)) + len(unread)


def nccl_init(measured: Measurements) -> Finding:
    after = measured.nccl_after_s
    if after is None:
        return error("no time of NCCL's initialisation in the logs", action="set NCCL_DEBUG=INFO in the manifest")
    if after > NCCL_LIMIT_S:
        return fail(
            f"{after:.0f} s from the start of the pods, above {NCCL_LIMIT_S:.0f} s ({measured.nccl_from})",
            action="check name resolution and the interface of NCCL_SOCKET_IFNAME",
            seconds=after,
        )
    return ok(f"within {after:.0f} s of the start of the pods ({measured.nccl_from})", seconds=after)


def checkpoint(measured: Measurements) -> Finding:
    why = [text for log in measured.logs.values() for text in log.checkpoint_faults]
    if measured.checkpoint is None:
        if not why and (missing := _count_unread(measured)) == measured.pods_wanted:
            text = f"no log of {missing} pods was read, and a log tells of checkpoints"
            return error(text, action="read them with: make logs-all")
        text = f": {why[0]}" if why else ""
        return fail(f"none was written{text}", action="check that /fsx is mounted and writable in the pods")
    if measured.checkpoint_fault is None:
        return error(f"{measured.checkpoint} was written and not read back", action="see the log of the reading pod")
    if measured.checkpoint_fault:
        return fail(
            f"{measured.checkpoint} cannot be read: {measured.checkpoint_fault}", action="check the file system"
        )
    return ok(f"{measured.checkpoint} was read back, every file with its digest", path=measured.checkpoint)


def gpu_utilisation(measured: Measurements) -> Finding:
    value = measured.gpu_percent
    if value is None:
        return error(
            "not measured: no dcgm-exporter answered, and no nvidia-smi in the pods",
            action="install NVIDIA's dcgm-exporter, or get the rights: trainmaster cluster rights --shell",
        )
    text = f"{value:.0f} % in the mean"
    if value <= GPU_LIMIT_PERCENT:
        return fail(f"{text}, not above {GPU_LIMIT_PERCENT:.0f} %", action="see data_share and comm_share of the run")
    return ok(text, percent=value)


def gpu_memory(measured: Measurements) -> Finding:
    value = measured.gpu_memory_gib
    if value is None:
        return error("not measured: the trainer reported no GPU memory", action="see the STEP events of the run")
    if value >= MEMORY_LIMIT_GIB:
        return fail(
            f"{value:.1f} GiB, not below {MEMORY_LIMIT_GIB:.0f} GiB", action="set parallel.recompute", gib=value
        )
    return ok(f"{value:.1f} GiB at most", gib=value)


def network(measured: Measurements) -> Finding:
    """All-reduce between the pods. The limit is that of EFA; what other networks should reach is not known here."""
    value = measured.network_gbps
    if measured.pods_wanted == 1 and not measured.wrong_rows:
        return skip("one pod has no network between nodes", proof="the manifest asks for one pod")
    if not measured.efa and not measured.wrong_rows:
        seen = "" if value is None else f"{value:.1f} Gbps between nodes; "
        return skip(
            f"{seen}the limit of {NETWORK_LIMIT_GBPS:.0f} Gbps is that of EFA",
            proof="the pods of the manifest ask for no vpc.amazonaws.com/efa",
        )
    if measured.wrong_rows:
        return fail(
            f"the all-reduce gave wrong values: {measured.wrong_rows[0]}",
            action="find the node with: trainmaster isolate; do not train on it",
            rows=list(measured.wrong_rows),
        )
    if measured.network_fault:
        return fail(measured.network_fault, action="find the node with: trainmaster isolate")
    if value is None:
        return error(
            "not measured: no all-reduce between the pods came to its end", action="run: trainmaster bandwidth"
        )
    if value <= NETWORK_LIMIT_GBPS:
        return fail(
            f"{value:.1f} Gbps between nodes, not above {NETWORK_LIMIT_GBPS:.0f}", action="check that NCCL uses EFA"
        )
    return ok(f"{value:.1f} Gbps between nodes, by all-reduce", gbps=value)


def throughput(measured: Measurements) -> Finding:
    rate, baseline = measured.tokens_per_s, measured.baseline_tokens_per_s
    if rate is None:
        return error("no rate in the logs", action="watch longer with --monitor-duration")
    if baseline is None or not (math.isfinite(baseline) and baseline > 0):
        if baseline is not None:
            return error(f"{rate:,.0f} tokens/s; {baseline} is no baseline", action="give one above 0")
        return skip(
            f"{rate:,.0f} tokens/s, not judged; give a rate to compare with: --baseline-tokens-per-s",
            proof="the test was given no baseline",
        )
    text = f"{rate:,.0f} tokens/s, {rate / baseline:.0%} of the baseline"
    if rate < _BASELINE_SHARE * baseline:
        return fail(f"{text}, below {_BASELINE_SHARE:.0%}", action="find the slow node with: trainmaster isolate")
    return ok(text, tokens_per_s=rate, baseline=baseline)


_INDICATORS: Mapping[str, Callable[[Measurements], Finding]] = {
    indicator.__name__: indicator
    for indicator in (
        nodes_ready, pods_running, loss_falling, no_nccl_timeout, nccl_init, checkpoint, gpu_utilisation, gpu_memory,
        network, throughput,
    )
}  # fmt: skip
