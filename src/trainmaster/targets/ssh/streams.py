"""Answers of an SSH host about the files of an attempt and about its GPUs, parsed."""

from __future__ import annotations

import re

from trainmaster.remote.devices import Gpu
from trainmaster.targets import FileSize
from trainmaster.targets._answers import clean, malformed
from trainmaster.targets.ssh.session import Reply, Session

_MAX_FILES = 1_000_000
_MAX_GPUS = 256  # of one host, and processes on one of them
_UUID = re.compile(r"(GPU|MIG)-[A-Za-z0-9/-]{1,120}")


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


def read_gpus(name: str, reply: Reply) -> list[Gpu]:
    """GPUs that a host lists. One entry that is none, or a user of one that cannot be read, refuses all: a GPU that
    looks free because of it would be given out."""
    listed = reply.result.get("gpus")
    if not isinstance(listed, list) or len(listed) > _MAX_GPUS:
        raise malformed(f"{name}: no list of GPUs")
    return [_read_gpu(name, item) for item in listed]


def _read_gpu(name: str, item: object) -> Gpu:
    uuid, model, parent, users = item if isinstance(item, list) and len(item) == 4 else (None, None, None, None)
    if not isinstance(uuid, str) or not _UUID.fullmatch(uuid) or not isinstance(model, str):
        raise malformed(f"{name}: an entry that is no GPU")
    if not isinstance(users, list) or len(users) > _MAX_GPUS or not all(map(_is_pair, users)):
        raise malformed(f"{name}: {uuid} without a list of its users")
    known = tuple((clean(attempt)[:64], clean(text)[:200]) for attempt, text in users)
    return Gpu(uuid=uuid, model=clean(model)[:100], parent=clean(str(parent))[:100], users=known)


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
