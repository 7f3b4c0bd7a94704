"""The name of this node: that of the user's list of hosts, where whoever starts the program knows it."""

from __future__ import annotations

import os
import socket

NODE_NAME_VARIABLE = "TRAINMASTER_NODE_NAME"


def host_name() -> str:
    """The name in the list of hosts; else the machine's own."""
    return os.environ.get(NODE_NAME_VARIABLE) or socket.gethostname()
