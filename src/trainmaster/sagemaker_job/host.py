"""The part of every host: check it, write its answer and its report to the store, take part in the collectives."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from trainmaster.checks import profiles
from trainmaster.cluster.sagemaker import job as sagemaker
from trainmaster.cluster.sagemaker import node as sagemaker_node
from trainmaster.cluster.sagemaker.job import Job
from trainmaster.cluster.sagemaker.node import HostReport
from trainmaster.core import schema
from trainmaster.core.errors import StorageError
from trainmaster.core.results import Finding
from trainmaster.node.host import Host
from trainmaster.sagemaker_job.options import Options, job_name, place
from trainmaster.storage import Store, upload_bundle

CHECK_S = {1: 300.0, 2: 1800.0, 3: 7200.0}  # by level: above the sum of the timeouts of a host's checks
COLLECTIVES_S = 3600.0
POLL_S = 1.0


def forget(here: str, folder: Path, store: Store) -> None:
    """Remove what an attempt of the same name left of this host, on its disk and in the store."""
    for name in ("checked", "bandwidth/bandwidth.json"):
        (folder / name).unlink(missing_ok=True)
    for kind in ("answers", "jobs", "ready"):
        with contextlib.suppress(StorageError):  # a role that may not delete: the host writes over it
            store.delete(place(kind, here))


def write_answer(here: str, options: Options, folder: Path, store: Store) -> None:
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
        log(f"{here}: the check of this host took longer than {CHECK_S[options.level]:g} s and was ended")
        text = b""
    if (folder / "capture").is_dir():
        upload_bundle(folder / "capture", f"{store.url}/nodes/{here}")
    # Written last: a reader that sees it may trust the capture. An unreadable answer is stored too: it is reported at
    # once instead of waited for.
    store.put(place("answers", here), text)


def write_report(
    job: Job, host: Host, options: Options, folder: Path, store: Store, *, gpus: int, per_node: int
) -> None:
    """Write the host's ranks, EFA test, nccl-tests and raw outputs to the store."""
    facts = sagemaker.describe(job, per_node=per_node, collectives=has_collectives(job, options, per_node))
    facts |= {"gpus": gpus} | sagemaker_node.read_facts(host, folder / "capture")
    efa: list[Finding] = []
    nccl: list[Finding] = []
    if options.level >= 2 and not options.alone:
        if len(job.hosts) > 1:
            efa = sagemaker_node.ping(
                host,
                job,
                store,
                provider=options.efa_provider,
                address=None,
                wait_s=options.wait,
                devices=_efa_devices(job, options),
                run=job_name(),
            )
        max_size = options.max_size or sagemaker.scale(ranks=gpus, hosts=1).max_size
        nccl = sagemaker_node.run_nccl_tests(host, gpus, max_size=max_size)
    host_report = HostReport(host=job.here, facts=facts, efa=tuple(efa), nccl=tuple(nccl))
    store.put(place("jobs", job.here), json.dumps(schema.to_plain(host_report)).encode())


def measure(job: Job, options: Options, folder: Path, store: Store, per_node: int) -> str:
    """Run the collectives: as the rank that the launcher made of this process, or with ranks of this host's own."""
    if job.distribution == "none" and (absent := wait_for_hosts(job, store, options.wait)):
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


def wait_for_hosts(job: Job, store: Store, wait_s: float) -> list[str]:
    """Wait until every host is ready to start its ranks; the hosts that are not. A launcher does this by itself."""
    store.put(place("ready", job.here), b"")
    until = time.monotonic() + wait_s
    while True:
        absent = [host for host in job.hosts if not store.exists(place("ready", host))]
        if not absent or time.monotonic() >= until:
            return absent
        time.sleep(POLL_S)


def _transport(job: Job, options: Options) -> str | None:
    """EFA between hosts that have it, TCP by design between those that have none; None where that is not known."""
    devices = _efa_devices(job, options)
    if devices is None or len(job.hosts) == 1:
        return None
    return "EFA" if devices else "Socket"


def _efa_devices(job: Job, options: Options) -> int | None:
    """EFA devices that SageMaker attaches to this instance type; None where the type is not known."""
    instance = instance_type(job, options)
    if instance is None or profiles.find_instance(instance) is None:
        return None
    return profiles.resolve([instance]).expect.efa_devices


def instance_type(job: Job, options: Options) -> str | None:
    """The instance type, with SageMaker's `ml.`: as stated with --expect, else as SageMaker names it."""
    name = next((word for word in options.expect if profiles.find_instance(word)), job.instance)
    return None if name is None else f"ml.{name.removeprefix('ml.')}"


def _without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without MPI's own rank variables, which would contradict those set here."""
    return {name: value for name, value in env.items() if not name.startswith(("OMPI_", "PMIX_"))}


def has_collectives(job: Job, options: Options, per_node: int) -> bool:
    return not options.alone and len(job.hosts) * per_node > 1


def log(line: str) -> None:
    """Write to the log, which SageMaker sends to CloudWatch."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
