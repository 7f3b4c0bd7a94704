"""SSH connections: whom we trust, how long we wait, and what each refusal means in words.

A machine's key is always checked against known_hosts. One that is unknown or has changed is refused, and the message
holds the command that shows its fingerprint; nothing here ever adds a key by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from trainmaster.cluster.hosts import SshHost
from trainmaster.core.errors import MissingExtra, Unreachable

if TYPE_CHECKING:
    import asyncssh

CONNECT_TIMEOUT_S = 15.0
# A machine that vanishes (power, cable) says nothing. Three unanswered questions: gone, after 15 to 20 s.
KEEPALIVE_S = 5.0
KEEPALIVES_LOST = 3


class CannotAsk(Unreachable):
    """A machine that could not be asked: why, and the one thing to do."""

    def __init__(self, reason: str, *, action: str) -> None:
        super().__init__(f"{reason}; {action}")
        self.reason = reason
        self.action = action


@contextlib.asynccontextmanager
async def connect(
    host: SshHost, known_hosts: bytes, *, timeout_s: float
) -> AsyncIterator[asyncssh.SSHClientConnection]:
    """A connection to a machine whose key is known; CannotAsk where there can be none. Leaving it never waits."""
    asyncssh = load()
    try:
        connection = await asyncssh.connect(
            host.host,
            **{name: value for name, value in (("port", host.port), ("username", host.user)) if value is not None},
            # An object, never None: to asyncssh None means "trust everybody".
            known_hosts=asyncssh.import_known_hosts(known_hosts.decode("utf-8", errors="replace")),
            **({"client_keys": [host.key]} if host.key else {}),
            preferred_auth="publickey",  # a prompt for a password would wait for ever
            connect_timeout=timeout_s,
            keepalive_interval=KEEPALIVE_S,
            keepalive_count_max=KEEPALIVES_LOST,
        )
    except Exception as wrong:
        raise explain(wrong, host, known_hosts, timeout_s=timeout_s) from None
    try:
        yield connection
    finally:
        # A polite close waits for the other side, which may hang; abort does not.
        connection.abort()


def load() -> Any:
    try:
        import asyncssh
    except ImportError:
        raise MissingExtra("SSH", "ssh") from None
    return asyncssh


def explain(wrong: Exception, host: SshHost, known_hosts: bytes, *, timeout_s: float) -> CannotAsk:
    """A refusal in our words. Foreign ones are kept where they say more than we know."""
    asyncssh = load()
    at, login = f"{host.host} port {host.port or 22}", _login(host)
    if isinstance(wrong, asyncssh.HostKeyNotVerifiable):
        return _untrusted(host, known_hosts, str(wrong))
    if isinstance(wrong, asyncssh.PermissionDenied):
        keys = host.key or "the agent or ~/.ssh"
        reason = f"it refuses user {host.user or 'of this session'} with the key of {keys}"
        return CannotAsk(reason, action=f"put the public key into its ~/.ssh/authorized_keys, then try: {login} true")
    if isinstance(wrong, (asyncssh.KeyImportError, asyncssh.KeyEncryptionError)) or _names_key(wrong, host):
        action = "name a private key that can be read; one with a passphrase belongs into the SSH agent (ssh-add)"
        return CannotAsk(f"the key {host.key or 'of ~/.ssh'} cannot be used: {str(wrong)[:200]}", action=action)
    if isinstance(wrong, (TimeoutError, asyncio.TimeoutError)):
        action = f"look at its power and network; then try: {login} true"
        return CannotAsk(f"no SSH server answered at {at} in {timeout_s:.3g} s", action=action)
    if isinstance(wrong, socket.gaierror):
        return CannotAsk(f"the name {host.host} does not resolve", action="mend the name in the hosts file, or DNS")
    if isinstance(wrong, ConnectionRefusedError):
        return CannotAsk(f"nothing listens at {at}", action="start sshd there, or mend its port in the hosts file")
    if isinstance(wrong, OSError):
        action = f"look at its power and network; then try: {login} true"
        return CannotAsk(f"{at} cannot be reached: {wrong.strerror or wrong}", action=action)
    reason = f"the SSH connection to {at} failed: {type(wrong).__name__}: {str(wrong)[:200]}"
    return CannotAsk(reason, action=f"see what this says: {login} true")


def _untrusted(host: SshHost, known_hosts: bytes, said: str) -> CannotAsk:
    known = load().match_known_hosts(known_hosts, host.host, "", host.port)
    scan = f"ssh-keyscan -p {host.port or 22} {shlex.quote(host.host)}"
    show = f"{scan} | ssh-keygen -lf -"
    if any(known[:3]):
        reason = (
            f"its host key is not the one in known_hosts: another machine answers, or it was installed anew ({said})"
        )
        return CannotAsk(reason, action=f"compare the fingerprint with the machine's own before you trust it: {show}")
    action = f"compare the fingerprint with the machine's own ({show}), then add the line of `{scan}` to known_hosts"
    return CannotAsk("its host key is not in known_hosts, so nobody knows that it is this machine", action=action)


def _login(host: SshHost) -> str:
    """The same connection for a person to try."""
    words = ["ssh", *(["-p", str(host.port)] if host.port else []), *(["-i", host.key] if host.key else [])]
    return shlex.join([*words, f"{host.user}@{host.host}" if host.user else host.host])


def _names_key(wrong: Exception, host: SshHost) -> bool:
    """asyncssh reads the key file itself: its absence is an OSError that names it."""
    return isinstance(wrong, OSError) and host.key is not None and str(wrong.filename or "") == host.key
