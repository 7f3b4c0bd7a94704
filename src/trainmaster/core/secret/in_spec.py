"""Secrets in a spec or a webhook URL. Both are stored and shown, and a command is visible to every account of the node:
a value that is a secret is refused before anything is written.

Two signs: a shape that only a credential has, in any field; and a name of a credential before a value, in `env`, in an
assignment (`export X_API_KEY=…`) or in an option (`--password …`). EOS_TOKEN=<|end|>, TOKENIZERS_PARALLELISM=false and
`$HF_TOKEN` are no secrets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainmaster.core import schema
from trainmaster.core.errors import Fault
from trainmaster.core.secret.shapes import HARMLESS, HEX_40, NAMES, TOKENS, WORDS, recognise

if TYPE_CHECKING:
    from trainmaster.core.spec import JobSpec

# Any value of these is a secret, however short.
_PASSWORD = re.compile(rf"({NAMES}|CREDENTIALS?)$", re.IGNORECASE)
_COOKIE = re.compile(r"COOKIE$", re.IGNORECASE)
_NAME = re.compile(r"((?<!CACHE_)KEY|TOKEN|PWD)$", re.IGNORECASE)
_NO_VALUE = re.compile(HARMLESS, re.IGNORECASE)
_MEANINGLESS = re.compile(r"[A-Za-z0-9+/_=.~-]{16,}")
_OPTION = re.compile(rf"(?i)^--?({WORDS}|{TOKENS})$")
# Programs that take a password in an option of another name: the option is one only behind them (shapes.py).
_PROGRAMS = re.compile(r"(?:.*/)?((?:mysql|mariadb)\S*|curl|sshpass|redis-cli)")
_INSTEAD = "set it in the environment of the server and name it in TRAINMASTER_JOB_ENV"


def find_in_spec(spec: JobSpec, *, recognise: Callable[[str], str | None] = recognise) -> Iterator[Fault]:
    """Every secret in a spec, by its place and never by its text; places that `allow` names are left out.

    `recognise` may remember what it has seen: the trials of a set have most of their texts in common.
    """
    for place, what, where in _find(schema.to_plain(spec), recognise):
        if place not in spec.allow:
            # In <…>, so that the name of the place and this are not hidden as a secret and its value.
            instead = f"{_INSTEAD}; if it is none, say why: allow: {{{place!r}: <reason>}}"
            yield Fault(path=place, message=f"{what}; {where}: {instead}")


def _find(plain: dict[str, Any], recognise: Callable[[str], str | None]) -> Iterator[tuple[str, str, str]]:
    """Place, kind, and who would see it."""
    shown = "a spec is stored and shown"
    for name, value in (plain.pop("env", None) or {}).items():
        what = recognise(str(value)) or recognise(str(name)) or _named(str(name), str(value))
        if what is not None:
            yield f"env.{name if recognise(str(name)) is None else '(a name)'}", what, shown
    before = program = ""
    for number, word in enumerate(plain.pop("command", None) or ()):
        what = (
            recognise(word) or _recognise_after(before, word) or (program and recognise(f"{program} {before} {word}"))
        )
        if what:
            yield f"command[{number}]", what, "a command is visible to every account of the node"
        before, program = (word, program) if not (found := _PROGRAMS.fullmatch(word)) else ("", found[1])
    for path, text in _texts(plain, "", recognise):
        if (what := recognise(text)) is not None:
            yield path, what, shown


def is_secret(name: str, value: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return _named(name, value) is not None


def _named(name: str, value: str) -> str | None:
    if not _is_value(value):
        return None
    if _PASSWORD.search(name) or (_COOKIE.search(name) and re.search(r"\d|=", value) and len(value) >= 8):
        return "a secret"
    return "a secret" if _NAME.search(name) and _MEANINGLESS.fullmatch(value) else None


def _is_value(text: str) -> bool:
    """Whether a text can be a secret itself, and not a reference to one or an option."""
    return bool(text) and not _NO_VALUE.match(text)


def _recognise_after(before: str, word: str) -> str | None:
    """A word that is a secret by the one before it: the value of an option, or a key of 40 digits."""
    if _OPTION.match(before) and _is_value(word) and not word.startswith("-"):
        return "a secret"
    return recognise(f"{before} {word}") if HEX_40.fullmatch(word) else None


def _texts(value: Any, path: str, recognise: Callable[[str], str | None]) -> Iterator[tuple[str, str]]:
    """Every text of plain data, names of mappings too, with its place."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            inner = f"{path}.{name}" if path else str(name)
            if recognise(str(name)) is not None:
                yield f"{path}.(a name)", str(name)
                inner = f"{path}.(a name)"
            yield from _texts(item, inner, recognise)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _texts(item, f"{path}[{number}]", recognise)
