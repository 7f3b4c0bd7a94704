"""Working folder of a job, sent to its nodes. A node that has one keeps it, with what the job changed there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from trainmaster.targets._answers import malformed
from trainmaster.targets.ssh.session import Session
from trainmaster.targets.ssh.transfer import upload


async def send(folder: Path, nodes: Sequence[Session], attempt: str) -> None:
    """Send the files of a folder to every node that has no working folder of this job yet. A rank sees all or none."""
    await asyncio.gather(*(_send(folder, node, attempt) for node in nodes))


async def _send(folder: Path, node: Session, attempt: str) -> None:
    result = (await node.request("has_work", attempt=attempt)).result
    if result.get("present") is True:
        return
    if not isinstance(place := result.get("folder"), str):
        raise malformed(f"{node.host.name}: no working folder")
    await upload(node, folder, place, durable=True)  # a node that has the folder is sent none again
