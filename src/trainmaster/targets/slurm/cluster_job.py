"""A program on all nodes of a Slurm cluster: one `srun` over all of them, a task per rank.

The ranks find their numbers in Slurm's variables. A node that is down, drained or in use makes srun fail: the cluster
is measured whole, or by a cluster file that names the nodes.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainmaster import targets
from trainmaster.core.errors import TargetError
from trainmaster.targets import Target
from trainmaster.targets._cluster_job import ClusterJob, ClusterJobEnd, Note, find_unequal
from trainmaster.targets._leftovers import remove_leftovers
from trainmaster.targets._runs import Owner, Run
from trainmaster.targets.slurm.node_list import FREE_S, SlurmNode, count_gpus, list_nodes, options
from trainmaster.targets.slurm.nodes import STEP, cancel, prepare, python_words
from trainmaster.targets.slurm.queue import queue
from trainmaster.targets.slurm.settings import SlurmSettings, node_half

_START_S = 30.0  # for srun itself, beside its program


class SlurmClusterJob:
    """One srun over all nodes."""

    def __init__(
        self, target: Target, settings: SlurmSettings, nodes: Sequence[SlurmNode], job: ClusterJob, *, home: Path
    ) -> None:
        self._target, self._settings, self._nodes, self._job, self._home = target, settings, nodes, job, home
        gpus = {node.name: count_gpus(node) for node in nodes}
        self.missing: Mapping[str, tuple[str, str]] = (
            find_unequal(gpus) if job.processes is None and job.uses_gpus else {}
        )
        self._per_node = job.processes or min(gpus.values()) or 1
        self.world = len(nodes) * (1 if self.missing else self._per_node)

    def render(self) -> str:
        owner = Owner(home="HOME", run="RUN")
        return shlex.join(self.command(name=self._job.app, owner=owner, package=node_half(self._settings))) + "\n"

    async def run(self, on_note: Note) -> ClusterJobEnd:  # noqa: ARG002 (nothing to keep)
        run, where = Run(self._home), queue(self._settings)
        name = f"{self._job.app}-{secrets.token_hex(6)}"
        try:
            await remove_leftovers(self._target, self._home)
            command = self.command(name=name, owner=run.owner, package=await prepare(where, self._settings))
            result, body = await where.request("run", words=command, timeout_s=self._job.limit_s + FREE_S + _START_S)
        except BaseException:
            # srun is dead by now, its job is not: it would hold all nodes until its time limit.
            with contextlib.suppress(TargetError):
                await cancel(where, f"--name={name}")
            raise
        finally:
            run.close()
            await targets.close()
        code = result.get("code")
        stderr = " ".join(str(result.get("error", "")).split())[-600:] or "nothing was printed"
        return ClusterJobEnd(
            out=body.decode(errors="replace"),
            code=code,
            highest=True,
            note=f"srun ended with {code} and no result: {stderr}",
            action="see `sinfo` for nodes that are down or in use; a cluster file can name the nodes",
        )

    def command(self, *, name: str, owner: Owner, package: str) -> list[str]:
        """The command line of the run."""
        settings, job = self._settings, self._job
        words = options(self._nodes, settings, name=name, owner=owner, limit_s=job.limit_s, per_node=self._per_node)
        # Names of Slurm's nodes need not resolve; NodeAddr is where Slurm itself reaches them.
        master = self._nodes[0].address if "MASTER_ADDR" not in dict(settings.env) else ""
        python = python_words(settings, package, **({"MASTER_ADDR": master} if master else {}))
        return ["srun", *words, *STEP, *python, "-m", job.module, *job.words]


async def plan(target: Target, settings: SlurmSettings, job: ClusterJob, *, home: Path) -> SlurmClusterJob:
    """The job on the nodes that Slurm lists now."""
    return SlurmClusterJob(target, settings, await list_nodes(queue(settings), settings), job, home=home)
