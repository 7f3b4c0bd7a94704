"""Hosts of a SageMaker training job, read from its variables, with defaults for those that are not set.

SM_HOSTS is a JSON list; unset, the job is SM_CURRENT_HOST alone. SM_CURRENT_HOST unset is the only host of the list.
SM_MASTER_ADDR and SM_MASTER_PORT unset are the first host and the port of SageMaker's own launcher. What contradicts
itself, or leaves open which of several hosts this is, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from trainmaster.core.errors import UsageError

PORT = 7777  # of SageMaker's own torchrun launcher
NAMES = ("SM_HOSTS", "SM_CURRENT_HOST", "SM_MASTER_ADDR")


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerHosts:
    """All hosts in order, this one, and the rendezvous."""

    hosts: tuple[str, ...]
    here: str
    master_addr: str
    master_port: int

    @property
    def index(self) -> int:
        return self.hosts.index(self.here)


def read_hosts(env: Mapping[str, str]) -> SageMakerHosts:
    """The hosts of this environment; outside of SageMaker this machine alone. UsageError if it contradicts itself."""
    hosts, here, master = list_hosts(env), env.get("SM_CURRENT_HOST"), env.get("SM_MASTER_ADDR")
    if not hosts:
        if here and master and master not in (here, "localhost", "127.0.0.1"):
            raise UsageError(f"SM_HOSTS is not set, but SM_MASTER_ADDR={master} is another host than {here}")
        hosts = (here or "localhost",)
    if not here:
        if len(hosts) > 1:
            raise UsageError(f"SM_HOSTS={','.join(hosts)} are several hosts, but SM_CURRENT_HOST is not set")
        here = hosts[0]
    if hosts.count(here) != 1:
        raise UsageError(f"SM_CURRENT_HOST={here} is not once in SM_HOSTS={','.join(hosts)}")
    return SageMakerHosts(hosts=hosts, here=here, master_addr=master or hosts[0], master_port=read_port(env))


def list_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """The hosts of SM_HOSTS; none where it is not set."""
    text = env.get("SM_HOSTS")
    if not text:
        return ()
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(host, str) and host for host in hosts):
        raise UsageError(f"SM_HOSTS={text[:200]} is not a JSON list of names")
    return tuple(hosts)


def read_port(env: Mapping[str, str]) -> int:
    """The port of the rendezvous."""
    text = env.get("SM_MASTER_PORT") or str(PORT)
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:6]) < 1 << 16:
        raise UsageError(f"SM_MASTER_PORT={text[:40]} is not a port")
    return int(text)
