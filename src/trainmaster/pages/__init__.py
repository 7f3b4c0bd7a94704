"""Pages: one file each, a query and a dataclass. The folder is the registry.

Every module has `Page`, a frozen dataclass of plain data, and `read(db, …) -> Page`. It knows nothing of HTML: the
web and the reports render the same dataclass, and JSON is `to_plain` of it. Files that begin with an underscore are
parts, not pages.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import Any


def names() -> list[str]:
    """Every page there is: the modules of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def to_plain(value: object) -> Any:
    """A page as dicts, lists and scalars, ready for JSON: times as ISO text in UTC, enums as their words."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value
