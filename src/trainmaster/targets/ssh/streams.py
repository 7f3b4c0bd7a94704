"""Answers of an SSH host about the files of an attempt, parsed."""

from __future__ import annotations

from trainmaster.targets import FileSize
from trainmaster.targets._answers import clean, malformed
from trainmaster.targets.ssh.session import Reply, Session

_MAX_FILES = 1_000_000


def split_body(node: Session, reply: Reply, count: int) -> list[bytes | None]:
    """The parts that a body consists of."""
    sizes, at = reply.result.get("sizes"), 0
    if not isinstance(sizes, list) or len(sizes) != count:
        raise malformed(f"{node.host.name}: parts without their sizes")
    parts: list[bytes | None] = []
    for size in sizes:
        parts.append(None if size is None else reply.body[at : at + int(size)])
        at += int(size or 0)
    if at != len(reply.body):
        raise malformed(f"{node.host.name}: {len(reply.body):,} bytes where {at:,} were announced")
    return parts


def read_files(node: Session, reply: Reply) -> list[FileSize]:
    listed = reply.result.get("files")
    if not isinstance(listed, list) or len(listed) > _MAX_FILES:
        raise malformed(f"{node.host.name}: no list of files")
    files = []
    for item in listed:
        name, size, fault = item if isinstance(item, list) and len(item) == 3 else (None, None, None)
        if not isinstance(name, str) or not isinstance(size, int) or size < 0 or not isinstance(fault, str):
            raise malformed(f"{node.host.name}: an entry that is no file")
        files.append(FileSize(name=name, size_bytes=size, fault=clean(fault)[:300]))
    return files
