"""A YAML file of a target, read and checked once for each version of it: each poll of each job asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    import yaml

_MAX_BYTES = 1 << 20
# Aliases of aliases grow without end; ten thousand hosts with ten fields each are 200,000 places.
_MAX_DEPTH, _MAX_PLACES = 20, 400_000
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
    except (OSError, ValueError) as wrong:
        why = wrong.strerror if isinstance(wrong, OSError) else wrong
        raise UsageError(f"{what} {path} cannot be read: {why}") from None
    return facts.st_mtime_ns, facts.st_size


@functools.lru_cache(maxsize=64)
def _load(path: Path, parse: Callable[[Any, Any, Path], Any], option: Any, what: str, _seen: tuple[int, int]) -> Any:
    return parse(read_yaml(path, what), option, path.parent)


@functools.lru_cache(maxsize=64)
def _load_all(
    paths: tuple[Path, ...], parse: Callable[[Any, Any], Any], option: Any, what: str, _seen: tuple[Any, ...]
) -> Any:
    return parse([(read_yaml(path, what), path.parent) for path in paths], option)


def read_yaml(path: Path, what: str) -> Any:
    """The document in a file; UsageError that begins with `what` where it is no small, plain document."""
    import yaml

    said = f"{what} {path}"
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as wrong:
        why = wrong.strerror if isinstance(wrong, OSError) else wrong
        raise UsageError(f"{said} cannot be read: {why}") from None
    if len(raw) > _MAX_BYTES:
        raise UsageError(f"{said} has {len(raw):,} bytes; it is not such a file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        line = raw[: wrong.start].count(b"\n") + 1
        raise UsageError(f"{said}, line {line}: not UTF-8; save the file as UTF-8") from None
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _check(root, said)
        return loader.construct_document(root)
    except yaml.YAMLError as wrong:
        mark, problem = getattr(wrong, "problem_mark", None), getattr(wrong, "problem", None)
        where = f"{said}, line {mark.line + 1}" if mark is not None else said
        raise UsageError(f"{where} is not YAML: {problem or str(wrong).splitlines()[0]}"[:600]) from None
    except RecursionError:
        raise UsageError(f"{said} is nested too deep") from None
    except (ValueError, OverflowError, TypeError, AttributeError) as wrong:  # of values: dates, numbers of 5,000 digits
        raise UsageError(f"{said} has a value that is none: {str(wrong)[:200]}; write it in quotes") from None
    finally:
        if loader is not None:
            loader.dispose()


def _check(root: yaml.Node, said: str) -> None:
    """Refuse what nests or grows beyond any list of machines, and a key that is written twice."""
    import yaml

    ahead, places = [(root, 0)], 0
    while ahead:
        node, depth = ahead.pop()
        places += 1
        if depth > _MAX_DEPTH or places > _MAX_PLACES:
            raise UsageError(f"{said} is nested too deep, or its aliases grow without end")
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                name = str(key.value)
                if isinstance(key, yaml.ScalarNode) and name in seen:
                    raise UsageError(f"{said}, line {key.start_mark.line + 1}: {name[:80]!r} is written twice")
                seen.add(name)
                ahead += [(key, depth + 1), (value, depth + 1)]
        elif isinstance(node, yaml.SequenceNode):
            ahead += [(item, depth + 1) for item in node.value]
