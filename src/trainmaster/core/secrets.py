"""Secrets in a spec or a webhook URL. Both are stored and shown, and a command is visible to every account of the node:
a value that is a secret is refused before anything is written.

Two signs: a shape that only a credential has, in any field; and a name of a credential before a value, in `env`, in an
assignment (`export X_API_KEY=…`) or in an option (`--password …`). EOS_TOKEN=<|end|>, TOKENIZERS_PARALLELISM=false and
`$HF_TOKEN` are no secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainmaster.core import schema
from trainmaster.core.errors import Fault
from trainmaster.core.secret_shapes import COMMIT, HEX_40, WORDS, recognise

if TYPE_CHECKING:
    from trainmaster.core.spec import JobSpec

# Any value of these is a secret, however short.
_PASSWORD = re.compile(
    r"(PASSWORD|PASSWD|PASSPHRASE|SECRET|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH_?TOKEN|ACCESS_?TOKEN|CREDENTIALS?)$",
    re.IGNORECASE,
)
_NAME = re.compile(r"(KEY|TOKEN|PWD)$", re.IGNORECASE)
_MEANINGLESS = re.compile(r"[A-Za-z0-9+/_=.~-]{16,}")
_OPTION = re.compile(rf"(?i)^--?{WORDS}$")
_INSTEAD = "set it in the environment of the server and name it in TRAINMASTER_JOB_ENV"


def find_in_spec(spec: JobSpec) -> Iterator[Fault]:
    """Every secret in a spec, by its place and never by its text."""
    plain = schema.to_plain(spec)
    env = plain.pop("env", None) or {}
    for name, value in env.items():
        what = recognise(str(value)) or recognise(str(name)) or _named(str(name), str(value))
        if what is not None:
            place = name if recognise(str(name)) is None else "(a name)"
            yield Fault(path=f"env.{place}", message=f"{what}; a spec is stored and shown: {_INSTEAD}")
    command = plain.pop("command", None) or ()
    for number, word in enumerate(command):
        before = command[number - 1] if number else ""
        what = recognise(word) or ("a secret" if _OPTION.match(before) and _is_value(word) else None)
        if what is not None:
            message = f"{what}; a command is visible to every account of the node: {_INSTEAD}"
            yield Fault(path=f"command[{number}]", message=message)
    for path, text in _texts(plain, ""):
        if (what := _recognise_at(path, text)) is not None:
            yield Fault(path=path, message=f"{what}; a spec is stored and shown: {_INSTEAD}")


def is_secret(name: str, value: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return _named(name, value) is not None


def _named(name: str, value: str) -> str | None:
    if not _is_value(value):
        return None
    if _PASSWORD.search(name):
        return "a secret"
    return "a secret" if _NAME.search(name) and _MEANINGLESS.fullmatch(value) else None


def _is_value(text: str) -> bool:
    """Whether a text can be a secret itself, and not a reference to one or an option."""
    return bool(text) and not text.startswith(("$", "<", "{", "%", "-"))


def _recognise_at(path: str, text: str) -> str | None:
    what = recognise(text)
    if what is not None and HEX_40.fullmatch(text) and COMMIT.search(path.rpartition(".")[2]):
        return None  # a revision
    return what


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every text of plain data, names of mappings too, with its place."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            inner = f"{path}.{name}" if path else str(name)
            if recognise(str(name)) is not None:
                yield f"{path}.(a name)", str(name)
                inner = f"{path}.(a name)"
            yield from _texts(item, inner)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _texts(item, f"{path}[{number}]")
