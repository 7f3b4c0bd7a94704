"""This node's name and the names of its peers resolve. A job whose first node cannot be found never starts.

Peers are those the launcher names: MASTER_ADDR, SageMaker's SM_HOSTS, and TRAINMASTER_PEERS (names with commas).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from trainmaster.core.errors import CommandMissing, CommandTimedOut, HostError
from trainmaster.core.expect import Expect
from trainmaster.core.loopback import is_loopback_address, is_loopback_host
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
PEERS_VARIABLE = "TRAINMASTER_PEERS"
ASK_TIMEOUT_S = 15.0  # a resolver tries its servers for 5 s each
NO_TOOL = "there is no getent to ask"
MOST_ASKED = 8  # of a thousand peers; the same servers answer for all
TIMEOUT_S = (MOST_ASKED + 2) * (ASK_TIMEOUT_S + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    name: str
    addresses: tuple[str, ...]  # empty: nobody knows it
    trouble: str | None  # why it could not even be asked
    own: bool


def read(host: Host) -> list[Name]:
    own = host.hostname()
    if not own:
        raise HostError("this machine has no name")
    peers = [name for name in _peers(host) if name != own]
    return [_resolve(host, own, own=True), *(_resolve(host, name, own=False) for name in peers[:MOST_ASKED])]


def judge(names: list[Name], expect: Expect) -> list[Finding]:  # noqa: ARG001 (the launcher names the peers)
    own, *peers = names
    return [_judge_own(own, peers=bool(peers)), *map(_judge_peer, peers)]


def _judge_own(own: Name, *, peers: bool) -> Finding:
    if own.trouble is not None:
        return _unasked(own)
    if not own.addresses:
        action = f"add `127.0.1.1 {own.name}` to /etc/hosts, or the name to your DNS"
        # Alone it costs a warning and a wait in every process that asks; among others they cannot call back.
        return (fail if peers else warn)(f"its own name {own.name} does not resolve", action=action, name=own.name)
    return ok(f"{own.name} is {', '.join(own.addresses)}", name=own.name, addresses=list(own.addresses))


def _judge_peer(peer: Name) -> Finding:
    if peer.trouble is not None:
        return _unasked(peer)
    if not peer.addresses:
        action = "give every node the same /etc/hosts or DNS"
        return fail(f"{peer.name} does not resolve on this node", action=action, device=peer.name)
    loop = [address for address in peer.addresses if is_loopback_address(address)]
    if len(loop) == len(peer.addresses) and not is_loopback_host(peer.name):
        reason = f"{peer.name} is {loop[0]} on this node: it would connect to itself"
        return fail(reason, action=f"take {peer.name} off the loopback line of /etc/hosts", device=peer.name)
    return ok(f"{peer.name} is {', '.join(peer.addresses)}", device=peer.name, addresses=list(peer.addresses))


def _resolve(host: Host, name: str, *, own: bool) -> Name:
    """getent asks as every program does: /etc/hosts, then DNS, in the order of nsswitch.conf."""
    if re.fullmatch(r"[\d.]+|[0-9a-fA-F:]*:[0-9a-fA-F:.]*", name):
        return Name(name=name, addresses=(name,), trouble=None, own=own)  # an address needs no resolver
    try:
        result = host.run("getent", "ahosts", name, timeout_s=ASK_TIMEOUT_S)
    except CommandMissing:
        return Name(name=name, addresses=(), trouble=NO_TOOL, own=own)
    except CommandTimedOut:
        return Name(name=name, addresses=(), trouble=None, own=own)
    if result.exit_code not in (0, 2):  # 2: the name is not known
        return Name(name=name, addresses=(), trouble=f"getent ended with {result.exit_code}", own=own)
    addresses = dict.fromkeys(line.split()[0] for line in result.stdout.splitlines() if line.strip())
    unreadable = [
        text for text in addresses if not re.fullmatch(r"[\d.]{7,15}|[0-9a-fA-F:.%\w]*:[0-9a-fA-F:.%\w]*", text)
    ]
    if unreadable or (addresses and not result.stdout.endswith("\n")):
        why = f"getent gives no whole answer: {(unreadable or list(addresses))[0]!r:.40}"
        return Name(name=name, addresses=(), trouble=why, own=own)
    return Name(name=name, addresses=tuple(addresses), trouble=None, own=own)


def _unasked(name: Name) -> Finding:
    if name.own and name.trouble == NO_TOOL:
        return skip(
            "no resolver to try, and no peer is named", proof=NO_TOOL, name=name.name
        )  # a small container; nothing else was asked of it
    device = None if name.own else name.name
    return error(f"{name.name}: {name.trouble}", action="run `getent ahosts` by hand", device=device)


def _peers(host: Host) -> list[str]:
    names = [host.env("MASTER_ADDR") or "", *(host.env(PEERS_VARIABLE) or "").split(",")]
    try:
        hosts = json.loads(host.env("SM_HOSTS") or "[]")
    except ValueError:
        hosts = []
    names += [name for name in hosts if isinstance(name, str)] if isinstance(hosts, list) else []
    return list(dict.fromkeys(name.strip() for name in names if name.strip()))
