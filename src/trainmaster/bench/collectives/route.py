"""Which network interface leads to the other ranks. gloo takes the one of the machine's own name, which many a
distribution maps to 127.0.1.1: ranks of several machines then never meet.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import MutableMapping

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def lead_gloo(env: MutableMapping[str, str], address: str) -> None:
    """Have gloo listen where the way to `address` begins; what the user set stays."""
    if "GLOO_SOCKET_IFNAME" not in env and (name := interface_to(address)) is not None:
        env["GLOO_SOCKET_IFNAME"] = name


def interface_to(address: str) -> str | None:
    """The interface by which `address` is reached; None where that cannot be told."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # of UDP, any port: chooses a route and sends nothing
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address_of(probe, name) == own:
                return name
    return None


def _address_of(probe: socket.socket, name: str) -> str | None:
    with contextlib.suppress(OSError):  # one without an address
        reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(reply[20:24])
    return None
