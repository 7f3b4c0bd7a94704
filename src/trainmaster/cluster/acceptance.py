"""Acceptance training over the nodes of a hosts file: one rank per GPU on every node, one verdict.

Every node must take part: one that cannot be reached or has no torch makes the run INCOMPLETE, and is named. Slurm is
in `acceptance_slurm.py`, Kubernetes in `acceptance_kubernetes.py`, SageMaker in `acceptance_sagemaker.py`; the last two
are one job of their target (`run_job`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmaster.bench.accept import baselines, judge, results
from trainmaster.bench.accept.options import Options, words
from trainmaster.cluster import launch
from trainmaster.cluster.exchange import Program, ProgramResult
from trainmaster.cluster.launch import Capabilities, Outcome
from trainmaster.core import schema
from trainmaster.core.plan import EXIT_FILE, ExitRecord, rank_log
from trainmaster.core.results import CheckResult, Finding, error, exit_code, judge_overall
from trainmaster.core.states import TargetState
from trainmaster.targets import Handle, Poll, Submission, Target
from trainmaster.targets.ssh.connect import NodeUnavailable
from trainmaster.targets.ssh.hosts import SshHost, SshHosts

MODULE = "trainmaster.bench.accept"
START_S = 900.0  # beside the measured steps: packages, compilation, warm-up
_BLOCK = 1 << 20


def accept(hosts: SshHosts, options: Options, *, timeout_s: float | None = None) -> dict[str, Any]:
    """Train on all nodes; the document of the run."""
    return asyncio.run(_accept(hosts, options, timeout_s or limit_s(options)))


async def _accept(hosts: SshHosts, options: Options, timeout_s: float) -> dict[str, Any]:
    link = launch.open_link(hosts, limit_s=timeout_s)
    found = await launch.ask_capabilities(hosts.hosts, link)
    missing = _missing(found, options)
    if missing:
        return incomplete(options, missing, world=len(hosts.hosts))
    ready = {name: one for name, one in found.items() if isinstance(one, Capabilities)}
    jobs = plan(hosts.hosts, ready, options)
    outcomes = await launch.run_together(jobs, link, timeout_s=timeout_s)
    return judge_outcomes(options, [host.name for host, _ in jobs], outcomes, per_node=len(jobs[0][1]))


def plan(
    hosts: Sequence[SshHost], ready: Mapping[str, Capabilities], options: Options
) -> list[tuple[SshHost, list[Program]]]:
    """The programs of every node: the same number of ranks on each, in torchrun's variables."""
    gpus = 0 if options.backend == "gloo" else min(one.gpus for one in ready.values())
    per_node = options.processes or gpus or 1
    first = ready[hosts[0].name]
    master = (hosts[0].address or first.address or hosts[0].host, first.ports[0])
    # Files of this machine mean nothing on a node.
    given = [*words(replace(options, processes=None, baselines=None, log_dir=None)), "--out", "-"]
    return [
        (
            host,
            [
                Program(
                    module=MODULE,
                    words=given,
                    env=launch.environment(
                        rank=node * per_node + local, world=len(hosts) * per_node, local_rank=local,
                        local_world=per_node, node=node, nodes=len(hosts), master=master,
                    ),
                )
                for local in range(per_node)
            ],
        )
        for node, host in enumerate(hosts)
    ]  # fmt: skip


def judge_outcomes(
    options: Options, names: Sequence[str], outcomes: Sequence[Outcome], *, per_node: int
) -> dict[str, Any]:
    """Rank 0's document; without one, the ranks that ended badly by name."""
    first = outcomes[0][0] if isinstance(outcomes[0], Sequence) else None
    documents = find_documents(first.out) if first is not None else []
    document = documents[0] if len(documents) == 1 else None
    world = len(names) * per_node
    if document is not None and first is not None and is_whole(document, world=world, code=first.code):
        return compare_golden(document, options)
    findings = [] if document is None else [not_whole(document, world=world)]
    for number, outcome in enumerate(outcomes):
        if not isinstance(outcome, Sequence):
            reason = outcome.reason if isinstance(outcome, NodeUnavailable) else "cut off after rank 0 had ended"
            findings.append(error(f"{names[number]}: {reason}", action="log in and look at it", device=names[number]))
            continue
        for local, ran in enumerate(outcome):
            if ran.code != 0 and not judge_peer(ran):
                rank = number * per_node + local
                why = f"rank {rank} on {names[number]} ended with {ran.code}: {launch.last_line(ran.err)}"
                findings.append(judge.judge_end(why, device=f"rank{rank}"))
    checks = [CheckResult(check="accept_ranks", findings=tuple(findings), took_s=0.0)]
    overall = judge_overall(checks, planned=judge.CHECKS)
    return results.build_lost(options, checks, overall, world=world)


def is_whole(document: Mapping[str, Any], *, world: int, code: int | None) -> bool:
    """Whether the document is of all ranks, and its program ended as it says."""
    return (document.get("world_size"), document.get("exit_code")) == (world, code)


def not_whole(document: Mapping[str, Any], *, world: int) -> Finding:
    """A result that counts other ranks than were started, or whose program ended otherwise than it says."""
    told = f"{document.get('overall')!r:.40} of {document.get('world_size')!r:.40} ranks"
    reason = f"{world} ranks were started, and the result is {told}; its program ended otherwise, or it is of fewer"
    return error(reason, action="see which ranks took part: `ranks` in results.json; run again")


def judge_peer(ran: ProgramResult) -> bool:
    """Whether a rank ended because another one did."""
    return any(word in ran.err for word in ("Connection closed by peer", "Connection reset by peer"))


def find_documents(text: str) -> list[dict[str, Any]]:
    """Documents among the lines that ranks printed: one, of rank 0, where they have met."""
    return [found for line in text.splitlines() if (found := _parse(line)) is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "overall" in found and "checks" in found else None


def _missing(found: Mapping[str, Capabilities | NodeUnavailable], options: Options) -> dict[str, tuple[str, str]]:
    """Reason and action for every node that cannot take part."""
    wrong: dict[str, tuple[str, str]] = {}
    wants_gpus = options.backend != "gloo" and any(isinstance(one, Capabilities) and one.gpus for one in found.values())
    for name, one in found.items():
        if isinstance(one, NodeUnavailable):
            wrong[name] = (one.reason, one.action)
        elif one.torch is None:
            wrong[name] = (one.why, "install torch for its Python")
        elif wants_gpus and not one.gpus:
            wrong[name] = ("its torch sees no GPU, while other nodes have some", "install torch with CUDA on it")
        elif not one.ports:
            wrong[name] = ("no free port from 20000 to 29999", "list its listeners: ss -ltn")
    if not wrong and wants_gpus and options.processes is None:
        wrong |= find_unequal({name: one.gpus for name, one in found.items() if isinstance(one, Capabilities)})
    return wrong


def find_unequal(gpus: Mapping[str, int]) -> dict[str, tuple[str, str]]:
    """Reason and action for every node with fewer GPUs than others: with as many ranks everywhere, GPUs of the others
    would not be measured."""
    most = max(gpus.values(), default=0)
    action = "find the missing GPUs, or state the GPUs to use of every node with --processes"
    return {
        name: (f"{count} GPUs, while other nodes have {most}", action) for name, count in gpus.items() if count < most
    }


def incomplete(options: Options, missing: Mapping[str, tuple[str, str]], *, world: int) -> dict[str, Any]:
    """The document of a run that could not begin."""
    findings = tuple(error(f"{name}: {why}", action=act, device=name) for name, (why, act) in missing.items())
    checks = [CheckResult(check="accept_ranks", findings=findings, took_s=0.0)]
    return results.build_lost(options, checks, judge_overall(checks, planned=judge.CHECKS), world=world)


def compare_golden(document: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """The document with the verdict of this site's golden run: nodes do not have its file."""
    if options.baselines is None or "ranks" not in document:
        return dict(document)
    now = baselines.figures_of(document, name="this run")
    golden = baselines.newest(baselines.load_golden(Path(options.baselines)), now.key)
    if golden is None:
        return dict(document)
    checks = {one["check"]: schema.build(CheckResult, one) for one in document["checks"]}
    hosts = {one["gpu"] or f"rank{one['rank']}": (f"rank{one['rank']}", one["host"]) for one in document["ranks"]}
    findings = judge.judge_golden(golden, now, hosts)
    checks["accept_regression"] = CheckResult(check="accept_regression", findings=tuple(findings), took_s=0.0)
    shipped = (document["baseline"] or {}).get("judges", False)
    if not shipped and options.min_throughput is None:
        found = judge.against_golden(golden, now.samples_per_s, {})
        checks["accept_throughput"] = CheckResult(check="accept_throughput", findings=(found,), took_s=0.0)
    overall = judge_overall(list(checks.values()), planned=judge.CHECKS)
    ours = {"samples_per_s": golden.samples_per_s, "source": golden.source, "judges": True}
    return {
        **document, "overall": str(overall), "exit_code": exit_code(overall),
        "checks": [schema.to_plain(one) for one in checks.values()],
        "baseline": document["baseline"] if shipped else ours,
    }  # fmt: skip


def limit_s(options: Options) -> float:
    """The longest time of a run, with its start."""
    return START_S + (options.duration_s or 0.0) * options.repeats + options.timeout_s


async def run_job(
    target: Target, submission: Submission, options: Options, *, world: int, action: str, poll_s: float = 1.0
) -> dict[str, Any]:
    """The document of the run. What was created is ended and deleted, also where this is cancelled."""
    handle = submission.handle
    # A request that is under way cannot be taken back: it is waited for, so that nothing is left behind.
    creating = asyncio.ensure_future(target.submit(submission))
    try:
        handle = await asyncio.shield(creating)
        poll = await _wait(target, handle, limit_s(options), poll_s)
        log = await _read(target, handle, rank_log(0))
        raw = await _read(target, handle, EXIT_FILE)
    finally:
        await asyncio.gather(creating, return_exceptions=True)
        await target.release(handle)
    record = ExitRecord.read(raw, attempt=str(handle["attempt"])) if raw else None
    code = record.exit_codes.get("0") if record is not None else None
    documents = find_documents(log.decode(errors="replace"))
    if len(documents) == 1 and is_whole(documents[0], world=world, code=code):
        return compare_golden(documents[0], options)
    found = not_whole(documents[0], world=world) if documents else judge_poll(poll, limit_s(options), action=action)
    checks = [CheckResult(check="accept_ranks", findings=(found,), took_s=0.0)]
    return results.build_lost(options, checks, judge_overall(checks, planned=judge.CHECKS), world=world)


def judge_poll(poll: Poll, within_s: float, *, action: str) -> Finding:
    """A run without a result. A rank that failed is a FAIL; machines that never ran or were lost say nothing."""
    if poll.state is TargetState.FAILED and poll.exit is not None and poll.exit.exit_codes:
        codes = poll.exit.exit_codes
        rank = next((rank for rank, code in codes.items() if code != 0), "0")
        return judge.judge_end(poll.exit.message[:600], device=f"rank{rank}")
    if poll.state.over:
        reason = f"it ended as {poll.state} without a result: {poll.note}"
    else:
        reason = f"no result in {within_s:.0f} s; it is {poll.state}: {poll.note}"
    return error(reason, action=action)


async def _wait(target: Target, handle: Handle, within_s: float, poll_s: float) -> Poll:
    end = time.monotonic() + within_s
    while True:
        poll = await target.poll(handle)
        if poll.state.over or time.monotonic() > end:
            return poll
        await asyncio.sleep(poll_s)


async def _read(target: Target, handle: Handle, stream: str) -> bytes:
    found = b""
    while block := await target.read(handle, stream, offset=len(found), limit=_BLOCK):
        found += block
    return found
