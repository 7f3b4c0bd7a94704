"""Files of an attempt on several nodes under one set of names, and the node that has each of them."""

from __future__ import annotations

import re
from dataclasses import replace

from trainmaster.core.plan import AGENT_LOG, EVENTS_FILE, EXIT_FILE, OUTPUTS_FOLDER, node_file, split_node_file
from trainmaster.targets import FileSize

_RANK_LOG = re.compile(r"rank-([0-9]{1,6})\.log")
_SPARE_LOG = re.compile(r"(rank-[0-9]{1,6})\.node-([1-9][0-9]{0,4})\.log")
_OF_NODE = re.compile(rf"{OUTPUTS_FOLDER}/node-([0-9]{{1,5}})/(.+)", re.DOTALL)
_OWN = (AGENT_LOG, EVENTS_FILE, EXIT_FILE)


def find_stream(stream: str, *, nodes: int, ranks_per_node: int) -> tuple[int, str]:
    """The node that has a stream, and its name there."""
    if nodes > 1 and (inner := _OF_NODE.fullmatch(stream)) and 0 < int(inner[1]) < nodes:
        return int(inner[1]), f"{OUTPUTS_FOLDER}/{inner[2]}"
    if (log := _SPARE_LOG.fullmatch(stream)) and int(log[2]) < nodes:
        return int(log[2]), f"{log[1]}.log"
    node, name = split_node_file(stream)
    if 0 < node < nodes:
        return node, name
    if nodes > 1 and (log := _RANK_LOG.fullmatch(stream)):
        return min(int(log[1]) // ranks_per_node, nodes - 1), stream
    return 0, stream


def rename(file: FileSize, node: int, *, nodes: int | None = None) -> FileSize:
    """Name of a file among those of all nodes: that of a later node has the node's number in it.

    A spare, which is none of the first `nodes`, has logs of ranks that another node has too.
    """
    if node == 0 or (_RANK_LOG.fullmatch(file.name) and (nodes is None or node < nodes)):
        return file
    if log := _RANK_LOG.fullmatch(file.name):
        return replace(file, name=f"rank-{log[1]}.node-{node}.log")
    if file.name in _OWN:
        return replace(file, name=node_file(file.name, node))
    inner = file.name.removeprefix(OUTPUTS_FOLDER)
    return replace(file, name=f"{OUTPUTS_FOLDER}/node-{node}{inner}")
