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

if TYPE_CHECKING:
    from trainmaster.core.spec import JobSpec

# Prefixes as their makers document them; lengths are the shortest in use.
_SHAPES = {
    "a token of a Trainmaster server": r"\btm_[A-Za-z0-9_-]{43}\b",
    "an AWS access key": r"\b(AKIA|ASIA)[A-Z0-9]{16}\b",
    "a Hugging Face token": r"\b(hf|api_org)_[A-Za-z0-9]{30,}",
    "a GitHub token": r"\b(gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{40,})",
    "a GitLab token": r"\bgl(pat|dt|rt|cbt|ptt|ft|soat|agent|oas)-[A-Za-z0-9_-]{16,}",
    "a Google API key": r"\bAIza[A-Za-z0-9_-]{30,}",
    "a Google OAuth token": r"\b(ya29\.[A-Za-z0-9_-]{20,}|GOCSPX-[A-Za-z0-9_-]{20,})",
    "a Slack token": r"\b(xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,})",
    "a Slack webhook": r"hooks\.slack\.com/services/[A-Za-z0-9/]{20,}",
    "a Discord webhook": r"discord(app)?\.com/api/webhooks/\d+/[A-Za-z0-9_-]{20,}",
    "a Telegram token": r"\b\d{8,10}:AA[A-Za-z0-9_-]{30,}",
    "an npm token": r"\bnpm_[A-Za-z0-9]{30,}",
    "a PyPI token": r"\bpypi-[A-Za-z0-9_-]{20,}",
    "a Docker token": r"\bdckr_(pat|oat)_[A-Za-z0-9_-]{20,}",
    "a DigitalOcean token": r"\bdo[opr]_v1_[a-f0-9]{32,}",
    "a Databricks token": r"\bdapi[a-f0-9]{32}",
    "a SendGrid key": r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    "a Stripe key": r"\b[rs]k_(live|test)_[A-Za-z0-9]{16,}",
    "a Replicate token": r"\br8_[A-Za-z0-9]{30,}",
    "an NVIDIA key": r"\bnvapi-[A-Za-z0-9_-]{30,}",
    "a Groq key": r"\bgsk_[A-Za-z0-9]{30,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "an Azure storage key": r"\b(AccountKey|SharedAccessKey)=[A-Za-z0-9+/=]{20,}",
    "a signed URL": r"[?&](X-Amz-Signature|X-Goog-Signature|sig)=[A-Za-z0-9%+/=_-]{20,}",
    "a JSON Web Token": r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+",
    "a bearer token": r"(?i)\bbearer\s+[A-Za-z0-9._~+/=-]{8,}",
    "a password of HTTP": r"(?i)\bbasic\s+[A-Za-z0-9+/]{12,}={0,2}(?![A-Za-z0-9])",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "an age key": r"\bAGE-SECRET-KEY-1[A-Z0-9]{20,}",
    "a Vault token": r"\bhv[sbr]\.[A-Za-z0-9_-]{20,}",
    "a URL with user and password": r"://[^\s/:@]*:[^\s/@]+@",
    "a URL with a token as user": r"https?://[A-Za-z0-9_-]{20,}@",
}
_SECRETS = {what: re.compile(shape) for what, shape in _SHAPES.items()}
# 40 hexadecimal digits are a key of Weights & Biases and others, or the id of a Git commit, which its name tells.
_HEX = re.compile(r"(?<![0-9A-Fa-f])[0-9a-f]{40}(?![0-9A-Fa-f])")
_COMMIT = re.compile(r"(?i)(revision|commit|sha1?|rev|ref|version|tree|blob|checksum|digest|@)[\s=:/\"']*$")
# Any value of these is a secret, however short.
_PASSWORD = re.compile(
    r"(PASSWORD|PASSWD|PASSPHRASE|SECRET|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH_?TOKEN|ACCESS_?TOKEN|CREDENTIALS?)$",
    re.IGNORECASE,
)
_NAME = re.compile(r"(KEY|TOKEN|PWD)$", re.IGNORECASE)
_MEANINGLESS = re.compile(r"[A-Za-z0-9+/_=.~-]{16,}")
_WORDS = (
    r"[\w-]*(?:password|passwd|passphrase|secret|api[_-]?key|access[_-]?key|private[_-]?key|"
    r"auth[_-]?token|access[_-]?token)"
)
# A reference ($NAME, ${NAME}, <…>, %(name)s, {name}) is no secret; the words that follow an option in another word are.
_ASSIGNED = re.compile(rf"(?i)(?<![\w$]){_WORDS}[\"']?\s*[=:]\s*[\"']?(?![$<%{{\s\"'])[^\s\"']{{3,}}")
_LONG_ASSIGNED = re.compile(r"(?<![\w$])[A-Za-z_]*(?:TOKEN|KEY)\s*=\s*[\"']?[A-Za-z0-9+/_.~-]{16,}")
_OPTION = re.compile(rf"(?i)^--?{_WORDS}$")
_OPTION_IN_TEXT = re.compile(rf"(?i)(?:^|\s)--?{_WORDS}\s+(?![$<%{{-])[^\s\"']{{3,}}")
_INSTEAD = "set it in the environment of the server and name it in TRAINMASTER_JOB_ENV"


def recognise(text: str) -> str | None:
    """The kind of secret in this text; None where there is none."""
    for what, shape in _SECRETS.items():
        if shape.search(text):
            return what
    if _ASSIGNED.search(text) or _LONG_ASSIGNED.search(text) or _OPTION_IN_TEXT.search(text):
        return "a secret"
    if any(not _COMMIT.search(text[: found.start()]) for found in _HEX.finditer(text)):
        return "a key of 40 hexadecimal digits"
    return None


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
    if what is not None and _HEX.fullmatch(text) and _COMMIT.search(path.rpartition(".")[2]):
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
