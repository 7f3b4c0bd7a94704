"""Identifiers of jobs and webhooks: UUIDs in their canonical lower-case form."""

from __future__ import annotations

import re

UUID_PATTERN = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_UUID = re.compile(UUID_PATTERN)


def is_uuid(text: str) -> bool:
    """Whether the whole text is a UUID. The database is asked for nothing else."""
    return _UUID.fullmatch(text) is not None
