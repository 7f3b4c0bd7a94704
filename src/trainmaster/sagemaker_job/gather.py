"""The part of the first host: gather the answers and reports of all hosts, and judge the cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmaster.bench import link_limits
from trainmaster.checks import document, profiles
from trainmaster.cluster.health import compare
from trainmaster.cluster.sagemaker import node as sagemaker_node
from trainmaster.cluster.sagemaker.job import Job
from trainmaster.cluster.sagemaker.node import HostReport
from trainmaster.core import schema
from trainmaster.core.errors import SpecError
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import CheckResult, Finding, Verdict, error
from trainmaster.sagemaker_job.host import POLL_S, instance_type
from trainmaster.sagemaker_job.options import Options, place
from trainmaster.storage import Store


def gather_all(job: Job, options: Options, store: Store, folder: Path, ran: str | None) -> ClusterHealth:
    """Health of all hosts, and the collectives with a verdict of a baseline, the site, peers or the link."""
    hosts = list(job.hosts)
    nodes, silent = gather(hosts, store, options.wait)
    reports, absent = read_reports([node.node for node in nodes], store, options.wait)
    instance = instance_type(job, options)
    known = profiles.find_instance(instance) if instance else None
    gpu = known.gpu if known is not None else None
    site = link_limits.parse_site(Path(options.baseline).read_text()) if options.baseline else None
    alone = link_limits.find_link(instance=instance, nodes=1, gpu=gpu)
    nccl = link_limits.settle_nodes(
        {host: list(report.nccl) for host, report in reports.items()}, link=alone, site=site
    )
    results = list(sagemaker_node.results(reports, nccl, absent=absent))
    if ran is not None:
        # The link is that of a whole host: fewer ranks than GPUs cannot fill it.
        filled = all(report.facts.get("gpus", 0) <= report.facts["processes_per_node"] for report in reports.values())
        each = known.gpus if known is not None else 1
        link = link_limits.find_link(instance=instance, nodes=len(hosts), gpu=gpu, gpus=each) if filled else None
        results += [
            replace(result, findings=tuple(link_limits.settle(result.findings, link=link, site=site)))
            for result in collectives(folder / "bandwidth", ran)
        ]
    between = compare.compare(nodes) if len(hosts) > 1 else ()
    return ClusterHealth(asked=tuple(hosts), nodes=tuple(nodes), silent=tuple(silent), cluster=(*between, *results))


def read_reports(hosts: list[str], store: Store, wait_s: float) -> tuple[dict[str, HostReport], dict[str, str]]:
    """Reports of the hosts that answered, and of each other one why there is none."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until and not all(store.exists(place("jobs", host)) for host in hosts):
        time.sleep(POLL_S)
    reports, absent = {}, {}
    for host in hosts:
        if not store.exists(place("jobs", host)):
            absent[host] = f"no report {wait_s:g} s after its checks"
            continue
        try:
            reports[host] = sagemaker_node.parse_report(json.loads(store.get(place("jobs", host))))
        except (ValueError, SpecError) as exc:
            absent[host] = f"its report cannot be parsed: {exc}"[:300]
    return reports, absent


def collectives(folder: Path, ran: str) -> tuple[CheckResult, ...]:
    """Results of the collectives; an error if they left none, because they were planned."""
    try:
        plain = json.loads((folder / "bandwidth.json").read_text())
        results = [schema.build(CheckResult, item) for item in plain["results"]]
        if "not by themselves" in ran:
            finding = error(f"the collectives {ran}", action="look for a crash in this job's log")
            results.append(CheckResult(check="collective_ranks", findings=(finding,), took_s=0.0))
        return tuple(
            replace(result, findings=tuple(_with_points(finding, plain) for finding in result.findings))
            for result in results
        )
    except (OSError, ValueError, KeyError, TypeError, SpecError) as exc:
        reason = f"the collectives left no result; they {ran} ({type(exc).__name__})"[:300]
        finding = error(reason, action="read this job's log from the first line with NCCL or `lost`")
        return (CheckResult(check="collective_bandwidth", findings=(finding,), took_s=0.0),)


def _with_points(finding: Finding, report: Mapping[str, Any]) -> Finding:
    """The finding of a collective with its ranks, and bandwidth and latency of every size."""
    name = finding.values.get("collective")
    if name is None:
        return finding
    points = [
        {"size_bytes": row["size_bytes"], "busbw_gbps": row["busbw_gbps"], "latency_us": row["median_us"]}
        for row in report["rows"]
        if row["collective"] == name
    ]
    return replace(finding, values={**finding.values, "ranks": report["world"], "points": points})


def gather(hosts: list[str], store: Store, wait_s: float) -> tuple[list[NodeHealth], list[Silent]]:
    """The answer of every host, or the reason for its absence, in the order of the hosts."""
    until = time.monotonic() + wait_s
    texts: dict[str, bytes] = {}
    while True:
        for host in hosts:
            if host not in texts and store.exists(place("answers", host)):
                texts[host] = store.get(place("answers", host))
        if len(texts) == len(hosts) or time.monotonic() >= until:
            break
        time.sleep(POLL_S)
    nodes, silent = [], []
    for host in hosts:
        action = "read this host's log stream in CloudWatch"
        if host not in texts:
            silent.append(_silent(host, f"no answer {wait_s:g} s after the others", action))
            continue
        try:
            health = document.parse(texts[host].decode("utf-8", errors="replace"))
            if health.node == host:
                nodes.append(health)
            else:
                silent.append(_silent(host, f"its answer names another node: {health.node}"[:300], action))
        except SpecError as exc:
            silent.append(_silent(host, f"its answer cannot be parsed: {exc}"[:300], action))
    return nodes, silent


def _silent(host: str, reason: str, action: str) -> Silent:
    return Silent(node=host, verdict=Verdict.ERROR, reason=reason, action=action)
