"""Program of every process of the SageMaker health check: check the host, measure collectives, write the result to S3.

SageMaker starts it once per GPU (Torchrun or MPI) or once per host (neither). The first process of a host checks the
host, alone and without a rendezvous, and writes the answer to the store. Then all ranks measure collectives together;
without a launcher each process starts the ranks of its host. The first process of the first host gathers the answers. A
host without an answer in time is named, and the answers of the others are kept.

    STORE/answers/JOB/HOST.json          the host's own answer
    STORE/jobs/JOB/HOST.json             its ranks, EFA test, nccl-tests and raw outputs
    STORE/nodes/HOST/…                   the evidence of its checks
    STORE/health_check_metrics.json      and report.html, report.md, junit.xml, metrics.prom, health.json

STORE is --to, else TRAINMASTER_METRICS_URL/TRAINING_JOB_NAME/metrics. The first process ends with 0 (PASS, WARN),
1 (FAIL) or 3 (INCOMPLETE), which also decides the status of the job.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from trainmaster.bench import link_limits
from trainmaster.bench.nccl_tests import count_gpus
from trainmaster.checks import document, profiles
from trainmaster.cluster import compare, evidence, prices, sagemaker, sagemaker_node
from trainmaster.cluster.sagemaker import Job
from trainmaster.cluster.sagemaker_node import HostReport
from trainmaster.core import schema
from trainmaster.core.errors import SpecError, StorageError, UsageError
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import CheckResult, Finding, Verdict, error, exit_code
from trainmaster.node.host import Host
from trainmaster.report.health import render_terminal, write_bundle
from trainmaster.storage import Store, open_store, upload_bundle

CHECK_S = {1: 300.0, 2: 1800.0, 3: 7200.0}  # by level: above the sum of the timeouts of a host's checks
COLLECTIVES_S = 3600.0
POLL_S = 1.0


def main(words: list[str] | None = None) -> int:
    options = parse(words)
    if options.own_ranks:
        for name in sagemaker.RANK_VARIABLES:
            os.environ.pop(name, None)
    job = sagemaker.read_job(os.environ)
    started_at, started = datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
    store = open_store(address(options.to))
    # With the job's name: what an earlier job left in this folder must not be taken for a result of this one.
    folder = Path(options.work) / _job_name() / job.here
    folder.mkdir(parents=True, exist_ok=True)
    if job.first_on_node:
        forget(job.here, folder, store)
    host = Host()
    gpus = count_gpus(host)
    per_node = max(1, gpus) if job.distribution == "none" else job.per_node
    done = folder / "checked"
    if job.first_on_node:
        answer(job.here, options, folder, store)
        report(job, host, options, folder, store, gpus=gpus, per_node=per_node)
        done.touch()
    elif not wait_for(done, CHECK_S[options.level] + options.wait + 60):
        say(f"{job.here}: the check of this host did not end; the collectives run all the same")
    ran = measure(job, options, folder, store, per_node) if has_collectives(job, options, per_node) else None
    if not job.first:
        return 0
    health = gather_all(job, options, store, folder, ran)
    health = replace(health, started_at=started_at, took_s=round(time.monotonic() - started, 3))
    bundle = Path(options.out)
    evidence.save(bundle, health)
    known = profiles.find_instance(_instance(job, options) or "")
    cost = prices.find(health, known.usd_per_hour if known is not None else None)
    write_bundle(health, bundle, cost=cost)
    for line in render_terminal(health, cost=cost):
        say(line)
    for url in upload_bundle(bundle, address(options.to)):
        say(f"wrote {url}")
    return exit_code(health.overall)


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check a SageMaker cluster before training on it.")
    parser.add_argument("--level", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--expect", action="append", default=[], help="a profile or name=value, e.g. ml.p5.48xlarge")
    parser.add_argument("--expect-json", help="the whole expectation as one JSON object")
    parser.add_argument("--only", action="append", default=[], help="run only this check on each host")
    parser.add_argument("--alone", action="store_true", help="no EFA test, no nccl-tests and no collectives")
    parser.add_argument("--own-ranks", action="store_true", help="start one rank per GPU, whoever started this process")
    parser.add_argument("--max-size", help="largest message of the collectives; else by the number of ranks and hosts")
    parser.add_argument("--expect-transport", help="transport that must carry the collectives: EFA, NVLS, P2P")
    parser.add_argument("--min-busbw", help="GB/s that must be reached at the largest size")
    parser.add_argument("--baseline", help='TOML file with figures of your site: [all_reduce] and "1G" = 85.0')
    parser.add_argument("--efa-provider", default="efa", help="libfabric provider of the EFA test")
    parser.add_argument("--replay", help="judge a captured host instead of this one, to try the job without GPUs")
    parser.add_argument("--wait", type=float, default=600.0, help="seconds for the answers of the other hosts")
    parser.add_argument("--to", help="destination of the results: s3://bucket/prefix or a folder")
    parser.add_argument("--out", default=os.environ.get("SM_OUTPUT_DATA_DIR", "/opt/ml/output/data") + "/health")
    parser.add_argument("--work", default=f"{tempfile.gettempdir()}/trainmaster", help="a folder on this host")
    # SageMaker adds hyperparameters of its own.
    return parser.parse_known_args(words)[0]


def has_collectives(job: Job, options: argparse.Namespace, per_node: int) -> bool:
    return not options.alone and len(job.hosts) * per_node > 1


def address(to: str | None) -> str:
    if to:
        return to
    base = os.environ.get("TRAINMASTER_METRICS_URL")
    if not base:
        raise UsageError("no destination for the results: pass --to s3://bucket/prefix or set TRAINMASTER_METRICS_URL")
    return f"{base.rstrip('/')}/{_job_name()}/metrics"


def _job_name() -> str:
    return os.environ.get("TRAINING_JOB_NAME") or "job"


def _place(kind: str, host: str) -> str:
    """Where a host leaves something for the first one. Two jobs with the same --to do not read each other's."""
    return f"{kind}/{_job_name()}/{host}.json"


def forget(here: str, folder: Path, store: Store) -> None:
    """Remove what an attempt of the same name left of this host, on its disk and in the store."""
    for name in ("checked", "bandwidth/bandwidth.json"):
        (folder / name).unlink(missing_ok=True)
    for kind in ("answers", "jobs", "ready"):
        with contextlib.suppress(StorageError):  # a role that may not delete: the host writes over it
            store.delete(_place(kind, here))


# --- on every host --------------------------------------------------------------------------------------------------


def answer(here: str, options: argparse.Namespace, folder: Path, store: Store) -> None:
    """Check this host in a process of its own, which can be killed, and write its answer to the store."""
    argv = [sys.executable, "-m", "trainmaster.checks", "--json", "--progress", "--level", str(options.level)]
    argv += ["--node", here, "--capture", str(folder / "capture")]
    argv += [word for value in options.expect for word in ("--expect", value)]
    argv += ["--expect-json", options.expect_json] if options.expect_json else []
    argv += [word for name in options.only for word in ("--only", name)]
    argv += ["--replay", options.replay] if options.replay else []
    try:
        ran = subprocess.run(argv, stdout=subprocess.PIPE, timeout=CHECK_S[options.level], check=False)
        text = ran.stdout
    except subprocess.TimeoutExpired:
        say(f"{here}: the check of this host took longer than {CHECK_S[options.level]:g} s and was ended")
        text = b""
    if (folder / "capture").is_dir():
        upload_bundle(folder / "capture", f"{store.url}/nodes/{here}")
    # Written last: a reader that sees it may trust the capture. An unreadable answer is stored too: it is reported at
    # once instead of waited for.
    store.put(_place("answers", here), text)


def report(
    job: Job, host: Host, options: argparse.Namespace, folder: Path, store: Store, *, gpus: int, per_node: int
) -> None:
    """Write the host's ranks, EFA test, nccl-tests and raw outputs to the store."""
    facts = sagemaker.describe(job, per_node=per_node, collectives=has_collectives(job, options, per_node))
    facts |= {"gpus": gpus} | sagemaker_node.read_facts(host, folder / "capture")
    efa: list[Finding] = []
    nccl: list[Finding] = []
    if options.level >= 2 and not options.alone:
        if len(job.hosts) > 1:
            efa = sagemaker_node.ping(
                host, job, store, provider=options.efa_provider, address=None, wait_s=options.wait,
                devices=_efa_devices(job, options), run=_job_name(),
            )  # fmt: skip
        max_size = options.max_size or sagemaker.scale(ranks=gpus, hosts=1).max_size
        nccl = sagemaker_node.run_nccl_tests(host, gpus, max_size=max_size)
    told = HostReport(host=job.here, facts=facts, efa=tuple(efa), nccl=tuple(nccl))
    store.put(_place("jobs", job.here), json.dumps(schema.to_plain(told)).encode())


def measure(job: Job, options: argparse.Namespace, folder: Path, store: Store, per_node: int) -> str:
    """Run the collectives: as the rank that the launcher made of this process, or with ranks of this host's own."""
    if job.distribution == "none" and (absent := meet(job, store, options.wait)):
        return f"did not start, because of {', '.join(absent)}: not ready in {options.wait:g} s"
    scale = sagemaker.scale(ranks=len(job.hosts) * per_node, hosts=len(job.hosts))
    argv = [sys.executable, "-m", "trainmaster", "bandwidth", "--max", options.max_size or scale.max_size]
    argv += ["--out", str(folder / "bandwidth"), "--timeout", str(scale.stall_s)]
    if (transport := options.expect_transport or _transport(job, options)) is not None:
        argv += ["--expect-transport", transport]
    if options.min_busbw:
        argv += ["--min-busbw", options.min_busbw]
    if job.distribution == "none":
        ranks = [sagemaker.rank_environment(job, local_rank=local, per_node=per_node) for local in range(per_node)]
    else:
        ranks = [sagemaker.rank_environment(job)]
    running = [subprocess.Popen(argv, env={**_without_launcher(os.environ), **rank}) for rank in ranks]
    until = time.monotonic() + COLLECTIVES_S
    codes = []
    for process in running:
        try:
            codes.append(process.wait(max(1.0, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(124)
    crashed = [code for code in codes if code < 0 or code == 124]
    return f"ended with {crashed[0]}, not by themselves" if crashed else f"ended with {codes[0]}"


def meet(job: Job, store: Store, wait_s: float) -> list[str]:
    """Wait until every host is ready to start its ranks; the hosts that are not. A launcher does this by itself."""
    store.put(_place("ready", job.here), b"")
    until = time.monotonic() + wait_s
    while True:
        absent = [host for host in job.hosts if not store.exists(_place("ready", host))]
        if not absent or time.monotonic() >= until:
            return absent
        time.sleep(POLL_S)


def _transport(job: Job, options: argparse.Namespace) -> str | None:
    """EFA between hosts that have it, TCP by design between those that have none; None where that is not known."""
    devices = _efa_devices(job, options)
    if devices is None or len(job.hosts) == 1:
        return None
    return "EFA" if devices else "Socket"


def _efa_devices(job: Job, options: argparse.Namespace) -> int | None:
    """EFA devices that SageMaker attaches to this instance type; None where the type is not known."""
    instance = _instance(job, options)
    if instance is None or profiles.find_instance(instance) is None:
        return None
    return profiles.resolve([instance]).expect.efa_devices


def _instance(job: Job, options: argparse.Namespace) -> str | None:
    """The instance type, with SageMaker's `ml.`: as stated with --expect, else as SageMaker names it."""
    name = next((word for word in options.expect if profiles.find_instance(word)), job.instance)
    return None if name is None else f"ml.{name.removeprefix('ml.')}"


def _without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without MPI's own rank variables, which would contradict those set here."""
    return {name: value for name, value in env.items() if not name.startswith(("OMPI_", "PMIX_"))}


# --- on the first host ----------------------------------------------------------------------------------------------


def gather_all(job: Job, options: argparse.Namespace, store: Store, folder: Path, ran: str | None) -> ClusterHealth:
    """Health of all hosts, and the collectives with a verdict of a baseline, the site, peers or the link."""
    hosts = list(job.hosts)
    nodes, silent = gather(hosts, store, options.wait)
    reports, absent = read_reports([node.node for node in nodes], store, options.wait)
    instance = _instance(job, options)
    known = profiles.find_instance(instance) if instance else None
    gpu = known.gpu if known is not None else None
    site = link_limits.parse_site(Path(options.baseline).read_text()) if options.baseline else None
    alone = link_limits.find_link(instance=instance, nodes=1, gpu=gpu)
    nccl = link_limits.settle_nodes({host: list(one.nccl) for host, one in reports.items()}, link=alone, site=site)
    results = list(sagemaker_node.results(reports, nccl, absent=absent))
    if ran is not None:
        # The link is that of a whole host: fewer ranks than GPUs cannot fill it.
        filled = all(one.facts.get("gpus", 0) <= one.facts["processes_per_node"] for one in reports.values())
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
    while time.monotonic() < until and not all(store.exists(_place("jobs", host)) for host in hosts):
        time.sleep(POLL_S)
    found, absent = {}, {}
    for host in hosts:
        if not store.exists(_place("jobs", host)):
            absent[host] = f"no report {wait_s:g} s after its checks"
            continue
        try:
            found[host] = sagemaker_node.parse_report(json.loads(store.get(_place("jobs", host))))
        except (ValueError, SpecError) as wrong:
            absent[host] = f"its report cannot be parsed: {wrong}"[:300]
    return found, absent


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
    except (OSError, ValueError, KeyError, TypeError, SpecError) as wrong:
        reason = f"the collectives left no result; they {ran} ({type(wrong).__name__})"[:300]
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
            if host not in texts and store.exists(_place("answers", host)):
                texts[host] = store.get(_place("answers", host))
        if len(texts) == len(hosts) or time.monotonic() >= until:
            break
        time.sleep(POLL_S)
    nodes, silent = [], []
    for host in hosts:
        action = "read this host's log stream in CloudWatch"
        if host not in texts:
            silent.append(quiet(host, f"no answer {wait_s:g} s after the others", action))
            continue
        try:
            health = document.parse(texts[host].decode("utf-8", errors="replace"))
            if health.node == host:
                nodes.append(health)
            else:
                silent.append(quiet(host, f"its answer names another node: {health.node}"[:300], action))
        except SpecError as wrong:
            silent.append(quiet(host, f"its answer cannot be parsed: {wrong}"[:300], action))
    return nodes, silent


def quiet(host: str, reason: str, action: str) -> Silent:
    return Silent(node=host, verdict=Verdict.ERROR, reason=reason, action=action)


def wait_for(path: Path, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() >= until:
            return False
        time.sleep(0.2)
    return True


def say(line: str) -> None:
    """Write to the log, which SageMaker sends to CloudWatch."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (StorageError, UsageError) as wrong:
        sys.stderr.write(f"error: {wrong}\n")
        sys.exit(wrong.exit_code)
