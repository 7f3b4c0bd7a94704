"""NCCL joins all GPUs of the node, and all_reduce returns right data at the rate of their links.

One process for each GPU (bench/collectives), as a training run has. A single GPU has no peer: NCCL starts on it and
returns its data, without a bandwidth to judge. The bandwidth is judged by a published baseline of this machine, or by
the physical limit of its links; nodes of a cluster are compared with each other afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainmaster.checks import nvidia
from trainmaster.checks.active import _probe
from trainmaster.checks.comparison import rate
from trainmaster.checks.contract import VERDICT
from trainmaster.core import schema
from trainmaster.core.errors import CommandTimedOut, HostError, SpecError
from trainmaster.core.expect import Expect
from trainmaster.core.node_links import SHARES, Link, find_node_link
from trainmaster.core.results import CheckResult, Finding, Verdict, error, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 2
GPU = True
EXPECTS = ()
COMPARES = (rate("gbps", "GB/s"),)
METRICS = {"summary.test_results.nccl_communication": VERDICT}
RUN_S = 140.0  # above the run's own limits: only the run itself can name the rank that hangs
TIMEOUT_S = RUN_S + nvidia.CHECK_TIMEOUT_S
START_S, STALL_S = 90.0, 30.0  # until all ranks have met (import of torch from a cold disk); without any progress
# 16 MiB, 128 MiB and 1 GiB: bandwidth dominates latency, and published figures are for the last two.
SMALLEST, LARGEST, FACTOR = "16M", "1G", 8
COLLECTIVE = "all_reduce"
IMPOSSIBLE = 1.5  # of the links' bandwidth: reduction inside NVSwitches reaches 1.1
FAIL_BELOW, WARN_BELOW = 0.80, 0.90  # of a published figure (docs/how/bandwidth.md)
_SLOW = "see gpu_nvlink, gpu_pcie and p2p for the link that is slow, then run `trainmaster bandwidth`"
_AGAIN = "run `trainmaster bandwidth` and read its output"

Backend = Literal["nccl", "gloo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """GPUs of the node and the answer of the run over those that this process may use; None where it may use none."""

    gpus: nvidia.Gpus
    visible: str | None
    hidden: frozenset[str]
    uuids: tuple[str, ...]
    answer: _probe.Answer | None


def read(host: Host) -> Joined:
    gpus = nvidia.read(host)
    usable = [gpu for gpu in gpus.smi.gpus if gpu.lost is None] if gpus.smi else []
    every = [str(gpu.uuid) for gpu in usable]
    visible = host.env("CUDA_VISIBLE_DEVICES") if every else None
    hidden = _probe.hidden_from(every, visible)
    uuids = tuple(uuid for uuid in every if uuid not in hidden)
    answer = run_collectives(host, len(uuids)) if uuids and not any(map(nvidia.mig_on, usable)) else None
    return Joined(gpus=gpus, visible=visible, hidden=hidden, uuids=uuids, answer=answer)


def run_collectives(host: Host, ranks: int, *, backend: Backend = "nccl", largest: str = LARGEST) -> _probe.Answer:
    """Run all_reduce over the GPUs of this machine; with gloo over processes of its CPUs."""
    try:
        return host.run(*command(ranks, backend=backend, largest=largest), timeout_s=RUN_S)
    except HostError as error:
        return error


def command(ranks: int, *, backend: Backend = "nccl", largest: str = LARGEST) -> tuple[str, ...]:
    """Command line of the run. It is the key of a capture, so it is the same on every machine."""
    smallest = SMALLEST if largest == LARGEST else largest
    return (
        "python", "-m", "trainmaster.bench.collectives", "--local", "--backend", backend, "--processes", str(ranks),
        "--collective", COLLECTIVE, "--min", smallest, "--max", largest, "--factor", str(FACTOR),
        "--start-timeout", f"{START_S:g}", "--timeout", f"{STALL_S:g}",
    )  # fmt: skip


def judge(joined: Joined, expect: Expect) -> list[Finding]:
    refused = nvidia.refuse(joined.gpus, expect)
    if refused is not None:
        return [refused]
    slots = nvidia.slots(joined.gpus, nvidia.expected(joined.gpus, expect))
    here = {str(slot.gpu.uuid): slot for slot in slots if slot.gpu is not None and slot.gpu.lost is None}
    divided = [slot.device for slot in here.values() if slot.gpu is not None and nvidia.mig_on(slot.gpu)]
    if divided:
        return [skip("NCCL does not join MIG devices of one node", proof=f"MIG is on: {', '.join(divided)}")]
    probed = _probe.Probed(gpus=joined.gpus, visible=joined.visible, hidden=joined.hidden, answers={})
    findings = [nvidia.missing_gpu(slot) for slot in slots if slot.gpu is None or slot.gpu.lost is not None]
    findings += [_probe.hidden_gpu(probed, here[uuid].device, expect) for uuid in sorted(joined.hidden) if uuid in here]
    models = {slot.gpu.name for slot in here.values() if slot.gpu is not None}
    link = find_node_link(models.pop()) if len(models) == 1 else None
    if joined.uuids:
        findings += judge_answer(joined.answer, ranks=len(joined.uuids), link=link)
    return _probe.in_order(findings)


def judge_answer(
    answer: _probe.Answer | None, *, ranks: int, link: Link | None, backend: Backend = "nccl"
) -> list[Finding]:
    """Findings on the run of so many ranks."""
    if answer is None:
        return [error("NCCL was never run", action="report it, with the captured folder")]
    if isinstance(answer, CommandTimedOut):
        return [error(f"hung: {answer}", action="look for Xid in the kernel log, then run `trainmaster bandwidth`")]
    if isinstance(answer, HostError):
        return [error(str(answer), action="run it by hand")]
    try:
        report = parse(answer.stdout, ranks=ranks, backend=backend)
    except ValueError as exc:
        return [_judge_unreported(answer, str(exc))]
    faults = _faults(report, ranks)
    if faults:
        return faults
    if ranks > 1:
        suspicious = [
            _of_node(finding) for finding in _named(report, "collective_transport") if finding.verdict is Verdict.WARN
        ]
        return [_judge_bandwidth(report, ranks, link), *suspicious]
    return [ok("NCCL starts on the one GPU and returns right data; without a peer there is no bandwidth", ranks=1)]


def _judge_unreported(answer: Any, why: str) -> Finding:
    """Error of a run that ended without a report."""
    words = " ".join((answer.stderr or answer.stdout).split())[-_probe.TAIL :] or "it printed nothing"
    values = {"exit_code": answer.exit_code, "last_words": words}
    if "trainmaster[train]" in words or "No module named 'torch'" in words:
        action = "install it for the Python that runs this: pip install 'trainmaster[train]'"
        return error(f"could not be tried: {words}", action=action, **values)
    return error(f"NCCL was not measured ({why}): {words}", action=_AGAIN, **values)


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclReport:
    """Report of a run: bus bandwidth by size, evidence against it, and the baselines that apply."""

    gbps: Mapping[int, float]
    points: tuple[Mapping[str, Any], ...]  # with latencies, for reports
    results: tuple[CheckResult, ...]
    lost: tuple[str, ...]
    wrong_rows: int  # rows in which a rank received wrong data
    baselines: tuple[Mapping[str, Any], ...]
    transport: str


def parse(text: str, *, ranks: int, backend: Backend = "nccl") -> NcclReport:
    """The report in the last line of the output. ValueError where there is none, or it is of another run."""
    lines = [line for line in text.splitlines() if line.startswith('{"report"')]
    if len(lines) != 1:
        raise ValueError(f"{len(lines)} reports")
    report = json.loads(lines[0]).get("report")
    try:
        if report["v"] != 1 or report["backend"] != backend or report["nodes"] != 1:
            raise ValueError("a report of another run")
        if report["world"] != ranks or len(report["members"]) > ranks:
            raise ValueError(f"{report['world']} ranks took part, not {ranks}")
        rows = report["rows"]
        _refuse_gaps(report, rows, ranks)
        gbps = {int(row["size_bytes"]): _probe.number(row, "busbw_gbps") for row in rows}
        results = tuple(schema.build(CheckResult, item) for item in report["results"])
        baselines = [
            item
            for result in results
            for finding in result.findings
            for item in finding.values.get("compared", ())
            if _probe.number(item, "baseline_gbps", least=0.001) and int(item["size_bytes"]) in gbps
        ]
        return NcclReport(
            gbps=gbps,
            points=tuple(
                {"size_bytes": size, "busbw_gbps": round(gbps[size], 3), "latency_us": row.get("median_us")}
                for size, row in zip(gbps, rows, strict=True)
            ),
            results=results,
            lost=tuple(str(lost["reason"]) for lost in report["lost"]),
            wrong_rows=sum(bool(row["wrong"]) for row in (*report["rows"], *report["partial"])),
            baselines=tuple(baselines),
            transport=str(report["transport"]),
        )
    except (KeyError, TypeError, AttributeError, SpecError) as error:
        raise ValueError(f"the report cannot be understood: {type(error).__name__}: {error}"[:200]) from None


def _refuse_gaps(report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], ranks: int) -> None:
    """ValueError where a size of the sweep is missing, unless a rank was lost or lacked the memory for it."""
    if any(row["collective"] != COLLECTIVE or sorted(row["heard"]) != list(range(ranks)) for row in rows):
        raise ValueError(f"a row is not one of {COLLECTIVE} over {ranks} ranks")
    sweep, sizes = report["sweep"], []
    size, factor = _probe.count(sweep, "min_bytes"), _probe.count(sweep, "factor")
    while 0 < size <= _probe.count(sweep, "max_bytes") and factor > 1:
        sizes.append(size)
        size *= factor
    measured = [row["size_bytes"] for row in rows]
    if measured != sizes[: len(measured)] or not sizes:
        raise ValueError("the sizes measured are not those of the sweep")
    if len(measured) < len(sizes) and not report["lost"] and not report["notes"]:
        raise ValueError(f"{len(measured)} of {len(sizes)} sizes were measured")


def _faults(report: NcclReport, ranks: int) -> list[Finding]:
    """Everything that forbids a verdict on the bandwidth: lost ranks, wrong data, nothing measured."""
    bad = (Verdict.FAIL, Verdict.ERROR)
    stated = [*_named(report, "collective_ranks"), *_named(report, "collective_data")]
    findings = [_of_node(finding) for finding in stated if finding.verdict in bad]
    if not findings and (report.lost or report.wrong_rows):
        reason = report.lost[0] if report.lost else f"wrong data arrived in {report.wrong_rows} rows"
        findings.append(fail(reason, action=_AGAIN))
    if not findings and not (_named(report, "collective_ranks") and _named(report, "collective_data")):
        findings.append(error("the report lacks the findings on ranks or data", action=_AGAIN))
    if not findings and not report.gbps:
        findings.append(error(f"no size was finished by all {ranks} ranks", action=_AGAIN))
    return findings


def _named(report: NcclReport, check: str) -> tuple[Finding, ...]:
    return tuple(finding for result in report.results if result.check == check for finding in result.findings)


def _of_node(finding: Finding) -> Finding:
    """The finding without its device, which is this node."""
    return Finding(verdict=finding.verdict, reason=finding.reason, action=finding.action, values=finding.values)


def _judge_bandwidth(report: NcclReport, ranks: int, link: Link | None) -> Finding:
    size = max(report.gbps)
    gbps = report.gbps[size]
    what = f"{COLLECTIVE} over {ranks} GPUs: {gbps:.3g} GB/s at {size >> 20} MiB"
    values: dict[str, Any] = {
        "collective": COLLECTIVE, "ranks": ranks, "busbw_gbps": round(gbps, 3), "points": list(report.points),
        "compared": list(report.baselines), "transport": report.transport,
    }  # fmt: skip
    if link is not None and gbps > IMPOSSIBLE * link.gbps:
        words = f"{what} is more than {link.words} can carry ({link.gbps:.3g}): the timing is wrong"
        return error(words, action="check the machine's clock, then run this again", **values)
    if report.baselines:
        return _by_baseline(report, what, values)
    if link is not None:
        share, (fails, warns) = gbps / link.gbps, SHARES[link.kind]
        words = f"{what}, {share:.0%} of {link.words}"
        return _verdict(share, fails, warns, words, {**values, "link_gbps": round(link.gbps, 3)})
    action = "state what it should reach: --expect busbw_gbps=N"
    return warn(
        f"{what}, not compared: neither a baseline nor the link of this model is known", action=action, **values
    )


def _by_baseline(report: NcclReport, what: str, values: Mapping[str, Any]) -> Finding:
    """The worst comparison with published figures. A floor of somebody's own check is a warning at most."""
    judged = []
    for base in report.baselines:
        share = report.gbps[int(base["size_bytes"])] / float(base["baseline_gbps"])
        fails, warns = (0.0, 1.0) if base.get("kind") == "floor" else (FAIL_BELOW, WARN_BELOW)
        at = f"{share:.0%} of {base['baseline_gbps']:g} at {int(base['size_bytes']) >> 20} MiB ({base.get('source')})"
        judged.append((share - fails, _verdict(share, fails, warns, f"{what}; {at}", values)))
    return min(judged, key=lambda item: ([Verdict.FAIL, Verdict.WARN, Verdict.PASS].index(item[1].verdict), item[0]))[1]


def _verdict(share: float, fails: float, warns: float, words: str, values: Mapping[str, Any]) -> Finding:
    if share < fails:
        return fail(words, action=_SLOW, **values)
    if share < warns:
        return warn(words, action="run it again on an idle machine", **values)
    return ok(words, **values)
