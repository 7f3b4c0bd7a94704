"""One machine behind a real OpenSSH server, as a session."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from sshd import Lab, Sshd
from trainmaster.targets.ssh.hosts import SshHost
from trainmaster.targets.ssh.session import Session, session


def host_of(made: Lab, one: Sshd) -> SshHost:
    return SshHost(host="127.0.0.1", name=one.name, port=one.port, key=str(made.key), python=sys.executable)


@pytest.fixture
def box(machines: Lab) -> Callable[[], Session]:
    """The session with the first machine, in the running event loop."""
    return lambda: session(host_of(machines, machines.hosts[0]), machines.known_hosts.read_bytes())
