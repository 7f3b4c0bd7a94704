"""SSH connections: host keys, timeouts, and an error message with a remedy for every refusal.

A host key is always checked against known_hosts. An unknown or changed key is refused, and the message holds the
command that shows its fingerprint. No key is ever added automatically.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from trainmaster.core.errors import MissingExtra, NodeUnavailable
from trainmaster.targets.ssh.hosts import SshHost

if TYPE_CHECKING:
    import asyncssh


CONNECT_TIMEOUT_S = 15.0
# A host that loses power or its cable sends nothing. Three unanswered keepalives end the connection after 15 to 20 s.
KEEPALIVE_S = 5.0
KEEPALIVES_LOST = 3
# First of the usual list: through OpenSSL twice as fast in this process as ChaCha20 (250 against 136 MB/s).
CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"


class LoginRefused(NodeUnavailable):
    """The server answers and refuses the user or the key."""


class NoPython(NodeUnavailable):
    """There is no Python that will do."""


class NoAnswer(NodeUnavailable):
    """No SSH server answered in time."""


@contextlib.asynccontextmanager
async def connect(
    host: SshHost, known_hosts: bytes, *, timeout_s: float
) -> AsyncIterator[asyncssh.SSHClientConnection]:
    """A connection to a host with a known key, or NodeUnavailable. Leaving the context never waits."""
    async with contextlib.AsyncExitStack() as stack:
        tunnel = None
        if host.jump is not None:
            tunnel = await stack.enter_async_context(connect(_jump(host), known_hosts, timeout_s=timeout_s))
        connection = await _connect(host, known_hosts, tunnel, timeout_s=timeout_s)
        # close() waits for the peer, which may hang; abort() does not.
        stack.callback(connection.abort)
        yield connection


def _jump(host: SshHost) -> SshHost:
    """The machine that a host is reached through; it takes the same key."""
    assert host.jump is not None
    user, _, place = host.jump.rpartition("@")
    name, _, port = place.partition(":")
    return SshHost(host=name, name=name, port=int(port) if port else None, user=user or host.user, key=host.key)


async def _connect(
    host: SshHost, known_hosts: bytes, tunnel: asyncssh.SSHClientConnection | None, *, timeout_s: float
) -> asyncssh.SSHClientConnection:
    library = load()
    try:
        connection: asyncssh.SSHClientConnection = await library.connect(
            host.host,
            tunnel=tunnel or (),
            **{name: value for name, value in (("port", host.port), ("username", host.user)) if value is not None},
            # An object, never None: asyncssh takes None as "trust every host".
            known_hosts=library.import_known_hosts(known_hosts.decode("utf-8", errors="replace")),
            **({"client_keys": [host.key]} if host.key else {}),
            preferred_auth="publickey",  # a password prompt would wait for ever
            encryption_algs=CIPHERS,
            connect_timeout=timeout_s,
            keepalive_interval=KEEPALIVE_S,
            keepalive_count_max=KEEPALIVES_LOST,
        )
    except Exception as error:
        raise explain(error, host, known_hosts, timeout_s=timeout_s) from None
    return connection


def load() -> Any:
    try:
        import asyncssh
    except ImportError:
        raise MissingExtra("SSH", "ssh") from None
    return asyncssh


def explain(error: Exception, host: SshHost, known_hosts: bytes, *, timeout_s: float) -> NodeUnavailable:
    """Reason and action for an exception of connecting."""
    asyncssh = load()
    at, login = f"{host.host} port {host.port or 22}", _login(host)
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return _untrusted(host, known_hosts, str(error))
    if isinstance(error, asyncssh.PermissionDenied):
        keys = host.key or "the agent or ~/.ssh"
        reason = f"it refuses user {host.user or 'of this session'} with the key of {keys}"
        action = f"add the public key to its ~/.ssh/authorized_keys, then try: {login} true"
        return LoginRefused(reason, action=action)
    if isinstance(error, (asyncssh.KeyImportError, asyncssh.KeyEncryptionError)) or _names_key(error, host):
        action = "give a readable private key file; load a key with a passphrase into the SSH agent (ssh-add)"
        return NodeUnavailable(f"the key {host.key or 'of ~/.ssh'} cannot be used: {str(error)[:200]}", action=action)
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        action = f"check its power and network; then try: {login} true"
        return NoAnswer(f"no SSH server answered at {at} in {timeout_s:.3g} s", action=action)
    if isinstance(error, socket.gaierror):
        return NodeUnavailable(f"the name {host.host} does not resolve", action="correct the hosts file or DNS")
    if isinstance(error, ConnectionRefusedError):
        return NodeUnavailable(f"nothing listens at {at}", action="start sshd there, or correct its port")
    if isinstance(error, OSError):
        action = f"check its power and network; then try: {login} true"
        return NodeUnavailable(f"{at} cannot be reached: {error.strerror or error}", action=action)
    reason = f"the SSH connection to {at} failed: {type(error).__name__}: {str(error)[:200]}"
    return NodeUnavailable(reason, action=f"try: {login} true")


def _untrusted(host: SshHost, known_hosts: bytes, message: str) -> NodeUnavailable:
    known = load().match_known_hosts(known_hosts, host.host, "", host.port)
    scan = f"ssh-keyscan -p {host.port or 22} {shlex.quote(host.host)}"
    show = f"{scan} | ssh-keygen -lf -"
    if any(known[:3]):
        reason = (
            f"its host key is not the one in known_hosts: another machine answers, or it was reinstalled ({message})"
        )
        name = f"[{host.host}]:{host.port}" if host.port not in (None, 22) else host.host
        action = (
            f"compare the fingerprint with the machine's own ({show}); only if they are equal, remove the old key with "
            f"`ssh-keygen -R {shlex.quote(name)}` and add the line of `{scan}` to known_hosts"
        )
        return NodeUnavailable(reason, action=action)
    action = f"compare the fingerprint with the machine's own ({show}), then add the line of `{scan}` to known_hosts"
    return NodeUnavailable("its host key is not in known_hosts, so its identity is unproven", action=action)


def _login(host: SshHost) -> str:
    """The equivalent ssh command, for the user to try."""
    words = ["ssh", *(["-p", str(host.port)] if host.port else []), *(["-i", host.key] if host.key else [])]
    return shlex.join([*words, f"{host.user}@{host.host}" if host.user else host.host])


def _names_key(error: Exception, host: SshHost) -> bool:
    """Whether the exception is an OSError about the key file, which asyncssh reads itself."""
    return isinstance(error, OSError) and host.key is not None and str(error.filename or "") == host.key


async def read_host_key(address: str, port: int | None) -> str:
    """A known_hosts line for the machine at this address; NodeUnavailable while no SSH server answers there.

    Nothing can vouch for the key of a machine that was rented a moment ago; what is pinned is that it stays the same.
    """
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
