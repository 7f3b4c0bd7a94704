"""Target `ssh:hosts.yaml`: attempts run on machines that are reached over SSH, under an agent that outlives us.

`ssh:lab` names the file lab.yaml in the folder of TRAINMASTER_HOSTS, which is HOME/hosts.

hosts.py     the hosts file                       connect.py    connections, host keys, refusals explained
target.py    the target                           session.py    one connection per host, many requests
channel.py   the bootstrap's process, its lines   slots.py      places of an attempt
transfer.py  files and trees, both ways           data_pipe.py  bulk data over the machine's own ssh
identity.py  which machine and user a login is    combine.py    state of an attempt on several machines
remote/      what runs on the node
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.core.errors import UsageError
from trainmaster.targets._queueing import DRAIN_HERE, NO_NAME, OWN_QUEUE
from trainmaster.targets._traits import FOLDER_VARIABLE, Account, Traits, is_name

if TYPE_CHECKING:
    from trainmaster.targets.ssh.target import Ssh

TRAITS = Traits(
    title="machines of a hosts file, over SSH",
    option="name_or_file",
    example="hosts.yaml",
    starts="`hosts: [{host: 10.0.0.2, user: ubuntu}]` (docs/guides/ssh.md)",
    required=True,
    nodes=True,
    instead={"remedy": f"name the one that runs on these hosts, or {DRAIN_HERE}"},
    accounts="UNIX-USER",
    queue=OWN_QUEUE,
    no_queue=NO_NAME,
    spares="so many more machines of the hosts file hold a slot, are checked, and wait with an agent",
)


def create(options: str, *, user: str | None = None) -> Ssh:
    """The target over the machines of a hosts file; `user` logs in there in place of those that the file names."""
    from trainmaster.targets.ssh.target import Ssh

    if not options:
        raise UsageError("target: write ssh:hosts.yaml, with the path of a hosts file")
    if not is_name(options):
        return Ssh(Path(options), user=user)
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise UsageError(f"target: ssh:{options} is a file of {FOLDER_VARIABLE}, which is not set; write ssh:FILE.yaml")
    return Ssh(Path(folder) / f"{options}.yaml", user=user)


def runs_as(options: str, user: str | None) -> Account:
    """The user that logs in to the machines of the hosts file."""
    from trainmaster.targets.ssh.hosts import describe_account

    return describe_account(create(options, user=user).hosts().hosts)


def charges(options: str, user: str | None) -> bool:
    """Whether machines of the hosts file have a price."""
    return any(host.price_per_hour for host in create(options, user=user).hosts().hosts)


async def identify(options: str, user: str | None) -> dict[str, str]:
    """What every machine of the hosts file says it is, and who logged in."""
    from trainmaster.targets.ssh import identity

    file = create(options, user=user).hosts()
    return await identity.identify(file.hosts, file.known_hosts)
