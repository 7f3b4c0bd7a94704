"""Verdicts on an acceptance run: wrong ranks, slow ranks, losses, throughput."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median_low
from typing import Any

from trainmaster.bench.accept import baselines
from trainmaster.bench.accept.options import Options
from trainmaster.bench.accept.record import RankRecord, total_s, total_samples
from trainmaster.core.gpus import of_gpu
from trainmaster.core.results import CheckResult, Finding, Verdict, error, fail, ok, skip, warn

CHECKS = (
    "accept_ranks", "accept_parameters", "accept_gradients", "accept_loss", "accept_stragglers", "accept_throughput",
    "accept_regression",
)  # fmt: skip
# Ours. Ranks of one healthy machine differ by 1 to 3 %; a GPU that throttles or shares its host differs by more.
SLOW_WARN, SLOW_FAIL = 0.10, 0.20
DATA_MARK = "cannot use the data: "  # in the last line of a rank that could not read them
# Shares of a measured figure, as for collectives (bench/limits.py).
FAIL_BELOW, WARN_BELOW = 0.8, 0.9
_REPLACE = "run `trainmaster check --level 2` on {host}, and replace the GPU if it happens again"


def judge(options: Options, records: Sequence[RankRecord], *, flops: int) -> list[CheckResult]:
    """Every check of a run that came to its end."""
    findings: Mapping[str, list[Finding]] = {
        "accept_ranks": _ranks(records),
        "accept_parameters": _parameters(records),
        "accept_gradients": _gradients(records),
        "accept_loss": _losses(records),
        "accept_stragglers": _stragglers(records),
        "accept_throughput": [_throughput(options, records, flops)],
        "accept_regression": _regression(options, records),
    }
    return [CheckResult.of(name, findings[name]) for name in CHECKS]


def judge_lost(lost: Mapping[int, str]) -> list[CheckResult]:
    """A run that ended before its end: the lost ranks, and nothing else was measured."""
    findings = tuple(judge_end(f"rank {rank} {why}", device=f"rank{rank}") for rank, why in lost.items())
    return [CheckResult.of("accept_ranks", findings)]


def judge_end(reason: str, *, device: str) -> Finding:
    """A rank that ended badly. Data that is not there and a batch that does not fit are no fault of the machine."""
    if DATA_MARK in reason:
        return error(reason, action="bring the data, or use --data-mode synthetic", device=device)
    if "out of memory" in reason and "OutOfMemoryError" in reason:
        action = "use a smaller --batch-size; `nvidia-smi` lists other processes that hold memory"
        return error(reason, action=action, device=device)
    action = "see the log of that rank; run `trainmaster check --level 2` on its node"
    return fail(reason, action=action, device=device)


def _ranks(records: Sequence[RankRecord]) -> list[Finding]:
    """Every rank once, and the same number of steps on each: otherwise samples are missing or counted twice."""
    steps = {len(record.steps_s) for record in records}
    if [record.rank for record in records] != list(range(len(records))) or len(steps) != 1:
        numbers = ", ".join(f"{record.rank} ({len(record.steps_s)} steps)" for record in records)
        return [error(f"a rank is missing, doubled or has other steps: {numbers}", action="run again")]
    return [ok(f"all {len(records)} ranks finished {len(records[0].steps_s)} steps")]


def _parameters(records: Sequence[RankRecord]) -> list[Finding]:
    """All ranks added the same gradients to the same values: their parameters are the same bits."""
    if len(records) == 1:
        return [skip("one rank has no other to be compared with", proof="world_size is 1")]
    usual, count = Counter(record.parameters_digest for record in records).most_common(1)[0]
    if 2 * count <= len(records):
        reason = f"parameters differ between ranks, and no value has a majority of {len(records)}"
        return [fail(reason, action="run again with more ranks, or with each GPU alone, to find the wrong one")]
    differing = [record for record in records if record.parameters_digest != usual]
    return [
        fail(
            f"parameters differ from those of {count} other ranks",
            action=_REPLACE.format(host=record.host),
            device=f"rank{record.rank}",
            host=record.host,
            gpu=record.gpu,
        )
        for record in differing
    ] or [ok(f"parameters of all {len(records)} ranks are the same bits", digest=usual)]


def _gradients(records: Sequence[RankRecord]) -> list[Finding]:
    """The same batch gives the same gradients: twice on one GPU, and on all GPUs of one model."""
    findings = [
        fail(
            "the same batch gave other gradients the second time",
            action=_REPLACE.format(host=record.host), device=f"rank{record.rank}", host=record.host, gpu=record.gpu,
        )
        for record in records if record.gradients_digest != record.gradients_again
    ]  # fmt: skip
    for device in sorted({record.device for record in records}):
        same = [record for record in records if record.device == device]
        usual, count = Counter(record.gradients_digest for record in same).most_common(1)[0]
        for record in same:
            if record.gradients_digest != usual and 2 * count > len(same):
                reason = f"gradients of one batch differ from those of {count} equal devices"
                action = _REPLACE.format(host=record.host)
                findings.append(
                    fail(reason, action=action, device=f"rank{record.rank}", host=record.host, gpu=record.gpu)
                )
        if 2 * count <= len(same) and len(same) > 1:
            reason = f"gradients of one batch differ between {len(same)} devices of {device}, without a majority"
            findings.append(fail(reason, action="run each GPU alone to find the wrong one"))
    return findings or [ok("one batch gave the same gradients twice on every rank, and on equal devices")]


def _losses(records: Sequence[RankRecord]) -> list[Finding]:
    findings = [
        fail(
            f"the loss became {next(loss for loss in record.losses if not math.isfinite(loss))} at step "
            f"{next(number for number, loss in enumerate(record.losses, 1) if not math.isfinite(loss))}",
            action=_REPLACE.format(host=record.host),
            device=f"rank{record.rank}",
            host=record.host,
        )
        for record in records
        if not all(math.isfinite(loss) for loss in record.losses)
    ]
    if findings:
        return findings
    first, last = _ends(records[0].losses)
    if last < first:
        return [ok(f"the loss fell from {first:.4g} to {last:.4g}")]
    reason = f"the loss did not fall: {first:.4g} at the first timed steps, {last:.4g} at the last"
    return [warn(reason, action="train for more iterations, or with another learning rate")]


def _ends(losses: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last tenth: batches of real data differ from each other."""
    count = max(1, len(losses) // 10)
    return fmean(losses[:count]), fmean(losses[-count:])


def _stragglers(records: Sequence[RankRecord]) -> list[Finding]:
    """Ranks by themselves: with exchange all wait for the slowest and look alike."""
    if len(records) == 1:
        return [skip("one rank has no other to be compared with", proof="world_size is 1")]
    own = {record.rank: median_low(record.alone_s) for record in records}
    usual = median_low(own.values())
    findings = []
    for record in records:
        over = own[record.rank] / usual - 1
        if over >= SLOW_WARN:
            say = fail if over >= SLOW_FAIL else warn
            reason = f"{own[record.rank] * 1e3:.1f} ms a step by itself, {over:.0%} more than the median of the ranks"
            action = (
                f"look at clocks, power and temperature on {record.host} (`trainmaster check`), and at its other jobs"
            )
            findings.append(say(reason, action=action, device=f"rank{record.rank}", host=record.host, node=record.node))
    worst = max(own.values()) / usual - 1
    return findings or [ok(f"the slowest of {len(records)} ranks takes {worst:.1%} more than the median")]


def _throughput(options: Options, records: Sequence[RankRecord], flops: int) -> Finding:
    measured = total_samples(options, records) / total_s(records)
    limit = _limit(records, flops)
    if limit is not None and measured > limit:
        reason = f"{measured:,.0f} samples/s is more than the {limit:,.0f} that the datasheet's peak allows"
        action = "do not trust this measurement: the clock or the device is not what it says"
        return error(reason, action=action, samples_per_s=measured, limit_samples_per_s=limit)
    values: dict[str, Any] = {"samples_per_s": measured, "limit_samples_per_s": limit}
    if options.min_throughput is not None:
        return _against(measured, options.min_throughput, options.min_throughput, "--min-throughput", values)
    known = baselines.find(options, records)
    if known and known[0].judges:
        best = known[0]
        floor, warning = best.samples_per_s * FAIL_BELOW, best.samples_per_s * WARN_BELOW
        values |= {"baseline_samples_per_s": best.samples_per_s, "source": best.source}
        return _against(measured, floor, warning, f"{best.samples_per_s:,.0f} samples/s ({best.source})", values)
    golden = baselines.find_golden(options, records)
    if golden is not None:
        return against_golden(golden, measured, values)
    beside = "".join(f"; beside it: {baseline.samples_per_s:,.0f} ({baseline.source})" for baseline in known)
    if (scaled := baselines.scale(options, records)) is not None:
        nodes = len({record.node for record in records})
        return _against_scaled(measured, scaled, values, beside, nodes=nodes)
    device = baselines.device_of(records)
    where = f"{options.model}, batch {options.batch_size}, {records[0].precision}, {len(records)}× {device}"
    of_limit = f", {measured / limit:.1%} of the datasheet's peak" if limit is not None else ""
    reason = f"{measured:,.0f} samples/s{of_limit}; no baseline for {where}{beside}"
    action = "state a floor with --min-throughput, or keep a run that you trust with `trainmaster baseline record`"
    return error(reason, action=action, **values, judged=False)


def ran_unjudged(checks: Sequence[CheckResult]) -> bool:
    """Whether the run came to its end and found nothing wrong, and only a baseline to judge its speed by is missing."""
    findings = [finding for check in checks for finding in check.findings]
    missing = [finding for finding in findings if finding.values.get("judged") is False]
    bad = [finding for finding in findings if finding.verdict in (Verdict.FAIL, Verdict.ERROR)]
    return bool(missing) and bad == missing and {check.check for check in checks if check.findings} >= set(CHECKS)


def _against_scaled(
    measured: float, scaled: baselines.Baseline, values: Mapping[str, Any], beside: str, *, nodes: int
) -> Finding:
    """Against the figure of another GPU: a wide limit. Between nodes the network counts too, so there it only warns."""
    floor = scaled.samples_per_s * baselines.SCALED_FAIL_BELOW if nodes == 1 else 0.0
    warning = scaled.samples_per_s * baselines.SCALED_WARN_BELOW
    more = {**values, "baseline_samples_per_s": scaled.samples_per_s, "source": scaled.source}
    name = f"{warning:,.0f}, half of {scaled.samples_per_s:,.0f} ({scaled.source}){beside}"
    return _against(measured, floor, warning, name, more)


def _regression(options: Options, records: Sequence[RankRecord]) -> list[Finding]:
    """This run against the site's golden run of the same configuration: each figure, and each GPU by itself."""
    golden = baselines.find_golden(options, records)
    if golden is None:
        where = options.baselines or "no --baselines file"
        return [skip("no golden run of this configuration", proof=f"{where}: none with the same key")]
    now = baselines.figures(options, records)
    names = {record.gpu or f"rank{record.rank}": (f"rank{record.rank}", record.host) for record in records}
    return judge_golden(golden, now, names)


def against_golden(golden: baselines.Golden, measured: float, values: Mapping[str, Any]) -> Finding:
    """Throughput against that of the golden run."""
    floor, warning = golden.samples_per_s * baselines.FAIL_BELOW, golden.samples_per_s * baselines.WARN_BELOW
    more = {**values, "baseline_samples_per_s": golden.samples_per_s, "source": golden.source}
    return _against(measured, floor, warning, f"{golden.samples_per_s:,.0f} samples/s ({golden.source})", more)


def judge_golden(
    golden: baselines.Golden, now: baselines.Golden, names: Mapping[str, tuple[str, str]]
) -> list[Finding]:
    """Each figure that is worse than in the golden run. `names`: rank and host of each GPU's uuid."""
    findings = []
    for name, loss in baselines.compare(golden, now):
        if name not in names:
            reason = f"{name} is {loss:.0%} worse than in the {golden.source}"
            findings.append(_worse(reason, loss, device=None))
        else:
            rank, host = names[name]
            reason = f"{name} on {host} by itself is {loss:.0%} slower than in the {golden.source}"
            findings.append(_worse(reason, loss, device=rank, host=host))
    share = now.samples_per_s / golden.samples_per_s
    new = len(set(now.alone_s) - set(golden.alone_s))
    more = f"; {new} of {len(now.alone_s)} GPUs were not in it: these are not compared by themselves" if new else ""
    return findings or [ok(f"{share:.1%} of the throughput of the {golden.source}{more}")]


def _worse(reason: str, loss: float, *, device: str | None, **values: Any) -> Finding:
    say = fail if loss > 1 - baselines.FAIL_BELOW else warn
    action = "compare versions, clocks and temperatures with those of the golden run; run `trainmaster check --level 2`"
    return say(reason, action=action, device=device, loss=round(loss, 4), **values)


def _against(measured: float, floor: float, warning: float, name: str, values: Mapping[str, Any]) -> Finding:
    reason = f"{measured:,.0f} samples/s against {name}"
    action = "run `trainmaster check --level 2` and `trainmaster bandwidth`, and compare the ranks in results.json"
    if measured < floor:
        return fail(reason, action=action, **values)
    return warn(reason, action=action, **values) if measured < warning else ok(reason, **values)


def _limit(records: Sequence[RankRecord], flops: int) -> float | None:
    """Samples/s at the dense peak of the devices; None where a peak is not known."""
    peaks = [of_gpu(record.device.removeprefix("NVIDIA ")) for record in records]
    known = [peak.bf16_tflops for peak in peaks if peak is not None and peak.bf16_tflops is not None]
    return sum(known) * 1e12 / flops if len(known) == len(records) and flops else None
