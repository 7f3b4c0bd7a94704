"""YAML from a file, read at the border: a plain mapping, with every fault told by its line."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from trainmaster.core.errors import Fault, SpecError, UsageError

T = TypeVar("T")
# A spec is a page of text; more is a mistake or an attack (aliases of aliases grow without end).
_MAX_BYTES, _MAX_DEPTH, _MAX_PLACES = 1 << 20, 50, 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A file's content and where in the file each path stands."""

    name: str
    value: Any
    lines: dict[str, int]

    def read(self, parse: Callable[[Any], T], words: Sequence[str] = ()) -> T:
        """`parse` the content; its faults come back with file and line before their path.

        `words` are the `key=value` words of the command line: a fault in what they state names no line of the file.
        """
        stated = [word.partition("=")[0] for word in words]
        try:
            return parse(self.value)
        except SpecError as wrong:
            raise SpecError(self._placed(fault, stated) for fault in wrong.faults) from None

    def _placed(self, fault: Fault, stated: Sequence[str]) -> Fault:
        path = fault.path
        if any(path == key or path.startswith((f"{key}.", f"{key}[")) for key in stated):
            return Fault(path=f"command line: {path}", message=fault.message)
        while path and path not in self.lines:  # a missing field stands where its section begins
            path = re.sub(r"(\.|^)[^.\[]*$|\[\d+\]$", "", path)
        line = self.lines.get(path, 1)
        return Fault(
            path=f"{self.name}:{line}: {fault.path}" if fault.path else f"{self.name}:{line}", message=fault.message
        )


def load(path: Path) -> Document:
    """The document in a file; a syntax error or a key written twice is a fault with its line."""
    try:
        raw = path.read_bytes()
    except OSError as wrong:
        raise UsageError(f"{path}: cannot be read ({wrong.strerror}); give the path of a YAML file") from None
    if len(raw) > _MAX_BYTES:
        raise UsageError(f"{path}: {len(raw):,} bytes; a spec has at most {_MAX_BYTES:,}")
    try:
        raw.decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        line = raw[: wrong.start].count(b"\n") + 1
        raise UsageError(f"{path}:{line}: not UTF-8 (byte 0x{raw[wrong.start]:02x}); save the file as UTF-8") from None
    loader = yaml.SafeLoader(raw)
    lines: dict[str, int] = {"": 1}
    faults: list[Fault] = []
    try:
        root = loader.get_single_node()
        if root is not None:
            _walk(root, "", lines, faults, path.name, depth=0)
        value = loader.construct_document(root) if root is not None else {}
    except yaml.YAMLError as wrong:
        raise SpecError([_syntax(path.name, wrong)]) from None
    except RecursionError:
        raise SpecError(
            [Fault(path=path.name, message="nested too deep, or too long; a spec is a page of text")]
        ) from None
    finally:
        loader.dispose()
    if faults:
        raise SpecError(faults)
    return Document(name=path.name, value=value, lines=lines)


def override(value: Any, words: Sequence[str]) -> Any:
    """The mapping with `a.b=c` words put in; values are read as YAML."""
    for word in words:
        path, equals, text = word.partition("=")
        if not equals or not path:
            raise UsageError(f"{word!r}: write it as key=value, for example optimizer.lr=0.001")
        try:
            new = yaml.safe_load(text)
        except yaml.YAMLError as wrong:
            raise SpecError([_syntax(word, wrong)]) from None
        here = value
        *parents, last = path.split(".")
        for name in parents:
            here = here.setdefault(name, {}) if isinstance(here, dict) else None
        if not isinstance(here, dict):
            raise UsageError(f"{word!r}: `{path}` goes through a value that has no fields")
        here[last] = new
    return value


def _walk(node: yaml.Node, path: str, lines: dict[str, int], faults: list[Fault], name: str, *, depth: int) -> None:
    if depth > _MAX_DEPTH or len(lines) > _MAX_PLACES:
        raise RecursionError
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = f"{path}.{key.value}" if path else str(key.value)
            if inner in lines:
                message = f"written twice (first on line {lines[inner]}); keep one"
                faults.append(Fault(path=f"{name}:{key.start_mark.line + 1}: {inner}", message=message))
            lines[inner] = key.start_mark.line + 1
            _walk(value, inner, lines, faults, name, depth=depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, f"{path}[{index}]", lines, faults, name, depth=depth + 1)


def _syntax(name: str, wrong: yaml.YAMLError) -> Fault:
    mark = getattr(wrong, "problem_mark", None)
    problem = getattr(wrong, "problem", None) or str(wrong)
    where = f"{name}:{mark.line + 1}" if mark is not None else name
    return Fault(path=where, message=f"not YAML: {problem}")
