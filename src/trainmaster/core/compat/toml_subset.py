"""The part of TOML that our own tables and baseline files use, for Python 3.10, which has no reader of its own.

Tables, arrays of tables, dotted and quoted keys, strings in one line, numbers, booleans, arrays and inline tables.
Anything else is a ValueError: a table that is read wrongly would judge wrongly. `tests/core/test_compat.py` holds it to
`tomllib` for every file that is shipped.
"""

from __future__ import annotations

import json
import re
from typing import Any

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_LITERAL = re.compile(r"'([^'\n]*)'")
_HEX = re.compile(r"0x[0-9a-fA-F]+(?:_[0-9a-fA-F]+)*")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*)(?:\.[\d_]+)?(?:[eE][+-]?\d+)?(?![\w:.-])")
_WORD = re.compile(r"(true|false|[+-]?inf|[+-]?nan)(?![\w-])")
_WORDS = {"true": True, "false": False}
_LINE_END = re.compile(r"[ \t]*(?:#[^\n]*)?\r?(?:\n|$)")


def read_toml(text: str) -> dict[str, Any]:
    """A document as nested dicts; ValueError where it is not of this part of TOML."""
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def read(self) -> dict[str, Any]:
        root: dict[str, Any] = {}
        table = root
        while True:
            self._skip(_BLANK)
            if self._at >= len(self._text):
                return root
            if self._take("[["):
                table = self._append_table(root)
            elif self._take("["):
                table = self._open_table(root)
            else:
                self._pair(table)
            self._need(_LINE_END)

    def _open_table(self, root: dict[str, Any]) -> dict[str, Any]:
        names = self._names()
        self._need(re.compile(r"\]"))
        return self._walk(root, names)

    def _append_table(self, root: dict[str, Any]) -> dict[str, Any]:
        names = self._names()
        self._need(re.compile(r"\]\]"))
        rows = self._walk(root, names[:-1]).setdefault(names[-1], [])
        if not isinstance(rows, list):
            raise self._error("a table of this name is there already")
        rows.append({})
        return rows[-1]  # type: ignore[no-any-return]

    def _walk(self, table: dict[str, Any], names: list[str]) -> dict[str, Any]:
        for name in names:
            inner = table.setdefault(name, {})
            table = inner[-1] if isinstance(inner, list) and inner else inner
            if not isinstance(table, dict):
                raise self._error(f"{name} is a value, no table")
        return table

    def _pair(self, table: dict[str, Any]) -> None:
        names = self._names()
        self._need(re.compile(r"="))
        self._skip(_SPACE)
        inside = self._walk(table, names[:-1])
        if names[-1] in inside:
            raise self._error(f"{names[-1]} stands there twice")
        inside[names[-1]] = self._value()

    def _names(self) -> list[str]:
        names = []
        while True:
            self._skip(_SPACE)
            names.append(self._string() if self._peek() in "\"'" else self._need(_KEY)[0])
            self._skip(_SPACE)
            if not self._take("."):
                return names

    def _value(self) -> Any:
        first = self._peek()
        if first in "\"'":
            return self._string()
        if self._take("["):
            return self._array()
        if self._take("{"):
            return self._inline()
        if word := _WORD.match(self._text, self._at):
            self._at = word.end()
            return _WORDS[word[0]] if word[0] in _WORDS else float(word[0])
        if hexadecimal := _HEX.match(self._text, self._at):
            self._at = hexadecimal.end()
            return int(hexadecimal[0].replace("_", ""), 16)
        digits = self._need(_NUMBER)[0].replace("_", "")
        return float(digits) if re.search(r"[.eE]", digits) else int(digits)

    def _array(self) -> list[Any]:
        items: list[Any] = []
        while True:
            self._skip(_BLANK)
            if self._take("]"):
                return items
            items.append(self._value())
            self._skip(_BLANK)
            if not self._take(","):
                self._need(re.compile(r"\]"))
                return items

    def _inline(self) -> dict[str, Any]:
        table: dict[str, Any] = {}
        self._skip(_SPACE)
        if self._take("}"):
            return table
        while True:
            self._pair(table)
            self._skip(_SPACE)
            if not self._take(","):
                self._need(re.compile(r"\}"))
                return table

    def _string(self) -> str:
        if self._text.startswith(('"""', "'''"), self._at):
            raise self._error("a string of several lines is not read here")
        if literal := _LITERAL.match(self._text, self._at):
            self._at = literal.end()
            return literal[1]
        # Its escapes are those of JSON, but for \U and \e, which JSON refuses.
        return str(json.loads(f'"{self._need(_STRING)[1]}"', strict=False))

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1] or "\n"

    def _take(self, word: str) -> bool:
        found = self._text.startswith(word, self._at)
        self._at += len(word) if found else 0
        return found

    def _skip(self, what: re.Pattern[str]) -> None:
        match = what.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _need(self, what: re.Pattern[str]) -> re.Match[str]:
        match = what.match(self._text, self._at)
        if match is None:
            raise self._error("not of the part of TOML that is read here")
        self._at = match.end()
        return match

    def _error(self, why: str) -> ValueError:
        return ValueError(f"line {self._text.count(chr(10), 0, self._at) + 1}: {why}")
