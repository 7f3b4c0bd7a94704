"""Loopback addresses: traffic to them never leaves this machine."""

from __future__ import annotations

import ipaddress


def is_loopback_address(text: str) -> bool:
    """Whether the text is an IP address of the loopback network (127.0.0.0/8 or ::1). A name never is."""
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def is_loopback_host(host: str) -> bool:
    """Whether a host, as written by a user, is `localhost` or a loopback address. Nothing is resolved."""
    return host == "localhost" or is_loopback_address(host)
