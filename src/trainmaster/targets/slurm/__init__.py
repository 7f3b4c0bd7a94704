"""Target `slurm`: attempts run as Slurm jobs, one agent per node, through sbatch, squeue, sacct, scancel and scontrol.

`slurm` uses the commands of this machine; `slurm:cluster.yaml` a cluster file, which may name a login node to reach
over SSH; `slurm:lab` the file lab.yaml in the folder of TRAINMASTER_HOSTS.

settings.py   the cluster file                  queue.py       one listing for all jobs
target.py     the target                        outcome.py     how an attempt stands and how it ended
queue_options.py  `queue:` as options of sbatch
script.py     the batch script                  remote/slurm/  what runs on the login node and the compute nodes
drain.py      nodes out of service and back
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.core.errors import UsageError
from trainmaster.targets._queueing import MAX_WAIT
from trainmaster.targets._traits import FOLDER_VARIABLE, Account, Traits, is_name

if TYPE_CHECKING:
    from trainmaster.targets._drain import Scheduler
    from trainmaster.targets.slurm.target import Slurm

_CLUSTER = re.compile(r"^(ClusterName|SlurmctldHost\[0\])\s*=\s*(\S+)", re.MULTILINE)
TRAITS = Traits(
    title="jobs of a Slurm cluster",
    option="name_or_file",
    example="cluster.yaml",
    starts="`{login: {host: login-1, user: alice}, folder: /shared/trainmaster}` (docs/guides/slurm.md)",
    nodes=True,
    drains=True,
    queue={
        "name": "sbatch --qos; the partition is slurm.partition",
        "priority": "sbatch --nice, --qos or --priority, as `priorities:` of the cluster file states it",
        "preemptible": "sbatch --requeue; it saves when Slurm preempts it, and goes back into the queue by itself",
        "max_wait_s": MAX_WAIT,
    },
    accounts="UNIX-USER",
    spares="so many more nodes are in the job; a lost node does not end it (sbatch --no-kill)",
)


def create(options: str, *, user: str | None = None) -> Slurm:
    """The target of a cluster file, or of the commands of this machine; `user` submits on the login node."""
    from trainmaster.targets.slurm.settings import SlurmSettings, read_settings, with_user
    from trainmaster.targets.slurm.target import Slurm

    if not options:
        return Slurm(with_user(SlurmSettings(), user))
    if not is_name(options):
        return Slurm(with_user(read_settings(Path(options)), user))
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise UsageError(
            f"target: slurm:{options} is a file of {FOLDER_VARIABLE}, which is not set; write slurm or slurm:FILE.yaml"
        )
    return Slurm(with_user(read_settings(Path(folder) / f"{options}.yaml"), user))


def runs_as(options: str, user: str | None) -> Account:
    """The user that submits: on the login node, or the server's own."""
    from trainmaster.targets.ssh.hosts import describe_account

    login = create(options, user=user).settings.login
    if login is None:
        return Account(name="", server="sbatch runs here, as the user of the server; write `login:` in a cluster file")
    return describe_account([login])


async def identify(options: str, user: str | None) -> dict[str, str]:
    """What the login node says it is and who logged in; and the same user on all of its cluster's login nodes."""
    from trainmaster.targets.ssh.hosts import place_of, read_known_hosts
    from trainmaster.targets.ssh.identity import ask

    settings = create(options, user=user).settings
    login, known = settings.login, settings.known_hosts
    if login is None or known is None:
        raise UsageError("slurm: it has no login node; write `login:` in a cluster file")
    program = f"{settings.commands}/scontrol" if settings.commands else "scontrol"
    answer = await ask(login, read_known_hosts(known), words=[program, "show", "config"], env=dict(settings.env))
    facts = dict(_CLUSTER.findall(answer.said))
    if len(facts) != 2:
        raise UsageError(f"{login.name}: scontrol does not say which cluster it is; check `commands:` and `env:`")
    cluster = "@".join(facts[name] for name in sorted(facts))
    return {place_of(login): answer.text, "cluster": f"slurm {cluster}/{answer.uid}"}


def create_scheduler(options: str) -> Scheduler:
    """scontrol: of the cluster file's login node, or of this machine."""
    from trainmaster.targets.slurm.drain import SlurmScheduler

    return SlurmScheduler(create(options).settings if options else None)
