"""A YAML file of a target, read and checked once for each version of it: each poll of each job asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from trainmaster.core.errors import UsageError

_MAX_FILE_BYTES = 1 << 20
Option = TypeVar("Option")
Made = TypeVar("Made")


def load(path: Path, parse: Callable[[Any, Option, Path], Made], option: Option, *, what: str) -> Made:
    """`parse(document, option, folder of the file)`; UsageError with `what` where the file cannot be read."""
    try:
        facts = path.stat()
    except OSError as wrong:
        raise UsageError(f"{what} {path} cannot be read: {wrong.strerror}") from None
    made: Made = _load(path, parse, option, what, (facts.st_mtime_ns, facts.st_size))
    return made


@functools.lru_cache(maxsize=64)
def _load(path: Path, parse: Callable[[Any, Any, Path], Any], option: Any, what: str, _version: tuple[int, int]) -> Any:
    import yaml

    try:
        raw = path.read_bytes()
        if len(raw) > _MAX_FILE_BYTES:
            raise UsageError(f"{what} {path} has {len(raw):,} bytes; it is not such a file")
        document = yaml.safe_load(raw)
    except OSError as wrong:
        raise UsageError(f"{what} {path} cannot be read: {wrong.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as wrong:
        first = str(wrong).partition("\n")[0]
        raise UsageError(f"{what} {path} is not YAML: {first}") from None
    return parse(document, option, path.parent)
