"""A YAML file of a target, read and checked once for each version of it: each poll of each job asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trainmaster.core.errors import UsageError

Option = TypeVar("Option")
Made = TypeVar("Made")


def load(path: Path, parse: Callable[[Any, Option, Path], Made], option: Option, *, what: str) -> Made:
    """`parse(document, option, folder of the file)`; UsageError with `what` where the file cannot be read."""
    made: Made = _load(path, parse, option, what, _version(path, what))
    return made


def load_all(
    paths: Sequence[Path], parse: Callable[[list[tuple[Any, Path]], Option], Made], option: Option, *, what: str
) -> Made:
    """The same for several files that are parsed as one: `parse` gets each document with the folder of its file."""
    made: Made = _load_all(tuple(paths), parse, option, what, tuple(_version(path, what) for path in paths))
    return made


def _version(path: Path, what: str) -> tuple[int, int]:
    try:
        facts = path.stat()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{what} {path} cannot be read: {why}") from None
    return facts.st_mtime_ns, facts.st_size


@functools.lru_cache(maxsize=64)
def _load(path: Path, parse: Callable[[Any, Any, Path], Any], option: Any, what: str, _seen: tuple[int, int]) -> Any:
    from trainmaster.documents import yaml_file

    return yaml_file.load(path, what=what).read(lambda value: parse(value, option, path.parent))


@functools.lru_cache(maxsize=64)
def _load_all(
    paths: tuple[Path, ...], parse: Callable[[Any, Any], Any], option: Any, what: str, _seen: tuple[Any, ...]
) -> Any:
    from trainmaster.documents import yaml_file

    return parse([(yaml_file.load(path, what=what).value, path.parent) for path in paths], option)
