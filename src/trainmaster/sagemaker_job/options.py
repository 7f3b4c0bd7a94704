"""Options of the job, and the places where its hosts meet: a folder of this host and a store for all of them."""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass

from trainmaster.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Hyperparameters of the job, as words of the command line. `parse` has the meaning of each."""

    level: int
    expect: list[str]
    expect_json: str | None
    only: list[str]
    alone: bool
    own_ranks: bool
    max_size: str | None
    expect_transport: str | None
    min_busbw: str | None
    baseline: str | None
    efa_provider: str
    replay: str | None
    wait: float
    to: str | None
    out: str
    work: str


def parse(words: list[str] | None) -> Options:
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
    return Options(**vars(parser.parse_known_args(words)[0]))


def address(to: str | None) -> str:
    if to:
        return to
    base = os.environ.get("TRAINMASTER_METRICS_URL")
    if not base:
        raise UsageError("no destination for the results: pass --to s3://bucket/prefix or set TRAINMASTER_METRICS_URL")
    return f"{base.rstrip('/')}/{job_name()}/metrics"


def job_name() -> str:
    return os.environ.get("TRAINING_JOB_NAME") or "job"


def place(kind: str, host: str) -> str:
    """Where a host leaves something for the first one. Two jobs with the same --to do not read each other's."""
    return f"{kind}/{job_name()}/{host}.json"
