"""First contact with a machine that was rented a moment ago: its host key is read and pinned from then on.

Nothing can vouch for the key of a machine that did not exist before; what is pinned is that it stays the same.
"""

from __future__ import annotations

from trainmaster.core.errors import NodeUnavailable
from trainmaster.targets.ssh.connect import CONNECT_TIMEOUT_S, explain, load
from trainmaster.targets.ssh.hosts import SshHost


async def read_host_key(address: str, port: int | None) -> str:
    """A known_hosts line for the machine at this address; NodeUnavailable while no SSH server answers there."""
    library = load()
    try:
        options = library.SSHClientConnectionOptions(
            config=None, known_hosts=None, connect_timeout=CONNECT_TIMEOUT_S, login_timeout=CONNECT_TIMEOUT_S
        )
        key = await library.get_server_host_key(address, port or 22, options=options)
    except Exception as error:
        raise explain(error, SshHost(host=address, port=port), b"", timeout_s=CONNECT_TIMEOUT_S) from None
    if key is None:
        raise NodeUnavailable(f"{address} has no host key", action="wait until its SSH server is up")
    place = address if port in (None, 22) else f"[{address}]:{port}"
    return f"{place} {key.export_public_key('openssh').decode().strip()}\n"
