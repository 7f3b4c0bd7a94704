"""Secrets that do not belong where they were written. A spec is stored, shown and passed on, and a command is seen by
everybody on the machine that runs it: what is certainly a secret is refused there before anything is written.

Two signs. A shape that only a credential has, wherever it stands; and in `env` a name that ends like one, with a value
that is long and without meaning. EOS_TOKEN=<|end|> and TOKENIZERS_PARALLELISM=false are neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainmaster.core.errors import Fault

if TYPE_CHECKING:
    from trainmaster.core.spec import JobSpec

# Prefixes as their makers document them; lengths are the shortest in use.
_SHAPES = {
    "a token of a Trainmaster server": r"\btm_[A-Za-z0-9_-]{43}\b",
    "an AWS access key": r"\b(AKIA|ASIA)[A-Z0-9]{16}\b",
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "a GitHub token": r"\b(gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})",
    "a Slack token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "an address with a password in it": r"://[^\s/:@]+:[^\s/@]+@",
}
_SECRETS = {what: re.compile(shape) for what, shape in _SHAPES.items()}
_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_MEANINGLESS = re.compile(r"[A-Za-z0-9+/_=.~-]{16,}")
_INSTEAD = "set it in the environment of the server, or of the node, from where every rank inherits it"


def recognise(text: str) -> str | None:
    """Kind of secret in this text, or None where none is certain."""
    return next((what for what, shape in _SECRETS.items() if shape.search(text)), None)


def find_in_spec(spec: JobSpec) -> Iterator[Fault]:
    """Every secret in a spec, by its place and never by its text."""
    for name, value in spec.env.items():
        what = recognise(value)
        if what is None and _NAME.search(name) and _MEANINGLESS.fullmatch(value):
            what = "a secret"
        if what is not None:
            yield Fault(path=f"env.{name}", message=f"this is {what}, and a spec is stored and shown; {_INSTEAD}")
    for number, word in enumerate(spec.command or ()):
        if (what := recognise(word)) is not None:
            message = f"here is {what}, and everybody on the machine sees a command; {_INSTEAD}"
            yield Fault(path=f"command[{number}]", message=message)
