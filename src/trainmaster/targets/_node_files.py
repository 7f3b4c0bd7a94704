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
    if spare := find_spare_log(stream, nodes=nodes):
        return spare
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
    if _RANK_LOG.fullmatch(file.name):
        return replace(file, name=name_spare_log(file.name, node))
    if file.name in _OWN:
        return replace(file, name=node_file(file.name, node))
    inner = file.name.removeprefix(OUTPUTS_FOLDER)
    return replace(file, name=f"{OUTPUTS_FOLDER}/node-{node}{inner}")


def name_spare_log(name: str, node: int) -> str:
    """Name of a rank's log on a spare: the node whose place it took has one too."""
    return f"{name.removesuffix('.log')}.node-{node}.log"


def find_spare_log(stream: str, *, nodes: int) -> tuple[int, str] | None:
    """The spare that has the log of a rank, and its name there; None for other streams."""
    log = _SPARE_LOG.fullmatch(stream)
    return (int(log[2]), f"{log[1]}.log") if log and int(log[2]) < nodes else None
