"""What each process of the SageMaker job runs: check this node, measure collectives, put the result into S3.

SageMaker starts it once per GPU (Torchrun or MPI), or once per node (neither). The first process of a node checks it,
alone and without a rendezvous, and puts the answer into the store. Then all processes measure collectives together, and
the first process of the first node gathers the answers. A node whose answer does not come in time is named, and the
others' answers are kept: nobody waits for ever for a node that hangs.

    STORE/answers/HOST.json              each node's own answer
    STORE/nodes/HOST/…                   the evidence it rests on
    STORE/health_check_metrics.json      and report.html, report.md, junit.xml, metrics.prom, health.json

STORE is --to, else TRAINMASTER_METRICS_URL/TRAINING_JOB_NAME/metrics. Ends, on the first process, with 0 (PASS, WARN),
1 (FAIL) or 3 (INCOMPLETE), so that the job's own status says it too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from trainmaster.checks import document
from trainmaster.cluster import compare, evidence
from trainmaster.core.errors import SpecError, StorageError, UsageError
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import CheckResult, Verdict, error, exit_code
from trainmaster.core.schema import build
from trainmaster.report.health import render_terminal, write_bundle
from trainmaster.storage import Store, open_store, upload_bundle

CHECK_S = {1: 300.0, 2: 1800.0, 3: 7200.0}  # by level: above what the checks of a node may take one after the other
POLL_S = 1.0


def main(words: list[str] | None = None) -> int:
    options = parse(words)
    hosts: list[str] = json.loads(os.environ.get("SM_HOSTS", "[]")) or ["localhost"]
    here = os.environ.get("SM_CURRENT_HOST", hosts[0])
    world, local = count("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE") or 1, count("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    started_at, started = datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
    store = open_store(address(options.to))
    folder = Path(options.work) / here
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "checked"
    if not local:
        answer(here, options, folder, store)
        done.touch()
    elif not wait_for(done, CHECK_S[options.level] + 60):
        say(f"{here}: the check of this node did not end; taking part in the collectives all the same")
    code = measure(options, folder) if world > 1 else 0
    if here != hosts[0] or local:
        return 0
    nodes, silent = gather(hosts, store, options.wait)
    between = compare.compare(nodes) if len(hosts) > 1 else ()
    health = ClusterHealth(
        asked=tuple(hosts),
        nodes=tuple(nodes),
        silent=tuple(silent),
        cluster=(*between, *(collectives(folder / "bandwidth", code) if world > 1 else ())),
        started_at=started_at,
        took_s=round(time.monotonic() - started, 3),
    )
    bundle = Path(options.out)
    evidence.save(bundle, health)
    write_bundle(health, bundle)
    for line in render_terminal(health):
        say(line)
    for url in upload_bundle(bundle, address(options.to)):
        say(f"wrote {url}")
    return exit_code(health.overall)


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check a SageMaker cluster before it is trained on.")
    parser.add_argument("--level", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--expect", action="append", default=[], help="a profile or name=value, e.g. ml.p5.48xlarge")
    parser.add_argument("--max-size", default="1G", help="largest message of the collectives")
    parser.add_argument("--expect-transport", help="EFA, NVLS, P2P: what must have carried the collectives")
    parser.add_argument("--min-busbw", help="GB/s that must be reached, where no baseline is known")
    parser.add_argument("--wait", type=float, default=600.0, help="seconds for the answers of the other nodes")
    parser.add_argument("--to", help="where the results go: s3://bucket/prefix or a folder")
    parser.add_argument("--out", default=os.environ.get("SM_OUTPUT_DATA_DIR", "/opt/ml/output/data") + "/health")
    parser.add_argument("--work", default=f"{tempfile.gettempdir()}/trainmaster", help="a folder on this node")
    # SageMaker adds hyperparameters of its own; they are not ours to refuse.
    return parser.parse_known_args(words)[0]


def address(to: str | None) -> str:
    if to:
        return to
    base = os.environ.get("TRAINMASTER_METRICS_URL")
    if not base:
        raise UsageError("nobody said where the results go: --to s3://bucket/prefix, or set TRAINMASTER_METRICS_URL")
    return f"{base.rstrip('/')}/{os.environ.get('TRAINING_JOB_NAME', 'job')}/metrics"


def answer(here: str, options: argparse.Namespace, folder: Path, store: Store) -> None:
    """Check this node in a process of its own, which can be killed, and put what it says into the store."""
    argv = [sys.executable, "-m", "trainmaster.checks", "--json", "--progress", "--level", str(options.level)]
    argv += ["--node", here, "--capture", str(folder / "capture")]
    argv += [word for value in options.expect for word in ("--expect", value)]
    try:
        ran = subprocess.run(argv, stdout=subprocess.PIPE, timeout=CHECK_S[options.level], check=False)
        told = ran.stdout
    except subprocess.TimeoutExpired:
        say(f"{here}: the check of this node took longer than {CHECK_S[options.level]:g} s and was ended")
        told = b""
    # An answer that cannot be understood is put there too: whoever gathers says so, and does not wait for another.
    store.put(f"answers/{here}.json", told)
    if (folder / "capture").is_dir():
        upload_bundle(folder / "capture", f"{store.url}/nodes/{here}")


def measure(options: argparse.Namespace, folder: Path) -> int:
    """Take part in the collectives as the rank that the launcher made of this process."""
    argv = [sys.executable, "-m", "trainmaster", "bandwidth", "--max", options.max_size]
    argv += ["--out", str(folder / "bandwidth"), "--timeout", "300"]
    for name in ("expect_transport", "min_busbw"):
        if getattr(options, name):
            argv += [f"--{name.replace('_', '-')}", getattr(options, name)]
    try:
        return subprocess.run(argv, timeout=3600, check=False).returncode
    except subprocess.TimeoutExpired:
        return 124


def collectives(folder: Path, code: int) -> tuple[CheckResult, ...]:
    """What the collectives found; an error if they left nothing, because they were planned."""
    try:
        plain = json.loads((folder / "bandwidth.json").read_text())
        return tuple(build(CheckResult, item) for item in plain["results"])
    except (OSError, ValueError, KeyError, TypeError, SpecError) as wrong:
        reason = f"they ended with {code} and left no result: {wrong}"[:300]
        finding = error(reason, action="read this job's log from the first line that says NCCL or lost")
        return (CheckResult(check="collective_bandwidth", findings=(finding,), took_s=0.0),)


def gather(hosts: list[str], store: Store, wait_s: float) -> tuple[list[NodeHealth], list[Silent]]:
    """Every node's answer, or why there is none, in the order of the hosts."""
    until = time.monotonic() + wait_s
    told: dict[str, bytes] = {}
    while True:
        for host in hosts:
            if host not in told and store.exists(f"answers/{host}.json"):
                told[host] = store.get(f"answers/{host}.json")
        if len(told) == len(hosts) or time.monotonic() >= until:
            break
        time.sleep(POLL_S)
    nodes, silent = [], []
    for host in hosts:
        action = "look at this host's log stream in CloudWatch"
        if host not in told:
            silent.append(quiet(host, f"no answer {wait_s:g} s after the others", action))
            continue
        try:
            health = document.parse(told[host].decode("utf-8", errors="replace"))
            if health.node == host:
                nodes.append(health)
            else:
                silent.append(quiet(host, f"its answer names another node: {health.node}"[:300], action))
        except SpecError as wrong:
            silent.append(quiet(host, f"its answer cannot be understood: {wrong}"[:300], action))
    return nodes, silent


def quiet(host: str, reason: str, action: str) -> Silent:
    return Silent(node=host, verdict=Verdict.ERROR, reason=reason, action=action)


def count(*names: str) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), 0)


def wait_for(path: Path, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() >= until:
            return False
        time.sleep(0.2)
    return True


def say(line: str) -> None:
    """To the log, which SageMaker sends to CloudWatch."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (StorageError, UsageError) as wrong:
        sys.stderr.write(f"error: {wrong}\n")
        sys.exit(wrong.exit_code)
