"""Acceptance training on the nodes of a Slurm cluster: one `srun` over all of them, one rank per GPU.

The ranks find their numbers in Slurm's variables. A node that is down, drained or in use makes the run INCOMPLETE: the
cluster is accepted whole, or by a cluster file that names the nodes.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainmaster import targets
from trainmaster.bench.accept import judge, results
from trainmaster.bench.accept.options import Options, words
from trainmaster.cluster.acceptance import (
    MODULE,
    compare_golden,
    find_documents,
    find_unequal,
    incomplete,
    is_whole,
    limit_s,
    not_whole,
)
from trainmaster.cluster.slurm_nodes import FREE_S, SlurmNode, SlurmNodes
from trainmaster.cluster.termination import run
from trainmaster.core.errors import TargetError
from trainmaster.core.results import CheckResult, error, judge_overall
from trainmaster.targets.slurm.queue import queue
from trainmaster.targets.slurm.target import node_half


def accept(cluster: SlurmNodes, options: Options) -> dict[str, Any]:
    """Train on all nodes; the document of the run. Ctrl-C and SIGTERM end the Slurm job too."""
    return run(_accept(cluster, options))


async def _accept(cluster: SlurmNodes, options: Options) -> dict[str, Any]:
    gpus = {node.name: count_gpus(node) for node in cluster.nodes}
    if options.processes is None and options.backend != "gloo" and (unequal := find_unequal(gpus)):
        return incomplete(options, unequal, world=len(gpus))
    per_node = options.processes or min(gpus.values()) or 1
    world = per_node * len(cluster.nodes)
    limit = limit_s(options)
    name, where = f"gpu-acceptance-{secrets.token_hex(6)}", queue(cluster.settings)
    try:
        prepared, _ = await where.ask("prepare", package=node_half(cluster.settings))
        package = str(prepared["package"])
        command = plan(cluster, options, name=name, per_node=per_node, package=package, limit_s=limit)
        result, body = await where.ask("run", words=command, timeout_s=limit + FREE_S + 30)
    except BaseException:
        # srun is dead by now, its job is not: it would hold all nodes until its time limit.
        with contextlib.suppress(TargetError):
            await where.ask("run", words=["scancel", "--quiet", f"--name={name}"], timeout_s=60.0)
        raise
    finally:
        await targets.close()
    documents, code = find_documents(body.decode(errors="replace")), result.get("code")
    if len(documents) == 1 and ended_as_told(documents[0], world=world, code=code):
        return compare_golden(documents[0], options)
    said = " ".join(str(result.get("error", "")).split())[-600:] or "nothing was printed"
    found = error(
        f"srun ended with {code} and no result: {said}",
        action="see `sinfo` for nodes that are down or in use; a cluster file can name the nodes",
    )
    if documents:
        found = not_whole(documents[0], world=world)
    checks = [CheckResult(check="accept_ranks", findings=(found,), took_s=0.0)]
    return results.build_lost(options, checks, judge_overall(checks, planned=judge.CHECKS), world=world)


def ended_as_told(document: Mapping[str, Any], *, world: int, code: int | None) -> bool:
    """As `is_whole`, by the code of srun: the highest of all tasks. Where the verdict is no 0, the first rank that ends
    with it has srun kill the others, whose signal counts for more; a verdict of 0 needs 0 of all."""
    told = document.get("exit_code")
    return is_whole(document, world=world, code=told if told and code else code)


def plan(cluster: SlurmNodes, options: Options, *, name: str, per_node: int, package: str, limit_s: float) -> list[str]:
    """The command line of the run."""
    nodes, settings = cluster.nodes, cluster.settings
    found = [
        "srun", f"--nodelist={','.join(node.name for node in nodes)}", f"--nodes={len(nodes)}",
        f"--ntasks={per_node * len(nodes)}", f"--ntasks-per-node={per_node}", f"--job-name={name}",
        f"--time={int(limit_s // 60) + 2}", f"--immediate={FREE_S}", "--exclusive", "--cpu-bind=none",
        "--quit-on-interrupt", "--kill-on-bad-exit=1",
    ]  # fmt: skip
    found += [f"--gres={nodes[0].gpus}"] if nodes[0].gpus and len({node.gpus for node in nodes}) == 1 else []
    for option in ("partition", "account", "qos"):
        if (value := getattr(settings.defaults, option)) is not None:
            found.append(f"--{option}={value}")
    given = words(replace(options, processes=None, baselines=None, log_dir=None))
    # Names of Slurm's nodes need not resolve; NodeAddr is where Slurm itself reaches them.
    master = nodes[0].address if "MASTER_ADDR" not in dict(settings.env) else ""
    program = ["env", f"PYTHONPATH={package}", "PYTHONSAFEPATH=1", *([f"MASTER_ADDR={master}"] if master else [])]
    program += [settings.python, "-m", MODULE]
    return [*found, *program, *given, "--out", "-"]


def count_gpus(node: SlurmNode) -> int:
    """GPUs of a node's GRES: `gpu:h100:8` is 8."""
    return sum(int(count) for count in re.findall(r":(\d+)(?:,|$)", node.gpus))
