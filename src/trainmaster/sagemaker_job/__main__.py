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

import os
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from trainmaster.bench.nccl_tests import count_gpus
from trainmaster.cluster.health import evidence, prices
from trainmaster.cluster.sagemaker import job as sagemaker
from trainmaster.core.errors import StorageError, UsageError
from trainmaster.core.results import exit_code
from trainmaster.node.host import Host
from trainmaster.report.health import render_terminal, write_bundle
from trainmaster.sagemaker_job.gather import gather_all
from trainmaster.sagemaker_job.host import (
    CHECK_S,
    forget,
    has_collectives,
    instance_type,
    log,
    measure,
    write_answer,
    write_report,
)
from trainmaster.sagemaker_job.options import address, job_name, parse
from trainmaster.storage import open_store, upload_bundle


def main(words: list[str] | None = None) -> int:
    options = parse(words)
    if options.own_ranks:
        for name in sagemaker.RANK_VARIABLES:
            os.environ.pop(name, None)
    job = sagemaker.read_job(os.environ)
    started_at, started = datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
    store = open_store(address(options.to))
    # With the job's name: what an earlier job left in this folder must not be taken for a result of this one.
    folder = Path(options.work) / job_name() / job.here
    _make(folder, "--work")
    if job.first:
        _make(Path(options.out), "--out")  # found out now, not after an hour of measuring
    if job.first_on_node:
        forget(job.here, folder, store)
    host = Host()
    gpus = count_gpus(host)
    per_node = max(1, gpus) if job.distribution == "none" else job.per_node
    done = folder / "checked"
    if job.first_on_node:
        write_answer(job.here, options, folder, store)
        write_report(job, host, options, folder, store, gpus=gpus, per_node=per_node)
        done.touch()
    elif not wait_for(done, CHECK_S[options.level] + options.wait + 60):
        log(f"{job.here}: the check of this host did not end; the collectives run all the same")
    ran = measure(job, options, folder, store, per_node) if has_collectives(job, options, per_node) else None
    if not job.first:
        return 0
    health = gather_all(job, options, store, folder, ran)
    health = replace(health, started_at=started_at, took_s=round(time.monotonic() - started, 3))
    bundle = Path(options.out)
    evidence.save(bundle, health)
    cost = prices.find(health, instance=instance_type(job, options))
    write_bundle(health, bundle, cost=cost)
    for line in render_terminal(health, cost=cost):
        log(line)
    for url in upload_bundle(bundle, address(options.to)):
        log(f"wrote {url}")
    return exit_code(health.overall)


def _make(folder: Path, option: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{option} {folder}: cannot be made ({error.strerror}); name a folder that can") from None


def wait_for(path: Path, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() >= until:
            return False
        time.sleep(0.2)
    return True


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (StorageError, UsageError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
