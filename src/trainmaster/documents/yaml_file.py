"""YAML from a file: plain values, where each stands, and one clear error for whatever is no small, plain document.

Every YAML of a user goes through here: specs, configs, hosts, settings, kubeconfigs, manifests and `key=value` words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from trainmaster.core.errors import Fault, SpecError, UsageError

T = TypeVar("T")
MAX_BYTES = 1 << 20
# Far deeper than any field of ours. The parser recurses for each level: unlimited, it would end in a traceback.
_MAX_DEPTH = 50
# With every alias written out. Ten thousand hosts with ten fields each are 200,000 places.
_MAX_PLACES = 400_000


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
        except SpecError as error:
            raise SpecError(self._placed(fault, stated) for fault in error.faults) from None

    def _placed(self, fault: Fault, stated: Sequence[str]) -> Fault:
        path = fault.path
        if any(path == key or path.startswith((f"{key}.", f"{key}[")) for key in stated):
            # The shell takes one pair of quotes away.
            message = re.sub(r'put it in quotes: ("[^"]*")$', lambda hit: f"write {path}='{hit[1]}'", fault.message)
            return Fault(path=f"command line: {path}", message=message)
        while path and path not in self.lines:  # a missing field stands where its section begins
            path = re.sub(r"(\.|^)[^.\[]*$|\[\d+\]$", "", path)
        line = self.lines.get(path, 1)
        return Fault(
            path=f"{self.name}:{line}: {fault.path}" if fault.path else f"{self.name}:{line}", message=fault.message
        )


def load(path: Path, *, what: str = "") -> Document:
    """The document in a file. Errors begin with its name, or with `what` ("target: hosts file") and its path."""
    return parse(read_bytes(path, what=what), f"{what} {path}" if what else path.name)


def read_bytes(path: Path, *, what: str = "") -> bytes:
    """The content of a file, for `parse` and `parse_all`; of one that is too large, a byte more than they take."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{what} {path} cannot be read: {why}".lstrip()) from None


def parse(raw: bytes, name: str) -> Document:
    """The one document of these bytes; an empty one is an empty mapping."""
    documents = _parse(raw, name, several=False)
    if not documents or documents[0].value is None:
        return Document(name=name, value={}, lines={"": 1})
    return documents[0]


def parse_all(raw: bytes, name: str) -> list[Any]:
    """Values of all documents of these bytes, but for empty ones."""
    return [document.value for document in _parse(raw, name, several=True) if document.value is not None]


def override(value: Any, words: Sequence[str]) -> Any:
    """The mapping with `a.b=c` words put in; values are read as YAML."""
    for word in words:
        path, equals, text = word.partition("=")
        if not equals or not path:
            raise UsageError(f"{word!r}: write it as key=value, for example optimizer.lr=0.001")
        # A word of the shell may hold bytes that are no text.
        documents = _parse(text.encode(errors="surrogateescape"), word[:200], several=False)
        here = value
        *parents, last = path.split(".")
        for name in parents:
            here = here.setdefault(name, {}) if isinstance(here, dict) else None
        if not isinstance(here, dict):
            raise UsageError(f"{word!r}: `{path}` goes through a value that has no fields")
        here[last] = documents[0].value if documents else None
    return value


def join_options(words: Sequence[str]) -> list[str]:
    """`--name value` and `--name=value` as `name=value`: a field, or an option of AWS's sample, which is then named."""
    joined: list[str] = []
    waits = False  # for the value of the option before
    for word in words:
        if word.startswith("--") and len(word) > 2:
            joined += [f"{joined.pop()}=true"] if waits else []
            name, equals, value = word[2:].partition("=")
            waits = not equals
            joined.append(name.replace("-", "_") + equals + value)  # --log-level is the field log_level
        elif waits:
            joined[-1] += f"={word}"
            waits = False
        else:
            joined.append(word)
    return [*joined[:-1], f"{joined[-1]}=true"] if waits else joined


def _parse(raw: bytes, name: str, *, several: bool) -> list[Document]:
    if len(raw) > MAX_BYTES:
        raise UsageError(f"{name}: more than {MAX_BYTES:,} bytes; it is not such a file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UsageError(f"{name}:{line}: not UTF-8 (byte 0x{raw[error.start]:02x}); save the file as UTF-8") from None
    documents: list[Document] = []
    try:
        loader = _Loader(text)
        try:
            while loader.check_node():
                root = loader.get_node()
                assert root is not None
                if documents and not several:
                    raise yaml.MarkedYAMLError(problem="a second document", problem_mark=root.start_mark)
                lines = _find_lines(root, name)
                documents.append(Document(name=name, value=loader.construct_document(root), lines=lines))
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise SpecError([_fault(name, error, text)]) from None
    return documents


_TEXT, _BOOL = "tag:yaml.org,2002:str", "tag:yaml.org,2002:bool"


class _Loader(yaml.SafeLoader):
    """The safe loader of PyYAML with limits on depth and aliases; every error of it has a place."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}  # places and levels of a node with its aliases written out

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self._depth >= _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {_MAX_DEPTH} levels", problem_mark=mark)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return None
        if isinstance(node, yaml.MappingNode):
            for key, _ in node.value:  # no field is named true: `on:` and a variable named NO are texts
                key.tag = _TEXT if key.tag == _BOOL else key.tag
        if not is_alias:
            inner = [self._sizes[each] for each in _inner(node)]
            self._sizes[node] = 1 + sum(places for places, _ in inner), 1 + max((deep for _, deep in inner), default=0)
        elif node not in self._sizes:
            raise yaml.MarkedYAMLError(problem="an alias inside of what it stands for", problem_mark=mark)
        places, levels = self._sizes[node]
        if places > _MAX_PLACES or levels > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="aliases of aliases grow without end", problem_mark=mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, OverflowError, TypeError, AttributeError) as error:
            # PyYAML lets these out: of a date without such a day, a number of 5,000 digits, a tag that does not fit.
            problem = f"a value that is none ({str(error)[:200]}); write it in quotes"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def _inner(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _find_lines(root: yaml.Node, name: str) -> dict[str, int]:
    """The line of each path; SpecError where a key is written twice."""
    lines, faults = {"": 1}, list[Fault]()
    seen: set[yaml.Node] = set()

    def walk(node: yaml.Node, path: str) -> None:
        lines.setdefault(path, node.start_mark.line + 1)
        if node in seen:  # an alias: what is below stands at its anchor
            return
        seen.add(node)
        if isinstance(node, yaml.MappingNode):
            keys: dict[str, int] = {}
            for key, value in node.value:
                word, line = str(key.value), key.start_mark.line + 1
                inner = f"{path}.{word}" if path else word
                if isinstance(key, yaml.ScalarNode) and word in keys:
                    message = f"written twice (first on line {keys[word]}); keep one"
                    faults.append(Fault(path=f"{name}:{line}: {inner[:200]}", message=message))
                keys[word] = lines[inner] = line
                walk(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                walk(item, f"{path}[{index}]")

    walk(root, "")
    if faults:
        raise SpecError(faults)
    return lines


def _fault(name: str, error: yaml.YAMLError, text: str) -> Fault:
    mark, position = getattr(error, "problem_mark", None), getattr(error, "position", None)
    line = mark.line + 1 if mark is not None else text.count("\n", 0, position) + 1
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    return Fault(path=f"{name}:{line}", message=f"not YAML: {problem}"[:600])
