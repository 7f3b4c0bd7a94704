"""Which cluster a login node belongs to, and which of its users logs in there."""

from __future__ import annotations

import re

from trainmaster.core.errors import UsageError
from trainmaster.targets.slurm.settings import SlurmSettings
from trainmaster.targets.ssh.hosts import place_of, read_known_hosts
from trainmaster.targets.ssh.identity import ask

_CLUSTER = re.compile(r"^(ClusterName|SlurmctldHost\[0\])\s*=\s*(\S+)", re.MULTILINE)


async def identify(settings: SlurmSettings) -> dict[str, str]:
    """Of the login node, and of the cluster, where one user has the same jobs from every login node."""
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
